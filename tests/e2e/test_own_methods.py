"""A run with a loss and an advantage estimator of a plugin, by name: off, in process and on Ray the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rayhelper import ConfigError, RayHelper
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, grpo_config, lines, together
from tests.golden.tiny import save_tiny
from trainers.batch import Ragged, Rollouts
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.generator import Generator

PLUGIN = """
from trainers.plugins import register_advantage, register_loss

@register_loss("capped", average="step_tokens")
def capped(batch, *, epsilon_high, cap):
    weights = batch.ratios_BX.detach().clamp(max=min(cap, 1 + epsilon_high))
    return -weights * batch.advantages_BX * batch.logps_BT

@register_advantage("above_worst")
def above_worst(batch):
    return batch.sums_PG - batch.sums_PG.min(axis=1, keepdims=True)
"""


pytestmark = pytest.mark.usefixtures("own_registries")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def keys(own_registries: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("plugin") / "methods.py"
    file.write_text(PLUGIN)
    return {
        "external_plugins": [str(file)],
        "loss_type": {"name": "capped", "cap": 1.5},
        "advantage_estimator": "above_worst",
        "epsilon_high": 0.4,
        "num_train_epochs": 1,
    }


@pytest.mark.xdist_group("ray_trainers")
def test_a_plugins_loss_and_estimator_learn_the_same_off_in_process_and_on_ray(
    model: str, tmp_path: Path, keys: dict[str, Any], ray_session: RaySession
) -> None:
    GRPOTrainer(grpo_config(model, tmp_path / "off", **keys)).train()
    with without_runtime(), RayHelper.session(together(1), runtime="inprocess", strict=True):
        GRPOTrainer(grpo_config(model, tmp_path / "inprocess", **keys)).train()
    with ray_session(together(1)):
        GRPOTrainer(grpo_config(model, tmp_path / "ray", **keys)).train()
    GRPOTrainer(grpo_config(model, tmp_path / "bundled", num_train_epochs=1)).train()
    for runtime in ("inprocess", "ray"):
        assert lines(tmp_path / runtime) == lines(tmp_path / "off")
        assert final_bytes(tmp_path / runtime) == final_bytes(tmp_path / "off")
    assert final_bytes(tmp_path / "off") != final_bytes(tmp_path / "bundled")
    assert "clip_ratio/low_mean" not in lines(tmp_path / "off")[0]


def test_an_unknown_name_is_refused_before_anything_starts(model: str, tmp_path: Path, keys: dict[str, Any]) -> None:
    for key, name, near in (("loss_type", "caped", "capped"), ("advantage_estimator", "above_wurst", "above_worst")):
        config = grpo_config(model, tmp_path / "out", **keys | {"epsilon_high": None, key: name})
        with pytest.raises(ConfigError, match=rf"{key} must be one of grpo, .*{near}.*, got '{name}'. Did you mean"):
            GRPOTrainer.check(config, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "real"])
def test_losses_that_watch_tokens_learn_the_same_however_a_step_is_cut(
    loss_type: str, model: str, tmp_path: Path
) -> None:
    """The tokens of a step are chosen over all its micro-batches; half of them, so that it shows."""
    keys: dict[str, Any] = {"loss_type": loss_type, "num_train_epochs": 1}
    own: dict[str, dict[str, Any]] = {"clip_cov": {"clip_cov_ratio": 0.5, "clip_cov_lb": -1.0}}
    own |= {"kl_cov": {"kl_cov_ratio": 0.5}, "real": {"generation_batch_size": 8}}  # a step has whole groups
    keys |= own.get(loss_type, {})
    for size in (3, 8):
        GRPOTrainer(grpo_config(model, tmp_path / str(size), **keys, per_device_train_batch_size=size)).train()
    three, eight = ([line for line in lines(tmp_path / str(size)) if "loss" in line] for size in (3, 8))
    first = [[line["loss"] for line in run[:2]] for run in (three, eight)]  # later, rounding may choose another token
    assert first[0] == pytest.approx(first[1], rel=1e-3, abs=1e-5)
    if loss_type.endswith("cov"):
        assert 0.05 < three[0]["cov/selected"] <= 0.5
        assert three[0]["cov/selected"] == eight[0]["cov/selected"]


def test_what_another_engine_drew_is_rejected_where_it_is_too_far(model: str, tmp_path: Path) -> None:
    """The engine's numbers are a nat off at every token whose id is a multiple of three, and exact at the others."""

    def finished(self: Generator, pending: Any) -> Rollouts:
        rollouts = exact(self, pending)
        moved = rollouts.rollout_logps.values - (rollouts.completion_ids.values % 3 == 0).astype(np.float32)
        return dataclasses.replace(rollouts, rollout_logps=Ragged(moved, rollouts.rollout_logps.offsets))

    exact = Generator.finished
    keys: dict[str, Any] = {"num_train_epochs": 1, "beta": 0.0}
    runs = {"token_k1": 1.5, "sequence_mean_k1": 1.5, "token_k2": 0.1}
    with patch.object(Generator, "finished", finished):
        for kind, high in runs.items():
            keys |= {"rollout_rejection": kind, "rollout_rejection_max": high}
            GRPOTrainer(grpo_config(model, tmp_path / kind, **keys)).train()
    first = {kind: lines(tmp_path / kind)[0] for kind in runs}
    assert 0.1 < first["token_k1"]["sampling/rejected_tokens"] < 0.9
    assert first["token_k1"]["sampling/rejected_sequences"] > first["token_k1"]["sampling/rejected_tokens"]
    assert 0 < first["sequence_mean_k1"]["sampling/rejected_sequences"] < 1
    assert first["token_k1"]["loss"] != first["sequence_mean_k1"]["loss"]
    assert first["token_k2"]["loss"] == first["token_k1"]["loss"]  # the same tokens: e > 1.5 and 1 / 2 > 0.1
