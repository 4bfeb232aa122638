"""Where the time of a traced run went: busy and idle time of every role and rank, from the union of its intervals.

Shares leave start-up out. They are of the time from the first marked step to the end of the last one. Without marks
they begin when the first objects are constructed, and last until the trace ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rayhelper.device_groups import DRIVER
from rayhelper.timeline.trace import NO_CALL, PHASES, STEP, Span

BUSY = frozenset({"run", "construct"})
IN_CALLS = ("serialise", "collect", "dispatch", "wait", "construct", "run")  # of the driver: a moment is the first's
OWN = "own code"  # of the driver: what is in no call. While it waits for workers it is idle
TO_WORKERS = frozenset({"dispatch", "serialise", "construct"})  # the direction of a span's bytes; queue repeats them
FROM_WORKERS = frozenset({"run", "collect", "wait"})

_SHOWN_RANKS = 8  # of a role in a table; of more, the least and the most busy
_SHOWN_METHODS = 3

Interval = tuple[int, int]


@dataclass(frozen=True)
class Method:
    """What one method took, its own calls within it included."""

    name: str
    busy_ns: int
    num_spans: int


@dataclass(frozen=True)
class Usage:
    """What a rank did during the trace; or a role: sums over its ranks, the mean of their shares, the longest gap."""

    role: str
    rank: int | None  # None: the role
    startup_ns: int  # it was busy so long before the window, which all else is about
    num_calls: int
    busy_ns: int  # of the union of its intervals: what overlaps counts once
    idle_ns: int
    share: float  # busy of the window
    gap_ns: int  # the longest time without work, before the first and after the last call included
    gap_start_ns: int  # when it began, since the start of the trace
    queue_ns: int  # while at least one call waited
    bytes_in: int
    bytes_out: int
    phases: Mapping[str, int]  # ns of the union, by phase; of the driver they add up to the window
    methods: tuple[Method, ...]  # the longest first


@dataclass(frozen=True)
class Summary:
    """A trace in numbers. ``roles``: the driver first; of each, its own usage and the usage of its ranks."""

    start_ns: int
    wall_ns: int
    num_spans: int
    roles: tuple[tuple[Usage, tuple[Usage, ...]], ...]
    window: Interval = (0, 0)  # without start-up, and with marked steps without what follows the last one
    steps: tuple[Span, ...] = ()  # in order


def summarise(spans: Iterable[Span], num_ranks: Mapping[str, int] | None = None) -> Summary:
    """Busy and idle time, calls and bytes of every role and rank.

    A worker is busy while it runs or constructs; the driver unless it waits for workers. The bytes of a role are those
    of its own spans and of the driver's spans of its calls.

    Args:
        num_ranks: how many ranks a role has, for those that left no span.
    """
    lanes: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for role, count in (num_ranks or {}).items():
        for rank in range(count):
            lanes[role][rank] = []
    for span in spans:
        lanes[span.role][span.rank].append(span._replace(end_ns=max(span.start_ns, span.end_ns)))
    everything = [span for ranks in lanes.values() for lane in ranks.values() for span in lane]
    start_ns = min((span.start_ns for span in everything), default=0)
    end_ns = max((span.end_ns for span in everything), default=0)
    steps = _steps(everything)
    window = _window(everything, steps, (start_ns, end_ns))
    carried = _carried(_clipped(everything, window))
    roles = []
    for role in sorted(lanes, key=lambda role: (role != DRIVER, role)):
        ranks = tuple(_usage(role, rank, lane, start_ns, window) for rank, lane in sorted(lanes[role].items()))
        num_calls = _num_calls(_clipped([span for lane in lanes[role].values() for span in lane], window))
        roles.append((_total(ranks, num_calls, carried.get(role, (0, 0))), ranks))
    return Summary(start_ns, end_ns - start_ns, len(everything), tuple(roles), window, steps)


def _steps(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The marked steps, in order. Under torchrun every process marks them: those of the first one."""
    marked = [span for span in spans if span.phase == STEP]
    first = min((span.rank for span in marked), default=0)
    return tuple(sorted((span for span in marked if span.rank == first), key=lambda span: span.start_ns))


