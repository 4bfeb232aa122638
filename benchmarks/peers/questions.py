"""What the contestants are asked, and which answer is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.peers import cluster, work
from benchmarks.peers.measure import Growth, Timing, alternating, growth, said, steady
from benchmarks.peers.work import Contestant, Items

COPIES = ("memcpy into new memory", "memcpy into used memory")


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    worker_counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    data_workers: int = 8
    broadcast_mb: int = 64
    scatter_mb: tuple[int, ...] = (64, 1024)
    num_items: int = 3072
    hand_over_mb: int = 256
    latency_blocks: int = 11
    data_blocks: int = 5
    num_starts: int = 1
    block_s: float = 0.2
    object_store_mb: int = 4096

    @classmethod
    def quick(cls) -> Plan:
        return cls((1, 2), 2, 8, (8,), 256, 16, 5, 5, 1, 0.05, 512)


@dataclass
class Question:
    """One row of the tables: a call made by every contestant."""

    title: str
    ask: Callable[[Contestant], Any]
    wrong: Callable[[Any], str]  # what is wrong with an answer; '' if nothing
    baselines: dict[str, Callable[[], object]] = field(default_factory=dict)
    blocks: int = 5
    block_s: float = 0.2
    warm_s: float = 0.2
    gb: float = 0.0  # that are scattered; nobody is asked who would exhaust the machine


@dataclass
class Answer:
    """A row's figures by contestant (and baseline)."""

    title: str
    timings: dict[str, Timing]
    growths: dict[str, Growth] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass
class Times:
    """Seconds to start workers (constructed, first call answered) and to stop them (their processes gone)."""

    num_workers: int
    start: dict[str, list[float]] = field(default_factory=dict)
    stop: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # of those that did not start


@dataclass
class Running:
    """A contestant with its workers."""

    contestant: Contestant
    processes: list[psutil.Process]

    @property
    def name(self) -> str:
        return self.contestant.name


def started(contestants: list[Contestant], num_workers: int, times: Times) -> list[Running]:
    """Those of the contestants that could start ``num_workers`` workers."""
    running = []
    for contestant in contestants:
        begin = time.perf_counter()
        try:
            contestant.start(num_workers)
            pids = contestant.process_ids()
        except Exception as error:
            times.failures[contestant.name] = said(error)
            continue
        if not contestant.shares_workers:
            times.start.setdefault(contestant.name, []).append(time.perf_counter() - begin)
        assert len(set(pids)) == num_workers, f"{contestant.name} started {len(set(pids))} of {num_workers} workers"
        running.append(Running(contestant, [psutil.Process(pid) for pid in pids]))
    steady()
    return running


def stopped(running: list[Running], times: Times) -> None:
    """Stops them one after the other, waiting for each one's processes to end."""
    for one in running:
        if one.contestant.shares_workers:
            continue
        begin = time.perf_counter()
        one.contestant.stop()
        psutil.wait_procs(one.processes, timeout=30)
        times.stop.setdefault(one.name, []).append(time.perf_counter() - begin)


def answered(question: Question, running: list[Running]) -> Answer:
    """Every contestant's answer checked once, then timed, then the driver's memory watched."""
    too_large, wrong = {}, {}
    calls: dict[str, Callable[[], object]] = {}
    for one in running:
        needed_gb, free_gb = question.gb * one.contestant.copies, cluster.free_gb()
        if needed_gb > free_gb:
            too_large[one.name] = f"not run: needs {needed_gb:.0f} GB of memory, {free_gb:.0f} are free"
            continue
        calls[one.name] = lambda asked=one.contestant: question.ask(asked)
        try:
            if found := question.wrong(calls[one.name]()):
                wrong[one.name] = found
        except Exception as error:
            wrong[one.name] = said(error)
    timings = alternating(
        calls | question.baselines, num_blocks=question.blocks, block_s=question.block_s, warm_s=question.warm_s
    )
    timings |= {name: Timing(failure=why) for name, why in too_large.items()}
    growths = {name: growth(call) for name, call in calls.items()} if question.baselines else {}
    return Answer(question.title, timings, growths, wrong)


def latency(plan: Plan, num_workers: int) -> Question:
    plural = "workers" if num_workers > 1 else "worker"
    return Question(
        f"no-op, {num_workers} {plural}", lambda one: one.noop(), lambda _: "", blocks=plan.latency_blocks, warm_s=1.0
    )


