"""Which curves a report has, and each as SVG with its text beside it as HTML, so that text keeps its size on a phone.

    groups(series)        charts by heading, of the metrics that are there
    lines(title, ...)     a figure of curves
    stack(title, ...)     a figure of layers that add up, as the seconds of a step do

A curve of many steps is thinned, keeping the least and the largest value of each stretch; a long one is drawn thin, and
over it the mean of its surroundings.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from trainers.report.recorded import EVAL, Points

WIDTH, HEIGHT = 1000, 300  # of a drawing, in its own units: it is stretched to the width of the page
MOST_POINTS = 400  # of a curve
SMOOTH_FROM = 60  # points from which on the mean is drawn too
COLOURS = 8
PHASES = ("generate", "reward", "logps", "update", "sync", "data", "offload", "idle")
NO_CHART = ("time/*", "time_share/*", "step_time", "epoch", f"{EVAL}*")

# Heading, then charts: title, metrics (patterns), unit. A metric is in the first chart that names it.
GROUPS: tuple[tuple[str, tuple[tuple[str, tuple[str, ...], str], ...]], ...] = (
    (
        "Rewards and completions",
        (
            ("Reward", ("reward", "objective/scores", "episode_reward"), ""),
            ("Rewards by function", ("rewards/*/mean",), ""),
            ("Spread of the reward", ("reward_std", "rewards/*/std"), ""),
            ("Groups without a difference", ("frac_reward_zero_std",), "share of completions"),
            ("Length of completions", ("completions/mean_length", "completions/mean_terminated_length"), "tokens"),
            ("Completions cut at the limit", ("completions/clipped_ratio",), "share of completions"),
            ("Turns and tool calls", ("num_turns", "tools/*"), "per completion"),
        ),
    ),
    (
        "Learning",
        (
            ("Loss", ("loss",), ""),
            ("Terms of the loss", ("*_loss", "loss/*", "nll_loss"), ""),
            ("Entropy", ("entropy",), "nats"),
            ("KL divergence", ("kl", "objective/kl", "approxkl*", "teacher_kl"), "nats"),
            ("Clipping", ("clip_ratio/*", "*clipfrac*"), "share of tokens"),
            ("Accuracy of tokens", ("mean_token_accuracy",), "share"),
            ("Rewards of chosen and rejected", ("rewards/chosen", "rewards/rejected", "rewards/margins"), ""),
            ("Accuracy of preferences", ("rewards/accuracies", "accuracy"), "share"),
            ("Gradient norm", ("grad_norm",), ""),
            ("Learning rate", ("learning_rate",), ""),
            ("Steps that changed nothing", ("bad_steps",), "steps so far"),
        ),
    ),
    (
        "Speed and memory",
        (
            ("Tokens per second", ("throughput/tokens_per_second",), "tokens/s"),
            ("Completion tokens per second", ("throughput/completion_tokens_per_second",), "tokens/s"),
            ("Model FLOPs utilisation (MFU)", ("throughput/mfu",), "share of the peak"),
            ("Memory", ("memory/*",), "GiB"),
            ("KV cache in use", ("rollout/kv_cache_usage",), "share"),
            ("Staleness", ("staleness", "staleness/*"), "steps"),
        ),
    ),
)


@dataclass(frozen=True)
class Chart:
    title: str
    metrics: list[str]
    unit: str


@dataclass(frozen=True)
class Line:
    label: str
    points: Points


def groups(names: Iterable[str]) -> list[tuple[str, list[Chart]]]:
    """(heading, charts) of the metrics that are there; those without a place are in the last group, one a chart."""
    left = [name for name in dict.fromkeys(names) if not any(fnmatch.fnmatchcase(name, one) for one in NO_CHART)]
    found = []
    for heading, specified in GROUPS:
        charts = []
        for title, patterns, unit in specified:
            own = [name for pattern in patterns for name in left if fnmatch.fnmatchcase(name, pattern)]
            left = [name for name in left if name not in own]
            if own:
                charts.append(Chart(title, list(dict.fromkeys(own)), unit))
        if charts:
            found.append((heading, charts))
    if left:
        found.append(("Other metrics", [Chart(name, [name], "") for name in sorted(left)]))
    return found


def lines(title: str, curves: Sequence[Line], unit: str = "") -> str:
    """The figure of some curves; nothing if none has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    frame = _Frame(min(steps), max(steps), *_range(min(values), max(values)))
    drawn = [shape for index, curve in enumerate(curves) for shape in _curve(curve.points, frame, index)]
    return _figure(title, unit, frame, drawn, curves, _told(title, curves))