def _window(spans: Sequence[Span], steps: Sequence[Span], whole: Interval) -> Interval:
    """The moments that shares are of; the whole trace if there is nothing but start-up."""
    if steps:
        return steps[0].start_ns, max(span.end_ns for span in steps)
    first_run = min((span.start_ns for span in spans if span.phase == "run"), default=whole[1])
    built = [span.end_ns for span in spans if span.phase == "construct" and span.start_ns <= first_run]
    begin_ns = max(built, default=whole[0])
    return (begin_ns, whole[1]) if begin_ns < whole[1] else whole


def _clipped(spans: Iterable[Span], window: Interval) -> list[Span]:
    """What of the spans is in the window."""
    begin_ns, end_ns = window
    return [
        span._replace(start_ns=max(span.start_ns, begin_ns), end_ns=min(span.end_ns, end_ns))
        for span in spans
        if begin_ns <= span.start_ns <= end_ns or span.start_ns < begin_ns < span.end_ns
    ]


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments of ``intervals`` that are not in ``others``; both are disjoint and in order."""
    left, position = [], 0
    for start, end in intervals:
        while position < len(others) and others[position][1] <= start:
            position += 1
        following = position
        while following < len(others) and others[following][0] < end:
            if start < others[following][0]:
                left.append((start, others[following][0]))
            start = max(start, others[following][1])
            following += 1
        if start < end:
            left.append((start, end))
    return left


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that are disjoint, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def num_ranks(metadata: Mapping[str, Any]) -> dict[str, int]:
    """How many ranks each role has, as far as the trace tells."""
    told = metadata.get("num_ranks")
    return {str(role): count for role, count in told.items() if type(count) is int} if isinstance(told, dict) else {}


def _usage(role: str, rank: int, recorded: Sequence[Span], start_ns: int, window: Interval) -> Usage:
    """What one rank did in the window, and how long it was busy from ``start_ns`` until then."""
    spans, by_phase = _clipped(recorded, window), _by_phase(role, recorded, window)
    before = {**_by_phase(role, recorded, (start_ns, window[0])), OWN: []}  # there the driver builds the workers
    busy, startup = (_busy(role, found) for found in (by_phase, before))
    busy_ns, wall_ns = _length(busy), window[1] - window[0]
    edges = [window[0], *(moment for interval in busy for moment in interval), window[1]]
    gap_ns, gap_at = max((end - start, -start) for start, end in zip(edges[::2], edges[1::2], strict=True))
    phases = {phase: _length(found) for phase, found in by_phase.items() if found}
    sent, received = _num_bytes(spans, TO_WORKERS), _num_bytes(spans, FROM_WORKERS)
    return Usage(
        role=role,
        rank=rank,
        startup_ns=_length(startup),
        num_calls=_num_calls(spans),
        busy_ns=busy_ns,
        idle_ns=wall_ns - busy_ns,
        share=busy_ns / wall_ns if wall_ns else 0.0,
        gap_ns=gap_ns,
        gap_start_ns=-gap_at - start_ns,
        queue_ns=phases.get("queue", 0),
        bytes_in=received if role == DRIVER else sent,
        bytes_out=sent if role == DRIVER else received,
        phases=phases,
        methods=_methods([span for span in spans if span.phase in BUSY]),
    )


def _by_phase(role: str, recorded: Sequence[Span], window: Interval) -> dict[str, list[Interval]]:
    """When a rank was in each phase. The driver is in one phase at a time: in a call, or in its own code."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span in _clipped(recorded, window):
        found[span.phase].append(span)
    if role != DRIVER:
        return {phase: _union_of(spans) for phase, spans in found.items()}
    phases, left = {}, [window] if window[0] < window[1] else []
    for phase in IN_CALLS:
        rest = _without(left, _union_of(found[phase]))
        phases[phase], left = _without(left, rest), rest
    return {**phases, OWN: left}


