"""What a token adds to a policy loss: ratios, surrogates, weights and the KL, each a formula of tensors.

They are put together, masked and summed in ``policy.py``. Sizes in names: B sequences, T tokens; X is T or 1,
one value a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainers.losses.tokens import check_choice, held
from trainers.losses.types import LARGEST_LOG_RATIO, ImportanceLevel

SMALLEST_LOG_RATIO = math.log(1e-8)  # of sequences in vespo, as in the paper's code


@dataclass(frozen=True)
class SapoGate:
    """The temperatures of sapo's gate; higher is closer to a hard clip."""

    temperature_pos: float = 1.0  # of positive advantages
    temperature_neg: float = 1.05


@dataclass(frozen=True)
class VespoWeight:
    """The shape of vespo's weight phi(w) = e^lambda w^k e^(-lambda w), 1 at w = 1, largest at w = k / lambda."""

    k_pos: float = 2.0  # of advantages >= 0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0


@dataclass(frozen=True)
class FipoWeight:
    """How fipo weighs a token by what has become of the tokens after it."""

    decay_rate: float = 32.0  # tokens after which the future counts half
    clip_range: float | None = 0.2  # the weight lies in 1 - range, 1 + range; None: not bounded
    clip_high_only: bool = True  # in 1, 1 + range instead
    safety_threshold: float | None = 4.0  # of the ratio above which a negative advantage is weighed in 0.8, 1


SAPO, VESPO, FIPO = SapoGate(), VespoWeight(), FipoWeight()


def importance_ratios(
    logps_BT: torch.Tensor, old_logps_BT: torch.Tensor, mask_BT: torch.Tensor, level: ImportanceLevel
) -> torch.Tensor:
    """exp(logps - old_logps) of the tokens or of their sequence.

    ================  ===========================================================================================
    token             (B, T)
    sequence          (B, 1), the geometric mean over the loss tokens: GSPO (arXiv 2507.18071)
    sequence_token    (B, T), with the value of 'sequence' and each token's own gradient: GSPO-token (section 4.3
                      there), for advantages that differ within a sequence; where they do not, it equals 'sequence'
    sequence_product  (B, 1), the product over the loss tokens: how TRL's RLOO clips (arXiv 2402.14740)
    ================  ===========================================================================================

    Every exponent is held within [-20, 20] (``tokens.held``).
    """
    check_choice("importance_sampling_level", level, ImportanceLevel)
    log_ratios_BT = logps_BT - old_logps_BT
    if level == "token":
        return held(log_ratios_BT).exp()
    log_ratios_B1 = (log_ratios_BT * mask_BT).sum(1, keepdim=True)
    if level == "sequence_product":
        return held(log_ratios_B1).exp()
    log_ratios_B1 = log_ratios_B1 / mask_BT.sum(1, keepdim=True).clamp(min=1)
    if level == "sequence":
        return held(log_ratios_B1).exp()
    return (held(log_ratios_B1).detach() + logps_BT - logps_BT.detach()).exp()


def policy_drift(logps_BT: torch.Tensor, old_logps_BT: torch.Tensor) -> torch.Tensor:
    """sg(min(ratio - 1, 2)) logp: its gradient holds the policy near the old one (CPGD, arXiv 2505.12504, section 3).

    Without the limit it is the gradient of the paper's KL(old || policy), by the estimator k3. The limit is siiRL's.
    """
    ratios_BT = held(logps_BT.detach() - old_logps_BT).exp()
    return (ratios_BT - 1).clamp(max=2.0) * logps_BT


