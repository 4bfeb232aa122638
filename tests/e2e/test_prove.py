"""``prove`` finds no difference in the bundled trainers: off, strict, with two workers, on Ray and under torchrun."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayhelper.prove import command
from rayhelper.prove.runs import APART, TORCHRUN, TWO_APART, groups_of, proof_of, roles_of, same_rows_per_step
from tests.conftest import without_runtime
from tests.e2e import runs
from tests.golden.tiny import save_tiny
from trainers.dpo import DPOTrainer
from trainers.gkd import GKDTrainer
from trainers.grpo import GRPOTrainer
from trainers.ppo import PPOTrainer
from trainers.reward import RewardTrainer
from trainers.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("own_modules")

PROVED: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "sft": (SFTTrainer, runs.sft_config, {}),
    "dpo": (DPOTrainer, runs.dpo_config, {}),
    "reward": (RewardTrainer, runs.reward_config, {}),
    "grpo": (GRPOTrainer, runs.grpo_config, {}),
    "gkd": (GKDTrainer, runs.gkd_config, {"teacher_model": ""}),
    "ppo": (PPOTrainer, runs.ppo_config, {}),
}
ON_RAY = ("grpo",)
UNDER_TORCHRUN = ("sft",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", PROVED)
def test_a_bundled_trainer_is_the_same_everywhere(
    name: str, model: str, tmp_path: Path, request: pytest.FixtureRequest, warm_torchrun: None
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
    groups = groups_of(trainer, {})
    with without_runtime():
        found, made, _ = proof_of(
            program, roles_of(trainer), ray=on_ray, torchrun=name in UNDER_TORCHRUN, groups=groups
        )
    assert [str(one) for one in found] == []
    assert (APART in made, TWO_APART in made) == ("rollout" in roles_of(trainer),) * 2
    assert (TORCHRUN in made) == (name in UNDER_TORCHRUN)


def test_two_workers_take_the_rows_of_one_where_the_keys_do_not_say_how_many(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": text} for text in runs.TEXTS]
    keys = {"model": model, "dataset": rows, "per_device_train_batch_size": 2, "report_to": [], "save_steps": 0}
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(keys))
    with without_runtime():
        code = command.prove("trainers.sft:SFTTrainer", str(file), "", 3, ray=False)
    said = capsys.readouterr().out
    assert "global_batch_size is 2 in all runs, so that two workers take the rows of one" in said
    assert code == 0, said
    assert same_rows_per_step(SFTTrainer, {"gradient_accumulation_steps": 3}) == {
        "global_batch_size": 24,
        "gradient_accumulation_steps": 1,
    }
    assert same_rows_per_step(SFTTrainer, {"global_batch_size": 4}) == {}
