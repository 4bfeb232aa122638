"""The loss of reward models, as ``Policy.step`` calls it."""

from __future__ import annotations

import torch

from trainers.batch import on_device
from trainers.data.preferences import Preferences
from trainers.losses.reward_model import add_reward_model_metrics, reward_model_loss
from trainers.metrics import Metrics
from trainers.reward.config import RewardConfig


def comparison_loss(
    config: RewardConfig,
    num_pairs: int,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch of pairs, divided by the pairs of the whole optimizer step.

    B are its sequences, twice as many: all chosen, then all rejected. Each has one target, so T is 1.
    """
    rewards_B = values_BT.sum(1)
    loss, diagnostics = reward_model_loss(
        rewards_B[: len(micro)],
        rewards_B[len(micro) :],
        # a copy: what came through Ray is read-only
        None if micro.margins is None else on_device(torch.tensor(micro.margins), rewards_B.device).to(rewards_B.dtype),
        num_pairs=num_pairs,
        center_rewards_coefficient=config.center_rewards_coefficient,
    )
    add_reward_model_metrics(metrics, diagnostics)
    return loss
