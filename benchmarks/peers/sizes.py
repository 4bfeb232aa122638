"""How cost grows: with the workers of a group (no-op), and with the items of a list (slice -> +1 -> flatten).

Both for this library and for naive hand-written actors. A line is fitted over the larger half of each axis, so that its
slope is the cost of one more worker or item, and the fixed cost of a call does not tilt it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.peers.by_hand import cut
from benchmarks.peers.counting import Actor, Trainer
from benchmarks.peers.measure import alternating, growth, private_bytes, steady
from rayhelper import RayHelper

WORKERS = (1, 2, 4, 8, 16, 32, 64)
ITEMS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
NUM_SLICES = 4
NAMES = BY_HAND, OURS = "by hand, naive", "rayhelper"


@dataclass
class Curve:
    """One contestant's cost at each size."""

    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)  # of the driver, during a call
    held_mb: list[float] = field(default_factory=list)  # of the driver, since before the workers were started

    def add(self, size: int, seconds: float, peak_mb: float, held_mb: float) -> None:
        self.sizes.append(size)
        self.seconds.append(seconds)
        self.peak_mb.append(peak_mb)
        self.held_mb.append(held_mb)


def measured(*, quick: bool) -> dict[str, Any]:
    """{'workers': {contestant: Curve}, 'items': the same}."""
    counts = [n for n in WORKERS if n <= (4 if quick else 64)]
    lengths = [n for n in ITEMS if n <= (10_000 if quick else 1_000_000)]
    blocks = 5 if quick else 9
    return {"workers": by_workers(counts, blocks), "items": by_items(lengths, blocks)}


def by_workers(counts: list[int], num_blocks: int) -> dict[str, Curve]:
    curves = {name: Curve() for name in NAMES}
    with _session(1):  # what is loaded once is no cost of a worker
        Trainer().noop()
    actors: list[Any] = []
    held_by_hand = 0.0
    for count in counts:
        before = private_bytes()
        actors += _actors(count - len(actors))
        held_by_hand += (private_bytes() - before) / 1e6
        before = private_bytes()
        with _session(count):
            trainer = Trainer()
            trainer.noop()
            held = {BY_HAND: held_by_hand, OURS: (private_bytes() - before) / 1e6}
            steady()
            calls = {
                BY_HAND: lambda actors=actors: ray.get([actor.noop.remote() for actor in actors]),
                OURS: lambda trainer=trainer: trainer.noop(),
            }
            timings = alternating(calls, num_blocks=num_blocks, block_s=0.2, warm_s=1.0)
            for name, call in calls.items():
                curves[name].add(count, timings[name].seconds, growth(call).peak_mb, held[name])
    _kill(actors)
    return curves


def by_items(lengths: list[int], num_blocks: int) -> dict[str, Curve]:
    curves = {name: Curve() for name in NAMES}
    actors = _actors(NUM_SLICES)
    with _session(NUM_SLICES):
        trainer = Trainer()
        trainer.noop()
        steady()
        for length in lengths:
            items = list(range(length))
            calls = {
                BY_HAND: lambda items=items: _sliced_by_hand(actors, items),
                OURS: lambda items=items: trainer.plus_one_each(items),
            }
            for name, call in calls.items():
                assert call() == [item + 1 for item in items], f"{name} returns other values for {length} items"
            timings = alternating(calls, num_blocks=num_blocks, block_s=0.2, warm_s=0.5)
            for name, call in calls.items():
                grown = growth(call)
                curves[name].add(length, timings[name].seconds, grown.peak_mb, grown.kept_mb)
    _kill(actors)
    return curves


def _actors(count: int) -> list[Any]:
    actors = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(count)]
    ray.get([actor.noop.remote() for actor in actors])
    return actors


def _kill(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def _session(count: int) -> Any:
    return RayHelper.session({"all": {"device": "CPU", "ranks": count, "workers": ["work"]}})


def _sliced_by_hand(actors: list[Any], items: list[int]) -> list[int]:
    slices = zip(actors, cut(items, len(actors)), strict=True)
    return list(chain.from_iterable(ray.get([actor.plus_one_each.remote(some) for actor, some in slices])))


def slope(curve: Curve, values: list[float]) -> float:
    """Value a unit of size, over the larger half of the sizes."""
    half = len(curve.sizes) // 2
    return float(np.polyfit(curve.sizes[half:], values[half:], 1)[0])


def described(results: dict[str, dict[str, Curve]]) -> str:
    """The slopes, in words, and the figures behind them."""
    lines = []
    for name, curve in results["workers"].items():
        lines.append(
            f"{name}: {1e6 * slope(curve, curve.seconds):.0f} us more for every worker of a no-op;"
            f" {1e3 * slope(curve, curve.held_mb):.0f} KB more held by the driver for every worker"
        )
    for name, curve in results["items"].items():
        lines.append(
            f"{name}: {1e9 * slope(curve, curve.seconds):.0f} ns more for every item (an int) sliced over {NUM_SLICES}"
            f" workers and flattened; {1e6 * slope(curve, curve.peak_mb):.0f} bytes more of the driver at the peak"
        )
    for axis, curves in results.items():
        sizes = next(iter(curves.values())).sizes
        for position, size in enumerate(sizes):
            figures = ", ".join(f"{name} {1e3 * curve.seconds[position]:.2f} ms" for name, curve in curves.items())
            lines.append(f"  {size:>9,} {axis}: {figures}")
    return "\n".join(lines)


def drawn(results: dict[str, dict[str, Curve]], folder: Path) -> None:
    """workers.svg and items.svg in ``folder``: time and the driver's memory over size, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rayhelper", "font.size": 9})
    folder.mkdir(exist_ok=True)
    memory = {"workers": ("held_mb", "MB held by the driver"), "items": ("peak_mb", "MB of the driver, at the peak")}
    for axis, curves in results.items():
        attribute, label = memory[axis]
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
        for name, curve in curves.items():
            left.plot(curve.sizes, [1e3 * seconds for seconds in curve.seconds], marker="o", label=name)
            right.plot(curve.sizes, getattr(curve, attribute), marker="o", label=name)
        left.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms a call")
        right.set(xscale="log", yscale="symlog", ylim=(0, None), xlabel=axis, ylabel=label)
        left.legend(frameon=False)
        for axes in (left, right):
            axes.minorticks_off()
            if axis == "workers":
                axes.set_xticks(curve.sizes, [str(size) for size in curve.sizes])
        figure.savefig(folder / f"{axis}.svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
