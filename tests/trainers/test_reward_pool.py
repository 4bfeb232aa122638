"""Reward functions in processes of their own: what they give, when they begin, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from rayhelper import ConfigError
from rayhelper.watch.watchdog import LateError
from tests.golden.tiny import tiny_tokenizer
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.parts.completion_metrics import rollout_metrics
from trainers.parts.generator import completed
from trainers.plugins import load_plugins
from trainers.rewards.functions import resolve_rewards, score
from trainers.rewards.patches import manager_of, processes_of
from trainers.rewards.pool import RewardPool
from trainers.rollout.base import Completion, Sampling

TOKENIZER = tiny_tokenizer()
PATIENCE_S = 60.0
ROWS = [{"prompt": f"{k}? ", "answer": str(k % 5)} for k in range(8)]
GROUPS = np.array([7, 7, 8, 8, 8, 9, 9, 9])  # a slice: group 7 is cut off
TEXTS = ["0", "it is 1", "", "#### 3", "4", "<answer>0</answer>", "five", "2"]

PLUGIN = """
import asyncio, os, signal, sys
from trainers.plugins import register_reward

loops = set()

@register_reward("long")
def long(completions, scale=1.0, **_):
    return [None if not text else scale * len(text) for text in completions]

@register_reward("whole_group")
def whole_group(prompts, completion_ids, answer):
    return [len(prompts) + ids[0] / 1000 for ids in completion_ids]

@register_reward("num_loops")
async def num_loops(completions, **_):
    await asyncio.sleep(0)
    loops.add(id(asyncio.get_running_loop()))
    return [len(loops)] * len(completions)

@register_reward("threads")
def threads(completions, **_):
    return [float(os.environ["OMP_NUM_THREADS"]) + ("torch" in sys.modules)] * len(completions)

@register_reward("tells")
def tells(completions, pipe):
    with open(pipe[0], "w") as file:
        file.write(str(os.getpid()))
    return [1.0] * len(completions)

class Strange(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f"{code}: {reason}")

@register_reward("fails")
def fails(completions, how):
    if "wrongly" in how:
        raise KeyError("no such thing")
    if "strangely" in how:
        raise Strange(3, reason="odd")
    if "leaving" in how:
        sys.exit()
    if "dead" in how:
        os._exit(3)
    return [0.5] * len(completions)

@register_reward("never")
def never(completions, **_):
    print("at work", flush=True)
    while True:
        signal.pause()
"""


pytestmark = pytest.mark.usefixtures("own_registries")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugin") / "pool_rewards.py"
    file.write_text(PLUGIN)
    return str(file)


@pytest.fixture(scope="module")
def pool_of(plugin: str) -> Iterator[Callable[..., RewardPool]]:
    """Pools of one process or more, closed in the end."""
    pools = []

    def pool_of(*reward_funcs: Any, num_processes: int = 1, limit_s: float | None = None) -> RewardPool:
        pools.append(RewardPool(reward_funcs, num_processes=num_processes, external_plugins=[plugin], limit_s=limit_s))
        return pools[-1]

    yield pool_of
    for pool in pools:
        pool.close()
    assert not multiprocessing.active_children()


class WritingEngine:
    """Writes the given texts, those of later prompts first; calls ``pause`` before the last one."""

    def __init__(self, texts: Sequence[str], pause: Callable[[], object] = lambda: None) -> None:
        self.rows = [np.array(TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id]) for text in texts]
        self.pause = pause

    def generate(self, prompts: Prompts, sampling: Sampling, *, seed: int, finished: Any = None) -> Rollouts:
        for place in reversed(range(len(prompts))):
            if place == 0:
                self.pause()
            logps = np.zeros(len(self.rows[place]), np.float32)
            finished(Completion(place, prompts.prompt_ids[place], self.rows[place], logps, np.zeros(0), False))
        ids = Ragged.of(self.rows, np.int64)
        logps_of_all = Ragged.split(np.zeros(len(ids.values), np.float32), ids.lengths)
        return Rollouts(prompts.prompt_ids, ids, logps_of_all, np.zeros(len(prompts), bool))


def rewarded(pool: RewardPool, rows: list[dict[str, Any]], groups: np.ndarray, engine: Any) -> Rollouts:
    ids = Ragged.of([TOKENIZER(row["prompt"])["input_ids"] for row in rows], np.int64)
    return completed(engine, Prompts(ids, rows, groups), Sampling(99), pool, TOKENIZER, seed=0)


def test_rewards_are_those_of_one_call_a_group(pool_of: Callable[..., RewardPool], plugin: str) -> None:
    specs = ["exact_answer", {"name": "long", "scale": 0.1}, "whole_group", "num_loops"]
    pool = pool_of(*specs, "threads", num_processes=2)
    rollouts = rewarded(pool, ROWS, GROUPS, WritingEngine(TEXTS))
    load_plugins([plugin])
    pairs, _ = resolve_rewards(specs)
    for number in (7, 8, 9):
        (places,) = np.nonzero(number == GROUPS)
        rows, texts = [ROWS[k] for k in places], [TEXTS[k] for k in places]
        expected = score(
            pairs,
            [row["prompt"] for row in rows],
            texts,
            rollouts.completion_ids[places],
            {"prompt": ["not told"] * len(rows), "answer": [row["answer"] for row in rows]},
        )
        expected[:, 3] = 1  # the same event loop in each call, of which a process may have had several
        assert rollouts.function_rewards is not None
        assert rollouts.function_rewards.dtype == np.float32
        np.testing.assert_array_equal(rollouts.function_rewards[places, :4], expected)
        np.testing.assert_array_equal(rollouts.function_rewards[places, 4], 1)  # one thread, and no torch
    assert rollouts.reward_seconds is not None
    assert rollout_metrics(rollouts).values()["rewards/pool_seconds"] == pytest.approx(rollouts.reward_seconds.sum())
    nothing = rewarded(pool, [], GROUPS[:0], WritingEngine([]))
    assert nothing.function_rewards is not None
    assert nothing.function_rewards.shape == (0, 5)


def test_what_has_finished_is_rewarded_while_others_are_written(
    pool_of: Callable[..., RewardPool], tmp_path: Path
) -> None:
    """The last completion is written once the function has told that it was there: it would never be."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    told: list[int] = []

    def wait() -> None:
        assert select.select([reader], [], [], PATIENCE_S)[0], "no reward while a completion is still written"
        told.append(int(os.read(reader, 99)))

    rows = [{"prompt": "?", "pipe": str(tmp_path / ("pipe" if k else "never read"))} for k in range(3)]
    try:
        engine = WritingEngine(["a", "b", "c"], pause=wait)
        rollouts = rewarded(pool_of("tells"), rows, np.array([0, 1, 1]), engine)
    finally:
        os.close(reader)
    assert rollouts.function_rewards is not None
    assert rollouts.function_rewards.tolist() == [[1.0]] * 3
    assert told[0] != os.getpid()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("wrongly", KeyError, "no such thing"),
        ("strangely", RuntimeError, "Strange: 3: odd\nraised by reward function 'fails'"),
        ("leaving", RuntimeError, r"^SystemExit\(\) raised by reward function 'fails'$"),
        ("dead", RuntimeError, r"a process that runs reward functions has died \(exit code 3\)"),
    ],
)
def test_what_goes_wrong_is_told_and_no_process_stays(
    pool_of: Callable[..., RewardPool], how: str, error: type[Exception], message: str
) -> None:
    pool = pool_of("fails", num_processes=2 if how == "dead" else 1)
    rows = [{"prompt": "?", "how": how if k == 2 else "well"} for k in range(3)]
    before = multiprocessing.active_children()
    with pytest.raises(error, match=message) as raised:
        rewarded(pool, rows, np.arange(3), WritingEngine(["a"] * 3))
    assert set(multiprocessing.active_children()) <= set(before)
    if how == "wrongly":
        assert raised.value.__notes__ == ["raised by reward function 'fails'"]
        rollouts = rewarded(pool, rows[:2], np.arange(2), WritingEngine(["a"] * 2))  # it can go on
        assert rollouts.function_rewards is not None
        assert rollouts.function_rewards.tolist() == [[0.5]] * 2


