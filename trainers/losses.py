"""Losses as plain functions of tensors: no configuration, no collectives, no logging.

Every loss is a sum over the micro-batch divided by a ``normaliser`` of the whole optimizer step (all micro-batches, all
workers), which the caller counts beforehand. So losses and gradients of micro-batches and workers simply *add up*, and
no way of cutting a batch changes them. Sizes in names: B sequences, T tokens, V vocabulary; X is T or 1, one value a
sequence. Masks are True where the loss counts a token; what stands elsewhere, NaN included, is never looked at.

Diagnostics come back as sums beside the loss, and ``add_policy_metrics`` writes them down under TRL's names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import get_args

import torch

from trainers.loss_types import ImportanceLevel, PolicyLossType, SFTLossType
from trainers.metrics import Metrics


def token_logps(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float32 log-probabilities of ``ids`` (...) under softmax(``logits`` / temperature) (..., V).

    ``logits[..., t, :]`` must be those that predict ``ids[..., t]``: shifting is the caller's.
    """
    scaled = logits.float() / temperature
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def token_entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float32 entropy (...), in nats, of softmax(``logits`` / temperature) (..., V); logits must be finite."""
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)


def sft_loss(
    logps_BT: torch.Tensor, mask_BT: torch.Tensor, *, normaliser: float, loss_type: SFTLossType = "nll"
) -> torch.Tensor:
    """The supervised loss: -sum(logps) / normaliser, which is the number of loss tokens of the optimizer step.

    ``dft`` weighs each token by its own probability, held constant (arXiv 2508.05629). A normaliser of 0,
    a step without loss tokens, gives 0.
    """
    check_choice("loss_type", loss_type, SFTLossType)
    logps = masked(logps_BT, mask_BT, "logps_BT")
    weights = logps.detach().exp() if loss_type == "dft" else 1.0
    return -(weights * logps).sum() / (normaliser or 1.0)


def grpo_normaliser(
    loss_type: PolicyLossType, *, num_sequences: float, num_tokens: float, max_completion_length: int
) -> float:
    """What ``policy_gradient_loss`` of this type is divided by; both counts are those of one whole optimizer step.

    ===========  ==========================================================================================
    grpo         sequences, each being averaged over its own tokens (arXiv 2402.03300)
    bnpo         loss tokens
    dr_grpo      sequences x max_completion_length (arXiv 2503.20783)
    dapo, cispo  loss tokens (arXiv 2503.14476; arXiv 2506.13585)
    ===========  ==========================================================================================

    Sequences count even when none of their tokens does. Departures from TRL: bnpo there takes the tokens of each
    micro-batch and averages those means; dapo and cispo take the tokens of the generation batch times the share of it
    that one optimizer step covers. To have the latter, pass that number, which need not be whole, as ``num_tokens``.
    """
    check_choice("loss_type", loss_type, PolicyLossType)
    if loss_type == "grpo":
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
    token_weights: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PolicyDiagnostics]:
    """The loss of the GRPO family, a scalar divided by ``normaliser`` (``grpo_normaliser``), and its diagnostics.

    ``old_logps_BT``: of the policy that generated; None: the current one (ratios are 1). ``advantages``: (B,) or (B,
    T). ``epsilon_high`` None: ``epsilon``. **For cispo it caps the ratio itself, not its excess over 1**: the paper's
    5.0 is meant, and the default holds every weight at 0.2. ``delta`` caps the ratio of negative advantages too
    (two-sided clipping, arXiv 2505.07291; not for cispo). ``importance_sampling_level`` 'sequence' is GSPO (arXiv
    2507.18071). ``token_weights`` (B, T) or (B, 1) multiplies the policy term and not the KL: rollout importance
    ratios, high-entropy and off-policy masks, or their product. ``beta`` weighs the KL to ``ref_logps_BT``, which is
    multiplied by the ratio unless ``use_bias_correction_kl`` is off (arXiv 2512.02556). ``entropy_BT`` is only
    reported.

    An empty batch and sequences without loss tokens give 0, with a gradient of 0.

    Raises: ValueError for an unknown type or level, shapes that do not fit, or ``beta`` without ``ref_logps_BT``.
    """
    check_choice("loss_type", loss_type, PolicyLossType)
    mask = mask_BT.bool()
    logps = masked(logps_BT, mask, "logps_BT")
    old_logps = logps.detach() if old_logps_BT is None else masked(old_logps_BT, mask, "old_logps_BT")
    advantages_BX = _per_token("advantages", advantages.unsqueeze(1) if advantages.dim() == 1 else advantages, mask)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    ratios_BX = importance_ratios(logps, old_logps, mask, importance_sampling_level)

    if loss_type == "cispo":
        loss_BX = -ratios_BX.clamp(max=epsilon_high).detach() * advantages_BX * logps
    else:
        loss_BX = clipped_surrogate(ratios_BX, advantages_BX, epsilon, epsilon_high, delta)
    if token_weights is not None:
        loss_BX = loss_BX * _per_token("token_weights", token_weights, mask)
    kl_BT = None
    if beta:
        if ref_logps_BT is None:
            raise ValueError(f"beta={beta} asks for the KL to a reference: pass ref_logps_BT, or set beta=0.0")
        kl_BT = k3_divergence(logps, masked(ref_logps_BT, mask, "ref_logps_BT"))
        kl_BT = kl_BT * ratios_BX if use_bias_correction_kl else kl_BT
        loss_BX = loss_BX + beta * kl_BT

    loss_BT = loss_BX * mask
    if loss_type == "grpo":
        loss_BT = loss_BT / mask.sum(1, keepdim=True).clamp(min=1)
    loss = loss_BT.sum() / (normaliser or 1.0)
    return loss, _diagnostics(loss_type, ratios_BX, advantages_BX, mask, epsilon, epsilon_high, kl_BT, entropy_BT)


def importance_ratios(
    logps_BT: torch.Tensor, old_logps_BT: torch.Tensor, mask_BT: torch.Tensor, level: ImportanceLevel
) -> torch.Tensor:
    """exp(logps - old_logps): (B, T) for level 'token'; for 'sequence' (B, 1), the geometric mean over loss tokens."""
    check_choice("importance_sampling_level", level, ImportanceLevel)
    log_ratios_BT = logps_BT - old_logps_BT
    if level == "token":
        return log_ratios_BT.exp()
    return ((log_ratios_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)).exp()


def clipped_surrogate(
    ratios: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> torch.Tensor:
    """-min(min(ratio, delta) A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), the shapes broadcast."""
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    ratios = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.min(ratios * advantages, clipped * advantages)


def k3_divergence(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """The estimator k3 of KL(policy || reference) at each token: r - log r - 1, r = p_ref / p; never negative."""
    log_ratios = ref_logps - logps
    return torch.expm1(log_ratios) - log_ratios


def entropy_bonus(
    entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, coefficient: float, num_tokens: float
) -> torch.Tensor:
    """-coefficient x mean entropy, to be added to a loss; ``num_tokens``: loss tokens of the whole optimizer step.

    Always a mean over tokens, whatever the loss type. Departure from TRL: there it is a mean of micro-batch means.
    """
    return -coefficient * masked(entropy_BT, mask_BT, "entropy_BT").sum() / (num_tokens or 1.0)


def add_policy_metrics(metrics: Metrics, diagnostics: PolicyDiagnostics) -> None:
    """Writes the diagnostics of one micro-batch under TRL's names; one transfer from the device.

    Joined over micro-batches and workers they describe the step: means weigh every token (sequence) alike, ``low_min``
    and ``high_max`` are over all its sequences. Departures from TRL, which averages all of these over micro-batches,
    counts sequences without loss tokens too at sequence level, and looks for clipping after ``delta`` was applied.
    """
    seen = transferred(diagnostics)
    tokens, units = seen["num_tokens"], seen["num_clip_units"]
    for name in ("kl", "entropy"):
        if name in seen:
            metrics.mean(name, seen[name], tokens)
    if "cispo_clipped" in seen:
        metrics.mean("cispo_clip_ratio", seen["cispo_clipped"], units)
    if "low_clipped" in seen:
        metrics.mean("clip_ratio/low_mean", seen["low_clipped"], units)
        metrics.mean("clip_ratio/high_mean", seen["high_clipped"], units)
        metrics.mean("clip_ratio/region_mean", seen["low_clipped"] + seen["high_clipped"], units)
        if units:
            metrics.min("clip_ratio/low_min", seen["low_clipped_min"])
            metrics.max("clip_ratio/high_max", seen["high_clipped_max"])


@torch.no_grad()
def _diagnostics(
    loss_type: PolicyLossType,
    ratios_BX: torch.Tensor,
    advantages_BX: torch.Tensor,
    mask_BT: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
    kl_BT: torch.Tensor | None,
    entropy_BT: torch.Tensor | None,
) -> PolicyDiagnostics:
    low_BX = (ratios_BX < 1 - epsilon) & (advantages_BX < 0)
    high_BX = (ratios_BX > 1 + epsilon_high) & (advantages_BX > 0)
    units_BX = mask_BT if low_BX.shape == mask_BT.shape else mask_BT.any(1, keepdim=True)
    diagnostics = PolicyDiagnostics(
        num_tokens=mask_BT.sum(),
        num_clip_units=units_BX.sum(),
        kl=None if kl_BT is None else (kl_BT * mask_BT).sum(),
        entropy=None if entropy_BT is None else masked(entropy_BT, mask_BT, "entropy_BT").sum(),
    )
    if loss_type == "cispo":
        capped_BX = (ratios_BX > epsilon_high) & (advantages_BX > 0)
        return dataclasses.replace(diagnostics, cispo_clipped=(capped_BX & units_BX).sum())
    fractions_2B = torch.stack([low_BX & units_BX, high_BX & units_BX]).sum(2) / units_BX.sum(1).clamp(min=1)
    low_B = fractions_2B[0].masked_fill(~units_BX.any(1), 1.0)
    return dataclasses.replace(
        diagnostics,
        low_clipped=(low_BX & units_BX).sum(),
        high_clipped=(high_BX & units_BX).sum(),
        low_clipped_min=torch.cat([low_B, low_B.new_ones(1)]).amin(),  # the one more makes an empty batch possible
        high_clipped_max=torch.cat([fractions_2B[1], low_B.new_zeros(1)]).amax(),
    )


def transferred(diagnostics: object) -> dict[str, float]:
    """The fields of a dataclass of 0-dim tensors that are not None, by name, in one transfer from the device."""
    present = {name: value for name, value in vars(diagnostics).items() if value is not None}
    return dict(zip(present, torch.stack([value.float() for value in present.values()]).tolist(), strict=True))


def masked(values_BT: torch.Tensor, mask_BT: torch.Tensor, name: str) -> torch.Tensor:
    """``values_BT`` with 0 where the mask is False, so that neither values nor gradients there can be NaN."""
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"{name} must have the mask's shape {tuple(mask_BT.shape)}, got {tuple(values_BT.shape)}")
    return values_BT.masked_fill(~mask_BT.bool(), 0.0)


def _per_token(name: str, values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """``values`` of shape (B, T), cleared outside the mask, or (B, 1), as it is."""
    num_sequences, num_tokens = mask_BT.shape
    if values.shape == (num_sequences, num_tokens):
        return masked(values, mask_BT, name)
    if values.shape == (num_sequences, 1):
        return values
    raise ValueError(
        f"{name} must hold one value a sequence ({num_sequences}) or one a token {(num_sequences, num_tokens)}, "
        f"got {tuple(values.shape)}"
    )


def check_choice(name: str, value: str, choices: object) -> None:
    """Raises ValueError if the value is none of a Literal's."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
