"""What does a decorated call cost? With Ray off against a plain call; with Ray on against hand-written Ray actors.

    python -m benchmarks.call_latency [--workers 8] [--rounds 40] [--json FILE]

Both sides run in the same process on the same cluster, in alternating blocks, so that a slow moment of the machine
meets both. Reported are medians over the blocks and the median of the block-wise ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.origin import origin
from rayhelper import RayHelper


@RayHelper.worker(group="work")
class Decorated:
    @RayHelper.function(group="work")
    def noop(self) -> None:
        return None


class Plain:
    def noop(self) -> None:
        return None


def seconds_a_call(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def off(rounds: int) -> dict[str, float]:
    """Microseconds a call with Ray off."""
    plain, decorated = Plain(), Decorated()
    pairs = [
        (seconds_a_call(lambda: plain.noop(), 20_000), seconds_a_call(lambda: decorated.noop(), 20_000))
        for _ in range(rounds)
    ]
    plain_us, decorated_us = (1e6 * statistics.median(side) for side in zip(*pairs, strict=True))
    return {"plain_us": plain_us, "decorated_us": decorated_us, "overhead_us": decorated_us - plain_us}


def fan_out(workers: int, rounds: int) -> dict[str, float]:
    """Milliseconds for a no-op on every one of ``workers`` actors, waited for."""
    import ray

    groups = {"all": {"device": "CPU", "ranks": workers, "workers": ["work"]}}
    with RayHelper.session(groups):
        decorated = Decorated()
        actors = [ray.remote(Plain).options(num_cpus=0).remote() for _ in range(workers)]
        ray.get([actor.noop.remote() for actor in actors])

        def by_hand() -> object:
            return ray.get([actor.noop.remote() for actor in actors])

        for _ in range(100):
            by_hand()
            decorated.noop()
        pairs = [(seconds_a_call(by_hand, 50), seconds_a_call(decorated.noop, 50)) for _ in range(rounds)]
        for actor in actors:
            ray.kill(actor)
    by_hand_ms, decorated_ms = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for other, one in pairs)
    return {"by_hand_ms": by_hand_ms, "decorated_ms": decorated_ms, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {
        **origin(),
        "off": off(args.rounds),
        "ray": fan_out(args.workers, args.rounds),
    }
    off_, ray_ = result["off"], result["ray"]
    print(
        f"Ray off      plain {off_['plain_us']:.3f} us   decorated {off_['decorated_us']:.3f} us   "
        f"overhead {off_['overhead_us']:.3f} us"
    )
    print(
        f"{args.workers} workers    by hand {ray_['by_hand_ms']:.3f} ms   decorated {ray_['decorated_ms']:.3f} ms   "
        f"ratio {ray_['ratio']:.3f}"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