def test_a_function_that_does_not_return_is_named(pool_of: Callable[..., RewardPool]) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(LateError, match=r"'never', given 1 completions, did not return within 0.5 s"):
        rewarded(pool_of("never", limit_s=0.5), [{"prompt": "?"}], np.arange(1), WritingEngine(["a"]))
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_plugin_that_leaves_a_process_is_told(tmp_path: Path) -> None:
    plugin = tmp_path / "leaving_rewards.py"
    plugin.write_text("import sys\nsys.exit('not here')\n")
    pool = RewardPool(["exact_answer"], num_processes=1, external_plugins=[plugin])
    with pytest.raises(RuntimeError, match=r"^SystemExit: not here$"):
        rewarded(pool, ROWS[:1], np.arange(1), WritingEngine(["a"]))


def test_an_error_does_not_wait_for_the_completions_behind_it(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of("fails")
    rows = [{"prompt": "?", "how": "wrongly"}] * 3
    with pool.scoring(rows, np.arange(3)) as scoring:
        scoring.add(2, "a", [1])
        with pytest.raises(KeyError):
            scoring.running[0][1].result(PATIENCE_S)
        with pytest.raises(KeyError):
            scoring.add(1, "a", [1])


def test_functions_that_other_processes_cannot_find_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        RewardPool([lambda completions: [0.0]], num_processes=1)
    RewardPool([partial(len)], num_processes=1)


def test_processes_are_known_once_they_were_started_and_not_where_a_version_keeps_them_elsewhere(
    pool_of: Callable[..., RewardPool],
) -> None:
    pool = pool_of("fails")
    pool.start()
    assert pool.executor is not None
    assert set(processes_of(pool.executor)) <= set(multiprocessing.active_children())
    assert len(processes_of(pool.executor)) == 1
    manager = manager_of(pool.executor)
    pool.close()
    assert manager is not None
    assert not manager.is_alive()
    other: Any = SimpleNamespace()
    assert (processes_of(other), manager_of(other)) == ([], None)


PARENT = """
import sys
import numpy as np
from trainers.rewards.patches import manager_of, processes_of
from trainers.rewards.pool import RewardPool

pool = RewardPool(["never"], num_processes=2, external_plugins=[sys.argv[1]])
with pool.scoring([{"prompt": "?"}] * 3, np.arange(3)) as scoring:
    for place in range(3):
        scoring.add(place, "", [1])
    print(*(process.pid for process in pool.executor._processes.values()), flush=True)
    scoring.rewarded(None)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_has_the_pool(plugin: str, by: signal.Signals) -> None:
    """Killed, or left by Ctrl-C, with functions at work that never end."""
    command = [sys.executable, "-c", PARENT, plugin]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert [parent.stdout.readline() for _ in processes] == ["at work\n"] * 2
        parent.send_signal(by)
        _, alive = psutil.wait_procs(processes, PATIENCE_S)
        assert not alive
        assert parent.wait(PATIENCE_S) == -by
