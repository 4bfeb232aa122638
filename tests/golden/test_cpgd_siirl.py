"""CPGD equals siiRL's own formulas: advantages, loss, drift and gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from tests.golden.siirl import record_cpgd as siirl
from tests.golden.verl import record_ppo
from trainers.losses.policy import policy_gradient_loss
from trainers.rewards.advantages import group_advantages

WANTED = json.loads((Path(__file__).parent / "siirl/cpgd.json").read_text())


@pytest.mark.parametrize(("weight", "scale"), [("STD_weight", "group"), ("naive", "none")])
def test_advantages_loss_and_gradient_are_those_of_siirl(weight: str, scale: Literal["group", "none"]) -> None:
    drawn, wanted = siirl.tables(), WANTED
    advantages_B, _ = group_advantages(
        drawn["scores"].numpy()[:, None], num_generations=siirl.GROUP, scale_rewards=scale
    )
    np.testing.assert_allclose(advantages_B, wanted[weight], rtol=3e-4)  # siiRL adds 1e-6 to the deviation, we 1e-4
    logps = drawn["logps"].clone().requires_grad_()
    loss, seen = policy_gradient_loss(
        logps,
        drawn["old_logps"],
        torch.tensor(wanted[weight]),
        drawn["mask"],
        loss_type="cpgd",
        normaliser=sum(record_ppo.LENGTHS),
        epsilon=siirl.CLIP_LOW,
        epsilon_high=siirl.CLIP_HIGH,
        policy_drift_coef=siirl.DRIFT,
    )
    loss.backward()
    assert loss.item() == pytest.approx(wanted[f"{weight} loss"], abs=1e-6)
    assert logps.grad is not None
    np.testing.assert_allclose(logps.grad[drawn["mask"]].numpy(), wanted[f"{weight} gradient"], atol=1e-6)
    assert seen.low_clipped is not None
    assert seen.high_clipped is not None
    clipped = (seen.low_clipped + seen.high_clipped) / seen.num_tokens
    assert clipped.item() == pytest.approx(wanted[f"{weight} clipped"])
