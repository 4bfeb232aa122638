"""The losses of the GRPO family: policy gradients, clipped or weighted, from advantages and log-probabilities.

As in ``tokens.py``: plain functions of tensors, each a sum over the micro-batch divided by a count of the whole
optimizer step, so that losses and gradients of micro-batches and workers add up. Sizes in names: B sequences, T
tokens; X is T or 1, one value a sequence. Masks are True where the loss counts a token; what stands elsewhere, NaN
included, is never looked at.

The formulas of single tokens are in ``policy_terms.py``, advantages come from ``rewards/advantages.py``, weights of
tokens from ``rollout_correction.py`` and ``entropy.py``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from trainers.losses.policy_terms import (
    FIPO,
    SAPO,
    VESPO,
    FipoWeight,
    SapoGate,
    VespoWeight,
    clipped_surrogate,
    future_weights,
    gamma_weights,
    gated_surrogate,
    importance_ratios,
    k3_divergence,
)
from trainers.losses.tokens import check_choice, masked, per_token, present
from trainers.losses.types import NOT_BUILT, ImportanceLevel, PolicyLossType
from trainers.metrics import Metrics


def grpo_normaliser(
    loss_type: PolicyLossType, *, num_sequences: float, num_tokens: float, max_completion_length: int
) -> float:
    """What ``policy_gradient_loss`` of this type is divided by; both counts are those of one whole optimizer step.

    ==================  ===================================================================================
    grpo, sapo          sequences, each being averaged over its own tokens (arXiv 2402.03300; 2511.20347)
    luspo               sequences, each being summed over its tokens (arXiv 2602.05261)
    bnpo                loss tokens
    dr_grpo             sequences x max_completion_length (arXiv 2503.20783)
    dapo, cispo         loss tokens (arXiv 2503.14476; 2506.13585)
    vespo, fipo         loss tokens (arXiv 2602.10693; 2603.19835)
    ==================  ===================================================================================

    Sequences count even when none of their tokens does. Departures from TRL: bnpo there takes the tokens of each
    micro-batch and averages those means; dapo, cispo and vespo take the tokens of the generation batch times the share
    of it that one optimizer step covers. To have the latter, pass that number, which need not be whole, as
    ``num_tokens``.
    """
    check_loss_type(loss_type)
    if loss_type in ("grpo", "sapo", "luspo"):
        return float(num_sequences)
    if loss_type == "dr_grpo":
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
    low_clipped: torch.Tensor | None = None  # units with ratio < 1 - epsilon and a negative advantage
    high_clipped: torch.Tensor | None = None  # units with ratio > 1 + epsilon_high and a positive advantage
    low_clipped_min: torch.Tensor | None = None  # smallest fraction of low-clipped units of any sequence
    high_clipped_max: torch.Tensor | None = None  # largest fraction of high-clipped units of any sequence
    cispo_clipped: torch.Tensor | None = None  # units with ratio > epsilon_high and a positive advantage
    vespo_phi: torch.Tensor | None = None  # the weight, as a mean over the tokens of each sequence, summed over these
    num_sequences: torch.Tensor | None = None  # sequences with loss tokens, where vespo_phi is
    fipo_weight: torch.Tensor | None = None  # summed over loss tokens
    kl: torch.Tensor | None = None  # summed over loss tokens, bias-corrected if that was asked for, before beta
    entropy: torch.Tensor | None = None  # summed over loss tokens


def policy_gradient_loss(
    logps_BT: torch.Tensor,
    old_logps_BT: torch.Tensor | None,
    advantages: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    loss_type: PolicyLossType,
    normaliser: float,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: ImportanceLevel = "token",
    ref_logps_BT: torch.Tensor | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    rollout_ratios: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
    sapo: SapoGate = SAPO,
    vespo: VespoWeight = VESPO,
    fipo: FipoWeight = FIPO,
) -> tuple[torch.Tensor, PolicyDiagnostics]:
    """The loss of the GRPO family, a scalar divided by ``normaliser`` (``grpo_normaliser``), and its diagnostics.

    ``old_logps_BT``: of the policy that generated; None: the current one (ratios are 1). ``advantages``: (B,) or (B,
    T). With c the ratio of ``importance_ratios``, A the advantage and sg a constant without gradient, a token's term is

    ==========  ===============================================================================================
    cispo       -sg(min(c, epsilon_high)) A logp
    sapo        -(4 / tau) sigmoid(tau (c - 1)) A, tau by the sign of A (``sapo``)
    vespo       -sg(phi(w)) A logp, w the ratio of the whole completion (``gamma_weights``, ``vespo``)
    fipo        the others' with A times ``future_weights`` (``fipo``)
    the others  -min(min(c, delta) A, clip(c, 1 - epsilon, 1 + epsilon_high) A)
    ==========  ===============================================================================================

    ``epsilon_high`` None: ``epsilon``. **For cispo it caps the ratio itself, not its excess over 1**: the paper's 5.0
    is meant, and the default holds every weight at 0.2. ``delta`` caps the ratio of negative advantages too (two-sided
    clipping, arXiv 2505.07291), where there is a clip.

    Both ``rollout_ratios`` (of ``rollout_correction``) and ``token_weights`` (high-entropy and off-policy masks, or
    their product), (B, T) or (B, 1), multiply the policy term and not the KL; vespo takes the ratios into w instead.
    ``beta`` weighs the KL to ``ref_logps_BT``, which is multiplied by c unless ``use_bias_correction_kl`` is off (arXiv
    2512.02556). ``entropy_BT`` is only reported.

    An empty batch and sequences without loss tokens give 0, with a gradient of 0.

    Raises: ValueError for an unknown type or level, shapes that do not fit, or ``beta`` without ``ref_logps_BT``.
    """
    check_loss_type(loss_type)
    mask = mask_BT.bool()
    logps = masked(logps_BT, mask, "logps_BT")
    old_logps = logps.detach() if old_logps_BT is None else masked(old_logps_BT, mask, "old_logps_BT")
    advantages_BX = per_token("advantages", advantages.unsqueeze(1) if advantages.dim() == 1 else advantages, mask)
    corrections_BX = None if rollout_ratios is None else per_token("rollout_ratios", rollout_ratios, mask)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    ratios_BX = importance_ratios(logps, old_logps, mask, importance_sampling_level)

    weights_BX = None
    if loss_type == "cispo":
        loss_BX = -ratios_BX.clamp(max=epsilon_high).detach() * advantages_BX * logps
    elif loss_type == "sapo":
        loss_BX = gated_surrogate(ratios_BX, advantages_BX, sapo)
    elif loss_type == "vespo":
        weights_BX = gamma_weights(logps - old_logps, advantages_BX, mask, corrections_BX, vespo)
        loss_BX = -weights_BX * advantages_BX * logps
    elif loss_type == "fipo":
        weights_BX = future_weights(logps - old_logps, ratios_BX, advantages_BX, delta, fipo)
        loss_BX = clipped_surrogate(ratios_BX, advantages_BX * weights_BX, epsilon, epsilon_high, delta)
    else:
        loss_BX = clipped_surrogate(ratios_BX, advantages_BX, epsilon, epsilon_high, delta)
    if token_weights is not None:
        loss_BX = loss_BX * per_token("token_weights", token_weights, mask)
    if corrections_BX is not None and loss_type != "vespo":
        loss_BX = loss_BX * corrections_BX
    kl_BT = None
    if beta:
        if ref_logps_BT is None:
            raise ValueError(f"beta={beta} asks for the KL to a reference: pass ref_logps_BT, or set beta=0.0")
        kl_BT = k3_divergence(logps, masked(ref_logps_BT, mask, "ref_logps_BT"))
        kl_BT = kl_BT * ratios_BX if use_bias_correction_kl else kl_BT
        loss_BX = loss_BX + beta * kl_BT

    loss_BT = loss_BX * mask
    if loss_type in ("grpo", "sapo"):
        loss_BT = loss_BT / mask.sum(1, keepdim=True).clamp(min=1)
    loss = loss_BT.sum() / (normaliser or 1.0)
    seen = _clipping(loss_type, ratios_BX, advantages_BX, mask, epsilon, epsilon_high)
    return loss, dataclasses.replace(seen, **_averages(loss_type, weights_BX, mask, kl_BT, entropy_BT))


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
    if "cispo_clipped" in seen:
        metrics.mean("cispo_clip_ratio", seen["cispo_clipped"], units)
    if "vespo_phi" in seen:
        metrics.mean("vespo/phi_seq_mean", seen["vespo_phi"], seen["num_sequences"])
    if "fipo_weight" in seen:
        metrics.mean("fipo/weight_mean", seen["fipo_weight"], tokens)
    if "low_clipped" in seen:
        metrics.mean("clip_ratio/low_mean", seen["low_clipped"], units)
        metrics.mean("clip_ratio/high_mean", seen["high_clipped"], units)
        metrics.mean("clip_ratio/region_mean", seen["low_clipped"] + seen["high_clipped"], units)
        metrics.min("clip_ratio/low_min", seen["low_clipped_min"], count=units)
        metrics.max("clip_ratio/high_max", seen["high_clipped_max"], count=units)


def check_loss_type(loss_type: str) -> None:
    """Raises ValueError for a type that is none of ours, saying what is near to one that other systems have."""
    if loss_type in NOT_BUILT:
        raise ValueError(NOT_BUILT[loss_type])
    check_choice("loss_type", loss_type, PolicyLossType)


@torch.no_grad()
def _clipping(
    loss_type: PolicyLossType,
    ratios_BX: torch.Tensor,
    advantages_BX: torch.Tensor,
    mask_BT: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> PolicyDiagnostics:
    """The counts of tokens and clip units, and how many were clipped, for the types that clip."""
    low_BX = (ratios_BX < 1 - epsilon) & (advantages_BX < 0)
    high_BX = (ratios_BX > 1 + epsilon_high) & (advantages_BX > 0)
    units_BX = mask_BT if low_BX.shape == mask_BT.shape else mask_BT.any(1, keepdim=True)
    counts = PolicyDiagnostics(num_tokens=mask_BT.sum(), num_clip_units=units_BX.sum())
    if loss_type in ("sapo", "vespo"):
        return counts
    if loss_type == "cispo":
        capped_BX = (ratios_BX > epsilon_high) & (advantages_BX > 0)
        return dataclasses.replace(counts, cispo_clipped=(capped_BX & units_BX).sum())
    fractions_2B = torch.stack([low_BX & units_BX, high_BX & units_BX]).sum(2) / units_BX.sum(1).clamp(min=1)
    low_B = fractions_2B[0].masked_fill(~units_BX.any(1), 1.0)
    return dataclasses.replace(
        counts,
        low_clipped=(low_BX & units_BX).sum(),
        high_clipped=(high_BX & units_BX).sum(),
        low_clipped_min=torch.cat([low_B, low_B.new_ones(1)]).amin(),  # the one more makes an empty batch possible
        high_clipped_max=torch.cat([fractions_2B[1], low_B.new_zeros(1)]).amax(),
    )


@torch.no_grad()
def _averages(
    loss_type: PolicyLossType,
    weights_BX: torch.Tensor | None,
    mask_BT: torch.Tensor,
    kl_BT: torch.Tensor | None,
    entropy_BT: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The fields of PolicyDiagnostics that are sums over tokens or sequences."""
    sums: dict[str, torch.Tensor] = {}
    if loss_type == "vespo" and weights_BX is not None:
        lengths_B1 = mask_BT.sum(1, keepdim=True)
        sums["vespo_phi"] = (weights_BX * mask_BT / lengths_B1.clamp(min=1)).sum()
        sums["num_sequences"] = (lengths_B1 > 0).sum()
    if loss_type == "fipo" and weights_BX is not None:
        sums["fipo_weight"] = (weights_BX * mask_BT).sum()
    if kl_BT is not None:
        sums["kl"] = (kl_BT * mask_BT).sum()
    if entropy_BT is not None:
        sums["entropy"] = masked(entropy_BT, mask_BT, "entropy_BT").sum()
    return sums
