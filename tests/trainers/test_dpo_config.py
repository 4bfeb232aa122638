"""Values of DPO's and reward models' keys without meaning are refused by name, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from rayhelper import ConfigError
from trainers.cli import load_config
from trainers.commands import command_named
from trainers.dpo.config import DPOConfig, weighted_losses
from trainers.reward.config import RewardConfig

MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"loss_type": ["sigmod"]}, ["loss_type must be one of", "Did you mean 'sigmoid'?"]),
    ({"loss_type": []}, ["loss_type names no loss"]),
    ({"loss_weights": [1.0, 2.0]}, ["loss_weights must hold one weight for each of the 1 loss types"]),
    ({"beta": 0.0}, ["beta must be positive"]),
    ({"loss_type": ["exo_pair"]}, ["exo_pair", "label_smoothing", "1e-3"]),
    ({"label_smoothing": 0.1}, ["label_smoothing=0.1", "'cdpo' is the smoothed sigmoid loss"]),
    ({"loss_type": ["apo_zero"], "reference_free": True}, ["apo_zero compare each completion with a reference"]),
    ({"loss_type": ["nca_pair"], "f_divergence_type": "js_divergence"}, ["f_divergence_type", "nca_pair"]),
    ({"f_alpha_divergence_coef": 0.7}, ["f_alpha_divergence_coef", "f_divergence_type: alpha_divergence"]),
    ({"discopop_tau": 0.1}, ["discopop_tau", "loss_type: discopop"]),
    ({"ld_alpha": 1.5}, ["ld_alpha must lie in [0, 1]"]),
    ({"rpo_alpha": 1.0, "loss_type": ["sigmoid", "sft"]}, ["rpo_alpha", "sft", "remove one"]),
    ({"rpo_alpha": 1.0, "use_weighting": True}, ["sft cannot be weighted"]),
    ({"nll_batch_size": 2}, ["nll_batch_size", "loss_type: sft, or rpo_alpha"]),
    ({"nll_batch_size": 2, "rpo_alpha": 1.0, "packing": True}, ["nll_batch_size", "without packing"]),
    ({"reference_free": True, "ref_model": "other"}, ["reference_free", "ref_model"]),
    ({"reference_free": True, "sync_ref_model": True}, ["reference_free", "sync_ref_model"]),
    ({"precompute_ref_log_probs": True, "sync_ref_model": True}, ["sync_ref_model", "precompute_ref_log_probs"]),
    ({"sync_ref_model": True, "tuner_type": "lora"}, ["sync_ref_model", "lora", "ref_model"]),
    ({"ref_model_sync_steps": 8}, ["ref_model_sync_steps is 8", "sync_ref_model is false"]),
    ({"sync_ref_model": True, "ref_model_mixup_alpha": 0.0}, ["ref_model_mixup_alpha must lie in (0, 1]"]),
    ({"precompute_ref_batch_size": 4}, ["precompute_ref_batch_size", "precompute_ref_log_probs is false"]),
    ({"truncation_mode": "keep_middle"}, ["truncation_mode must be one of keep_start, keep_end, drop"]),
    ({"max_length": 1}, ["max_length must be at least 2"]),
]


def config(**changed: Any) -> DPOConfig:
    return DPOConfig(**({"model": "tiny", "dataset": "pairs"} | changed))


@pytest.mark.parametrize(("changed", "told"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_told_with_its_key_and_its_remedy(changed: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(**changed)
    for words in told:
        assert words in str(error.value)


def test_rpo_is_the_supervised_loss_beside_the_others() -> None:
    assert weighted_losses(config(rpo_alpha=0.5)) == (["sigmoid", "sft"], [1.0, 0.5])
    both = config(loss_type=["ipo", "hinge"], loss_weights=[1.0, 2.0])
    assert weighted_losses(both) == (["ipo", "hinge"], [1.0, 2.0])
    mixed = {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}
    assert weighted_losses(config(rpo_alpha=0.0, **mixed)) == (["sigmoid", "sft"], [0.8, 0.2])  # ms-swift's mpo.sh
    with pytest.raises(ConfigError, match="rpo_alpha adds the loss type sft"):
        config(rpo_alpha=0.1, **mixed)


def test_one_loss_or_several_are_read_from_the_command_line() -> None:
    arguments = ["--model=m", "--dataset=d"]
    assert load_config(DPOConfig, [*arguments, "--loss_type=ipo"]).loss_type == ["ipo"]
    assert load_config(DPOConfig, [*arguments, "--loss_type=[ipo,sft]"]).loss_type == ["ipo", "sft"]


def test_a_negative_centring_is_refused_and_rm_is_another_name_of_reward() -> None:
    with pytest.raises(ConfigError, match="center_rewards_coefficient must be at least 0"):
        RewardConfig(model="tiny", dataset="pairs", center_rewards_coefficient=-0.1)
    assert command_named("rm") == command_named("reward")
    assert command_named("rm").config_type is RewardConfig
