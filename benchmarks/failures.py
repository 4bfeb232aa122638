"""How soon is trouble known, and over? An exception, a kill -9, a deadline, a restart, each with 8 workers.

    python -m benchmarks.failures [--workers 8] [--rounds 5] [--questions traced deaths ...] [--json FILE]

The peer is hand-written: Ray actors with the same methods, and `ray.get` of all references. Seconds from the moment the
worker fails (its own clock, on this machine) until the driver's call raises; then until the group answers again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.origin import origin
from rayhelper import DeadlineError, RayHelper, WorkerDiedError


class FailedError(Exception):
    """Carries the moment at which it was raised."""

    def __init__(self, moment: float) -> None:
        super().__init__(moment)
        self.moment = moment


class Work:
    """What the workers of both sides do."""

    def pid(self) -> int:
        return os.getpid()

    def fail(self, rank: int, failing: int, others: str) -> None:
        if rank == failing:
            time.sleep(0.2)  # the others are busy by then
            raise FailedError(time.time())
        if others == "sleep":
            time.sleep(5)
        elif others == "collective":
            torch.distributed.all_reduce(torch.ones(1))


@RayHelper.worker(group="work")
class Ours(Work):
    def __init__(self) -> None:
        self.join()

    @RayHelper.function(group="work")
    def join(self) -> None:
        RayHelper.init_process_group("gloo", timeout_s=300)

    @RayHelper.function(group="work")
    def pids(self) -> int:
        return self.pid()

    @RayHelper.function(group="work")
    def failing(self, failing: int, others: str) -> None:
        self.fail(RayHelper.current().rank, failing, others)

    @RayHelper.function(group="work")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@RayHelper.worker(group="work")
class Stateless(Work):
    @RayHelper.function(group="work")
    def pids(self) -> int:
        return self.pid()

    @RayHelper.function(group="work")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def told_after(call: Callable[[], Any]) -> float:
    """Seconds from a worker's exception until ``call`` raises it."""
    try:
        call()
    except FailedError as error:
        return time.time() - error.moment
    raise AssertionError("the call did not fail")


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def exceptions(workers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Told and over, by what the other workers do meanwhile; for the hand-written peer only told."""
    import ray

    found: dict[str, dict[str, list[float]]] = {}
    with RayHelper.session({"crew": {"device": "CPU", "ranks": workers, "workers": ["work"]}}):
        ours = Ours()
        peers = [ray.remote(Work).options(num_cpus=0).remote() for _ in range(workers)]
        ray.get([peer.pid.remote() for peer in peers])
        for others in ("return", "sleep", "collective"):
            row = found.setdefault(others, {"ours_told_s": [], "ours_usable_again_s": [], "peer_told_s": []})
            for _ in range(rounds):
                row["ours_told_s"].append(told_after(lambda others=others: ours.failing(workers - 1, others)))
                row["ours_usable_again_s"].append(seconds(ours.pids))
                if others == "collective":
                    continue  # by hand there is no process group to be freed from: it would wait for its timeout
                refs = [peer.fail.remote(rank, workers - 1, others) for rank, peer in enumerate(peers)]
                row["peer_told_s"].append(told_after(lambda refs=refs: ray.get(refs)))
                ray.wait(refs, num_returns=len(refs))
    return {others: _medians(row) for others, row in found.items()}


def deaths(workers: int, rounds: int) -> dict[str, float]:
    """Seconds until a kill -9 is noticed: without restarts the call raises, with restarts it returns."""
    noticed, replaced = [], []
    for _ in range(rounds):
        with RayHelper.session({"crew": {"device": "CPU", "ranks": workers, "workers": ["work"]}}):
            ours = Stateless()
            pids = ours.pids()
            call = ours.sleep.defer(30)
            time.sleep(0.3)
            killed = time.perf_counter()
            os.kill(pids[1], signal.SIGKILL)
            try:
                call.result()
            except WorkerDiedError:
                noticed.append(time.perf_counter() - killed)
    with RayHelper.session({"crew": {"device": "CPU", "ranks": workers, "workers": ["work"], "restarts": rounds}}):
        ours = Stateless()
        for _ in range(rounds):
            os.kill(ours.pids()[1], signal.SIGKILL)
            replaced.append(seconds(ours.pids))
    return {
        "noticed_s": statistics.median(noticed),
        "noticed_max_s": max(noticed),
        "replaced_s": statistics.median(replaced),
    }


def deadlines(workers: int, rounds: int) -> dict[str, float]:
    """Seconds beyond a deadline of one second until the error with all stacks is there."""
    late = []
    with RayHelper.session({"crew": {"device": "CPU", "ranks": workers, "workers": ["work"]}}):
        ours = Stateless()
        ours.pids()
        for _ in range(rounds):
            call = ours.sleep.defer(30)
            start = time.perf_counter()
            try:
                call.result(timeout_s=1.0)
            except DeadlineError as error:
                if "time.sleep(seconds)" not in str(error):
                    raise AssertionError("the stacks are missing") from error
                late.append(time.perf_counter() - start - 1.0)
            call.cancel()
    return {"stacks_after_s": statistics.median(late)}


def traced(workers: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a no-op on all workers without and with a trace: two sessions at once, in alternating blocks."""
    groups = {"crew": {"device": "CPU", "ranks": workers, "workers": ["work"]}}
    times: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder, RayHelper.session(groups):
        plain = Stateless()
        with RayHelper.local(), RayHelper.session(groups, trace=f"{folder}/trace.json"):
            sides = {"off": plain, "on": Stateless()}
            for ours in sides.values():
                hundred(ours)
            for block in range(10 * rounds):
                for name in sorted(sides, reverse=bool(block % 2)):
                    times[name].append(10 * seconds(lambda name=name: hundred(sides[name])))
    ratio = statistics.median(on / off for on, off in zip(times["on"], times["off"], strict=True))
    return {"off_ms": statistics.median(times["off"]), "on_ms": statistics.median(times["on"]), "ratio": ratio}


def hundred(ours: Stateless) -> None:
    for _ in range(100):
        ours.pids()


def _medians(row: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 4) for name, values in row.items() if values} | {
        "ours_told_max_s": round(max(row["ours_told_s"]), 4)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    questions = {question.__name__: question for question in (exceptions, deaths, deadlines, traced)}
    parser.add_argument("--questions", nargs="+", choices=list(questions), default=list(questions))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        **origin(),
        "load": round(os.getloadavg()[0], 2),
    }
    for name in args.questions:
        result[name] = questions[name](args.workers, args.rounds)
        print(f"... {name}: {result[name]}", file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
