"""The tables, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.measure import Growth, Timing
from benchmarks.peers.questions import COPIES, Answer, Times
from benchmarks.peers.work import Contestant


def heading(facts: Mapping[str, Any], command: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    machine = f"{facts['cores']} cores ({facts['processor']}), {facts['memory_gb']} GB, {facts['system']}"
    return (
        f"`{command.strip()}`, commit {facts['commit']}; {machine}, load {facts['load_at_start'][0]} at the start;"
        f" Python {facts['python']}, {versions}. All contestants in one process on one cluster, in alternating blocks,"
        " OMP_NUM_THREADS=1."
    )


def contestants_table(contestants: Sequence[Contestant], missing: Mapping[str, str]) -> str:
    rows = [[one.name, one.how] for one in contestants]
    return table(["contestant", "written as"], rows + [[name, f"missing: {why}"] for name, why in missing.items()])


def calls_table(answers: Sequence[Answer], names: Sequence[str], base: str) -> str:
    """Median milliseconds, and the median of the block-wise ratios to the naive hand-written calls."""
    columns = [*names, *(name for name in COPIES if any(name in answer.timings for answer in answers))]
    rows = []
    for answer in answers:
        cells = [_timing(answer, name, base) for name in columns]
        rows.append([answer.title, *cells])
    return table(["ms (ratio)", *columns], rows)


def _timing(answer: Answer, name: str, base: str) -> str:
    timing = answer.timings.get(name)
    if timing is None:
        return ""
    if timing.failure:
        return timing.failure
    cell = _digits(1e3 * timing.seconds)
    against = answer.timings.get(base, Timing(failure="missing"))
    if name != base and not against.failure:
        cell += f" ({timing.ratio_to(against):.2f}x)"
    wrong = answer.wrong.get(name)
    return f"{cell}; **{wrong}**" if wrong else cell


def memory_table(answers: Sequence[Answer], names: Sequence[str]) -> str:
    rows = [
        [answer.title, *(_growth(answer.growths.get(name)) for name in names)] for answer in answers if answer.growths
    ]
    return table(["driver's private memory, MB: peak / kept", *names], rows)


def _growth(grown: Growth | None) -> str:
    if grown is None:
        return ""
    return grown.failure or f"{grown.peak_mb:.1f} / {max(grown.kept_mb, 0):.1f}"


def times_table(all_times: Sequence[Times], names: Sequence[str]) -> str:
    rows = []
    for times in all_times:
        for what, measured in (("start", times.start), ("stop", times.stop)):
            cells = [
                _digits(statistics.median(measured[name])) if name in measured else times.failures.get(name, "as naive")
                for name in names
            ]
            plural = "workers" if times.num_workers > 1 else "worker"
            rows.append([f"{what} {times.num_workers} {plural}", *cells])
    return table(["s", *names], rows)


def words_table(found: Mapping[str, Mapping[str, str]]) -> str:
    names = list(next(iter(found.values()), {}))
    return table(
        ["own words, on tensors", *names], [[row, *(found[row].get(name, "") for name in names)] for row in found]
    )


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
