"""One HTML page of a trace, to look into: the summary, and below it a lane a rank to zoom and pan.

The page (``page.html``) is a table, a style, data and a script, which draws what is visible and merges what is narrower
than a pixel: 100,000 spans stay usable. It needs no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from rayhelper.timeline.summary import COLUMNS, Summary, headline, num_ranks, rows, summarise
from rayhelper.timeline.trace import PHASES, STEP, Span


def html(spans: Iterable[Span], metadata: Mapping[str, Any]) -> str:
    """A page that holds everything it needs: the summary, and the lanes to zoom and pan. ASCII only."""
    spans = list(spans)
    summary = summarise(spans, num_ranks(metadata))
    head, *body = [COLUMNS, *rows(summary)]
    lines = ["<tr>" + "".join(f"<th>{_escaped(cell)}</th>" for cell in head) + "</tr>"]
    for role, *cells in body:
        kind = "rank" if role.startswith(" ") else "role"
        cells_html = "".join(f"<td>{_escaped(cell)}</td>" for cell in cells)
        lines.append(f'<tr class="{kind}"><th scope="row">{_escaped(role.strip())}</th>{cells_html}</tr>')
    page = Template(files("rayhelper.timeline").joinpath("page.html").read_text(encoding="utf-8"))
    told = _escaped(headline(summary, metadata))
    return page.substitute(headline=told, rows="\n".join(lines), data=_embedded(_drawing(spans, summary)))


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
        if span.phase != STEP:  # drawn across all lanes
            ordered[span.role, span.rank].append(span)
    names = {method.name: None for total, _ in summary.roles for method in total.methods}
    names |= {span.name: None for lane in ordered.values() for span in lane}
    number = {name: index for index, name in enumerate(names)}
    steps = [[span.name, span.start_ns - summary.start_ns, span.end_ns - span.start_ns] for span in summary.steps]
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
    told = {"wall": summary.wall_ns, "lanes": lanes, "names": list(names), "phases": phases, "steps": steps}
    return {**told, "spans": columns}


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
