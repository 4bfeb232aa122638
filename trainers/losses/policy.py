"""The losses of the GRPO family: policy gradients, clipped or weighted, from advantages and log-probabilities.

As in ``tokens.py``: plain functions of tensors, each a sum over the micro-batch divided by a count of the whole
optimizer step, so that losses and gradients of micro-batches and workers add up. Sizes in names: B sequences, T
tokens; X is T or 1, one value a sequence. Masks are True where the loss counts a token; what stands elsewhere, NaN
included, is never looked at.

The losses that ``loss_type`` names are in ``surrogates.py``, advantages come from ``rewards/advantages.py``, weights of
tokens from ``rollout_correction.py`` and ``entropy.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainers.losses.policy_terms import importance_ratios, k3_divergence, policy_drift
from trainers.losses.surrogates import PolicyBatch, PolicyTerms
from trainers.losses.tokens import masked, per_token, present
from trainers.losses.types import ImportanceLevel, PolicyLoss
from trainers.metrics import Metrics
from trainers.plugins import LOSSES, parameters


def grpo_normaliser(loss_type: str, *, num_sequences: float, num_tokens: float, max_completion_length: int) -> float:
    """What ``policy_gradient_loss`` of this type is divided by; both counts are those of one whole optimizer step.

    ==================  ===========================================  ==============================================
    ``average``         divided by                                   of
    ==================  ===========================================  ==============================================
    sequence_means      sequences, each averaged over its tokens     grpo (arXiv 2402.03300), sapo, gmpo
    sequence_sums       sequences, each summed over its tokens       luspo (arXiv 2602.05261)
    step_tokens         loss tokens of the step                      bnpo, real, cpgd
    max_length          sequences x max_completion_length            dr_grpo (arXiv 2503.20783)
    tokens              loss tokens, see below                       dapo (arXiv 2503.14476) and the others
    ==================  ===========================================  ==============================================

    Sequences count even when none of their tokens does. Departures from TRL: bnpo there takes the tokens of each
    micro-batch and averages those means; types averaged over ``tokens`` take the tokens of the generation batch times
    the share of it that one optimizer step covers. To have the latter, pass that number, which need not be whole, as
    ``num_tokens``.
    """
    average = loss_named(loss_type).average
    if average in ("sequence_means", "sequence_sums"):
        return float(num_sequences)
    if average == "max_length":
        return float(num_sequences * max_completion_length)
    return float(num_tokens)


@dataclass(frozen=True)
class PolicyDiagnostics:
    """What one micro-batch showed: 0-dim tensors on its device, without gradient; None where it does not apply.

    Clipping is counted in *clip units*: tokens, or sequences when one ratio is shared by a whole sequence. Sequences
    without loss tokens are no units.
    """

    num_tokens: torch.Tensor  # loss tokens
    num_clip_units: torch.Tensor
    low_clipped: torch.Tensor | None = None  # units cut from below: ratio < 1 - epsilon and a negative advantage
    high_clipped: torch.Tensor | None = None  # units cut from above: ratio > 1 + epsilon_high and a positive advantage
    low_clipped_min: torch.Tensor | None = None  # smallest fraction of low-clipped units of any sequence
    high_clipped_max: torch.Tensor | None = None  # largest fraction of high-clipped units of any sequence
    # The loss's own metrics by name: a sum over loss tokens, or over sequences that have any, and the number of these
    means: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    kl: torch.Tensor | None = None  # summed over loss tokens, bias-corrected if that was asked for, before beta
    entropy: torch.Tensor | None = None  # summed over loss tokens


def policy_gradient_loss(
    logps_BT: torch.Tensor,
    old_logps_BT: torch.Tensor | None,
    advantages: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    loss_type: str,
    normaliser: float,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling_level: ImportanceLevel = "token",
    ref_logps_BT: torch.Tensor | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    kl_clip_max: float | None = None,
    policy_drift_coef: float = 0.0,
    rollout_ratios: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
    selected_BT: torch.Tensor | None = None,
    **constants: Any,
) -> tuple[torch.Tensor, PolicyDiagnostics]:
    """The loss of the GRPO family, a scalar divided by ``normaliser`` (``grpo_normaliser``), and its diagnostics.

    ``old_logps_BT``: log-probabilities of the policy that generated. None: of the current policy (ratios are 1).
    ``advantages``: (B,) or (B, T). ``loss_type``: a registered loss; ``surrogates.py`` has the bundled losses. A loss
    gets those of ``epsilon``, ``epsilon_high`` and ``constants`` (``delta``, ``sapo``, ...) that its signature names.

    ``epsilon_high`` None: ``epsilon``. **For cispo it caps the ratio itself, not its excess over 1**. Use the paper's
    5.0: the default keeps every weight at 0.2. ``delta`` also caps the ratio of negative advantages, in losses with a
    clip (two-sided clipping, arXiv 2505.07291).

    ``rollout_ratios`` (of ``rollout_correction``) and ``token_weights`` are (B, T) or (B, 1). ``token_weights`` are
    high-entropy and off-policy masks, or their product. Both multiply the policy term and not the KL. vespo takes the
    ratios into its weight instead. ``selected_BT``: tokens that clip_cov and kl_cov treat differently (``entropy.py``).
    ``beta`` weighs the KL to ``ref_logps_BT``, which is multiplied by c unless ``use_bias_correction_kl`` is off (arXiv
    2512.02556). ``kl_clip_max`` limits the KL of a token. A larger KL has no gradient (ms-swift, verl: 10).
    ``policy_drift_coef`` weighs ``policy_drift``, beside the KL. ``entropy_BT`` is only reported.

    An empty batch and sequences without loss tokens give 0, with a gradient of 0.

    Raises: ValueError for an unknown type or level, shapes that do not fit, or ``beta`` without ``ref_logps_BT``.
    """
    chosen = loss_named(loss_type)
    mask = mask_BT.bool()
    logps = masked(logps_BT, mask, "logps_BT")
    old_logps = logps.detach() if old_logps_BT is None else masked(old_logps_BT, mask, "old_logps_BT")
    advantages_BX = per_token("advantages", advantages.unsqueeze(1) if advantages.dim() == 1 else advantages, mask)
    corrections_BX = None if rollout_ratios is None else per_token("rollout_ratios", rollout_ratios, mask)
    ratios_BX = importance_ratios(logps, old_logps, mask, importance_sampling_level)
    batch = PolicyBatch(logps, old_logps, ratios_BX, advantages_BX, mask, corrections_BX, selected_BT)
    constants |= {"epsilon": epsilon, "epsilon_high": epsilon if epsilon_high is None else epsilon_high}
    taken = parameters(chosen.function).keys() & constants.keys()
    made = chosen.function(batch, **{name: constants[name] for name in taken})
    terms = made if isinstance(made, PolicyTerms) else PolicyTerms(made)

    loss_BX = per_token(f"the terms of loss_type {loss_type!r}", terms.loss_BX, mask)
    if token_weights is not None:
        loss_BX = loss_BX * per_token("token_weights", token_weights, mask)
    if corrections_BX is not None and not chosen.corrects_rollouts:
        loss_BX = loss_BX * corrections_BX
    kl_BT = None
    if beta:
        if ref_logps_BT is None:
            raise ValueError(f"beta={beta} needs the KL to a reference: pass ref_logps_BT, or set beta=0.0")
        kl_BT = k3_divergence(logps, masked(ref_logps_BT, mask, "ref_logps_BT"), kl_clip_max)
        kl_BT = kl_BT * ratios_BX if use_bias_correction_kl else kl_BT
        loss_BX = loss_BX + beta * kl_BT

    if policy_drift_coef:
        loss_BX = loss_BX + policy_drift_coef * policy_drift(logps, old_logps)
    loss_BT = loss_BX * mask
    if chosen.average == "sequence_means":
        loss_BT = loss_BT / mask.sum(1, keepdim=True).clamp(min=1)
    loss = loss_BT.sum() / (normaliser or 1.0)
    return loss, _diagnostics(terms, ratios_BX, mask, kl_BT, entropy_BT)


def add_policy_metrics(metrics: Metrics, diagnostics: PolicyDiagnostics) -> None:
    """Writes the diagnostics of one micro-batch under TRL's names.

    Joined over micro-batches and workers they describe the step: means weigh every token (sequence) alike, ``low_min``
    and ``high_max`` are over all its sequences. Departures from TRL, which averages all of these over micro-batches,
    counts sequences without loss tokens too (at sequence level, and in vespo's phi), and looks for clipping after
    ``delta`` was applied.
    """
    seen = present(diagnostics)
    tokens, units = seen["num_tokens"], seen["num_clip_units"]
    for name in ("kl", "entropy"):
        if name in seen:
            metrics.mean(name, seen[name], tokens)
    for name, (total, count) in diagnostics.means.items():
        metrics.mean(name, total, count)
    if "low_clipped" in seen:
        metrics.mean("clip_ratio/low_mean", seen["low_clipped"], units)
        metrics.mean("clip_ratio/high_mean", seen["high_clipped"], units)
        metrics.mean("clip_ratio/region_mean", seen["low_clipped"] + seen["high_clipped"], units)
        metrics.min("clip_ratio/low_min", seen["low_clipped_min"], count=units)
        metrics.max("clip_ratio/high_max", seen["high_clipped_max"], count=units)


def loss_named(loss_type: str) -> PolicyLoss:
    """The registered loss of a name. Raises ValueError for an unknown one, with what is near to it, and the known."""
    if loss_type not in LOSSES:
        raise ValueError(f"loss_type must be one of {', '.join(LOSSES)}, got {loss_type!r}")
    loss: PolicyLoss = LOSSES[loss_type]
    return loss


@torch.no_grad()
def _diagnostics(
    terms: PolicyTerms,
    ratios_BX: torch.Tensor,
    mask_BT: torch.Tensor,
    kl_BT: torch.Tensor | None,
    entropy_BT: torch.Tensor | None,
) -> PolicyDiagnostics:
    """Counts of tokens and clip units, how many were clipped, and sums over tokens or sequences."""

    def units_of(values_BX: torch.Tensor) -> torch.Tensor:
        return mask_BT if values_BX.shape == mask_BT.shape else mask_BT.any(1, keepdim=True)

    clip_units_BX = units_of(ratios_BX if terms.clipped_BX is None else terms.clipped_BX[0])
    seen = PolicyDiagnostics(
        num_tokens=mask_BT.sum(),
        num_clip_units=clip_units_BX.sum(),
        means={
            name: (values_BX.masked_fill(~units_of(values_BX), 0).sum(), units_of(values_BX).sum())
            for name, values_BX in terms.means.items()
        },
        kl=None if kl_BT is None else (kl_BT * mask_BT).sum(),
        entropy=None if entropy_BT is None else masked(entropy_BT, mask_BT, "entropy_BT").sum(),
    )
    if terms.clipped_BX is None:
        return seen
    low_BX, high_BX = (cut_BX & clip_units_BX for cut_BX in terms.clipped_BX)
    fractions_2B = torch.stack([low_BX, high_BX]).sum(2) / clip_units_BX.sum(1).clamp(min=1)
    low_B = fractions_2B[0].masked_fill(~clip_units_BX.any(1), 1.0)
    return dataclasses.replace(
        seen,
        low_clipped=low_BX.sum(),
        high_clipped=high_BX.sum(),
        low_clipped_min=torch.cat([low_B, low_B.new_ones(1)]).amin(),  # the one more makes an empty batch possible
        high_clipped_max=torch.cat([fractions_2B[1], low_B.new_zeros(1)]).amax(),
    )
