"""Bar charts of benchmarks as SVG, drawn from JSON; the same JSON gives the same bytes.

    python -m benchmarks.bars benchmarks/results/*.json --out benchmarks/plots     # draws one SVG per file
    python -m benchmarks.bars benchmarks/results/*.json --out benchmarks/plots --check   # says which differ

A file holds one question:

    {"title": "GRPO step, Qwen3-0.6B", "unit": "tokens/s", "better": "higher",
     "bars": [{"label": "ours", "value": 5120, "low": 5000, "high": 5200, "ours": true, "group": "short"},
              {"label": "TRL", "value": 2210, "group": "short"}],
     "card": "H100", "command": "python -m benchmarks.real.grpo", "commit": "3a88d80"}

``low`` and ``high`` (the scatter), ``group``, ``ours``, ``card``, ``command`` and ``commit`` may be left out. A value
of null is drawn as "not measured".
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LABELS, FIGURES = 640, 170, 110  # of the picture, of the names at the left, of the numbers at the right
BAR, GAP, TITLE, HEAD = 20, 6, 26, 46
LINE = 88  # characters that fit into the width
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b1f24}.quiet{fill:#57606a}.title{font-weight:600;font-size:15px}"
    ".ours{fill:#0b62c4}.peer{fill:#8a949e}.scatter{stroke:#1b1f24;stroke-width:1.5}"
    "@media (prefers-color-scheme:dark){text{fill:#e4e8ec}.quiet{fill:#9ba5af}.ours{fill:#6cb0ff}.peer{fill:#8a949e}"
    ".scatter{stroke:#e4e8ec}}"
)


def svg(question: Mapping[str, Any]) -> str:
    """The chart of a question.

    Raises:
        ValueError: what is wrong with the question, in words.
    """
    _check(question)
    bars = question["bars"]
    most = max((bar.get("high") or bar["value"] for bar in bars if bar["value"] is not None), default=0) or 1.0
    room = WIDTH - LABELS - FIGURES
    parts, y, group = [], HEAD, None
    for bar in bars:
        if bar.get("group") != group:
            group = bar.get("group")
            parts.append(_text(0, y + 17, group or "", "quiet"))
            y += TITLE
        middle = y + BAR / 2
        parts.append(_text(LABELS - 8, middle + 5, bar["label"], "", "end"))
        if bar["value"] is None:
            parts.append(_text(LABELS, middle + 5, "not measured", "quiet"))
        else:
            width = room * bar["value"] / most
            kind = "ours" if bar.get("ours") else "peer"
            parts.append(f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}"/>')
            if "low" in bar:
                low, high = (LABELS + room * bar[end] / most for end in ("low", "high"))
                parts.append(f'<path class="scatter" d="M{low:.1f} {middle}H{high:.1f}"/>')
            parts.append(_text(LABELS + room * (bar.get("high") or bar["value"]) / most + 8, middle + 5, _number(bar)))
        y += BAR + GAP
    where = ", ".join(str(question[name]) for name in ("card", "commit", "command") if question.get(name))
    for line in textwrap.wrap(where, LINE):
        parts.append(_text(0, y + 14, line, "quiet"))
        y += BAR
    better = f"; {question['better']} is better" if question.get("better") else ""
    subtitle = f"{question['unit']}{better}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4}" width="{WIDTH}" role="img" '
        f'aria-labelledby="title words"><title id="title">{escape(question["title"])}</title>'
        f'<desc id="words">{escape(words(question))}</desc><style>{STYLE}</style>'
        f"{_text(0, 16, question['title'], 'title')}{_text(0, 36, subtitle, 'quiet')}{''.join(parts)}</svg>\n"
    )


def words(question: Mapping[str, Any]) -> str:
    """The chart in words: the alternative text of its picture."""
    told = []
    for bar in question["bars"]:
        group = f"{bar['group']}, " if bar.get("group") else ""
        value = "not measured" if bar["value"] is None else f"{_number(bar)} {question['unit']}"
        told.append(f"{group}{bar['label']}: {value}")
    return f"{question['title']}. {'; '.join(told)}."


def _check(question: Mapping[str, Any]) -> None:
    for name in ("title", "unit", "bars"):
        if not question.get(name):
            raise ValueError(f"it has no {name!r}")
    if question.get("better") not in (None, "higher", "lower"):
        raise ValueError(f"better must be higher or lower, got {question['better']!r}")
    for bar in question["bars"]:
        if not isinstance(bar, dict) or not isinstance(bar.get("label"), str) or "value" not in bar:
            raise ValueError(f"a bar needs label and value, got {bar!r}")
        if ("low" in bar) != ("high" in bar):
            raise ValueError(f"bar {bar['label']!r} needs both low and high, or neither")
        ends = [bar[name] for name in ("low", "value", "high") if bar.get(name) is not None]
        if any(not isinstance(end, (int, float)) or not math.isfinite(end) or end < 0 for end in ends):
            raise ValueError(f"the numbers of bar {bar['label']!r} must be at least 0, got {ends}")
        if ends != sorted(ends):
            raise ValueError(f"bar {bar['label']!r} needs low <= value <= high, got {ends}")


def _number(bar: Mapping[str, Any]) -> str:
    value = float(bar["value"])
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    more = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 all is well, 1 with ``--check`` a picture is not as drawn, 2 a file cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the pictures")
    parser.add_argument("--check", action="store_true", help="write nothing; say which pictures are not as drawn")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    stale = []
    for file in options.files:
        try:
            drawn = svg(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            print(f"error: {file}: {error}", file=sys.stderr)
            return 2
        picture = options.out / f"{file.stem}.svg"
        if not options.check:
            picture.write_text(drawn, encoding="utf-8")
        elif not picture.is_file() or picture.read_text(encoding="utf-8") != drawn:
            stale.append(picture)
    for picture in stale:
        print(f"{picture} is not as its JSON has it. Draw it again: leave out --check", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
