"""Where the time of a traced run went: numbers on the terminal, and one HTML page to look into.

    python -m rayhelper timeline trace.json.gz
    python -m rayhelper timeline trace.json.gz --html trace.html

    summarise(spans)        busy and idle time of every role and rank, from the union of its intervals
    html(spans, metadata)   the table, and below it a lane a rank to zoom into; it needs no network

The file itself is ``trace.py``. The page is a table, a style, data and a script, which draws what is visible and merges
what is narrower than a pixel: 100,000 spans stay usable.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayhelper import trace
from rayhelper.device_groups import DRIVER
from rayhelper.errors import ConfigError
from rayhelper.trace import NO_CALL, PHASES, Span

BUSY = frozenset({"run", "construct"})
DRIVER_BUSY = BUSY | {"dispatch", "serialise", "collect"}  # while it waits for workers it is idle
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
    num_calls: int
    busy_ns: int  # of the union of its intervals: what overlaps counts once
    idle_ns: int
    share: float  # busy of the trace's wall time
    gap_ns: int  # the longest time without work, before the first and after the last call included
    gap_start_ns: int  # when it began, since the start of the trace
    queue_ns: int  # while at least one call waited
    bytes_in: int
    bytes_out: int
    phases: Mapping[str, int]  # ns of the union, by phase
    methods: tuple[Method, ...]  # the longest first


@dataclass(frozen=True)
class Summary:
    """A trace in numbers. ``roles``: the driver first; of each, its own usage and that of its ranks."""

    start_ns: int
    wall_ns: int
    num_spans: int
    roles: tuple[tuple[Usage, tuple[Usage, ...]], ...]


def timeline(file: str, html: str | None = None) -> int:
    """Prints where the time of a traced run went; 0, or 2 with one line about what is wrong.

    Args:
        file: the trace, .json or .json.gz.
        html: also write the timeline to this file, as a page for a browser.
    """
    try:
        spans, metadata = trace.read(file)
        if html is not None:
            _save(html, spans, metadata)
    except (ConfigError, OSError) as error:
        print(f"timeline: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    summary = summarise(spans, num_ranks(metadata))
    console.print(Text(_printable(f"{file}: {_headline(summary, metadata)}")))
    console.print(_table(summary))
    if html is not None:
        console.print(Text(f"The timeline is in {html}."))
    return 0


def summarise(spans: Iterable[Span], num_ranks: Mapping[str, int] | None = None) -> Summary:
    """Busy and idle time, calls and bytes of every role and rank.

    A worker is busy while it runs or constructs; the driver while it dispatches, serialises, collects or runs. The
    bytes of a role are those of its own spans and of the driver's spans of its calls.

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
    window = start_ns, max((span.end_ns for span in everything), default=0)
    carried = _carried(everything)
    roles = []
    for role in sorted(lanes, key=lambda role: (role != DRIVER, role)):
        ranks = tuple(_usage(role, rank, lane, window) for rank, lane in sorted(lanes[role].items()))
        num_calls = _num_calls(span for lane in lanes[role].values() for span in lane)
        roles.append((_total(ranks, num_calls, carried.get(role, (0, 0))), ranks))
    return Summary(start_ns, window[1] - start_ns, len(everything), tuple(roles))


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


def _usage(role: str, rank: int, spans: Sequence[Span], window: Interval) -> Usage:
    """What one rank did."""
    busy_phases = DRIVER_BUSY if role == DRIVER else BUSY
    busy = _union_of(span for span in spans if span.phase in busy_phases)
    busy_ns, wall_ns = _length(busy), window[1] - window[0]
    edges = [window[0], *(moment for interval in busy for moment in interval), window[1]]
    gap_ns, gap_at = max((end - start, -start) for start, end in zip(edges[::2], edges[1::2], strict=True))
    by_phase: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_phase[span.phase].append(span)
    phases = {phase: _length(_union_of(found)) for phase, found in by_phase.items()}
    sent, received = _num_bytes(spans, TO_WORKERS), _num_bytes(spans, FROM_WORKERS)
    return Usage(
        role=role,
        rank=rank,
        num_calls=_num_calls(spans),
        busy_ns=busy_ns,
        idle_ns=wall_ns - busy_ns,
        share=busy_ns / wall_ns if wall_ns else 0.0,
        gap_ns=gap_ns,
        gap_start_ns=-gap_at - window[0],
        queue_ns=phases.get("queue", 0),
        bytes_in=received if role == DRIVER else sent,
        bytes_out=sent if role == DRIVER else received,
        phases=phases,
        methods=_methods([span for span in spans if span.phase in busy_phases]),
    )


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


