"""Learning curves as SVG: test accuracy by step, a line per seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 320, 56, 40, 44, 90
COLOURS = ("#0b62c4", "#c4570b", "#2e8540", "#8a2be2", "#8a949e")
STYLE = "text{font:13px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;font-size:15px}"


def svg(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A picture of curves of (step, accuracy in percent), each with its name at its end."""
    points = [point for curve in curves.values() for point in curve]
    last = max((step for step, _ in points), default=0) or 1
    most = max((value for _, value in points), default=0) or 1

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most

    parts = [f'<text class="title" x="8" y="22">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        _, y = place(0, share * most)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8a949e66"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most:.1f} %</text>')
        x, _ = place(share * last, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{share * last:.0f}</text>')
    for (name, curve), colour in zip(curves.items(), COLOURS * len(curves), strict=False):
        corners = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in curve)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if curve:
            x, y = place(*curve[-1])
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
    return f"<svg {box}><style>{STYLE}</style>{''.join(parts)}</svg>\n"