def _busy(role: str, phases: Mapping[str, Sequence[Interval]]) -> list[Interval]:
    is_busy = phases.keys() - {"wait"} if role == DRIVER else BUSY & phases.keys()
    return union(interval for phase in is_busy for interval in phases[phase])


def _total(ranks: Sequence[Usage], num_calls: int, carried: tuple[int, int]) -> Usage:
    """What a role did, from its ranks and from the bytes that the driver counted for it."""
    longest = max(ranks, key=lambda usage: usage.gap_ns)
    methods: dict[str, list[Method]] = defaultdict(list)
    phases: Counter[str] = Counter()
    for usage in ranks:
        phases.update(usage.phases)
        for method in usage.methods:
            methods[method.name].append(method)
    return Usage(
        role=ranks[0].role,
        rank=None,
        startup_ns=sum(usage.startup_ns for usage in ranks),
        num_calls=num_calls,
        busy_ns=sum(usage.busy_ns for usage in ranks),
        idle_ns=sum(usage.idle_ns for usage in ranks),
        share=sum(usage.share for usage in ranks) / len(ranks),
        gap_ns=longest.gap_ns,
        gap_start_ns=longest.gap_start_ns,
        queue_ns=sum(usage.queue_ns for usage in ranks),
        bytes_in=sum(usage.bytes_in for usage in ranks) + carried[0],
        bytes_out=sum(usage.bytes_out for usage in ranks) + carried[1],
        phases=phases,
        methods=_longest_first(
            Method(name, sum(m.busy_ns for m in found), sum(m.num_spans for m in found))
            for name, found in methods.items()
        ),
    )


def _carried(spans: Sequence[Span]) -> dict[str, tuple[int, int]]:
    """The bytes (to, from) each role that the driver counted, by the role that ran the call."""
    role_of = {span.call: span.role for span in spans if span.phase == "run" and span.role != DRIVER}
    counted: dict[str, tuple[int, int]] = {}
    for span in spans:
        role = role_of.get(span.call)
        if span.role == DRIVER and span.call != NO_CALL and role is not None:
            sent, received = counted.get(role, (0, 0))
            counted[role] = sent + _num_bytes([span], TO_WORKERS), received + _num_bytes([span], FROM_WORKERS)
    return counted


def _num_bytes(spans: Iterable[Span], phases: Collection[str]) -> int:
    return sum(span.num_bytes for span in spans if span.phase in phases)


def _num_calls(spans: Iterable[Span]) -> int:
    """How many calls were dispatched or ran."""
    return len({span.call for span in spans if span.phase in ("dispatch", "run")} - {NO_CALL})


def _methods(spans: Sequence[Span]) -> tuple[Method, ...]:
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    return _longest_first(Method(name, _length(_union_of(found)), len(found)) for name, found in by_name.items())


def _longest_first(methods: Iterable[Method]) -> tuple[Method, ...]:
    return tuple(sorted(methods, key=lambda method: (-method.busy_ns, method.name)))


