"""``prove`` finds no difference in the bundled trainers: the same off, strict, with two workers and on Ray."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayhelper.prove import prove
from rayhelper.prove.runs import roles_of
from tests.conftest import without_runtime
from tests.e2e import runs
from tests.golden.tiny import save_tiny
from trainers.dpo import DPOTrainer
from trainers.gkd import GKDTrainer
from trainers.grpo import GRPOTrainer
from trainers.ppo import PPOTrainer
from trainers.reward import RewardTrainer
from trainers.sft import SFTTrainer

PROVED: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "sft": (SFTTrainer, runs.sft_config, {}),
    "dpo": (DPOTrainer, runs.dpo_config, {}),
    "reward": (RewardTrainer, runs.reward_config, {}),
    "grpo": (GRPOTrainer, runs.grpo_config, {}),
    "gkd": (GKDTrainer, runs.gkd_config, {"teacher_model": ""}),
    "ppo": (PPOTrainer, runs.ppo_config, {}),
}
ON_RAY = ("sft", "grpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", PROVED)
def test_a_bundled_trainer_is_the_same_everywhere(
    name: str, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trainer, configured, keys = PROVED[name]
    if "teacher_model" in keys:
        keys = {**keys, "teacher_model": model}
    numbers = itertools.count()

    def program() -> None:
        trainer(configured(model, tmp_path / str(next(numbers)), max_steps=3, **keys)).train()

    on_ray = name in ON_RAY
    if on_ray:
        request.getfixturevalue("ray_cluster")
    with without_runtime():
        found = prove(program, roles_of(trainer), ray=on_ray)
    assert [str(one) for one in found] == []