def stack(title: str, layers: Sequence[Line], unit: str) -> str:
    """The figure of layers that lie on one another, each in its own colour, and a line of the step's values."""
    layers = [layer for layer in layers if any(value for _, value in layer.points)]
    if not layers:
        return ""
    steps = sorted({step for layer in layers for step, _ in layer.points})
    parts = _parts(len(steps), MOST_POINTS // 2)
    where = [steps[first] for first, _ in parts]
    where[-1] = steps[-1]
    means = []
    for layer in layers:
        known = dict(layer.points)
        values = [known.get(step, 0.0) for step in steps]
        means.append([sum(values[first:last]) / (last - first) for first, last in parts])
    tops = [0.0] * len(where)
    frame = _Frame(steps[0], steps[-1], 0.0, max(sum(column) for column in zip(*means, strict=True)) or 1.0)
    drawn = []
    for index, values in enumerate(means):
        bottoms, tops = tops, [top + value for top, value in zip(tops, values, strict=True)]
        if len(where) == 1:
            left, right = 0.35 * WIDTH, 0.65 * WIDTH
            corners = [(left, frame.y(tops[0])), (right, frame.y(tops[0]))]
            corners += [(right, frame.y(bottoms[0])), (left, frame.y(bottoms[0]))]
        else:
            corners = [(frame.x(step), frame.y(top)) for step, top in zip(where, tops, strict=True)]
            below = zip(reversed(where), reversed(bottoms), strict=True)
            corners += [(frame.x(step), frame.y(bottom)) for step, bottom in below]
        drawn.append(f'<polygon class="area s{index % COLOURS}" points="{_pairs(corners)}"/>')
    thinned = [
        Line(layer.label, list(zip(where, values, strict=True))) for layer, values in zip(layers, means, strict=True)
    ]
    return _figure(title, unit, frame, drawn, thinned, _told(title, thinned), filled=True)


def short(value: float) -> str:
    """A number as a person reads it: four digits that count."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points (about): of each stretch of steps the least and the largest value, in order."""
    if len(points) <= most:
        return points
    kept: Points = []
    for first, last in _parts(len(points), most // 2):
        stretch = points[first:last]
        low = min(stretch, key=lambda point: point[1])
        high = max(stretch, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


def smoothed(points: Points) -> Points:
    """The mean of each point's surroundings, a fortieth of the curve."""
    reach = max(1, len(points) // 80)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    found = []
    for place, (step, _) in enumerate(points):
        first, last = max(0, place - reach), min(len(points), place + reach + 1)
        found.append((step, (sums[last] - sums[first]) / (last - first)))
    return found


@dataclass(frozen=True)
class _Frame:
    """What a drawing shows, in steps and values."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return WIDTH / 2 if self.last == self.first else (step - self.first) / (self.last - self.first) * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT - (value - self.low) / (self.high - self.low) * HEIGHT


def _range(low: float, high: float) -> tuple[float, float]:
    """From the least to the largest value; one value alone lies in the middle."""
    if low == high == 0:
        return 0.0, 1.0
    if low == high:
        reach = abs(low) or 1.0
        return low - reach / 2, high + reach / 2
    return low, high


def _curve(points: Points, frame: _Frame, index: int) -> list[str]:
    colour = f"s{index % COLOURS}"
    if len(points) == 1:
        ((step, value),) = points
        x, y = frame.x(step), frame.y(value)
        return [f'<polyline class="line {colour}" points="{_pairs([(max(0, x - 8), y), (min(WIDTH, x + 8), y)])}"/>']

    def drawn(style: str, shown: Points) -> str:
        return f'<polyline class="{style} {colour}" points="{_pairs((frame.x(s), frame.y(v)) for s, v in shown)}"/>'

    if len(points) < SMOOTH_FROM:
        return [drawn("line", points)]
    return [drawn("raw", thinned(points)), drawn("line", thinned(smoothed(points)))]


def _pairs(corners: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


def _figure(
    title: str, unit: str, frame: _Frame, drawn: Sequence[str], curves: Sequence[Line], told: str, filled: bool = False
) -> str:
    mark = "area" if filled else "line"
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 24 10" aria-hidden="true"><path class="{mark} s{index % COLOURS}" '
        f'd="{"M0 0H24V10H0Z" if filled else "M0 5H24"}"/></svg>{escape(curve.label)}</li>'
        for index, curve in enumerate(curves)
    )
    legend = f'<ul class="legend">{keys}</ul>' if len(curves) > 1 else ""
    beside = ", ".join(filter(None, ["" if legend or curves[0].label == title else curves[0].label, unit]))
    unit_shown = f' <span class="unit">{escape(beside)}</span>' if beside else ""
    points = escape(_points(curves), quote=True)
    grid = "".join(f'<path class="grid" d="M0 {y}H{WIDTH}"/>' for y in (0, HEIGHT // 2, HEIGHT))
    return (
        f'<figure class="chart" data-points="{points}"><figcaption>{escape(title)}{unit_shown}</figcaption>'
        f'<div class="plot"><div class="y" aria-hidden="true"><span>{short(frame.high)}</span>'
        f"<span>{short((frame.high + frame.low) / 2)}</span><span>{short(frame.low)}</span></div>"
        f'<svg class="drawing" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(told, quote=True)}">{grid}{"".join(drawn)}</svg>'
        f'<div class="x" aria-hidden="true"><span>step {frame.first:,}</span><span>{frame.last:,}</span></div></div>'
        f'{legend}<p class="read" aria-hidden="true"></p></figure>\n'
    )


def _points(curves: Sequence[Line]) -> str:
    """What the page's script reads to say the values under the pointer: per curve its label, steps and values."""
    data = [
        [curve.label, [step for step, _ in shown], [float(f"{value:.5g}") for _, value in shown]]
        for curve in curves
        for shown in [thinned(curve.points)]
    ]
    return json.dumps(data, separators=(",", ":"))


def _told(title: str, curves: Sequence[Line]) -> str:
    """The figure in words, for those who do not see it."""
    parts = []
    for curve in curves:
        (first, start), (last, end) = curve.points[0], curve.points[-1]
        values = [value for _, value in curve.points]
        parts.append(
            f"{curve.label}: {short(start)} at step {first}, {short(end)} at step {last}, "
            f"between {short(min(values))} and {short(max(values))}"
        )
    return f"{title}. {'; '.join(parts)}."


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """``count`` things cut into at most so many stretches: (first, behind the last)."""
    number = max(1, min(count, most))
    edges = [round(place * count / number) for place in range(number + 1)]
    return [(first, last) for first, last in itertools.pairwise(edges) if last > first]


def phases_of(series: Mapping[str, Points]) -> list[Line]:
    """The seconds of the steps by phase, in the order in which a step goes through them."""
    found = {
        name.removeprefix("time/"): points
        for name, points in series.items()
        if name.startswith("time/") and name != "time/step"
    }
    others = sorted(found.keys() - set(PHASES))
    return [Line(phase, found[phase]) for phase in (*PHASES[:-1], *others, PHASES[-1]) if phase in found]
