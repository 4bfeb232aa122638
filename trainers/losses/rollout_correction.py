"""Correcting for completions that another policy sampled than the one that learns.

An inference engine computes other log-probabilities than the training code, even with the same weights, and a policy
moves while its completions are used. Here are the importance ratios between engine and old policy that go into the
policy loss as ``rollout_ratios``, the tokens that are left when those too far apart are rejected, and the mask that
leaves out what has become too unlikely, one of the loss's ``token_weights``. Sizes, masks and sums as in ``tokens.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trainers.batch import Ragged
from trainers.losses.tokens import check_choice, held, masked, per_token, present
from trainers.losses.types import LARGEST_LOG_RATIO, RolloutCorrection, RolloutRejection
from trainers.metrics import Metrics


@dataclass(frozen=True)
class RolloutDiagnostics:
    """What one micro-batch showed: 0-dim tensors on its device.

    Ratios are counted a token, or, where a sequence shares one, a sequence with loss tokens.
    """

    num_scored: torch.Tensor  # loss tokens with a log-probability from the engine
    differences: torch.Tensor  # |old - rollout| of log-probabilities, summed over them
    largest_difference: torch.Tensor
    num_ratios: torch.Tensor
    ratios: torch.Tensor  # summed, as they are applied: truncated or masked
    smallest_ratio: torch.Tensor
    largest_ratio: torch.Tensor


@torch.no_grad()
def rollout_ratios(
    old_logps_BT: torch.Tensor,
    rollout_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: RolloutCorrection,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> tuple[torch.Tensor, RolloutDiagnostics]:
    """exp(old_logps - rollout_logps), bounded, (B, T) or (B, 1), and its diagnostics; without gradient.

    ``old_logps_BT`` are the training code's, ``rollout_logps_BT`` the engine's, both under the same weights and
    temperature. ``mode`` token_*: of each token; sequence_*: of the whole completion, the product over its loss tokens;
    geometric_*: the geometric mean over those that the engine gave a log-probability of, which does not grow with
    length and lies near 1 (https://richardli.xyz/rl-collapse; biased, as GSPO's ratio is).
    *_truncate: kept within ``clip_min`` and ``clip_max`` (truncated importance sampling); *_mask: 0 where it lies
    outside (masked importance sampling). None is no bound. A token whose engine log-probability is NaN has the ratio 1.

    Departures from TRL: minimum, mean and maximum are those of the tokens (sequences) of the step, not means over
    workers, and sequences without loss tokens are not counted.

    Raises: ValueError for an unknown mode, bounds in the wrong order, shapes that do not fit.
    """
    check_choice("mode", mode, RolloutCorrection)
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    if low > high:
        raise ValueError(f"clip_min={clip_min} is above clip_max={clip_max}: no ratio lies between")
    mask = mask_BT.bool()
    differences_BT = masked(old_logps_BT, mask, "old_logps_BT") - masked(rollout_logps_BT, mask, "rollout_logps_BT")
    scored_BT = mask & ~differences_BT.isnan()
    differences_BT = differences_BT.masked_fill(~scored_BT, 0.0)
    level, _, bound = mode.partition("_")
    log_ratios_BX = differences_BT if level == "token" else differences_BT.sum(1, keepdim=True)
    if level == "geometric":
        log_ratios_BX = log_ratios_BX / scored_BT.sum(1, keepdim=True).clamp(min=1)
    ratios_BX = held(log_ratios_BX).exp()
    if bound == "truncate":
        ratios_BX = ratios_BX.clamp(low, high)
    else:
        ratios_BX = ratios_BX.masked_fill((ratios_BX < low) | (ratios_BX > high), 0.0)
    units_BX = mask if level == "token" else mask.any(1, keepdim=True)
    distances_BT = differences_BT.abs()
    none = distances_BT.new_zeros(1)  # makes an empty batch possible
    return ratios_BX, RolloutDiagnostics(
        num_scored=scored_BT.sum(),
        differences=distances_BT.sum(),
        largest_difference=torch.cat([distances_BT.flatten(), none]).amax(),
        num_ratios=units_BX.sum(),
        ratios=(ratios_BX * units_BX).sum(),
        smallest_ratio=torch.cat([ratios_BX.masked_fill(~units_BX, math.inf).flatten(), none + math.inf]).amin(),
        largest_ratio=torch.cat([ratios_BX.masked_fill(~units_BX, 0.0).flatten(), none]).amax(),
    )


def accepted_tokens(
    old_logps: Ragged,
    rollout_logps: Ragged,
    loss_mask: Ragged,
    *,
    statistic: RolloutRejection,
    high: float,
    low: float | None = None,
) -> Ragged:
    """bool, one per target: loss tokens whose statistic lies within the bounds (rejection sampling). In NumPy.

    With d = old_logps - rollout_logps, held within [-20, 20], the estimators of the KL between engine and training code
    (http://joschu.net/blog/kl-approx.html) are k1 = d, k2 = d^2 / 2 and k3 = e^d - 1 - d. ``statistic`` token_*: of
    each token; sequence_sum_*, _mean_*, _max_*: over the loss tokens of its completion, which stays or goes as a whole.
    Of k1 the bounds are those of the ratio: low <= e^k1 <= high, ``low`` None: 1 / high; so that sequence_mean_k1
    bounds the geometric mean. Of k2 and k3 ``high`` bounds the number itself. Tokens that the engine gave no
    log-probability of (NaN) are left as they are, and counted in no sum.

    The names and numbers are verl's (``rollout_rs``). Departure: verl bounds e^-k1, the ratio turned around.

    Raises: ValueError for an unknown statistic, rows that do not fit, and bounds that nothing lies between.
    """
    check_choice("statistic", statistic, RolloutRejection)
    for name, column in (("rollout_logps", rollout_logps), ("loss_mask", loss_mask)):
        if not np.array_equal(column.offsets, old_logps.offsets):
            raise ValueError(f"{name} must have the rows of old_logps")
    level, estimator = statistic.rsplit("_", 1)
    lowest = (1 / high if low is None else low) if estimator == "k1" else 0.0
    if not 0 <= lowest <= high:
        raise ValueError(f"low={lowest} is above high={high}: nothing lies between")
    differences = old_logps.values.astype(np.float64) - rollout_logps.values
    known = loss_mask.values.astype(bool) & ~np.isnan(differences)
    d = np.where(known, np.clip(differences, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO), 0.0)
    values = {"k1": d, "k2": d**2 / 2, "k3": np.expm1(d) - d}[estimator]
    if level != "token":
        rows, count = np.repeat(np.arange(len(old_logps)), old_logps.lengths), len(old_logps)
        if level == "sequence_max":
            values_B = np.zeros(count)
            np.maximum.at(values_B, rows, values)
        else:
            values_B = np.zeros(count)
            np.add.at(values_B, rows, values)
        if level == "sequence_mean":
            values_B /= np.maximum(np.bincount(rows[known], minlength=count), 1)
        values = values_B[rows]
    if estimator == "k1":
        values = np.exp(np.clip(values, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    is_kept = (values >= lowest) & (values <= high)
    if level == "token":
        is_kept |= ~known
    return Ragged(loss_mask.values.astype(bool) & is_kept, old_logps.offsets)


@torch.no_grad()
def off_policy_mask(
    logps_BT: torch.Tensor,
    rollout_logps_BT: torch.Tensor,
    advantages: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    threshold: float,
) -> torch.Tensor:
    """True where a sequence is kept (B, 1), or a token where ``advantages`` are (B, T); without gradient.

    Left out is what has a negative advantage and whose mean over loss tokens of rollout_logps - logps, an estimate of
    how far the current policy has moved away from it, exceeds ``threshold`` (DeepSeek-V3.2, arXiv 2512.02556).
    ``rollout_logps_BT``: the engine's, or, without those, the old policy's; a token where they are NaN counts as not
    moved.
    """
    mask = mask_BT.bool()
    moved_BT = masked(rollout_logps_BT, mask, "rollout_logps_BT") - masked(logps_BT, mask, "logps_BT")
    moved_B1 = moved_BT.masked_fill(moved_BT.isnan(), 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    advantages_BX = per_token("advantages", advantages.unsqueeze(1) if advantages.dim() == 1 else advantages, mask)
    return (advantages_BX >= 0) | (moved_B1 <= threshold)


def add_rollout_metrics(metrics: Metrics, diagnostics: RolloutDiagnostics) -> None:
    """Writes the diagnostics of one micro-batch under TRL's names."""
    seen = present(diagnostics)
    scored, ratios = seen["num_scored"], seen["num_ratios"]
    metrics.mean("sampling/sampling_logp_difference/mean", seen["differences"], scored)
    metrics.max("sampling/sampling_logp_difference/max", seen["largest_difference"], count=scored)
    metrics.min("sampling/importance_sampling_ratio/min", seen["smallest_ratio"], count=ratios)
    metrics.mean("sampling/importance_sampling_ratio/mean", seen["ratios"], ratios)
    metrics.max("sampling/importance_sampling_ratio/max", seen["largest_ratio"], count=ratios)
