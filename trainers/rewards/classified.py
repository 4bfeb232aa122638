"""What REAL makes of the completions of a prompt: it classifies those with a reward above their mean against the others
(Rewards as Labels, arXiv 2602.05630), in NumPy, on the driver.

The loss of a group is log(1 + sum exp(s / tau)) over its others, plus log(1 + sum exp(-s / tau)) over the better ones.
The score s of a completion is the mean of its log-ratios to the old policy. A group of one kind alone has no loss.
"""

from __future__ import annotations

import numpy as np

from trainers.batch import Ragged


def mean_log_ratios(logps: Ragged, old_logps: Ragged | None, loss_mask: Ragged) -> np.ndarray:
    """float64 (B,): log p - log p_old, averaged over the loss tokens of each completion; 0 without any."""
    if old_logps is None:
        return np.zeros(len(logps))
    ratios = np.where(loss_mask.values, logps.values.astype(np.float64) - old_logps.values, 0.0)
    sums_B = np.zeros(len(logps))
    np.add.at(sums_B, np.repeat(np.arange(len(logps)), logps.lengths), ratios)
    counts_B = np.array([int(row.sum()) for row in loss_mask])
    means_B: np.ndarray = sums_B / np.maximum(counts_B, 1)
    return means_B


def classified(
    scores_B: np.ndarray, advantages_B: np.ndarray, num_generations: int, tau: float
) -> tuple[float, np.ndarray]:
    """REAL's loss, averaged over groups, and float64 (B,) its derivative by each score.

    ``advantages_B``: above 0 for the better completions, in groups of ``num_generations`` next to each other.
    """
    scores_PG = scores_B.reshape(-1, num_generations) / tau
    is_better_PG = advantages_B.reshape(-1, num_generations) > 0
    differs_P1 = is_better_PG.any(axis=1, keepdims=True) & ~is_better_PG.all(axis=1, keepdims=True)
    loss, slopes_PG = 0.0, np.zeros_like(scores_PG)
    for sign, is_of_kind_PG in ((1.0, ~is_better_PG), (-1.0, is_better_PG)):
        logits_PG = np.where(is_of_kind_PG & differs_P1, sign * scores_PG, -np.inf)
        highest_P1 = np.maximum(logits_PG.max(axis=1, keepdims=True), 0.0)
        powers_PG = np.exp(logits_PG - highest_P1)
        sums_P1 = np.exp(-highest_P1) + powers_PG.sum(axis=1, keepdims=True)
        loss += float((highest_P1 + np.log(sums_P1)).sum())
        slopes_PG += sign * powers_PG / sums_P1 / tau
    return loss / len(scores_PG), slopes_PG.reshape(-1) / len(scores_PG)
