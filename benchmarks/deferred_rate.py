"""How many deferred calls a second, beside hand-written Ray actors?

    python -m benchmarks.deferred_rate [--workers 4] [--calls 500] [--rounds 20] [--json FILE] [--profile]

A block sends ``calls`` no-ops to every worker, by ``method.defer()`` or ``actor.method.remote()``. Then it takes all
values: ``future.result()`` of each, or one ``ray.get``. Both sides run in the same process on the same cluster, in
alternating blocks. Reported are medians over the blocks and the median of the block-wise ratios. ``max_in_flight`` is
once above the number of calls, once not set, and once 64, where ``defer`` waits for room.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.call_latency import Decorated, Plain
from benchmarks.origin import origin
from rayhelper import RayHelper


def rates(workers: int, calls: int, rounds: int, max_in_flight: int | None, profiled: bool) -> dict[str, float | None]:
    """Calls a second (each to all workers) by hand and decorated, and their ratio."""
    import ray

    room = {} if max_in_flight is None else {"max_in_flight": max_in_flight}
    groups = {"all": {"device": "CPU", "ranks": workers, "workers": ["work"], **room}}
    with RayHelper.session(groups):
        decorated = Decorated()
        actors = [ray.remote(Plain).options(num_cpus=0).remote() for _ in range(workers)]

        def by_hand() -> None:
            ray.get([actor.noop.remote() for _ in range(calls) for actor in actors])

        def deferred() -> None:
            for future in [decorated.noop.defer() for _ in range(calls)]:
                future.result()

        for _ in range(3):
            by_hand()
            deferred()
        pairs = [(calls / seconds(by_hand), calls / seconds(deferred)) for _ in range(rounds)]
        if profiled:
            with cProfile.Profile() as profile:
                deferred()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        for actor in actors:
            ray.kill(actor)
    by_hand_hz, deferred_hz = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for other, one in pairs)
    return {"max_in_flight": max_in_flight, "by_hand_hz": by_hand_hz, "deferred_hz": deferred_hz, "ratio": ratio}


def seconds(block: Callable[[], None]) -> float:
    start = time.perf_counter()
    block()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="of the driver's side of one block")
    args = parser.parse_args()
    found = [rates(args.workers, args.calls, args.rounds, room, args.profile) for room in (2 * args.calls, None, 64)]
    for one in found:
        print(
            f"{args.workers} workers, at most {one['max_in_flight'] or 'by default'} in flight   "
            f"by hand {one['by_hand_hz']:.0f} /s   deferred {one['deferred_hz']:.0f} /s   ratio {one['ratio']:.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({**origin(), "deferred": found}, indent=2))


if __name__ == "__main__":
    main()