def data_questions(plan: Plan) -> Iterator[Question]:
    """Tensors and lists, there and back, with the copies that a lone process would make of the same bytes.

    Made one after the other: each holds its data.
    """
    n = plan.data_workers
    tensor = counted(plan.broadcast_mb)
    yield Question(
        f"broadcast a {plan.broadcast_mb} MB tensor to {n}",
        lambda one: one.broadcast(tensor),
        lambda answer: _differs(answer, [work.glance(tensor)] * n),
        copies_of(tensor),
        plan.data_blocks,
    )
    items = token_ids(plan.num_items)
    megabytes = sum(item.nbytes for item in items) / 1e6
    yield Question(
        f"broadcast {plan.num_items:,} arrays ({megabytes:.1f} MB) to {n}",
        lambda one: one.broadcast(items),
        lambda answer: _differs(answer, [work.glance(items)] * n),
        {COPIES[0]: lambda: [item.copy() for item in items]},
        plan.data_blocks,
    )
    yield Question(
        f"scatter {plan.num_items:,} arrays over {n}, +1, gather",
        lambda one: one.scatter_items(items),
        lambda answer: _other_items(answer, work.plus_one_each(items)),
        {COPIES[0]: lambda: [item.copy() for item in items]},
        plan.data_blocks,
    )
    length = (plan.hand_over_mb << 18) // n
    yield Question(
        f"hand {plan.hand_over_mb} MB from {n} workers to {n} workers",
        lambda one: one.hand_over(length),
        lambda answer: _differs(answer, [work.glance(work.ones(length))] * n),
        copies_of(counted(plan.hand_over_mb)),
        plan.data_blocks,
    )
    for size_mb in plan.scatter_mb:
        yield scatter(plan, size_mb)


def scatter(plan: Plan, megabytes: int) -> Question:
    tensor = counted(megabytes)
    return Question(
        f"scatter {megabytes:,} MB over {plan.data_workers}, +1, gather",
        lambda one: one.scatter(tensor),
        lambda answer: _other_tensor(answer, tensor + 1),
        copies_of(tensor),
        plan.data_blocks,
        warm_s=0.5,
        gb=tensor.nbytes / 1e9,
    )


def counted(megabytes: int) -> torch.Tensor:
    """float32 [megabytes * 2**18]: 0, 1, ... 999, 0, ..."""
    return (torch.arange(megabytes << 18, dtype=torch.int32) % 1000).float()


def copies_of(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What copying the same bytes once costs in one process."""
    array, target = tensor.numpy(), np.empty_like(tensor.numpy())
    return {COPIES[0]: lambda: array.copy(), COPIES[1]: lambda: np.copyto(target, array)}


def token_ids(num_items: int) -> Items:
    """Arrays of 64 to 512 int32."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(64, 513, num_items)
    return [generator.integers(0, 150_000, length, dtype=np.int32) for length in lengths]


def words_of_their_own(running: list[Running]) -> dict[str, dict[str, str]]:
    """What the libraries' own words for cutting and joining make of tensors and tuples. (By hand there are none.)"""
    floats, whole, pair = torch.arange(16, dtype=torch.float32), torch.arange(4), (1, "one")
    rows: dict[str, Callable[[Any, int], str]] = {
        "cut a float32 tensor, +1, join": lambda one, n: _other_tensor(one.slice_a_tensor(floats), floats + 1),
        "join an int64 tensor from each": lambda one, n: _other_tensor(one.flatten_whole_numbers(), whole.repeat(n)),
        f"the values {pair} from each, as a list": lambda one, n: _differs(one.pair_from_each(), [pair] * n),
    }
    found: dict[str, dict[str, str]] = {row: {} for row in rows}
    for one in running:
        if not hasattr(one.contestant, "pair_from_each"):
            continue
        for row, wrong in rows.items():
            try:
                found[row][one.name] = wrong(one.contestant, len(one.processes)) or "right"
            except Exception as error:
                found[row][one.name] = said(error)
    return found


def _differs(answer: Any, right: Any) -> str:
    return "" if list(answer) == right else f"wrong: {str(answer)[:60]}"


def _other_tensor(answer: Any, right: torch.Tensor) -> str:
    if not isinstance(answer, torch.Tensor):
        return f"returns a {type(answer).__name__}"
    if answer.dtype != right.dtype:
        return f"returns {str(answer.dtype).removeprefix('torch.')} for {str(right.dtype).removeprefix('torch.')}"
    return "" if torch.equal(answer, right) else f"other values, shape {tuple(answer.shape)}"


def _other_items(answer: Any, right: Items) -> str:
    if type(answer) is not list or len(answer) != len(right):
        return f"returns a {type(answer).__name__} of {len(answer)}"
    same = all(
        type(one) is np.ndarray and one.dtype == other.dtype and np.array_equal(one, other)
        for one, other in zip(answer, right, strict=True)
    )
    return "" if same else f"other values or types: {type(answer[0]).__name__} of {getattr(answer[0], 'dtype', '?')}"
