"""What do large values cost on their way? Ours against naive Ray actors, and against the machine's own memory copy.

    python -m benchmarks.transport [--workers 8] [--rounds 9] [--json FILE]

Four questions, each answered by alternating the sides in one process on one cluster:

tensor      a 64 MB float32 tensor to every worker. Naive: `ray.get([actor.take.remote(x) for actor in actors])`.
arrays      3,072 int32 arrays of 64 to 511 elements to every worker (3.5 MB in all). Naive: as above.
tensors     The same as torch tensors, which Ray pickles one by one; fewer rounds, as the naive side takes seconds.
gigabyte    1 GB sliced over the workers, one added to it there, the results flattened: once a tensor, once an array.
            Naive (array): `np.array_split`, a remote call a slice, `ray.get`, `np.concatenate`.

What the memory copy gives for the same bytes: 1 GB goes out and 1 GB comes back, so 2 GB are copied, each into memory
that was allocated for it and kept until both are done. One thread of NumPy and all threads of PyTorch, both into
memory that NumPy allocated (huge pages); the faster one is the yardstick. Medians are compared with medians and best
rounds with best rounds: a virtual machine gives free memory back to its host, and a round that has to ask for it
again takes up to ten times as long, the copy's as well as ours. Not counted: allocating and filling the gigabyte that
is sent. Counted for us: everything from the call to the joined, writable result, also the worker's pass that adds
one, which is the user's work and not transport. It is shown apart: ``returned`` is the same call of a method that
returns what it was given, and ``pass`` is the processor time of the passes in the workers, by number of cores.

The cluster's shared memory is touched for the first time by warm-up rounds, which are not counted. The order of the
sides changes from round to round.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.origin import origin
from rayhelper import RayHelper

_GIGABYTE = 1 << 30
_WARM_ROUNDS = 3
_STORE_BYTES = 5 * _GIGABYTE

Row = dict[str, float]


class Work:
    """What the workers of both sides do."""

    def take(self, value: Any) -> None:
        return None

    def plus_one(self, value: Any) -> Any:
        return value + 1


@RayHelper.worker(group="work")
class Ours:
    @RayHelper.function(group="work")
    def take(self, value: Any) -> None:
        return None

    @RayHelper.function(group="work", dispatch="slice", collect="flatten")
    def plus_one(self, value: Any) -> tuple[Any, list[float]]:
        start = time.thread_time()
        added = value + 1
        return added, [time.thread_time() - start]

    @RayHelper.function(group="work", dispatch="slice", collect="flatten")
    def returned(self, value: Any) -> Any:
        return value


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternating(sides: dict[str, Callable[[], Any]], rounds: int, warm: int, calls: int = 1) -> dict[str, list[float]]:
    """Milliseconds a call of every side, by blocks of ``calls``; their order changes, for each leaves memory behind."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = random.Random(0)
    for number in range(warm + rounds):
        for name in order.sample(list(sides), len(sides)):
            taken = 1e3 * statistics.median(seconds(sides[name]) for _ in range(calls))
            if number >= warm:
                times[name].append(taken)
    return times


def spread(times: list[float]) -> Row:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"best_ms": min(times), "median_ms": middle, "low_quartile_ms": low, "high_quartile_ms": high}


def to_all(
    value: Any, ours: Ours, actors: list[Any], rounds: int, warm: int = _WARM_ROUNDS, calls: int = 5
) -> dict[str, Any]:
    """The value to every worker."""
    import ray

    sides: dict[str, Callable[[], Any]] = {
        "naive": lambda: ray.get([actor.take.remote(value) for actor in actors]),
        "ours": lambda: ours.take(value),
    }
    times = alternating(sides, rounds, warm, calls)
    ratios = [naive / own for naive, own in zip(times["naive"], times["ours"], strict=True)]
    rows = {name: spread(taken) for name, taken in times.items()}
    return {**rows, "times_faster": rows["naive"]["median_ms"] / rows["ours"]["median_ms"], "by_round": sorted(ratios)}


def copied_twice(copy: Callable[[Any, Any], Any], sent: Any) -> Any:
    """Both copies of ``sent``: what goes out and what comes back."""
    out = np.empty_like(sent)
    copy(out, sent)
    back = np.empty_like(sent)
    copy(back, out)
    return out, back


