"""The policy losses that ``loss_type`` names, each a function of a micro-batch: bundled ones, and the form of yours.

    @register_loss("reinforce", average="tokens")
    def reinforce(batch: PolicyBatch, *, scale: float = 1.0) -> torch.Tensor:
        return -scale * batch.advantages_BX * batch.logps_BT

A loss returns the terms that are minimised, (B, T), or (B, 1) where a sequence has one, which then stands for each of
its tokens. Or it returns ``PolicyTerms``, to log something beside. ``policy.py`` multiplies them by weights, adds the
KL, clears them outside the mask, and sums them divided by what ``average`` counts over the whole optimizer step. So a
loss reads one sequence at a time: what compares sequences or tokens of a step is decided before (``selected_BT``).
Sizes and masks as in ``policy.py``; the formulas that several losses share are in ``policy_terms.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
)
from trainers.losses.tokens import held
from trainers.plugins import register_loss

BINARY_FLOOR = 1e-8  # of the probability of all other tokens
ROUNDING = 1e-5  # nats: two forward passes with the same weights differ by less in float32
SMALLEST_WEIGHT = 1e-10  # of a rollout ratio whose logarithm is taken, as in verl


@dataclass(frozen=True)
class PolicyBatch:
    """One micro-batch as a policy loss sees it; everything is 0 outside the mask, ratios there are 1."""

    logps_BT: torch.Tensor  # float32, with gradient
    old_logps_BT: torch.Tensor  # of the policy that generated; on policy, ``logps_BT`` without gradient
    ratios_BX: torch.Tensor  # exp of their difference, with gradient, as importance_sampling_level says
    advantages_BX: torch.Tensor
    mask_BT: torch.Tensor  # bool: loss tokens
    rollout_ratios_BX: torch.Tensor | None = None  # of the correction for the engine; None: there is none
    selected_BT: torch.Tensor | None = None  # bool: tokens that clip_cov and kl_cov treat otherwise; None: none


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss makes of a micro-batch."""

    loss_BX: torch.Tensor
    clipped_BX: tuple[torch.Tensor, torch.Tensor] | None = None  # bool: cut from below, from above; for clip_ratio/*
    # Further metrics by name: (B, T) is averaged over loss tokens, (B, 1) over sequences that have any
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)


