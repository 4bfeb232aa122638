"""GRPO's loss of one micro-batch: what the configuration says, put into the formulas of ``losses/policy.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainers.batch import Ragged, Samples, on_device
from trainers.grpo.config import GRPOConfig
from trainers.grpo.samples import asked, with_policy_mask
from trainers.losses import entropy as entropy_control
from trainers.losses import policy as policy_losses
from trainers.losses.rollout_correction import add_rollout_metrics, off_policy_mask, rollout_ratios
from trainers.losses.tokens import masked
from trainers.metrics import Metrics
from trainers.plugins import constants, named


@dataclass(frozen=True)
class StepNumbers:
    """What the micro-batches of one optimizer step have in common: counted over all of them, and all workers."""

    normaliser: float  # of the policy loss
    num_bonus_tokens: int  # of the entropy bonus
    entropy_coef: float  # what it is weighed with; 0: there is none


def step_numbers(
    config: GRPOConfig, chunk: Samples, generation: Samples, entropy_coef: float
) -> tuple[Samples, StepNumbers]:
    """The samples of one optimizer step, a chunk of a generation, with what their loss is divided by."""
    share = len(chunk) / len(generation)  # TRL: tokens of the generation, shared out evenly over its steps
    per_step = policy_losses.loss_named(config.loss_name).average == "step_tokens"
    num_tokens = chunk.num_loss_tokens if per_step else generation.num_loss_tokens * share
    normaliser = policy_losses.grpo_normaliser(
        config.loss_name,
        num_sequences=len(chunk),
        num_tokens=num_tokens,
        max_completion_length=config.max_completion_length,
    )
    num_bonus_tokens = chunk.num_loss_tokens
    if config.top_entropy_quantile < 1:
        chunk = with_policy_mask(chunk, config.top_entropy_quantile)
        num_bonus_tokens = int(asked(chunk.policy_mask).values.sum())
    return chunk, StepNumbers(normaliser, num_bonus_tokens, entropy_coef)


def grpo_loss(
    config: GRPOConfig,
    step: StepNumbers,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Samples,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch, already divided by the normalisers of the whole optimizer step."""

    def padded(column: Ragged | None, fill: Any = 0) -> Any:
        return None if column is None else column.padded(fill, device=logps_BT.device)

    loss_mask_BT = mask_BT if micro.loss_mask is None else padded(micro.loss_mask, False)
    policy_mask_BT = padded(micro.policy_mask, False)
    old_logps_BT, rollout_logps_BT = padded(micro.old_logps), padded(micro.rollout_logps)
    assert micro.advantages is not None, "credit comes first"
    if isinstance(micro.advantages, Ragged):
        advantages = padded(micro.advantages)
    else:  # a copy: what came through Ray is read-only
        advantages = on_device(torch.tensor(micro.advantages), logps_BT.device).to(logps_BT.dtype)

    token_weights = policy_mask_BT
    if config.off_policy_mask_threshold is not None:
        kept_BX = off_policy_mask(
            logps_BT, rollout_logps_BT, advantages, loss_mask_BT, threshold=config.off_policy_mask_threshold
        )
        token_weights = kept_BX if token_weights is None else token_weights & kept_BX
    ratios_BX = None
    if config.rollout_correction is not None:
        ratios_BX, seen = rollout_ratios(
            old_logps_BT,
            rollout_logps_BT,
            loss_mask_BT,
            mode=config.rollout_correction,
            clip_max=config.rollout_importance_sampling_clip_max,
            clip_min=config.rollout_importance_sampling_clip_min,
        )
        add_rollout_metrics(metrics, seen)
    elif rollout_logps_BT is not None:  # engine against trainer, as they are
        trainers_BT = logps_BT.detach() if old_logps_BT is None or config.old_is_rollouts else old_logps_BT
        _, seen = rollout_ratios(trainers_BT, rollout_logps_BT, loss_mask_BT, mode="token_truncate", clip_max=None)
        add_rollout_metrics(metrics, seen)
    name, arguments = named(config.loss_type)
    chosen = constants(policy_losses.loss_named(name).function, config, arguments)
    loss, diagnostics = policy_losses.policy_gradient_loss(
        logps_BT,
        old_logps_BT,
        advantages,
        loss_mask_BT,
        loss_type=config.loss_name,
        normaliser=step.normaliser,
        importance_sampling_level=config.importance_sampling_level,
        ref_logps_BT=padded(micro.ref_logps),
        beta=0.0 if config.has_kl_in_reward else config.beta,
        use_bias_correction_kl=config.use_bias_correction_kl,
        kl_clip_max=config.kl_clip_max,
        policy_drift_coef=config.policy_drift_coef,
        rollout_ratios=ratios_BX,
        token_weights=None if token_weights is None else token_weights.to(logps_BT),
        entropy_BT=entropy_BT.detach(),
        selected_BT=padded(micro.selected, False),
        **chosen,
    )
    policy_losses.add_policy_metrics(metrics, diagnostics)
    bonus_mask_BT = loss_mask_BT if policy_mask_BT is None else loss_mask_BT & policy_mask_BT
    if policy_mask_BT is not None:
        metrics.mean("top_entropy", masked(entropy_BT, bonus_mask_BT, "entropy_BT").sum(), bonus_mask_BT.sum())
    if config.entropy_coef or config.use_adaptive_entropy:
        metrics.sum("policy_loss", loss)
    if step.entropy_coef:
        loss = loss + entropy_control.entropy_bonus(
            entropy_BT, bonus_mask_BT, coefficient=step.entropy_coef, num_tokens=step.num_bonus_tokens
        )
    return loss
