"""Losses that learn from pairs, a chosen and a rejected completion: the DPO family, and those without a reference.

As in ``tokens.py``: plain functions of tensors, each a sum over the micro-batch divided by counts of the whole
optimizer step (all micro-batches, all workers), so that losses and gradients of micro-batches and workers add up.
Sizes in names: B pairs, T tokens, which chosen and rejected may have different numbers of. Masks are True where a
completion has a token; what stands elsewhere, NaN included, is never looked at.

``preference_loss`` is DPO's with its variants; ``cpo_loss`` (CPO, SimPO) and ``orpo_loss`` know no reference.
``aot`` and ``aot_unpaired`` are the exception: they sort the pairs of the step, so one call must see all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import logsigmoid, relu

from trainers.losses.tokens import check_choice, masked, present
from trainers.losses.types import LARGEST_LOG_RATIO, CPOLossType, FDivergenceType, PreferenceLossType
from trainers.metrics import Metrics

DIFFERENCE_LOSSES = frozenset(["sigmoid", "cdpo", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"])
SORTING_LOSSES = frozenset(["aot", "aot_unpaired"])
SMOOTHED_LOSSES = SORTING_LOSSES | {"cdpo", "exo_pair", "robust"}
MAX_EXPONENT = LARGEST_LOG_RATIO
MEAN_LOSSES = frozenset(["ipo", "simpo"])  # of CPO: they compare means over tokens


@dataclass(frozen=True)
class Completions:
    """The chosen, or the rejected, completions of B pairs; every tensor is (B, T)."""

    logps_BT: torch.Tensor  # of the policy
    mask_BT: torch.Tensor
    ref_logps_BT: torch.Tensor | None = None  # of the reference; None: reference-free
    log_sum_sq_probs_BT: torch.Tensor | None = None  # log sum_v p_v^2 of the policy: given, pairs are weighted (WPO)


@dataclass(frozen=True)
class CompletionTotals:
    """``Completions`` summed over their tokens; every tensor is (B,)."""

    logps_B: torch.Tensor  # LD-DPO's weights applied, as in the two below
    ref_logps_B: torch.Tensor  # 0 without a reference
    log_ratios_B: torch.Tensor  # logps - ref_logps
    lengths_B: torch.Tensor  # tokens, at least 1


@dataclass(frozen=True)
class PreferenceDiagnostics:
    """Sums over the pairs of one micro-batch: 0-dim tensors on its device, without gradient.

    A reward is beta x log-ratio to the reference; without a reference, beta x log-probability.
    """

    num_pairs: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    accurate: torch.Tensor  # pairs whose chosen completion has the higher reward
    chosen_logps: torch.Tensor
    rejected_logps: torch.Tensor
    nll: torch.Tensor | None = None  # what is learned as in SFT, of losses without a reference
    num_nll_tokens: torch.Tensor | None = None
    log_odds: torch.Tensor | None = None  # of ORPO: log-odds of chosen minus those of rejected
    log_odds_ratios: torch.Tensor | None = None  # log sigmoid of these


def check_preference_options(
    loss_type: PreferenceLossType | Sequence[PreferenceLossType],
    loss_weights: Sequence[float] | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: FDivergenceType = "reverse_kl",
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    use_weighting: bool = False,
    reference_free: bool = False,
) -> None:
    """Nothing, if ``preference_loss`` takes these options together: configurations call it before anything starts.

    Stricter than TRL, which takes a ``label_smoothing`` that no type uses, or one of a half and more.

    Raises: ValueError, naming the option, what it is and what would do.
    """
    types = _as_list(loss_type)
    if not types:
        raise ValueError("loss_type names no loss: give at least one, such as ['sigmoid']")
    for name in types:
        check_choice("loss_type", name, PreferenceLossType)
    check_choice("f_divergence_type", f_divergence_type, FDivergenceType)
    if loss_weights is not None and len(loss_weights) != len(types):
        raise ValueError(
            f"loss_weights must hold one weight for each of the {len(types)} loss types {types}, got "
            f"{list(loss_weights)}"
        )
    for option, value in (("beta", beta), ("discopop_tau", discopop_tau)):
        if not value > 0:
            raise ValueError(f"{option} must be positive, got {value}")
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha must lie in [0, 1], or be None for no weighting, got {ld_alpha}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is the share of flipped labels and must lie in [0, 0.5), got {label_smoothing}"
        )
    if label_smoothing and not SMOOTHED_LOSSES & set(types):
        raise ValueError(
            f"label_smoothing={label_smoothing} is used by {_names(SMOOTHED_LOSSES)} and not by {_names(types)}. "
            "'cdpo' is the smoothed sigmoid loss, and 'robust' the unbiased loss. Or set label_smoothing to 0"
        )
    if "exo_pair" in types and not label_smoothing:
        raise ValueError("exo_pair takes the logarithm of label_smoothing, which is 0: the paper recommends 1e-3")
    only_differences = DIFFERENCE_LOSSES | {"sft"}
    others = set(types) - only_differences
    if others and f_divergence_type != "reverse_kl":
        raise ValueError(
            f"f_divergence_type={f_divergence_type!r} has no meaning for {_names(others)}: its partition function "
            f"cancels only in a difference. Use reverse_kl, or some of {_names(only_differences)}"
        )
    if others and reference_free:
        raise ValueError(
            f"{_names(others)} compare each completion with a reference: pass ref_logps_BT. Without one there are "
            f"{_names(only_differences)}"
        )
    if reference_free and f_divergence_type != "reverse_kl":
        raise ValueError(
            f"f_divergence_type={f_divergence_type!r} measures the distance from a reference: pass ref_logps_BT"
        )
    unweighted = set(types) & (SORTING_LOSSES | {"sft"})
    if use_weighting and unweighted:
        raise ValueError(
            f"{_names(unweighted)} cannot be weighted pair by pair: leave log_sum_sq_probs_BT (use_weighting) out, or "
            "the loss type"
        )


def preference_loss(
    chosen: Completions,
    rejected: Completions,
    *,
    num_pairs: float,
    num_chosen_tokens: float | None = None,
    nll_weights_B: torch.Tensor | None = None,
    loss_type: PreferenceLossType | Sequence[PreferenceLossType] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: FDivergenceType = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    bco_shift: float = 0.0,
) -> tuple[torch.Tensor, PreferenceDiagnostics]:
    """The loss of the DPO family, a scalar that adds up over the step, and its diagnostics.

    Several types are summed with ``loss_weights`` (None: 1 each; MPO, arXiv 2411.10442). Every type is a mean over the
    ``num_pairs`` of the whole optimizer step, see ``pair_losses``. ``sft`` is a mean over its ``num_chosen_tokens``. If
    a completion has no token, its pair still counts, with a log-probability of 0.

    ``ld_alpha`` weights the tokens of the longer completion beyond the length of the shorter one (LD-DPO, arXiv
    2409.06411). It does not apply to sft. ``f_divergence_type`` replaces log-ratios by ``divergence_scores``. With
    ``log_sum_sq_probs_BT`` each pair is weighted by its probability under the policy (WPO, arXiv 2406.11827). The
    weight is exp(mean(logps - log_sum_sq_probs)) of chosen times the same of rejected, held constant. Without
    ``ref_logps_BT`` the reference's log-probabilities are 0. Only ``DIFFERENCE_LOSSES`` and sft allow this.
    sigmoid_norm is then SimPO (arXiv 2405.14734) without its target margin.

    ``aot`` and ``aot_unpaired`` sort the pairs of the step, so one micro-batch must be the step: B = ``num_pairs``.

    Departures from TRL: TRL's sft is a mean over the chosen tokens of each micro-batch, and it averages these means.
    TRL's aot sorts each micro-batch of each worker separately. TRL always has a reference.

    Raises: ValueError for options that do not fit together (``check_preference_options``), or shapes that do not fit.
    Also for a column of only one side, aot on a part of the step, or sft without ``num_chosen_tokens``.
    """
    types = _as_list(loss_type)
    _check_sides(chosen, rejected)
    check_preference_options(
        types,
        loss_weights,
        beta=beta,
        label_smoothing=label_smoothing,
        f_divergence_type=f_divergence_type,
        ld_alpha=ld_alpha,
        discopop_tau=discopop_tau,
        use_weighting=chosen.log_sum_sq_probs_BT is not None,
        reference_free=chosen.ref_logps_BT is None,
    )
    num_here = len(chosen.mask_BT)
    if SORTING_LOSSES & set(types) and num_here not in (0, num_pairs):
        raise ValueError(
            f"{_names(SORTING_LOSSES & set(types))} sort all pairs of an optimizer step, but this micro-batch holds "
            f"only {num_here} of {num_pairs:g}. Use one worker and one micro-batch per step, or another loss type"
        )
    shared_lengths_B = torch.minimum(chosen.mask_BT.bool().sum(1), rejected.mask_BT.bool().sum(1))
    chosen_totals = completion_totals(chosen, shared_lengths_B, ld_alpha, "chosen")
    rejected_totals = completion_totals(rejected, shared_lengths_B, ld_alpha, "rejected")
    weights_B = _likelihood(chosen, "chosen") * _likelihood(rejected, "rejected")

    loss = chosen_totals.logps_B.new_zeros(())
    for name, weight in zip(types, [1.0] * len(types) if loss_weights is None else loss_weights, strict=True):
        if name == "sft":
            if num_chosen_tokens is None:
                raise ValueError("sft is a mean over the chosen tokens of the optimizer step: pass num_chosen_tokens")
            nll = _likelihood_loss(chosen.logps_BT, chosen.mask_BT, nll_weights_B)
            loss = loss + weight * nll / (num_chosen_tokens or 1.0)
            continue
        losses_B = pair_losses(
            name,
            chosen_totals,
            rejected_totals,
            beta=beta,
            label_smoothing=label_smoothing,
            f_divergence_type=f_divergence_type,
            f_alpha_divergence_coef=f_alpha_divergence_coef,
            discopop_tau=discopop_tau,
            bco_shift=bco_shift,
        )
        loss = loss + weight * (losses_B * weights_B).sum() / (num_pairs or 1.0)
    return loss, _preference_diagnostics(chosen_totals, rejected_totals, beta)


def cpo_loss(
    chosen: Completions,
    rejected: Completions,
    *,
    num_pairs: float,
    num_chosen_tokens: float,
    nll_weights_B: torch.Tensor | None = None,
    loss_type: CPOLossType = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
) -> tuple[torch.Tensor, PreferenceDiagnostics]:
    """CPO's loss of a micro-batch of pairs (arXiv 2401.08417), or SimPO's, and its diagnostics.

    The loss is the mean over the pairs, plus ``cpo_alpha`` x the negative log-likelihood of the chosen completions. The
    likelihood is a mean over tokens. c and r are the log-probabilities of chosen and rejected: sums over tokens, and
    means for ipo and simpo. If ``alpha`` x is not 0, c becomes (1 - exp(-x c)) / x, and r likewise (AlphaPO, arXiv
    2501.03884). m = beta (c - r), e is ``label_smoothing``, and s is the logarithm of the sigmoid.

    =======  =======================================================================================
    sigmoid  -(1 - e) s(m) - e s(-m) (CPO, arXiv 2401.08417, eq. 3)
    hinge    max(0, 1 - m)
    ipo      (c - r - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17, without its reference)
    simpo    -(1 - e) s(m - simpo_gamma) - e s(simpo_gamma - m) (SimPO, arXiv 2405.14734, eq. 6)
    =======  =======================================================================================

    A reward is beta c, or beta r. Departures from TRL: TRL's likelihood is a mean over the tokens of each micro-batch,
    and it averages these means; ``nll_weights_B`` can do so. Here exponents of ``alpha`` are capped at 20, without a
    gradient above it.

    Raises: ValueError for another loss type, or shapes that do not fit.
    """
    check_choice("loss_type", loss_type, CPOLossType)
    _check_sides(chosen, rejected)
    c_B, r_B = (_log_likelihood(side, name, loss_type in MEAN_LOSSES) for side, name in _named(chosen, rejected))
    nll = _likelihood_loss(chosen.logps_BT, chosen.mask_BT, nll_weights_B)
    scores_B, other_scores_B = (_shaped(x, alpha) for x in (c_B, r_B))
    difference_B = scores_B - other_scores_B
    if loss_type == "hinge":
        losses_B = relu(1 - beta * difference_B)
    elif loss_type == "ipo":
        losses_B = (difference_B - 0.5 / beta).square()
    else:
        margin = simpo_gamma if loss_type == "simpo" else 0.0
        losses_B = _smoothed_sigmoid(beta * difference_B - margin, label_smoothing)
    loss = losses_B.sum() / (num_pairs or 1.0) + cpo_alpha * nll / (num_chosen_tokens or 1.0)
    return loss, _likelihood_diagnostics((c_B, r_B), (scores_B, other_scores_B), beta, nll, chosen.mask_BT)


def orpo_loss(
    chosen: Completions,
    rejected: Completions,
    learned_BT: torch.Tensor,
    *,
    num_pairs: float,
    num_learned_tokens: float,
    nll_weights_B: torch.Tensor | None = None,
    beta: float = 0.1,
) -> tuple[torch.Tensor, PreferenceDiagnostics]:
    """ORPO's loss of a micro-batch of pairs (arXiv 2403.07691, eqs. 6 and 7), and its diagnostics.

    nll - beta x mean over pairs of s(log odds(c) - log odds(r)). c and r are the mean log-probabilities of the tokens
    of chosen and rejected. odds(x) = e^x / (1 - e^x), and s is the logarithm of the sigmoid. ``beta`` is the paper's
    lambda. nll is a mean over the ``num_learned_tokens`` of the optimizer step, the tokens in ``learned_BT``. This mask
    also has the tokens of the prompt. Learning the prompt departs from the paper, as in TRL.

    A reward is beta c, or beta r. Departures from TRL: the likelihood as in ``cpo_loss``. A completion with probability
    1 has finite odds.

    Raises: ValueError for shapes that do not fit.
    """
    _check_sides(chosen, rejected)
    c_B, r_B = (_log_likelihood(side, name, True) for side, name in _named(chosen, rejected))
    nll = _likelihood_loss(chosen.logps_BT, learned_BT, nll_weights_B)
    log_odds_B = (c_B - r_B) - (_log1mexp(c_B) - _log1mexp(r_B))
    ratios_B = logsigmoid(log_odds_B)
    loss = nll / (num_learned_tokens or 1.0) - beta * ratios_B.sum() / (num_pairs or 1.0)
    diagnostics = _likelihood_diagnostics((c_B, r_B), (c_B, r_B), beta, nll, learned_BT)
    return loss, replace(diagnostics, log_odds=log_odds_B.detach().sum(), log_odds_ratios=ratios_B.detach().sum())


def completion_totals(
    side: Completions, shared_lengths_B: torch.Tensor, ld_alpha: float | None, name: str
) -> CompletionTotals:
    """The sums over tokens; those past ``shared_lengths_B`` weigh ``ld_alpha`` (None: 1). ``name`` is for errors."""
    mask = side.mask_BT.bool()
    logps_BT = masked(side.logps_BT, mask, f"{name}.logps_BT")
    ref_logps_BT = torch.zeros_like(logps_BT)
    if side.ref_logps_BT is not None:
        ref_logps_BT = masked(side.ref_logps_BT, mask, f"{name}.ref_logps_BT")
    if ld_alpha is not None:
        in_tail_BT = mask.cumsum(1) > shared_lengths_B.unsqueeze(1)
        weights_BT = torch.where(in_tail_BT, ld_alpha, 1.0)
        logps_BT, ref_logps_BT = logps_BT * weights_BT, ref_logps_BT * weights_BT
    logps_B, ref_logps_B = logps_BT.sum(1), ref_logps_BT.sum(1)
    return CompletionTotals(logps_B, ref_logps_B, logps_B - ref_logps_B, mask.sum(1).clamp(min=1))


def pair_losses(
    loss_type: PreferenceLossType,
    chosen: CompletionTotals,
    rejected: CompletionTotals,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence_type: FDivergenceType = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    bco_shift: float = 0.0,
) -> torch.Tensor:
    """The loss of each pair (B,); for aot, of each rank in the sorted order. All types but sft, which has none.

    c and r are the log-ratios of chosen and rejected, f' ``divergence_scores``, m = beta (f'(c) - f'(r)), e
    ``label_smoothing``, s the logarithm of the sigmoid.

    =================  ======================================================================================
    sigmoid            -s(m) (DPO, arXiv 2305.18290; no label smoothing: that is cdpo or robust)
    cdpo               -(1 - e) s(m) - e s(-m) (conservative DPO; ms-swift's sigmoid with label smoothing)
    hinge              max(0, 1 - m) (SLiC-HF, arXiv 2305.10425)
    ipo                (f'(c) / |chosen| - f'(r) / |rejected| - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17). Departure
                       from the paper's formula, as in TRL: a mean over tokens, not a sum
    sigmoid_norm       -s(beta (f'(c) / |chosen| - f'(r) / |rejected|)) (Tulu 3, arXiv 2411.15124)
    exo_pair           KL of (sigmoid(m), sigmoid(-m)) to (1 - e, e) (arXiv 2402.00856, eq. 16)
    robust             (-(1 - e) s(m) + e s(-m)) / (1 - 2e) (arXiv 2403.00409)
    discopop           -s(m) (1 - w) + exp(-m) w, w = sigmoid(m / tau) (arXiv 2406.08414, eq. 5)
    nca_pair           -s(beta c) - s(-beta c) / 2 - s(-beta r) / 2 (arXiv 2402.05369)
    bco_pair           -s(beta c - d) - s(d - beta r), d = ``bco_shift`` (arXiv 2404.04656; TRL has no shift)
    sppo_hard          (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 (arXiv 2405.00675)
    apo_zero           1 - sigmoid(beta c) + sigmoid(beta r) (arXiv 2408.06266, eq. 7)
    apo_down           sigmoid(beta c) + 1 - sigmoid(beta (c - r)) (arXiv 2408.06266, eq. 8)
    aot                -(1 - e) s(beta d) - e s(-beta d), d = the sorted margins of the policy's log-probabilities
                       minus the sorted margins of the reference's (arXiv 2406.05882)
    aot_unpaired       the same, d = sorted c - sorted r
    =================  ======================================================================================

    Departure from TRL: discopop's exp(-m) w is one exponential, so that far below 0 it is no inf x 0.
    """
    c, r = chosen.log_ratios_B, rejected.log_ratios_B
    chosen_scores = divergence_scores(c, f_divergence_type, f_alpha_divergence_coef)
    rejected_scores = divergence_scores(r, f_divergence_type, f_alpha_divergence_coef)
    m = beta * (chosen_scores - rejected_scores)
    mean_difference = chosen_scores / chosen.lengths_B - rejected_scores / rejected.lengths_B
    match loss_type:
        case "sigmoid":
            return -logsigmoid(m)
        case "cdpo":
            return _smoothed_sigmoid(m, label_smoothing)
        case "hinge":
            return relu(1 - m)
        case "ipo":
            return (mean_difference - 0.5 / beta).square()
        case "sigmoid_norm":
            return -logsigmoid(beta * mean_difference)
        case "exo_pair":
            preferred = m.sigmoid() * (logsigmoid(m) - math.log1p(-label_smoothing))
            return preferred + (-m).sigmoid() * (logsigmoid(-m) - math.log(label_smoothing))
        case "robust":
            flipped = label_smoothing * logsigmoid(-m)
            return (flipped - (1 - label_smoothing) * logsigmoid(m)) / (1 - 2 * label_smoothing)
        case "discopop":
            exponential = (logsigmoid(m / discopop_tau) - m).clamp(max=MAX_EXPONENT).exp()
            return exponential - logsigmoid(m) * (-m / discopop_tau).sigmoid()
        case "nca_pair":
            return -logsigmoid(beta * c) - 0.5 * logsigmoid(-beta * c) - 0.5 * logsigmoid(-beta * r)
        case "bco_pair":
            return -logsigmoid(beta * c - bco_shift) - logsigmoid(bco_shift - beta * r)
        case "sppo_hard":
            return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()
        case "apo_zero":
            return (-beta * c).sigmoid() + (beta * r).sigmoid()
        case "apo_down":
            return (beta * c).sigmoid() + (-beta * (c - r)).sigmoid()
        case "aot":
            ref_margins = chosen.ref_logps_B - rejected.ref_logps_B
            d = (chosen.logps_B - rejected.logps_B).sort().values - ref_margins.sort().values
            return _smoothed_sigmoid(beta * d, label_smoothing)
        case "aot_unpaired":
            return _smoothed_sigmoid(beta * (c.sort().values - r.sort().values), label_smoothing)
        case _:
            raise ValueError(f"{loss_type!r} has no loss for each pair: preference_loss adds it")


def divergence_scores(
    log_ratios: torch.Tensor, f_divergence_type: FDivergenceType, f_alpha_divergence_coef: float = 0.5
) -> torch.Tensor:
    """f'(exp(x)) of the log-ratios x to the reference (f-DPO, arXiv 2309.16240); a coefficient of 1 is reverse_kl.

    reverse_kl: x (its constant cancels); forward_kl: 1 - exp(-x); js_divergence: log 2 + log sigmoid(x);
    alpha_divergence: (exp((alpha - 1) x) - 1) / (alpha - 1), of which forward_kl is alpha = 0. Exponents are capped at
    20, where the gradient ends; departure from TRL, which caps those of alpha_divergence only.
    """
    if f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios)
    exponent = (0.0 if f_divergence_type == "forward_kl" else f_alpha_divergence_coef) - 1.0
    if f_divergence_type == "reverse_kl" or abs(exponent) < 1e-6:
        return log_ratios
    return torch.expm1((exponent * log_ratios).clamp(max=MAX_EXPONENT)) / exponent


def add_preference_metrics(metrics: Metrics, diagnostics: PreferenceDiagnostics) -> None:
    """Writes the diagnostics of one micro-batch under TRL's names.

    Joined over micro-batches and workers they weigh every pair of the step alike; TRL averages micro-batches.
    """
    seen = present(diagnostics)
    pairs = seen["num_pairs"]
    metrics.mean("rewards/chosen", seen["chosen_rewards"], pairs)
    metrics.mean("rewards/rejected", seen["rejected_rewards"], pairs)
    metrics.mean("rewards/accuracies", seen["accurate"], pairs)
    metrics.mean("rewards/margins", seen["chosen_rewards"].double() - seen["rejected_rewards"], pairs)
    metrics.mean("logps/chosen", seen["chosen_logps"], pairs)
    metrics.mean("logps/rejected", seen["rejected_logps"], pairs)
    if "nll" in seen:
        metrics.mean("nll_loss", seen["nll"], seen["num_nll_tokens"])
    if "log_odds" in seen:
        metrics.mean("log_odds_chosen", seen["log_odds"], pairs)
        metrics.mean("log_odds_ratio", seen["log_odds_ratios"], pairs)


@torch.no_grad()
def _preference_diagnostics(chosen: CompletionTotals, rejected: CompletionTotals, beta: float) -> PreferenceDiagnostics:
    return PreferenceDiagnostics(
        num_pairs=torch.ones_like(chosen.logps_B).sum(),
        chosen_rewards=beta * chosen.log_ratios_B.sum(),
        rejected_rewards=beta * rejected.log_ratios_B.sum(),
        accurate=(chosen.log_ratios_B > rejected.log_ratios_B).sum(),
        chosen_logps=chosen.logps_B.sum(),
        rejected_logps=rejected.logps_B.sum(),
    )


@torch.no_grad()
def _likelihood_diagnostics(
    logps: tuple[torch.Tensor, torch.Tensor],
    scores: tuple[torch.Tensor, torch.Tensor],
    beta: float,
    nll: torch.Tensor,
    learned_BT: torch.Tensor,
) -> PreferenceDiagnostics:
    """Of losses without a reference: ``logps`` and ``scores`` (B,) of chosen and rejected."""
    return PreferenceDiagnostics(
        num_pairs=torch.ones_like(logps[0]).sum(),
        chosen_rewards=beta * scores[0].sum(),
        rejected_rewards=beta * scores[1].sum(),
        accurate=(scores[0] > scores[1]).sum(),
        chosen_logps=logps[0].sum(),
        rejected_logps=logps[1].sum(),
        nll=nll.detach(),
        num_nll_tokens=learned_BT.sum(),
    )


def _likelihood_loss(logps_BT: torch.Tensor, learned_BT: torch.Tensor, weights_B: torch.Tensor | None) -> torch.Tensor:
    """() the negative log-likelihood of the learned tokens, a sum in which each pair has its weight (None: 1)."""
    nll_BT = -masked(logps_BT, learned_BT, "chosen.logps_BT")
    return nll_BT.sum() if weights_B is None else (nll_BT.sum(1) * weights_B).sum()


def _log_likelihood(side: Completions, name: str, is_mean: bool) -> torch.Tensor:
    """(B,) the log-probability of each completion, a sum over its tokens or their mean."""
    logps_B = masked(side.logps_BT, side.mask_BT, f"{name}.logps_BT").sum(1)
    return logps_B / side.mask_BT.sum(1).clamp(min=1) if is_mean else logps_B


def _shaped(logps_B: torch.Tensor, alpha: float) -> torch.Tensor:
    """AlphaPO's (1 - p^-alpha) / alpha of p = exp(logps); exponents are capped at 20, where the gradient ends."""
    return logps_B if not alpha else -torch.expm1((-alpha * logps_B).clamp(max=MAX_EXPONENT)) / alpha


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) of x < 0, held below 0; the branch that is not taken stays finite, so that its gradient does."""
    x = x.clamp(max=-1e-6)
    is_small = x > -math.log(2)
    near, far = torch.where(is_small, x, -1.0), torch.where(is_small, -1.0, x)
    return torch.where(is_small, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


@torch.no_grad()
def _likelihood(side: Completions, name: str) -> torch.Tensor | float:
    """exp of the mean over tokens of logps - log_sum_sq_probs (B,); 1 when the latter are not given."""
    if side.log_sum_sq_probs_BT is None:
        return 1.0
    mask = side.mask_BT.bool()
    logps_BT = masked(side.logps_BT, mask, f"{name}.logps_BT")
    aligned_BT = logps_BT - masked(side.log_sum_sq_probs_BT, mask, f"{name}.log_sum_sq_probs_BT")
    return (aligned_BT.sum(1) / mask.sum(1).clamp(min=1)).exp()


def _smoothed_sigmoid(m: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * logsigmoid(m) - label_smoothing * logsigmoid(-m)


def _check_sides(chosen: Completions, rejected: Completions) -> None:
    if len(chosen.mask_BT) != len(rejected.mask_BT):
        raise ValueError(
            f"chosen and rejected must hold the same pairs, got {len(chosen.mask_BT)} chosen and "
            f"{len(rejected.mask_BT)} rejected completions"
        )
    for name in ("ref_logps_BT", "log_sum_sq_probs_BT"):
        if (getattr(chosen, name) is None) != (getattr(rejected, name) is None):
            missing = "chosen" if getattr(chosen, name) is None else "rejected"
            raise ValueError(f"{name} must be given for both sides or for none: {missing} has none")


def _named(chosen: Completions, rejected: Completions) -> list[tuple[Completions, str]]:
    return [(chosen, "chosen"), (rejected, "rejected")]


def _as_list(loss_type: PreferenceLossType | Sequence[PreferenceLossType]) -> list[PreferenceLossType]:
    return [loss_type] if isinstance(loss_type, str) else list(loss_type)


def _names(types: Iterable[str]) -> str:
    return ", ".join(sorted(types))