def clipped(batch: PolicyBatch, *, epsilon: float, epsilon_high: float, delta: float | None = None) -> PolicyTerms:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7): see ``clipped_surrogate``."""
    loss_BX = clipped_surrogate(batch.ratios_BX, batch.advantages_BX, epsilon, epsilon_high, delta)
    return PolicyTerms(loss_BX, ratio_clipping(batch, epsilon, epsilon_high))


register_loss("grpo", average="sequence_means")(clipped)  # arXiv 2402.03300
register_loss("bnpo", average="step_tokens")(clipped)
register_loss("dr_grpo", average="max_length")(clipped)  # arXiv 2503.20783
register_loss("dapo", average="tokens")(clipped)  # arXiv 2503.14476


@register_loss("cispo", average="tokens")
def cispo(batch: PolicyBatch, *, epsilon_high: float) -> PolicyTerms:
    """-sg(min(ratio, epsilon_high)) A logp (arXiv 2506.13585); ``epsilon_high`` caps the ratio itself."""
    ratios_BX, advantages_BX = batch.ratios_BX, batch.advantages_BX
    loss_BX = -ratios_BX.clamp(max=epsilon_high).detach() * advantages_BX * batch.logps_BT
    return PolicyTerms(loss_BX, means={"cispo_clip_ratio": (ratios_BX > epsilon_high) & (advantages_BX > 0)})


@register_loss("sapo", average="sequence_means")
def sapo(batch: PolicyBatch, *, sapo: SapoGate = SAPO) -> torch.Tensor:
    """A soft gate in place of the clip (arXiv 2511.20347)."""
    return gated_surrogate(batch.ratios_BX, batch.advantages_BX, sapo)


register_loss("luspo", average="sequence_sums")(clipped)  # arXiv 2602.05261


@register_loss("vespo", average="tokens", corrects_rollouts=True)
def vespo(batch: PolicyBatch, *, vespo: VespoWeight = VESPO) -> PolicyTerms:
    """-sg(phi(w)) A logp, w the ratio of the whole completion to what the engine drew (arXiv 2602.10693)."""
    log_ratios_BT, mask_BT = batch.logps_BT - batch.old_logps_BT, batch.mask_BT
    weights_BX = gamma_weights(log_ratios_BT, batch.advantages_BX, mask_BT, batch.rollout_ratios_BX, vespo)
    phi_B1 = (weights_BX * mask_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)).sum(1, keepdim=True)
    return PolicyTerms(-weights_BX * batch.advantages_BX * batch.logps_BT, means={"vespo/phi_seq_mean": phi_B1})


@register_loss("fipo", average="tokens")
def fipo(
    batch: PolicyBatch, *, epsilon: float, epsilon_high: float, delta: float | None = None, fipo: FipoWeight = FIPO
) -> PolicyTerms:
    """The clipped surrogate, A weighed by what became of the tokens after it (arXiv 2603.19835)."""
    ratios_BX, advantages_BX = batch.ratios_BX, batch.advantages_BX
    weights_BT = future_weights(batch.logps_BT - batch.old_logps_BT, ratios_BX, advantages_BX, delta, fipo)
    loss_BX = clipped_surrogate(ratios_BX, advantages_BX * weights_BT, epsilon, epsilon_high, delta)
    clipping = ratio_clipping(batch, epsilon, epsilon_high)
    return PolicyTerms(loss_BX, clipping, {"fipo/weight_mean": weights_BT})


@register_loss("gmpo", average="sequence_means", corrects_rollouts=True)
def gmpo(batch: PolicyBatch, *, epsilon: float, epsilon_high: float) -> PolicyTerms:
    """-A times the geometric mean of a completion's clipped ratios: GMPO (arXiv 2507.20673, section 3, Algorithm 1).

    Clipped is the log-ratio of each token, to [-epsilon, epsilon_high], where that lowers what A asks for; the paper's
    range is 0.4 on both sides. Rollout ratios enter by their geometric mean over the completion, as in verl.
    Departure from verl: the gradient of a sequence whose advantages differ by token (a teacher's) has the sign of each
    token's own advantage in the clip.
    """
    log_ratios_BT, advantages_BX = held(batch.logps_BT - batch.old_logps_BT), batch.advantages_BX
    signs_BX = advantages_BX.sign()
    bounded_BT = log_ratios_BT.clamp(-epsilon, epsilon_high)
    chosen_BT = signs_BX * torch.min(signs_BX * log_ratios_BT, signs_BX * bounded_BT)
    if batch.rollout_ratios_BX is not None:
        chosen_BT = chosen_BT + batch.rollout_ratios_BX.clamp(min=SMALLEST_WEIGHT).log()
    lengths_B1 = batch.mask_BT.sum(1, keepdim=True).clamp(min=1)
    ratios_B1 = ((chosen_BT * batch.mask_BT).sum(1, keepdim=True) / lengths_B1).exp()
    low_BT = (log_ratios_BT < -epsilon) & (advantages_BX < 0)
    return PolicyTerms(-advantages_BX * ratios_B1, (low_BT, (log_ratios_BT > epsilon_high) & (advantages_BX > 0)))


@register_loss("gpg", average="tokens")
def gpg(batch: PolicyBatch) -> torch.Tensor:
    """-A logp, the plain policy gradient: no ratio, no clip (GPG, arXiv 2504.02546, section 3).

    Meant with ``advantage_estimator: gpg``, one optimizer step per generation, and no reference.
    """
    return -batch.advantages_BX * batch.logps_BT


@register_loss("real", average="step_tokens")
def real(batch: PolicyBatch) -> torch.Tensor:
    """-A logp less its value, so that A alone decides the gradient: REAL (arXiv 2602.05630).

    The loss of a completion depends on the others of its prompt. ``grpo/samples.py`` knows them all: A is there what
    the gradient of their loss is, by ``rewards/classified.py``.
    """
    return -batch.advantages_BX * (batch.logps_BT - batch.logps_BT.detach())


@register_loss("cpgd", average="step_tokens")
def cpgd(batch: PolicyBatch, *, epsilon: float, epsilon_high: float) -> PolicyTerms:
    """-A logp, with no gradient where the ratio has gone too far in A's direction: CPGD (arXiv 2505.12504, section 3).

    The log-probability is clipped, not the ratio: no ratio multiplies the gradient. As in siiRL the value contains logp
    itself, which differs from the paper's log-ratio by a constant. The paper's policy drift is the key
    ``policy_drift_coef``.
    """
    low, high = math.log1p(-epsilon) if epsilon < 1 else -math.inf, math.log1p(epsilon_high)
    log_ratios_BT, is_good_BX = batch.logps_BT - batch.old_logps_BT, batch.advantages_BX > 0
    bounded_BT = torch.where(is_good_BX, log_ratios_BT.clamp(max=high), log_ratios_BT.clamp(min=low))
    clipping = (log_ratios_BT < low) & (batch.advantages_BX < 0), (log_ratios_BT > high) & is_good_BX
    return PolicyTerms(-batch.advantages_BX * (batch.old_logps_BT + bounded_BT), clipping)


@register_loss("clip_cov", average="tokens")
def clip_cov(batch: PolicyBatch, *, epsilon: float, epsilon_high: float, delta: float | None = None) -> PolicyTerms:
    """The clipped surrogate, without gradient at the selected tokens: Clip-Cov (arXiv 2505.22617, section 4.2).

    Selected are a few tokens of high covariance, by ``entropy.clip_cov_selection``.
    """
    terms = clipped(batch, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)
    if batch.selected_BT is None:
        return terms
    loss_BT = (terms.loss_BX * batch.mask_BT).masked_fill(batch.selected_BT, 0.0)
    return PolicyTerms(loss_BT, terms.clipped_BX, {"cov/selected": batch.selected_BT})


@register_loss("kl_cov", average="tokens")
def kl_cov(batch: PolicyBatch, *, kl_cov_coef: float = 1.0) -> PolicyTerms:
    """-ratio A, + kl_cov_coef |logp - old| at the selected tokens: KL-Cov (arXiv 2505.22617, section 4.2).

    There is no clip. Selected are the tokens of highest covariance, by ``entropy.kl_cov_selection``.
    Departure from verl: a distance of at most ``ROUNDING`` counts as 0. Its gradient is the sign of a rounding error,
    which is not smaller than that of a true distance, and another one for other micro-batches, workers or layouts.
    """
    loss_BX = -batch.ratios_BX * batch.advantages_BX
    if batch.selected_BT is None:
        return PolicyTerms(loss_BX)
    distances_BT = held(batch.logps_BT - batch.old_logps_BT).abs()
    distances_BT = distances_BT.masked_fill(distances_BT <= ROUNDING, 0.0)
    loss_BT = loss_BX + kl_cov_coef * distances_BT * batch.selected_BT
    return PolicyTerms(loss_BT, means={"cov/selected": batch.selected_BT})


@register_loss("dppo_tv", average="tokens")
def dppo_tv(
    batch: PolicyBatch, *, epsilon: float, epsilon_high: float, dppo_ratio_cap: float | None = 20.0
) -> PolicyTerms:
    """-sg(min(ratio, cap)) A logp where the token's probability stays in reach: DPPO, binary TV (arXiv 2602.04879).

    Of reach is a token with p - p_old > epsilon_high and A > 0, or p_old - p > epsilon and A < 0: |p - p_old| is the
    total variation between "this token" and "another one" (section 4 there). Departure from the paper, whose p_old is
    the engine's: it is the training code's, the engine's with ``max_staleness``; ``rollout_importance_sampling_mode``
    corrects for the difference.
    """
    moved_BT = batch.logps_BT.detach().exp() - batch.old_logps_BT.exp()
    return within_reach(batch, moved_BT < -epsilon, moved_BT > epsilon_high, dppo_ratio_cap)


@register_loss("dppo_kl", average="tokens")
def dppo_kl(
    batch: PolicyBatch, *, epsilon: float, epsilon_high: float, dppo_ratio_cap: float | None = 20.0
) -> PolicyTerms:
    """As ``dppo_tv``, with KL(p_old || p) between "this token" and "another one": DPPO, binary KL (arXiv 2602.04879).

    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); 1e-8 is added to 1 - p, as in verl.
    """
    logps_BT, old_logps_BT = batch.logps_BT.detach(), batch.old_logps_BT
    p_BT, old_p_BT = logps_BT.exp(), old_logps_BT.exp()
    rest_BT, old_rest_BT = (1 - p_BT).clamp(min=0), (1 - old_p_BT).clamp(min=0)  # rounding may put p above 1
    others_BT = ((old_rest_BT + BINARY_FLOOR) / (rest_BT + BINARY_FLOOR)).log()
    divergence_BT = old_p_BT * held(old_logps_BT - logps_BT) + old_rest_BT * others_BT
    below_BT = (divergence_BT > epsilon) & (p_BT < old_p_BT)
    return within_reach(batch, below_BT, (divergence_BT > epsilon_high) & (p_BT > old_p_BT), dppo_ratio_cap)


def within_reach(
    batch: PolicyBatch, below_BT: torch.Tensor, above_BT: torch.Tensor, ratio_cap: float | None
) -> PolicyTerms:
    """-sg(min(ratio, cap)) A logp, 0 where A asks for more of a move that has gone too far, down or up."""
    low_BT, high_BT = below_BT & (batch.advantages_BX < 0), above_BT & (batch.advantages_BX > 0)
    cap = math.inf if ratio_cap is None else ratio_cap
    weights_BT = held(batch.logps_BT.detach() - batch.old_logps_BT).exp().clamp(max=cap)
    loss_BT = -weights_BT * batch.advantages_BX * batch.logps_BT
    return PolicyTerms(loss_BT.masked_fill(low_BT | high_BT, 0.0), (low_BT, high_BT))


def ratio_clipping(batch: PolicyBatch, epsilon: float, epsilon_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the ratio is below 1 - epsilon and A negative, and where it is above 1 + epsilon_high and A positive."""
    low_BX = (batch.ratios_BX < 1 - epsilon) & (batch.advantages_BX < 0)
    return low_BX, (batch.ratios_BX > 1 + epsilon_high) & (batch.advantages_BX > 0)
