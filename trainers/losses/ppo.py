"""The losses of PPO (arXiv 1707.06347): of the policy, clipped, with an advantage a token; and of the critic.

As in ``tokens.py``: plain functions of tensors, each a sum over the micro-batch divided by a count of the whole
optimizer step, so that losses and gradients of micro-batches and workers add up. Sizes in names: B sequences, T tokens
of the policy or places of the critic (``rewards/gae.py`` says what those are). Masks are True where the loss counts
one; what stands elsewhere, NaN included, is never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainers.losses.policy_terms import k3_divergence
from trainers.losses.tokens import held, masked, present
from trainers.metrics import Metrics


@dataclass(frozen=True)
class PPODiagnostics:
    """What one micro-batch showed the policy: sums over loss tokens, 0-dim tensors without gradient."""

    loss: torch.Tensor  # divided by the normaliser
    num_tokens: torch.Tensor
    clipped: torch.Tensor  # tokens whose clipped term is the larger one
    approxkl: torch.Tensor  # (logp - old)^2 / 2
    ratio_excess: torch.Tensor  # ratio - 1
    squared_ratio_excess: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor | None = None  # to the reference, where the loss has it


@dataclass(frozen=True)
class ValueDiagnostics:
    """What one micro-batch showed the critic: sums over its places, 0-dim tensors without gradient."""

    loss: torch.Tensor  # divided by the normaliser
    num_places: torch.Tensor
    clipped: torch.Tensor  # places whose clipped term is the larger one


def ppo_policy_loss(
    logps_BT: torch.Tensor,
    old_logps_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    cliprange: float,
    normaliser: float,
    entropy_BT: torch.Tensor,
    cliprange_high: float | None = None,
    delta: float | None = None,
    ref_logps_BT: torch.Tensor | None = None,
    kl_loss_coef: float = 0.0,
    kl_clip_max: float | None = None,
) -> tuple[torch.Tensor, PPODiagnostics]:
    """sum max(-A c, -A clip(c, 1 - cliprange, 1 + cliprange)) / normaliser with c = exp(logp - old), and diagnostics.

    logp - old is clipped to [-20, 20] (``tokens.held``). ``normaliser`` counts the loss tokens of the whole optimizer
    step. ``entropy_BT`` is only reported. ``cliprange_high``: another range above 1. ``delta``: where A is negative a
    term is at most -A delta (dual clip, arXiv 1912.09729, equation 5). ``kl_loss_coef`` weighs
    the KL (k3) to ``ref_logps_BT``, of each token at most ``kl_clip_max``. Departures from TRL: TRL averages over each
    micro-batch, and then over micro-batches. Its approxkl, entropy and ratio also count padding.

    Raises: ValueError for shapes other than the mask's.
    """
    mask = mask_BT.bool()
    logps = masked(logps_BT, mask, "logps_BT")
    log_ratios_BT = held(logps - masked(old_logps_BT, mask, "old_logps_BT"))
    advantages = masked(advantages_BT, mask, "advantages_BT")
    ratios_BT = log_ratios_BT.exp()
    free_BT = -advantages * ratios_BT
    above = cliprange if cliprange_high is None else cliprange_high
    clipped_BT = -advantages * ratios_BT.clamp(1 - cliprange, 1 + above)
    losses_BT = torch.maximum(free_BT, clipped_BT)
    if delta is not None:
        losses_BT = torch.where(advantages < 0, torch.minimum(losses_BT, -advantages * delta), losses_BT)
    kl_BT = None
    if ref_logps_BT is not None:
        kl_BT = k3_divergence(logps, masked(ref_logps_BT, mask, "ref_logps_BT"), kl_clip_max)
        losses_BT = losses_BT + kl_loss_coef * kl_BT
    loss = losses_BT.sum() / (normaliser or 1.0)
    with torch.no_grad():
        excess_BT = log_ratios_BT.expm1()
        diagnostics = PPODiagnostics(
            loss=loss.detach(),
            num_tokens=mask.sum(),
            clipped=(clipped_BT > free_BT).sum(),
            approxkl=log_ratios_BT.square().sum() / 2,
            ratio_excess=excess_BT.sum(),
            squared_ratio_excess=excess_BT.square().sum(),
            entropy=masked(entropy_BT, mask, "entropy_BT").sum(),
            kl=None if kl_BT is None else kl_BT.sum(),
        )
    return loss, diagnostics


def ppo_value_loss(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    cliprange_value: float,
    normaliser: float,
) -> tuple[torch.Tensor, ValueDiagnostics]:
    """sum max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2) / 2 normaliser, and diagnostics.

    ``normaliser`` counts the positions of the whole optimizer step. Departures from TRL: as in ``ppo_policy_loss``.

    Raises: ValueError for shapes other than the mask's.
    """
    mask = mask_BT.bool()
    values = masked(values_BT, mask, "values_BT")
    old_values = masked(old_values_BT, mask, "old_values_BT")
    returns = masked(returns_BT, mask, "returns_BT")
    free_BT = (values - returns).square()
    clipped_BT = (values.clamp(old_values - cliprange_value, old_values + cliprange_value) - returns).square()
    loss = torch.maximum(free_BT, clipped_BT).sum() / 2 / (normaliser or 1.0)
    clipped = (clipped_BT > free_BT).sum()
    return loss, ValueDiagnostics(loss=loss.detach(), num_places=mask.sum(), clipped=clipped)


def add_ppo_metrics(metrics: Metrics, diagnostics: PPODiagnostics) -> None:
    """Writes the policy's diagnostics of one micro-batch under TRL's names."""
    seen = present(diagnostics)
    tokens = seen["num_tokens"]
    metrics.sum("loss/policy_avg", seen["loss"])
    metrics.mean("policy/clipfrac_avg", seen["clipped"], tokens)
    metrics.mean("policy/approxkl_avg", seen["approxkl"], tokens)
    metrics.mean("policy/entropy_avg", seen["entropy"], tokens)
    if "kl" in seen:
        metrics.mean("policy/kl_loss_avg", seen["kl"], tokens)
    metrics.mean("val/ratio", tokens.double() + seen["ratio_excess"], tokens)
    metrics.mean(SQUARED_RATIO_EXCESS, seen["squared_ratio_excess"], tokens)


def add_value_metrics(metrics: Metrics, diagnostics: ValueDiagnostics) -> None:
    """Writes the critic's diagnostics of one micro-batch under TRL's names."""
    seen = present(diagnostics)
    metrics.sum("loss/value_avg", seen["loss"])
    metrics.mean("val/clipfrac_avg", seen["clipped"], seen["num_places"])


SQUARED_RATIO_EXCESS = "squared ratio excess"  # not reported: what val/ratio_var is made of


def with_ratio_variance(metrics: Metrics) -> Metrics:
    """The metrics of a whole optimizer step with ``val/ratio_var``, the variance of the ratio over its loss tokens.

    TRL's is that of the means of the minibatches of a batch.
    """
    values = metrics.values()
    metrics = metrics.without(SQUARED_RATIO_EXCESS)
    if SQUARED_RATIO_EXCESS in values:
        metrics.same("val/ratio_var", values[SQUARED_RATIO_EXCESS] - (values["val/ratio"] - 1) ** 2)
    return metrics