def _headline(summary: Summary, metadata: Mapping[str, Any]) -> str:
    """The trace in a line; what was lost is never left out."""
    parts = [f"{_duration(summary.wall_ns)}, {summary.num_spans:,} spans"]
    parts += [f"{key} {value}" for key, value in metadata.items() if key not in ("dropped", "num_ranks")]
    if metadata.get("dropped"):
        parts.append(f"{metadata['dropped']} spans were dropped: the numbers below leave them out")
    return ", ".join(parts)


_COLUMNS = ("role", "calls", "busy", "share", "idle", "longest gap", "queued", "in", "out", "busy with")


def _rows(summary: Summary) -> list[tuple[str, ...]]:
    """The cells of the table under _COLUMNS: of every role, and of its ranks where it has several."""
    rows = []
    for total, ranks in summary.roles:
        role = total.role if len(ranks) == 1 else f"{total.role} ({len(ranks)} ranks)"
        rows.append((role, *_cells(total), _doing(total)))
        shown = _shown(ranks) if len(ranks) > 1 else []
        rows += [(f"  rank {usage.rank}", *_cells(usage), "") for usage in shown]
        if 0 < len(shown) < len(ranks):
            rows.append((f"  {len(ranks) - len(shown)} more between", *[""] * (len(_COLUMNS) - 1)))
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
        took = [(phase, usage.phases.get(phase, 0)) for phase in PHASES]
    return ", ".join(f"{name} {_duration(ns)}" for name, ns in took if ns)


def _table(summary: Summary) -> Table:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in _COLUMNS:
        left = column in ("role", "busy with")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "busy with")
    for role, *cells in _rows(summary):
        style = "" if role.startswith(" ") else "bold"
        table.add_row(*(Text(_printable(cell)) for cell in (role, *cells)), style=style)
    return table


def _printable(text: str) -> str:
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