def gigabyte(ours: Ours, actors: list[Any], rounds: int) -> dict[str, Any]:
    """1 GB out, one added, 1 GB back; and the memory copy of 2 GB."""
    import ray

    array = np.ones(_GIGABYTE // 4, np.float32)
    tensor = torch.from_numpy(array)
    passes: dict[str, list[float]] = {"tensor": [], "array": []}

    def plus_one(name: str, value: Any) -> None:
        added, taken = ours.plus_one(value)
        if float(added[0]) != 2.0 or len(added) != len(array):
            raise AssertionError("the gigabyte came back wrong")
        passes[name].append(1e3 * sum(taken) / (os.cpu_count() or 1))

    def naive() -> Any:
        slices = np.array_split(array, len(actors))
        return np.concatenate(
            ray.get([actor.plus_one.remote(part) for actor, part in zip(actors, slices, strict=True)])
        )

    sides: dict[str, Callable[[], Any]] = {
        "copy, NumPy": lambda: copied_twice(np.copyto, array),
        "tensor": lambda: plus_one("tensor", tensor),
        "tensor returned": lambda: ours.returned(tensor),
        "copy, PyTorch": lambda: copied_twice(lambda to, of: torch.from_numpy(to).copy_(torch.from_numpy(of)), array),
        "array": lambda: plus_one("array", array),
        "array returned": lambda: ours.returned(array),
        "naive array": naive,
    }
    times = alternating(sides, rounds, _WARM_ROUNDS)
    rows: dict[str, Any] = {name: spread(taken) for name, taken in times.items()}
    for name in ("tensor", "tensor returned", "array", "array returned", "naive array"):
        for kind in ("median", "best"):
            yardstick = min(rows[copy][f"{kind}_ms"] for copy in ("copy, NumPy", "copy, PyTorch"))
            rows[name][f"share_of_{kind}_copy"] = yardstick / rows[name][f"{kind}_ms"]
    for name, taken in passes.items():
        rows[name]["pass_ms"] = statistics.median(taken[_WARM_ROUNDS:])
    return rows


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':24}{'best ms':>10}{'median ms':>10}{'quartiles':>18}"]

    def add(name: str, row: Row, note: str = "") -> None:
        quartiles = f"{row['low_quartile_ms']:.1f} - {row['high_quartile_ms']:.1f}"
        lines.append(f"{name:24}{row['best_ms']:10.1f}{row['median_ms']:10.1f}{quartiles:>18}  {note}".rstrip())

    for name in ("tensor 64 MB", "arrays 3,072", "tensors 3,072"):
        found = result[name]
        add(f"{name}, naive", found["naive"])
        add(f"{name}, ours", found["ours"], f"{found['times_faster']:.1f}x faster")
    for name, row in result["gigabyte"].items():
        notes = []
        if "share_of_best_copy" in row:
            shares = f"{100 * row['share_of_median_copy']:.0f} % of the copy by medians"
            notes.append(f"{shares}, {100 * row['share_of_best_copy']:.0f} % by the best")
        if "pass_ms" in row:
            notes.append(f"pass {row['pass_ms']:.0f} ms")
        add(f"1 GB {name}", row, ", ".join(notes))
    return "\n".join(lines)


def measured(workers: int, rounds: int) -> dict[str, Any]:
    import ray

    numbers = np.random.default_rng(0)
    arrays = [numbers.integers(0, 1000, size).astype(np.int32) for size in numbers.integers(64, 512, 3072)]
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    result: dict[str, Any] = {}
    with RayHelper.session({"crew": {"device": "CPU", "ranks": workers, "workers": ["work"]}}):
        ours = Ours()
        actors = [ray.remote(Work).options(num_cpus=0).remote() for _ in range(workers)]
        questions: dict[str, Callable[[], Any]] = {
            "arrays 3,072": lambda: to_all(arrays, ours, actors, rounds),
            "tensors 3,072": lambda: to_all([torch.from_numpy(one) for one in arrays], ours, actors, 5, 1, 1),
            "tensor 64 MB": lambda: to_all(torch.ones(16 << 20), ours, actors, rounds),
            "gigabyte": lambda: gigabyte(ours, actors, rounds),
        }
        for name, question in questions.items():
            result[name] = question()
            print(name, json.dumps(result[name], default=lambda number: round(number, 1)), flush=True)
    ray.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {
        **origin(),
        "load_before": os.getloadavg()[0],
        **measured(args.workers, args.rounds),
        "load_after": os.getloadavg()[0],
    }
    print(table(result))
    print(f"load average {result['load_before']:.1f} before, {result['load_after']:.1f} after")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
