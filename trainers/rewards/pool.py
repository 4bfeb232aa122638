"""Reward functions in processes of their own, at work while completions are still written.

    pool = RewardPool(["exact_answer"], num_processes=4)
    with pool.scoring(rows, groups) as scoring:             # rows of the dataset, and which completions belong together
        scoring.add(place, completion, ids)                 # as soon as it is there; others may be under way
        rollouts = scoring.rewarded(rollouts)               # waits for what is missing
    pool.close()

A function is given the completions of a group together, as ``functions.score`` gives it those of a whole batch. Each
process has functions of its own (what one remembers, the others do not know), and one event loop for async ones. The
processes end with the pool, and with the process that has it, even if that is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

import rayhelper
from rayhelper import ConfigError
from trainers.batch import Rollouts
from trainers.data.rows import prompt_of
from trainers.rewards.functions import RESERVED_COLUMNS
from trainers.rewards.patches import manager_of, processes_of
from trainers.rewards.process import begin, get_ready, scored

GRACE_S = 5.0  # for processes that have nothing to do, until they are killed


@contextlib.contextmanager
def _own_package_first() -> Iterator[None]:
    """Inside, spawned processes find this package, whatever else of its name lies in a folder of the user's."""
    folder = str(Path(rayhelper.__file__).parent / "trainers" / "first")
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


class RewardPool:
    """``num_processes`` processes that have the functions which ``reward_funcs`` of a configuration names.

    ``limit_s``: seconds that each function has for the completions of a group; None: no limit. The processes start as
    completions begin, with ``scoring``, and anew after ``close``.

    Raises:
        ConfigError: a function cannot be told to other processes.
    """

    def __init__(
        self,
        reward_funcs: Sequence[Any],
        *,
        num_processes: int,
        external_plugins: Sequence[str | Path] = (),
        limit_s: float | None = None,
    ) -> None:
        try:
            functions = pickle.dumps(list(reward_funcs))
        except Exception as error:  # of any type, by what is pickled
            raise ConfigError(
                f"reward_processes: a function of reward_funcs cannot be sent to other processes ({error}). "
                "Define it at the top of a module and name it module:function. Or register it in a file of "
                "external_plugins."
            ) from error
        self.settings = pickle.dumps((list(map(str, external_plugins)), functions))
        self.num_rewards, self.num_processes, self.limit_s = len(reward_funcs), num_processes, limit_s
        self.executor: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """The processes are starting, if there are none."""
        if self.executor is not None:
            return
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(self.num_processes, context, initializer=begin)
        with _own_package_first():
            for _ in range(self.num_processes):
                self.executor.submit(get_ready, self.settings)  # one more process each, as all others are busy

    def close(self, grace_s: float = GRACE_S) -> None:
        """No process is left; those that are still at work after ``grace_s`` are killed."""
        if self.executor is None:
            return
        executor, self.executor = self.executor, None
        processes, manager = processes_of(executor), manager_of(executor)
        executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        waiting: dict[Any, Any] = {process.sentinel: process for process in processes}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for sentinel in wait(list(waiting), left_s):
                del waiting[sentinel]
        for process in waiting.values():
            process.kill()
        if manager is not None:
            manager.join(GRACE_S)

    @contextlib.contextmanager
    def scoring(self, rows: Sequence[Mapping[str, Any]], groups: np.ndarray) -> Iterator[Scoring]:
        """Takes completions of ``rows`` (B,), of which those that are equal in ``groups`` (B,) are rewarded together.

        Leaving it by an exception closes the pool.

        Raises:
            RuntimeError: a process died.
        """
        try:
            self.start()
            yield Scoring(self, rows, groups)
        except BrokenProcessPool as error:
            processes = [] if self.executor is None else processes_of(self.executor)
            self.close()  # the executor has told the others to end
            raise RuntimeError(
                f"a process that runs reward functions has died ({_ends(processes)}); its output is above. "
                "Killed by signal 9means in most cases that no memory was left: lower reward_processes. A script "
                "that trains without `if __name__ == '__main__':` around it cannot start processes."
            ) from error
        except BaseException:
            self.close(grace_s=0)
            raise

    def submit(self, *batch: Any) -> Future[tuple[np.ndarray, float]]:
        """What becomes of a batch: see ``process.scored``."""
        assert self.executor is not None, "start comes first"
        return self.executor.submit(scored, self.settings, self.limit_s, *batch)


class Scoring:
    """The rewards of one batch of completions; see ``RewardPool.scoring``."""

    def __init__(self, pool: RewardPool, rows: Sequence[Mapping[str, Any]], groups: np.ndarray) -> None:
        self.pool, self.rows, self.groups = pool, rows, np.asarray(groups).tolist()
        self.num_missing = Counter(self.groups)
        self.given: dict[int, tuple[Any, Any]] = {}  # completion and ids of each place
        self.places: dict[int, list[int]] = {}  # of each group
        for place, group in enumerate(self.groups):
            self.places.setdefault(group, []).append(place)
        self.running: list[tuple[list[int], Future[tuple[np.ndarray, float]]]] = []
        self.failed: list[Future[tuple[np.ndarray, float]]] = []

    def add(self, place: int, completion: Any, ids: Any) -> None:
        """The completion (text or messages, and token ids) of a row is there.

        Raises what a function has raised about an earlier one, so that no others are waited for.
        """
        for future in self.failed:
            future.result()
        self.given[place] = (completion, ids)
        group = self.groups[place]
        self.num_missing[group] -= 1
        if not self.num_missing[group]:
            self._submit(self.places[group])

    def _submit(self, places: list[int]) -> None:
        rows = [self.rows[place] for place in places]
        completions, ids = zip(*(self.given.pop(place) for place in places), strict=True)
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in RESERVED_COLUMNS}
        future = self.pool.submit(list(map(prompt_of, rows)), completions, ids, columns)
        future.add_done_callback(self._note)
        self.running.append((places, future))

    def _note(self, future: Future[tuple[np.ndarray, float]]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self.failed.append(future)

    def rewarded(self, rollouts: Rollouts) -> Rollouts:
        """The completions with ``function_rewards`` and ``reward_seconds``, all of which have been added."""
        assert not any(self.num_missing.values()), "a completion was not added"
        rewards_BK = np.full((len(self.groups), self.pool.num_rewards), np.nan, np.float32)
        seconds_B = np.zeros(len(self.groups), np.float32)
        for places, future in self.running:
            rewards_BK[places], seconds = future.result()
            seconds_B[places] = seconds / len(places)
        return dataclasses.replace(rollouts, function_rewards=rewards_BK, reward_seconds=seconds_B)


def _ends(processes: Sequence[Any]) -> str:
    """How processes have ended, without those that the executor ended because of others."""
    died = [process.exitcode for process in processes if process.exitcode not in (None, 0, -signal.SIGTERM)]
    return ", ".join(f"signal {-code}" if code < 0 else f"exit code {code}" for code in died) or "signal 15"