def _union_of(spans: Iterable[Span]) -> list[Interval]:
    return union((span.start_ns, span.end_ns) for span in spans)


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def headline(summary: Summary, metadata: Mapping[str, Any]) -> str:
    """The trace in a line; what was lost is never left out."""
    begin_ns, end_ns = summary.window
    in_all, took = _duration(summary.wall_ns), _duration(end_ns - begin_ns)
    startup_ns, after_ns = begin_ns - summary.start_ns, summary.start_ns + summary.wall_ns - end_ns
    parts = [in_all]
    if summary.steps:
        each = _duration((end_ns - begin_ns) // len(summary.steps))
        parts = [f"{in_all}: start-up {_duration(startup_ns)}, {len(summary.steps)} steps {took} ({each} per step)"]
        parts += [f"afterwards {_duration(after_ns)}"] if after_ns else []
    elif startup_ns:
        parts = [f"{in_all}: start-up {_duration(startup_ns)}, then {took}"]
    parts.append(f"{summary.num_spans:,} spans")
    parts += [f"{key} {value}" for key, value in metadata.items() if key not in ("dropped", "num_ranks")]
    if metadata.get("dropped"):
        parts.append(f"{metadata['dropped']} spans were dropped: the numbers below leave them out")
    return ", ".join(parts)


COLUMNS = ("role", "start-up", "calls", "busy", "share", "idle", "longest gap", "queued", "in", "out", "busy with")


def rows(summary: Summary) -> list[tuple[str, ...]]:
    """The cells of the table under COLUMNS: of every role, and of its ranks where it has several."""
    rows = []
    for total, ranks in summary.roles:
        role = total.role if len(ranks) == 1 else f"{total.role} ({len(ranks)} ranks)"
        rows.append((role, *_cells(total), _doing(total)))
        shown = _shown(ranks) if len(ranks) > 1 and total.busy_ns else []
        rows += [(f"  rank {usage.rank}", *_cells(usage), "") for usage in shown]
        if 0 < len(shown) < len(ranks):
            rows.append((f"  {len(ranks) - len(shown)} more between", *[""] * (len(COLUMNS) - 1)))
    return rows


def _shown(ranks: Sequence[Usage]) -> list[Usage]:
    """All ranks if they are few, else the least busy and the most busy ones."""
    if len(ranks) <= _SHOWN_RANKS:
        return list(ranks)
    by_share = sorted(ranks, key=lambda usage: usage.share)
    return [*by_share[: _SHOWN_RANKS // 2], *by_share[-_SHOWN_RANKS // 2 :]]


def _cells(usage: Usage) -> tuple[str, ...]:
    gap = f"{_duration(usage.gap_ns)} at {_duration(usage.gap_start_ns)}" if usage.gap_ns else "-"
    return (
        _duration(usage.startup_ns) if usage.startup_ns else "-",
        f"{usage.num_calls:,}",
        _duration(usage.busy_ns),
        f"{usage.share:.1%}",
        _duration(usage.idle_ns),
        gap,
        _duration(usage.queue_ns) if usage.queue_ns else "-",
        _size(usage.bytes_in),
        _size(usage.bytes_out),
    )


def _doing(usage: Usage) -> str:
    """What took longest: of the driver the phases, which say more than the names of what it called."""
    took = [(method.name, method.busy_ns) for method in usage.methods[:_SHOWN_METHODS]]
    if usage.role == DRIVER:
        took = [(phase, usage.phases.get(phase, 0)) for phase in (*PHASES, OWN)]
    return ", ".join(f"{name} {_duration(ns)}" for name, ns in took if ns)


def table(summary: Summary) -> Table:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        left = column in ("role", "busy with")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "busy with")
    for role, *cells in rows(summary):
        style = "" if role.startswith(" ") else "bold"
        table.add_row(*(Text(printable(cell)) for cell in (role, *cells)), style=style)
    return table


def printable(text: str) -> str:
    """The text without what would command a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _duration(ns: int) -> str:
    if ns >= 120 * 10**9:
        minutes, seconds = divmod(ns // 10**9, 60)
        return f"{minutes} min {seconds:02d} s"
    return _three_digits(ns, {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}) if ns else "0"


def _size(num_bytes: int) -> str:
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
    return _three_digits(num_bytes, units) if num_bytes else "-"


def _three_digits(value: int, units: Mapping[str, int]) -> str:
    """The value in the largest unit of which it is one when rounded."""
    unit = next(unit for unit, size in units.items() if value >= 0.9995 * size)
    return f"{value / units[unit]:.3g} {unit}"