def html(spans: Iterable[Span], metadata: Mapping[str, Any]) -> str:
    """A page that holds everything it needs: the summary, and the lanes to zoom and pan. ASCII only."""
    spans = list(spans)
    summary = summarise(spans, num_ranks(metadata))
    head, *body = [_COLUMNS, *_rows(summary)]
    rows = ["<tr>" + "".join(f"<th>{_escaped(cell)}</th>" for cell in head) + "</tr>"]
    for role, *cells in body:
        kind = "rank" if role.startswith(" ") else "role"
        cells_html = "".join(f"<td>{_escaped(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="{kind}"><th scope="row">{_escaped(role.strip())}</th>{cells_html}</tr>')
    return _PAGE.substitute(
        headline=_escaped(_headline(summary, metadata)), rows="\n".join(rows), data=_embedded(_drawing(spans, summary))
    )


def _save(file: str, spans: Iterable[Span], metadata: Mapping[str, Any]) -> None:
    Path(file).write_text(html(spans, metadata), encoding="ascii")


def _escaped(text: str) -> str:
    """The text inside an element."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _embedded(value: Any) -> str:
    """JSON that can end no script element."""
    text = json.dumps(value, separators=(",", ":"), default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _drawing(spans: Iterable[Span], summary: Summary) -> dict[str, Any]:
    """What the page draws: lanes, and in columns the spans of one lane after the other, each in order of start.

    ``first`` of a lane: its first span; ``depth``: how many spans of the lane are open around or beside one.
    """
    usages = [usage for _, ranks in summary.roles for usage in ranks]
    ordered: dict[tuple[str, int | None], list[Span]] = {(usage.role, usage.rank): [] for usage in usages}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        ordered[span.role, span.rank].append(span)
    names = {method.name: None for total, _ in summary.roles for method in total.methods}
    names |= {span.name: None for lane in ordered.values() for span in lane}
    number = {name: index for index, name in enumerate(names)}
    phases = list(dict.fromkeys([*PHASES, *(span.phase for lane in ordered.values() for span in lane)]))
    columns: dict[str, list[int]] = {key: [] for key in ("name", "phase", "start", "length", "call", "bytes", "depth")}
    lanes = []
    for usage, lane in zip(usages, ordered.values(), strict=True):
        lanes.append({"role": usage.role, "rank": usage.rank, "share": usage.share, "first": len(columns["name"])})
        columns["name"] += [number[span.name] for span in lane]
        columns["phase"] += [phases.index(span.phase) for span in lane]
        columns["start"] += [span.start_ns - summary.start_ns for span in lane]
        columns["length"] += [max(0, span.end_ns - span.start_ns) for span in lane]
        columns["call"] += [span.call for span in lane]
        columns["bytes"] += [span.num_bytes for span in lane]
        columns["depth"] += _depths(lane)
    return {"wall": summary.wall_ns, "lanes": lanes, "names": list(names), "phases": phases, "spans": columns}


def _depths(lane: Sequence[Span]) -> list[int]:
    """The row of each span, such that spans which overlap lie in different rows; queued ones have their own strip."""
    open_ends: list[int] = []
    depths = []
    for span in lane:
        depth = 0
        if span.phase != "queue":
            depth = next((row for row, end in enumerate(open_ends) if end <= span.start_ns), len(open_ends))
            open_ends[depth : depth + 1] = [span.end_ns]
        depths.append(depth)
    return depths


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Timeline</title>
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --quiet: #5d6670; --line: #d9dee3; --band: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171a; --text: #e4e8ec; --quiet: #97a1ab; --line: #343a40; --band: #1b1f23; }
}
body { margin: 1rem 1.25rem; background: var(--back); color: var(--text); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.15rem; margin: 0; }
p { margin: .3rem 0 .8rem; color: var(--quiet); }
.table { overflow-x: auto; max-height: 40vh; overflow-y: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .15rem .7rem; text-align: right; font-weight: normal; border-bottom: 1px solid var(--line); }
th:first-child, td:last-child, tr:first-child th:last-child { text-align: left; }
tr:first-child th { position: sticky; top: 0; background: var(--back); color: var(--quiet); }
.role > * { font-weight: 600; }
.rank th { padding-left: 1.7rem; color: var(--quiet); }
#legend { display: flex; flex-wrap: wrap; gap: .3rem .4rem; margin: .8rem 0 .5rem; align-items: center; }
#legend button, #legend span { display: flex; gap: .4rem; align-items: center; padding: .1rem .5rem; font: inherit;
  font-size: 12px; color: inherit; background: none; border: 1px solid transparent; border-radius: 4px; }
#legend button { cursor: pointer; border-color: var(--line); overflow-wrap: anywhere; text-align: left; }
#legend button[aria-pressed=true] { border-color: var(--text); }
#legend canvas { width: 22px; height: 12px; flex: none; }
#scroll { position: relative; overflow-y: auto; border: 1px solid var(--line); }
#chart { position: sticky; top: 0; display: block; cursor: grab; touch-action: none; }
#chart.held { cursor: grabbing; }
#tip { position: fixed; pointer-events: none; display: none; max-width: 40rem; padding: .35rem .6rem; font-size: 12px;
  white-space: pre-line; overflow-wrap: anywhere; background: var(--back); border: 1px solid var(--quiet);
  border-radius: 4px; box-shadow: 0 2px 8px #0004; }
</style>
</head>
<body>
<h1>Timeline</h1>
<p>$headline</p>
<div class="table"><table>
$rows
</table></div>
<div id="legend"></div>
<div id="scroll" tabindex="0"><canvas id="chart" role="img" aria-label="A lane for every rank, over time; the table
above has its numbers"></canvas><div id="space"></div></div>
<p>Wheel: zoom. Drag: move. Shift and wheel: scroll. Double click or 0: everything. Arrow keys, + and - work as well.
A coloured strip below a lane: calls that wait in its queue. The mark of a method above leaves only that one bright.</p>
<noscript>The lanes are drawn by a script, which is turned off here.</noscript>
<div id="tip"></div>
<script id="data" type="application/json">$data</script>
<script>
"use strict";
{
const data = JSON.parse(document.getElementById("data").textContent);
const { name, phase, start, length, call, bytes, depth } = data.spans;
const HEAD = 26, GUTTER = 170, TITLE = 20, LANE = 24, STRIP = 6, QUEUE = data.phases.indexOf("queue");
const chart = document.getElementById("chart"), paint = chart.getContext("2d");
const scroll = document.getElementById("scroll"), tip = document.getElementById("tip");
const everything = { from: -0.01 * data.wall, to: Math.max(1.01 * data.wall, 1) };
const view = { ...everything };
let width = 0, height = 0, only = -1, hovered = -1, waiting = false, theme = {};

// Lanes from top to bottom, a title above each role's first; reach[i]: the latest end of the lane's spans up to i.
const reach = new Float64Array(start.length), byCall = new Map();
let bottom = HEAD;
data.lanes.forEach((lane, k) => {
  lane.last = k + 1 < data.lanes.length ? data.lanes[k + 1].first : start.length;
  lane.title = k === 0 || data.lanes[k - 1].role !== lane.role;
  bottom += lane.title ? TITLE : 0;
  lane.top = bottom;
  bottom += LANE + STRIP + 2;
  for (let i = lane.first, latest = 0; i < lane.last; i++) {
    reach[i] = latest = Math.max(latest, start[i] + length[i]);
    if (call[i]) byCall.has(call[i]) ? byCall.get(call[i]).push(i) : byCall.set(call[i], [i]);
  }
});

const hue = (n) => (205 + n * 137.508) % 360;
const colour = (n, alpha) => "hsla(" + hue(n) + ", 58%, " + (n % 2 ? 66 : 58) + "%, " + alpha + ")";
const xOf = (t) => GUTTER + (t - view.from) / (view.to - view.from) * (width - GUTTER);
const tOf = (x) => view.from + (x - GUTTER) / (width - GUTTER) * (view.to - view.from);

function time(ns, digits, largest) {
  const size = largest === undefined ? ns : largest;
  const [unit, scale] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6] : size >= 1e3 ? ["us", 1e3] : ["ns", 1];
  return Number((ns / scale).toPrecision(digits)) + " " + unit;
}

// A box in the manner of its phase: run and dispatch plain, the others hatched, hollow or striped.
function fill(on, x, y, w, h, n, kind, alpha) {
  on.fillStyle = colour(n, kind === "wait" ? 0.22 * alpha : kind === "queue" ? 0.55 * alpha : alpha);
  on.fillRect(x, y, w, h);
  if (w < 4) return;
  on.strokeStyle = kind === "wait" ? colour(n, alpha) : "rgba(0, 0, 0, " + 0.45 * alpha + ")";
  on.lineWidth = 1;
  on.beginPath();
  if (kind === "wait") on.rect(x + 0.5, y + 0.5, w - 1, h - 1);
  const slope = { construct: 1, collect: -1 }[kind];
  const left = Math.max(x, 0), right = Math.min(x + w, on.canvas.width);
  if (slope) {
    on.save();
    on.clip(box(left, y, right - left, h));
    for (let a = left - h; a < right + h; a += 7) { on.moveTo(a, y + h); on.lineTo(a + slope * h, y); }
    on.stroke();
    on.restore();
    return;
  }
  if (kind === "serialise") for (let b = y + 3.5; b < y + h; b += 4) { on.moveTo(left, b); on.lineTo(right, b); }
  on.stroke();
}

function box(x, y, w, h) { const path = new Path2D(); path.rect(x, y, w, h); return path; }

function placed(lane, i) {  // top and height of a span
  if (phase[i] === QUEUE) return [lane.top - scroll.scrollTop + LANE, STRIP - 1];
  const inset = 5 * Math.min(depth[i], 3);
  return [lane.top - scroll.scrollTop + inset, LANE - 1 - inset];
}

function firstAt(lane, t) {  // of the lane's spans, the first that may last until t
  let low = lane.first, high = lane.last;
  while (low < high) { const mid = (low + high) >> 1; if (reach[mid] < t) low = mid + 1; else high = mid; }
  return low;
}

// What is narrower than a pixel is gathered in its pixel, which shows the longest, as bright as it is covered.
function drawLane(lane) {
  const gathered = new Map(), brightness = (i) => (only < 0 || name[i] === only ? 1 : 0.12);
  const flush = (row) => {
    const pixel = gathered.get(row);
    if (!pixel) return;
    const [y, h] = placed(lane, pixel.longest);
    fill(paint, pixel.x, y, 1, h, name[pixel.longest], data.phases[phase[pixel.longest]],
         brightness(pixel.longest) * (0.4 + 0.6 * Math.min(1, pixel.covered)));
    gathered.delete(row);
  };
  for (let i = firstAt(lane, view.from); i < lane.last && start[i] < view.to; i++) {
    const x = xOf(start[i]), w = xOf(start[i] + length[i]) - x;
    if (x + w < GUTTER) continue;
    if (w < 1) {
      const row = phase[i] === QUEUE ? -1 : Math.min(depth[i], 3), at = Math.floor(x);
      let pixel = gathered.get(row);
      if (!pixel || pixel.x !== at) {
        flush(row);
        gathered.set(row, pixel = { x: at, covered: 0, longest: i });
      }
      pixel.covered += w;
      if (length[i] > length[pixel.longest]) pixel.longest = i;
      continue;
    }
    const [y, h] = placed(lane, i), left = Math.max(x, GUTTER), right = Math.min(x + w, width);
    const wide = right - left, kind = data.phases[phase[i]];
    fill(paint, left, y, Math.max(wide - (w > 3 ? 0.5 : 0), 1), h, name[i], kind, brightness(i));
    const free = i + 1 < lane.last && depth[i + 1] > depth[i] ? Math.min(right, xOf(start[i + 1])) - left : wide;
    if (free > 40 && h > 10) label(data.names[name[i]], left + 4, y + h / 2, free - 8, kind, brightness(i));
  }
  for (const row of [...gathered.keys()]) flush(row);
}

function label(text, x, y, room, kind, alpha) {
  const most = Math.floor(room / 6.2);
  if (text.length > most) text = text.slice(text.lastIndexOf(".") + 1);
  if (text.length > most) text = most > 3 ? text.slice(0, most - 2) + ".." : "";
  paint.fillStyle = kind === "wait" ? theme.text : "rgba(0, 0, 0, " + 0.9 * alpha + ")";
  paint.fillText(text, x, y);
}

function drawCall() {  // the spans of the call under the pointer, and lines from its dispatch to its runs
  const own = call[hovered] ? byCall.get(call[hovered]) : [hovered];
  paint.strokeStyle = paint.fillStyle = theme.text;
  paint.lineWidth = 1.5;
  const middle = (i) => { const [y, h] = placed(laneOf(i), i); return y + h / 2; };
  const from = own.find((i) => data.phases[phase[i]] === "dispatch");
  for (const i of own) {
    const [y, h] = placed(laneOf(i), i), x = Math.max(xOf(start[i]), GUTTER - 2);
    const right = Math.min(xOf(start[i] + length[i]), width + 2);
    if (right >= GUTTER && x <= width) paint.strokeRect(x, y, Math.max(right - x, 2), h);
    if (from === undefined || data.phases[phase[i]] !== "run") continue;
    const x0 = xOf(start[from] + length[from]), x1 = xOf(start[i]), bend = Math.max(12, Math.abs(x1 - x0) / 2);
    paint.beginPath();
    paint.moveTo(x0, middle(from));
    paint.bezierCurveTo(x0 + bend, middle(from), x1 - bend, middle(i), x1, middle(i));
    paint.stroke();
  }
}

function laneOf(i) {
  let low = 0, high = data.lanes.length - 1;
  while (low < high) {
    const mid = (low + high + 1) >> 1;
    if (data.lanes[mid].first <= i) low = mid; else high = mid - 1;
  }
  return data.lanes[low];
}

function drawGutter(lane) {
  const y = lane.top - scroll.scrollTop;
  if (lane.title) {
    paint.fillStyle = theme.text;
    paint.font = "600 12px system-ui, sans-serif";
    paint.fillText(short(lane.role, GUTTER - 12), 8, y - TITLE / 2 + 2);
    paint.font = "12px system-ui, sans-serif";
  }
  paint.fillStyle = theme.quiet;
  paint.fillText("rank " + lane.rank, 16, y + LANE / 2);
  paint.textAlign = "right";
  paint.fillText((100 * lane.share).toFixed(1) + "%", GUTTER - 8, y + LANE / 2);
  paint.textAlign = "left";
}

function short(text, room) {
  while (text.length > 1 && paint.measureText(text).width > room) text = text.slice(0, -1);
  return text;
}

function drawAxis() {
  paint.fillStyle = theme.back;
  paint.fillRect(0, 0, width, HEAD);
  let step = Math.pow(10, Math.ceil(Math.log10((view.to - view.from) / Math.max(1, (width - GUTTER) / 110))));
  for (const part of [5, 2]) if (xOf(view.from + step / part) - GUTTER > 100) { step /= part; break; }
  step = Math.max(step, 1);
  paint.fillStyle = theme.quiet;
  for (let t = Math.ceil(Math.max(view.from, 0) / step) * step; t <= view.to; t += step) {
    paint.fillRect(xOf(t), HEAD - 5, 1, 5);
    paint.fillText(time(t, 12, view.to), xOf(t) + 4, HEAD / 2);
  }
  paint.fillStyle = theme.line;
  paint.fillRect(0, HEAD - 1, width, 1);
}

function draw() {
  waiting = false;
  const style = getComputedStyle(document.documentElement), dots = window.devicePixelRatio || 1;
  for (const key of ["back", "text", "quiet", "line", "band"]) theme[key] = style.getPropertyValue("--" + key).trim();
  if (chart.width !== Math.round(width * dots) || chart.height !== Math.round(height * dots)) {
    chart.width = Math.round(width * dots);
    chart.height = Math.round(height * dots);
  }
  paint.setTransform(dots, 0, 0, dots, 0, 0);
  paint.font = "12px system-ui, sans-serif";
  paint.textBaseline = "middle";
  paint.textAlign = "left";
  paint.fillStyle = theme.back;
  paint.fillRect(0, 0, width, height);
  const seen = data.lanes.filter((lane) => {
    const y = lane.top - scroll.scrollTop;
    return y < height + TITLE && y + LANE + STRIP > HEAD;
  });
  for (const lane of seen) {
    paint.fillStyle = theme.band;
    paint.fillRect(GUTTER, lane.top - scroll.scrollTop, width - GUTTER, LANE + STRIP);
    drawLane(lane);
  }
  if (hovered >= 0) drawCall();
  paint.fillStyle = theme.back;
  paint.fillRect(0, 0, GUTTER, height);
  seen.forEach(drawGutter);
  drawAxis();
}

function redraw() { if (!waiting) { waiting = true; requestAnimationFrame(draw); } }

function measure() {
  scroll.style.height = "min(70vh, " + bottom + "px)";
  width = scroll.clientWidth;
  height = scroll.clientHeight;
  chart.style.width = width + "px";
  chart.style.height = height + "px";
  document.getElementById("space").style.height = Math.max(0, bottom - height) + "px";
  redraw();
}

function show(from, to) {  // never narrower than a microsecond, never beyond what there is
  const all = everything.to - everything.from, span = Math.min(all, Math.max(to - from, 1000));
  view.from = Math.min(Math.max((from + to - span) / 2, everything.from), everything.to - span);
  view.to = view.from + span;
  redraw();
}

function zoom(factor, x) {
  const t = tOf(Math.max(x, GUTTER));
  show(t - (t - view.from) * factor, t + (view.to - t) * factor);
}

function spanAt(x, y) {  // the innermost span under the pointer, and how many share its pixel
  const high = y + scroll.scrollTop, t0 = tOf(x - 1), t1 = tOf(x + 1);
  const lane = x < GUTTER || y < HEAD ? undefined
    : data.lanes.find((lane) => high >= lane.top && high < lane.top + LANE + STRIP);
  let found = -1, crowd = 0;
  if (!lane) return [found, crowd];
  const inStrip = high >= lane.top + LANE, top = (i) => lane.top + (inStrip ? 0 : 5 * Math.min(depth[i], 3));
  for (let i = firstAt(lane, t0); i < lane.last && start[i] <= t1; i++) {
    if (start[i] + length[i] < t0 || (phase[i] === QUEUE) !== inStrip || high < top(i)) continue;
    crowd += length[i] < t1 - t0 ? 1 : 0;
    if (found < 0 || depth[i] > depth[found] || (depth[i] === depth[found] && length[i] > length[found])) found = i;
  }
  return [found, crowd];
}

function hover(event) {
  const frame = chart.getBoundingClientRect();
  const [i, crowd] = spanAt(event.clientX - frame.left, event.clientY - frame.top);
  if (i !== hovered) { hovered = i; redraw(); }
  tip.style.display = i < 0 ? "none" : "block";
  if (i < 0) return;
  const lane = laneOf(i);
  tip.textContent = [
    data.names[name[i]],
    data.phases[phase[i]] + " on " + lane.role + ", rank " + lane.rank,
    time(length[i], 4) + ", from " + time(start[i], 6),
    call[i] ? "call " + call[i] : "",
    bytes[i] ? bytes[i].toLocaleString("en") + " bytes" : "",
    crowd > 1 ? crowd + " spans here: zoom in" : "",
  ].filter(Boolean).join("\\n");
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}

function leave() { hovered = -1; tip.style.display = "none"; redraw(); }

chart.addEventListener("wheel", (event) => {
  if (event.shiftKey) return;
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 30 : 1;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const by = event.deltaX * lines * (view.to - view.from) / (width - GUTTER);
    show(view.from + by, view.to + by);
  } else zoom(Math.exp(event.deltaY * lines * 0.002), event.clientX - chart.getBoundingClientRect().left);
}, { passive: false });
chart.addEventListener("pointerdown", (event) => {
  chart.setPointerCapture(event.pointerId);
  chart.className = "held";
  leave();
});
chart.addEventListener("pointerup", () => { chart.className = ""; });
chart.addEventListener("pointercancel", () => { chart.className = ""; });
chart.addEventListener("pointermove", (event) => {
  if (chart.className !== "held") return hover(event);
  const by = -event.movementX * (view.to - view.from) / (width - GUTTER);
  show(view.from + by, view.to + by);
  scroll.scrollTop -= event.movementY;
});
chart.addEventListener("pointerleave", leave);
chart.addEventListener("dblclick", () => show(everything.from, everything.to));
scroll.addEventListener("scroll", redraw);
scroll.addEventListener("keydown", (event) => {
  const by = 0.15 * (view.to - view.from), middle = (GUTTER + width) / 2;
  const does = {
    ArrowLeft: () => show(view.from - by, view.to - by),
    ArrowRight: () => show(view.from + by, view.to + by),
    "+": () => zoom(0.7, middle),
    "-": () => zoom(1 / 0.7, middle),
    0: () => show(everything.from, everything.to),
  }[event.key];
  if (does) { event.preventDefault(); does(); }
});

function entry(kind, text, n, as) {
  const item = document.createElement(kind), swatch = document.createElement("canvas");
  swatch.width = 22;
  swatch.height = 12;
  fill(swatch.getContext("2d"), 0, as === "queue" ? 6 : 0, 22, as === "queue" ? 6 : 12, n, as, 1);
  item.append(swatch, text);
  return document.getElementById("legend").appendChild(item);
}

const buttons = data.names.slice(0, 40).map((text, n) => {
  const button = entry("button", text, n, "run");
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    only = only === n ? -1 : n;
    buttons.forEach((one, k) => one.setAttribute("aria-pressed", String(k === only)));
    redraw();
  });
  return button;
});
const others = data.names.length - buttons.length;
if (others > 0) document.getElementById("legend").append("and " + others + " more methods");
data.phases.filter((_, p) => phase.includes(p)).forEach((text) => entry("span", text, 0, text));

window.addEventListener("resize", measure);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
measure();
}
</script>
</body>
</html>
""")
