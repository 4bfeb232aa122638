"""PPO's losses of one micro-batch: what the configuration says, put into the formulas of ``losses/ppo.py``."""

from __future__ import annotations

import torch

from trainers.batch import Ragged
from trainers.losses.ppo import add_ppo_metrics, add_value_metrics, ppo_policy_loss, ppo_value_loss
from trainers.metrics import Metrics
from trainers.ppo.config import PPOConfig
from trainers.ppo.samples import PolicySamples, ValueSamples


def policy_loss(
    config: PPOConfig,
    num_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: PolicySamples,
    metrics: Metrics,
) -> torch.Tensor:
    """The policy's loss of one micro-batch, divided by ``num_tokens``, the loss tokens of the whole optimizer step."""
    loss, diagnostics = ppo_policy_loss(
        logps_BT,
        padded(micro.old_logps, logps_BT),
        padded(micro.advantages, logps_BT),
        padded(micro.loss_mask, mask_BT),
        cliprange=config.cliprange,
        cliprange_high=config.cliprange_high,
        delta=config.delta,
        normaliser=num_tokens,
        entropy_BT=entropy_BT,
        ref_logps_BT=padded(micro.ref_logps, logps_BT) if config.kl_loss_coef else None,
        kl_loss_coef=config.kl_loss_coef,
        kl_clip_max=config.kl_clip_max,
    )
    add_ppo_metrics(metrics, diagnostics)
    return loss


def value_loss(
    config: PPOConfig,
    num_places: int,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: ValueSamples,
    metrics: Metrics,
) -> torch.Tensor:
    """The critic's loss of one micro-batch times ``vf_coef``, divided by ``num_places`` of the whole optimizer step."""
    loss, diagnostics = ppo_value_loss(
        values_BT,
        padded(micro.old_values, values_BT),
        padded(micro.returns, values_BT),
        padded(micro.loss_mask, mask_BT),
        cliprange_value=config.cliprange_value,
        normaliser=num_places,
    )
    add_value_metrics(metrics, diagnostics)
    return config.vf_coef * loss


def padded(column: Ragged | None, like: torch.Tensor) -> torch.Tensor:
    """(B, T) a column of a micro-batch, beside what the model made of it."""
    assert column is not None, "credit comes first"
    return column.padded(device=like.device)
