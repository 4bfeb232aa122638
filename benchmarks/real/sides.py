"""The sides of a benchmark: each a process of its own with a limit of time, watched from outside.

A side is a command that writes a JSON line per optimizer step to a file. What counts for its time to the first step is
when that line comes, so that imports, engines and compilation are in it. A side that fails or is ended keeps the steps
that it made, and the end of its log is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.origin import origin

WARM = 2  # steps that medians leave out: compilation, CUDA graphs, measuring
LOOK_S = 0.02  # between two looks at the file


def parsed(side: str) -> tuple[str, dict[str, Any]]:
    """``ours:torch_compile=true,token_budget=9`` is ours with two keys more."""
    name, _, keys = side.partition(":")
    values: dict[str, Any] = {}
    for given in filter(None, keys.split(",")):
        key, _, value = given.partition("=")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return name, values


def options_of(description: str, sizes: Iterable[str], *, limit_s: float) -> argparse.Namespace:
    """What the command line says; ``sizes``: the names of numbers that it may change."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a real model, which learns GSM8K")
    parser.add_argument("--data", help="folder of GSM8K")
    parser.add_argument("--shape", default="0.6b", help="random weights, where no model is named")
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"], metavar="SIDE[:key=value,...]")
    parser.add_argument("--limit_s", type=float, default=limit_s, help="seconds that one side may take")
    parser.add_argument("--tiny", action="store_true")
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    if options.tiny and options.model is None:
        options.shape = "tiny"
    return options


def chosen(options: argparse.Namespace, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, but for those that the command line says."""
    return {name: value if getattr(options, name) is None else getattr(options, name) for name, value in sizes.items()}


def model_of(options: argparse.Namespace) -> str:
    """What titles call the model."""
    return Path(options.model).name if options.model else f"{options.shape}, random weights"


def run_sides(
    options: argparse.Namespace,
    top: Path,
    commands: Mapping[str, Callable[[dict[str, Any]], tuple[list[str], Path]]],
    asked: Mapping[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each side, and what came of it: one after the other, in a folder each. ``asked``: what all are told."""
    for k, side in enumerate(options.sides):
        name, keys = parsed(side)
        folder = top / f"side{k}"
        folder.mkdir()
        own = {"folder": str(folder), "keys": keys, "steps_file": str(folder / "steps.jsonl")}
        command, steps_file = commands[name]({**asked, **own})
        yield side, run_side(command, steps_file, folder / "log", options.limit_s)


def run_side(command: list[str], steps_file: Path, log: Path, limit_s: float) -> dict[str, Any]:
    """The steps of a command, when each ended (seconds since the start), the peak of memory, and how it ended.

    Nothing that the command started is left.
    """
    ends: list[float] = []
    held = _used_gib()  # by this process and others, before
    start = time.perf_counter()
    with PeakMemory() as peak, log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and time.perf_counter() - start < limit_s:
                count = len(_lines(steps_file))
                ends += [time.perf_counter() - start] * (count - len(ends))
                time.sleep(LOOK_S)
        finally:
            code = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started: engines have processes of their own
            process.wait()
        steps = [json.loads(line) for line in _lines(steps_file)]
        ends += [time.perf_counter() - start] * (len(steps) - len(ends))
    found = {"whole_s": time.perf_counter() - start, "ends": ends, "peak_gib": peak.gib(start) - held, "steps": steps}
    if code != 0:
        found["failed"] = f"took more than {limit_s:.0f} s" if code is None else f"ended with {code}"
        found["log"] = log.read_text(errors="replace")[-3000:]
    return found


def median(found: dict[str, Any], name: str) -> float:
    """Of the steps but the first ``WARM``, or of all where there are no more; NaN where none has it."""
    steps = found["steps"][WARM:] or found["steps"]
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(values) if values else float("nan")


def report(title: str, results: dict[str, dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> None:
    """Prints one table: a line per side, and below it why sides failed."""
    widths = {
        name: max(len(name), *(len(_cell(show, one)) for one in results.values())) for name, show in columns.items()
    }
    first = max(len(side) for side in results)
    print(f"\n{title}")
    print("  ".join([" " * first, *(name.rjust(widths[name]) for name in columns)]))
    for side, one in results.items():
        print("  ".join([side.ljust(first), *(_cell(show, one).rjust(widths[name]) for name, show in columns.items())]))
    for side, one in results.items():
        if "failed" in one:
            print(f"{side} {one['failed']} after {len(one['steps'])} steps; its log ends:\n{one['log']}")
    sys.stdout.flush()


def by_step(results: dict[str, dict[str, Any]], name: str) -> None:
    """Prints a number of every step, a column per side."""
    most = max(len(one["steps"]) for one in results.values())
    print(f"{name} by step\nstep  " + "  ".join(side.rjust(max(8, len(side))) for side in results))
    for k in range(most):
        cells = []
        for side, one in results.items():
            value = one["steps"][k].get(name) if k < len(one["steps"]) else None
            cells.append(("" if value is None else f"{value:.4f}").rjust(max(8, len(side))))
        print(f"{k + 1:4d}  " + "  ".join(cells))
    sys.stdout.flush()


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def write(name: str, options: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """All so far, into ``$OUT/name.json``, where OUT is set."""
    if out := os.environ.get("OUT"):
        found = {**origin(), "device": card(), "options": options, "sides": results}
        Path(out, f"{name}.json").write_text(json.dumps(found, indent=1))


def _cell(show: Callable[[dict[str, Any]], str], one: dict[str, Any]) -> str:
    return show(one) if one["steps"] else "-"


def _lines(file: Path) -> list[str]:
    """The whole lines of a file."""
    if not file.exists():
        return []
    return file.read_text().rpartition("\n")[0].splitlines()


def _used_gib() -> float:
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
