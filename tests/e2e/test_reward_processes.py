"""Rewards from processes beside the engines: the numbers of the driver's, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayhelper import ConfigError
from tests.conftest import RaySession
from tests.e2e.runs import TEXTS, apart, final_bytes, grpo_config, interrupted_after, lines, ppo_config
from tests.golden.tiny import save_tiny
from trainers.grpo.trainer import GRPOTrainer
from trainers.ppo.trainer import PPOTrainer
from trainers.rollout.environments import Reply

PLUGIN = '''
import os
from pathlib import Path
from trainers.plugins import register_reward

@register_reward("even")
async def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

@register_reward("notes")
def notes(prompts, completions, completion_ids, row, folder=None):
    """Looks at all that a function is given; notes the process that it is in."""
    if folder is not None:
        (Path(folder) / str(os.getpid())).touch()
    return [
        None if len(ids) == 1 else row[k] / 10 + len(prompts[k]) / 100 - len(completions[k]) / 1000
        for k, ids in enumerate(completion_ids)
    ]

@register_reward("fails")
def fails(completions, **_):
    raise KeyError("no such thing")
'''
ROWS = [{"prompt": text, "row": k} for k, text in enumerate(TEXTS[:6])]


pytestmark = pytest.mark.usefixtures("own_registries")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("plugin") / "noting_rewards.py"
    file.write_text(PLUGIN)
    return {"external_plugins": [str(file)], "dataset": ROWS, "eval_dataset": ROWS[:2], "num_train_epochs": 1}


def noting(folder: Path, **keys: Any) -> dict[str, Any]:
    """The processes that ran functions are noted in the folder."""
    folder.mkdir(exist_ok=True)
    return {"reward_funcs": ["even", {"name": "notes", "folder": str(folder)}], **keys}


def assert_same_run(found: Path, expected: Path) -> None:
    told = lines(found)
    seconds = [line.pop("rewards/pool_seconds", None) for line in told]
    assert seconds[0] is not None
    assert seconds[0] > 0
    for line in told:
        line.pop("eval_rewards/pool_seconds", None)
    assert told == lines(expected)
    assert final_bytes(found) == final_bytes(expected)


class Echo:
    """Asks once more."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.texts: list[str] = []

    def step(self, text: str) -> Reply:
        self.texts.append(text)
        return Reply("" if len(self.texts) == 2 else "more: ", reward=len(text) / 10)


RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, grpo_config, {"rollout_batch_size": 6}),  # groups of 4: some are there in parts
    "redrawn": (
        GRPOTrainer,
        grpo_config,
        {"dynamic_sample": True, "max_resample_times": 1, "generation_batch_size": 8, "max_steps": 2},
    ),
    "played": (GRPOTrainer, grpo_config, {"environment": Echo, "reward_weights": None, "eval_dataset": None}),
    "ppo": (PPOTrainer, ppo_config, {}),
}


@pytest.mark.parametrize("case", RUNS)
def test_where_functions_run_changes_no_number(case: str, model: str, shared: dict[str, Any], tmp_path: Path) -> None:
    trainer, config, keys = RUNS[case]
    driver, pool = noting(tmp_path / "driver"), noting(tmp_path / "pool", reward_processes=2)
    trainer(config(model, tmp_path / "0", **shared | keys | driver)).train()
    trainer(config(model, tmp_path / "2", **shared | keys | pool)).train()
    assert_same_run(tmp_path / "2", tmp_path / "0")
    (here,) = noted(tmp_path / "driver")
    others = noted(tmp_path / "pool")
    assert here not in others
    assert 1 <= len(others) <= 2
    assert not multiprocessing.active_children()


def test_two_rollout_workers_of_ray_have_processes_each(
    model: str, shared: dict[str, Any], tmp_path: Path, ray_session: RaySession
) -> None:
    """Three prompts of four completions: the second group is rewarded in two parts. Processes end with their worker."""
    keys: dict[str, Any] = {"generation_batch_size": 12, "global_batch_size": 12, "num_iterations": 1}
    pool = noting(tmp_path / "pool", reward_processes=1)
    with ray_session(apart(restarts=50)):
        GRPOTrainer(grpo_config(model, tmp_path / "0", **shared | keys | noting(tmp_path / "driver"))).train()
        trainer = GRPOTrainer(grpo_config(model, tmp_path / "1", **shared | keys | pool))
        trainer.train()
        of_the_run = noted(tmp_path / "pool")
        trainer.evaluate()  # begins processes anew
        anew = [psutil.Process(pid) for pid in noted(tmp_path / "pool") - of_the_run]
        mourned, other = sorted(anew, key=lambda process: process.pid)
        assert mourned.ppid() != other.ppid()
        os.kill(mourned.ppid(), signal.SIGKILL)
        assert_all_end([*of_the_run, mourned.pid])
        trainer.generator.close_pool()
        assert_all_end([other.pid])
    assert_same_run(tmp_path / "1", tmp_path / "0")
    assert len(of_the_run) == 2


def noted(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def assert_all_end(pids: Iterable[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 20)
    assert not alive


def test_an_error_of_a_function_is_its_own_and_ends_the_processes(
    model: str, shared: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"reward_funcs": ["even", "fails"], "reward_processes": 1}
    with pytest.raises(KeyError, match="no such thing") as raised:
        GRPOTrainer(grpo_config(model, tmp_path, **shared | keys)).train()
    assert "raised by reward function 'fails'" in raised.value.__notes__
    assert not multiprocessing.active_children()


def test_no_process_stays_when_a_run_is_interrupted_as_it_learns(
    model: str, shared: dict[str, Any], tmp_path: Path
) -> None:
    config = grpo_config(model, tmp_path, **shared | noting(tmp_path / "pool", reward_processes=1))
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        GRPOTrainer(config).train()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, grpo_config), (PPOTrainer, ppo_config)])
def test_mistakes_are_told_before_anything_starts(trainer: Any, config: Any, model: str, tmp_path: Path) -> None:
    nothing = {"reward_funcs": [], "reward_model": model, "reward_weights": None}
    if config is grpo_config:
        nothing["reward_model"] = [model]
    with pytest.raises(ConfigError, match="reward_processes is set, but there are no reward_funcs"):
        config(model, tmp_path, **nothing, reward_processes=1)
    with pytest.raises(ConfigError, match="reward_processes must be at least 0"):
        config(model, tmp_path, reward_processes=-1)
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        trainer.check(
            config(model, tmp_path, reward_funcs=[lambda completions: [0.0]], reward_weights=None, reward_processes=1),
            None,
        )