def clipped_surrogate(
    ratios: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> torch.Tensor:
    """-min(min(ratio, delta) A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), the shapes broadcast."""
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    ratios = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.min(ratios * advantages, clipped * advantages)


def gated_surrogate(ratios: torch.Tensor, advantages: torch.Tensor, gate: SapoGate) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, the soft gate of SAPO (arXiv 2511.20347); at ratio 1 its slope is 1."""
    temperatures = torch.where(advantages > 0, gate.temperature_pos, gate.temperature_neg)
    return -4 / temperatures * (temperatures * (ratios - 1)).sigmoid() * advantages


@torch.no_grad()
def gamma_weights(
    log_ratios_BT: torch.Tensor,
    advantages_BX: torch.Tensor,
    mask_BT: torch.Tensor,
    rollout_ratios_BX: torch.Tensor | None,
    shape: VespoWeight,
) -> torch.Tensor:
    """VESPO's weight phi(w) = exp(lambda + k log w - lambda w) (arXiv 2602.10693), shaped like the advantages.

    w is the product of the ratios of a sequence's loss tokens, and of their ``rollout_ratios_BX`` if there are any.
    Log-ratios are bounded as in TRL: a token's in [-20, 20], a sequence's and a rollout ratio's in [log 1e-8, 20]; a
    weight too large for float32, which only unusual constants give, becomes 0.
    """
    log_w_B1 = (held(log_ratios_BT) * mask_BT).sum(1, keepdim=True)
    if rollout_ratios_BX is not None:
        corrections_BX = rollout_ratios_BX.log().clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
        counted_BX = mask_BT if corrections_BX.shape == mask_BT.shape else mask_BT.any(1, keepdim=True)
        log_w_B1 = log_w_B1 + (corrections_BX * counted_BX).sum(1, keepdim=True)
    log_w_B1 = log_w_B1.clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
    k_BX = torch.where(advantages_BX >= 0, shape.k_pos, shape.k_neg)
    lambda_BX = torch.where(advantages_BX >= 0, shape.lambda_pos, shape.lambda_neg).clamp(min=1e-4)
    weights_BX = (lambda_BX + k_BX * log_w_B1 - lambda_BX * log_w_B1.exp()).exp()
    return weights_BX.nan_to_num(nan=math.nan, posinf=0.0)


@torch.no_grad()
def future_weights(
    log_ratios_BT: torch.Tensor,
    ratios_BX: torch.Tensor,
    advantages_BX: torch.Tensor,
    delta: float | None,
    shape: FipoWeight,
) -> torch.Tensor:
    """FIPO's weights (B, T) (arXiv 2603.19835): exp of the discounted sum of log-ratios from a token on, bounded.

    ``log_ratios_BT`` must be 0 outside the mask. The token itself counts whole, one ``decay_rate`` tokens later half.
    Tokens whose ratio exceeds ``delta`` add nothing to the sums, if there is one. Bounds: see ``FipoWeight``. The
    constants are those of ms-swift, which documents the method; TRL does not have it.
    """
    if delta is not None:
        log_ratios_BT = log_ratios_BT.masked_fill(ratios_BX > delta, 0.0)
    weights_BT = held(discounted_sums(log_ratios_BT, 0.5 ** (1 / shape.decay_rate))).exp()
    if shape.clip_range is not None:
        low = 1.0 if shape.clip_high_only else 1 - shape.clip_range
        weights_BT = weights_BT.clamp(low, 1 + shape.clip_range)
    if shape.safety_threshold is not None:
        endangered_BX = (advantages_BX < 0) & (ratios_BX > shape.safety_threshold)
        weights_BT = torch.where(endangered_BX, weights_BT.clamp(0.8, 1.0), weights_BT)
    return weights_BT


def discounted_sums(values_BT: torch.Tensor, discount: float) -> torch.Tensor:
    """At t, the sum over s >= t of discount^(s - t) values[s]; in log2(T) steps, each of which doubles the window."""
    sums_BT, window = values_BT, 1
    while window < values_BT.shape[1]:
        beyond_BT = torch.nn.functional.pad(sums_BT[:, window:], (0, window))
        sums_BT, window = sums_BT + discount**window * beyond_BT, 2 * window
    return sums_BT


def k3_divergence(logps: torch.Tensor, ref_logps: torch.Tensor, most: float | None = None) -> torch.Tensor:
    """The estimator k3 of KL(policy || reference) at each token: r - log r - 1, r = p_ref / p; never negative.

    log r is held within [-20, 20] (``tokens.held``). ``most``: a larger divergence is cut to it, and has no gradient.
    """
    log_ratios = held(ref_logps - logps)
    divergences = torch.expm1(log_ratios) - log_ratios
    return divergences if most is None else divergences.clamp(max=most)
