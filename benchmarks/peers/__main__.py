"""Asks every contestant every question and prints the tables: see the package's first page."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import cluster, report
from benchmarks.peers.measure import said
from benchmarks.peers.questions import (
    Answer,
    Plan,
    Times,
    answered,
    data_questions,
    latency,
    started,
    stopped,
    words_of_their_own,
)
from benchmarks.peers.work import Contestant

PLOTS = Path(__file__).parent.parent / "plots"
OTHERS = {"ours": "Ours", "ms_swift": "SwiftRayHelper", "verl_workers": "VerlWorkerGroup"}


def entered() -> tuple[list[Contestant], dict[str, str]]:
    """The contestants, and those that cannot be imported with the reason."""
    from benchmarks.peers.by_hand import Careful, Naive

    naive = Naive()
    contestants: list[Contestant] = [naive, Careful(naive)]
    missing = {}
    for module, name in OTHERS.items():
        try:
            contestants.append(getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)())
        except ImportError as error:
            missing[name] = said(error)
    return contestants, missing


def compared(plan: Plan, contestants: list[Contestant]) -> dict[str, Any]:
    """The answers to all questions; contestants alternate within each."""
    latencies: list[Answer] = []
    data: list[Answer] = []
    words: dict[str, dict[str, str]] = {}
    all_times = []
    for num_workers in plan.worker_counts:
        note(f"{num_workers} workers each")
        times = Times(num_workers)
        all_times.append(times)
        running = started(contestants, num_workers, times)
        latencies.append(told(answered(latency(plan, num_workers), running)))
        if num_workers == plan.data_workers:
            words = words_of_their_own(running)
            for question in data_questions(plan):
                note(question.title)
                data.append(told(answered(question, running)))
        stopped(running, times)
        if num_workers == plan.data_workers:
            for _ in range(plan.num_starts - 1):
                note("started again")
                stopped(started(contestants, num_workers, times), times)
    return {"latency": latencies, "data": data, "times": all_times, "words": words}


def told(answer: Answer) -> Answer:
    """The answer, after its medians were noted: a run that is cut short has not been for nothing."""
    figures = (
        f"{name} {timing.failure or f'{1e3 * timing.seconds:.2f} ms'}" for name, timing in answer.timings.items()
    )
    note(f"{answer.title}: {', '.join(figures)}")
    return answer


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def printed(
    facts: dict[str, Any], results: dict[str, Any], contestants: list[Contestant], missing: dict[str, str]
) -> None:
    names = [one.name for one in contestants]
    base = names[0]
    sections = [
        report.heading(facts, "sh benchmarks/peers.sh " + " ".join(sys.argv[1:])),
        report.contestants_table(contestants, missing),
        report.calls_table(results["latency"], names, base),
        report.calls_table(results["data"], names, base),
        report.memory_table(results["data"], names),
        report.words_table(results["words"]),
        report.times_table(results["times"], names),
    ]
    print("\n\n".join(sections))


def main() -> None:
    parser = argparse.ArgumentParser(prog="sh benchmarks/peers.sh", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="everything, small: shows that it runs, not how fast")
    parser.add_argument("--sizes", action="store_true", help="the other mode: cost with workers and items, and plots")
    parser.add_argument("--json", type=Path, help="every block's figures, for later")
    parser.add_argument("--workers", type=int, nargs="+", help="the worker counts (default: 1 2 4 8 16; data with 8)")
    parser.add_argument("--scatter_mb", type=int, nargs="+", help="the sizes that are scattered (default: 64 1024)")
    args = parser.parse_args()
    plan = Plan.quick() if args.quick else Plan()
    if args.workers:
        plan = replace(plan, worker_counts=tuple(args.workers))
    if args.scatter_mb:
        plan = replace(plan, scatter_mb=tuple(args.scatter_mb))
    facts = cluster.facts()
    begin = time.monotonic()
    cluster.start(plan.object_store_mb)
    try:
        if args.sizes:
            from benchmarks.peers import sizes

            results: dict[str, Any] = sizes.measured(quick=args.quick)
            print(report.heading(facts, "sh benchmarks/peers.sh " + " ".join(sys.argv[1:])) + "\n")
            print(sizes.described(results))
            with tempfile.TemporaryDirectory() as nowhere:
                sizes.drawn(results, Path(nowhere) if args.quick else PLOTS)
        else:
            contestants, missing = entered()
            results = compared(plan, contestants)
            printed(facts, results, contestants, missing)
    finally:
        cluster.stop()
    note(f"{time.monotonic() - begin:.0f} s in all")
    if args.json:
        args.json.write_text(json.dumps({"facts": facts, **results}, indent=1, default=asdict))


if __name__ == "__main__":
    main()
