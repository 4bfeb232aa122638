"""Tokens that end a completion beside the model's own, in every trainer; engines: tests/rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from tests.e2e.runs import gkd_config, grpo_config, lines, ppo_config
from tests.golden.tiny import save_tiny
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.ppo.trainer import PPOTrainer

EVERY_TOKEN = list(range(260))
REWARD: dict[str, Any] = {"reward_funcs": ["tests.e2e.runs.evenness"], "reward_weights": None}
UNDER_TEST: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, grpo_config, REWARD),
    "ppo": (PPOTrainer, ppo_config, REWARD),
    "gkd": (GKDTrainer, gkd_config, {"lmbda": 1.0, "sft_alpha": 0.0, "tuner_type": "lora"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", UNDER_TEST)
def test_a_further_stop_token_ends_a_completion_before_its_limit(name: str, model: str, tmp_path: Path) -> None:
    trainer, config, keys = UNDER_TEST[name]
    trainer(config(model, tmp_path, **keys, max_steps=1, eval_dataset=None, stop_token_ids=EVERY_TOKEN)).train()
    (step,) = lines(tmp_path)
    assert step["completions/max_length"] == 1
    assert step["completions/clipped_ratio"] == 0


@pytest.mark.parametrize("name", UNDER_TEST)
def test_a_stop_token_that_no_tokenizer_has_is_told_before_anything_is_built(
    name: str, model: str, tmp_path: Path
) -> None:
    trainer, config, keys = UNDER_TEST[name]
    with pytest.raises(ConfigError, match="stop_token_ids holds 260, but the tokenizer's tokens are 0 to 259"):
        trainer(config(model, tmp_path, **keys, stop_token_ids=[5, 260]))
