"""PPO with verl's settings equals verl's own formulas: rewards of tokens, GAE, both losses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.verl import record_ppo as verl
from trainers.batch import Ragged, Rollouts
from trainers.losses.ppo import ppo_policy_loss, ppo_value_loss
from trainers.ppo.samples import credit, policy_samples, value_samples

WANTED = json.loads((Path(__file__).parent / "verl/ppo.json").read_text())


def test_advantages_returns_and_losses_are_those_of_verl() -> None:
    drawn, lengths = verl.tables(), np.array(verl.LENGTHS)

    def column(name: str) -> Ragged:
        return Ragged.split(drawn[name][drawn["mask"]].numpy(), lengths)

    rollouts = Rollouts(
        prompt_ids=Ragged.split(np.ones(len(lengths), np.int64), np.ones_like(lengths)),
        completion_ids=Ragged.split(np.ones(lengths.sum(), np.int64), lengths),
        rollout_logps=column("old_logps"),
        truncated=np.zeros(len(lengths), bool),
    )
    samples, states = policy_samples(rollouts), value_samples(rollouts, lengths, end_token_id=2)
    assert states.input_ids.lengths.tolist() == (lengths + 1).tolist()  # none has a place behind its end
    samples.old_logps, states.old_values = column("old_logps"), column("old_values")
    samples, states, _ = credit(
        samples,
        states,
        column("ref_logps"),
        drawn["scores"].numpy().astype(np.float64),
        kl_coef=verl.KL_COEF,
        kl_estimator="k1",
        whiten_rewards=False,
        gamma=verl.GAMMA,
        lam=verl.LAM,
    )
    assert samples.advantages is not None
    assert states.returns is not None
    np.testing.assert_allclose(samples.advantages.values, WANTED["advantages"], atol=1e-6)
    np.testing.assert_allclose(states.returns.values, WANTED["returns"], atol=1e-6)
    policy_loss = partial(
        ppo_policy_loss,
        drawn["logps"],
        drawn["old_logps"],
        samples.advantages.padded(),
        drawn["mask"],
        cliprange=verl.CLIP_LOW,
        cliprange_high=verl.CLIP_HIGH,
        delta=verl.CLIP_C,
        normaliser=lengths.sum(),
        entropy_BT=torch.zeros_like(drawn["logps"]),
    )
    loss, _ = policy_loss()
    assert loss.item() == pytest.approx(WANTED["policy_loss"], abs=1e-6)
    with_kl, seen = policy_loss(ref_logps_BT=3 * drawn["ref_logps"], kl_loss_coef=0.5, kl_clip_max=10.0)
    assert with_kl.item() == pytest.approx(WANTED["policy_loss"] + 0.5 * WANTED["kl_loss"], abs=1e-5)
    assert seen.kl is not None
    assert seen.kl.item() / lengths.sum() == pytest.approx(WANTED["kl_loss"], rel=1e-5)
    value, _ = ppo_value_loss(
        drawn["values"],
        drawn["old_values"],
        states.returns.padded(),
        drawn["mask"],
        cliprange_value=verl.CLIP_VALUE,
        normaliser=lengths.sum(),
    )
    assert value.item() == pytest.approx(WANTED["value_loss"], abs=1e-6)
