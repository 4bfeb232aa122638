"""Keeping a policy exploring: a bonus for entropy, its coefficient, the tokens worth learning from, and those that
would take the entropy away.

Plain functions, no collectives. The numbers of a whole optimizer step (entropies of all its tokens, its mean) are
gathered by the caller.
"""

from __future__ import annotations

import numpy as np
import torch

from trainers.losses.tokens import masked


def entropy_bonus(
    entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, coefficient: float, num_tokens: float
) -> torch.Tensor:
    """-coefficient x mean entropy, to be added to a loss; ``num_tokens``: tokens of the mask in the whole step.

    The mask is that of the policy term: loss tokens, of which ``entropy_threshold`` may leave only some. Always a mean
    over tokens, whatever the loss type. Departure from TRL: there it is a mean of micro-batch means.
    """
    return -coefficient * masked(entropy_BT, mask_BT, "entropy_BT").sum() / (num_tokens or 1.0)


def entropy_threshold(entropies: np.ndarray, top_entropy_quantile: float) -> float:
    """The entropy that a token must reach to be among the share ``top_entropy_quantile`` of highest entropy.

    ``entropies`` (N,): of all loss tokens of the step, over all workers; NaN counts nothing, and nothing but that gives
    infinity. The quantile 1 - share, interpolated linearly like torch's, of any number of tokens: torch.quantile
    refuses more than 2^24. Only the tokens above it get a policy gradient in arXiv 2506.01939, with a share of 0.2; a
    share of 0 leaves the one token (with its equals) of highest entropy.

    Raises: ValueError for a share outside [0, 1].
    """
    if not 0 <= top_entropy_quantile <= 1:
        raise ValueError(f"top_entropy_quantile must lie in [0, 1], got {top_entropy_quantile}")
    known = np.asarray(entropies, np.float32)
    known = known[~np.isnan(known)]
    if not known.size:
        return float("inf")
    rank = (1 - top_entropy_quantile) * (known.size - 1)
    if abs(rank - round(rank)) < 1e-6:  # 1 - 0.8 is not 0.2: a rank beside a whole one would lose the token there
        rank = round(rank)
    below = int(rank)
    ordered = np.partition(known, (below, min(below + 1, known.size - 1)))
    low, high = float(ordered[below]), float(ordered[min(below + 1, known.size - 1)])
    return float(low + (rank - below) * (high - low))


def covariances(advantages: np.ndarray, logps: np.ndarray) -> np.ndarray:
    """float64 (N,): (A - mean A)(logp - mean logp) of each token; high where confidence is rewarded further.

    Their mean is what changes the entropy of the policy in a step (arXiv 2505.22617, sections 3 and 4). Means are over
    the N loss tokens of the optimizer step, over all workers. Departure from the authors' code and verl, which take
    those of each micro-batch.
    """
    advantages, logps = advantages.astype(np.float64), logps.astype(np.float64)
    if not len(advantages):
        return np.zeros(0)
    centred: np.ndarray = (advantages - advantages.mean()) * (logps - logps.mean())
    return centred


def clip_cov_selection(
    covariance: np.ndarray, eligible: np.ndarray, *, ratio: float, lower: float, upper: float, seed: tuple[int, ...]
) -> np.ndarray:
    """(N,) bool: ``ratio`` x N tokens, one at least, drawn from those of a covariance between the bounds.

    Fewer if there are not so many. ``eligible`` is False at tokens that are clipped already. Equal seeds draw the same.
    """
    candidates = np.flatnonzero(eligible & (covariance > lower) & (covariance < upper))
    count = min(max(int(ratio * len(covariance)), 1), len(candidates))
    selected = np.zeros(len(covariance), bool)
    selected[np.random.default_rng(seed).choice(candidates, count, replace=False)] = True
    return selected


def kl_cov_selection(covariance: np.ndarray, *, ratio: float) -> np.ndarray:
    """(N,) bool: the ``ratio`` x N tokens, one at least, of highest covariance; of equal ones the first."""
    selected = np.zeros(len(covariance), bool)
    count = min(max(int(ratio * len(covariance)), 1), len(covariance))
    selected[np.argsort(-covariance, kind="stable")[:count]] = True
    return selected


def applied_entropy_coefficient(coefficient: float, entropy: float | None, *, target: float) -> float:
    """The coefficient while the last step's mean entropy is at most ``target``, else 0; ``entropy`` None: no step yet.

    Entropies in nats, over the tokens of the bonus.
    """
    return coefficient if entropy is not None and entropy <= target else 0.0


def next_entropy_coefficient(
    coefficient: float, entropy: float, *, target: float, delta: float, minimum: float, maximum: float
) -> float:
    """The coefficient after a step of mean entropy ``entropy``: larger by ``delta`` if that is at most the target.

    Otherwise smaller by it; never beyond ``minimum`` and ``maximum`` (Skywork-OR1, arXiv 2505.22312). A run that goes
    on needs the coefficient and the entropy that it was at.
    """
    if entropy <= target:
        return min(coefficient + delta, maximum)
    return max(coefficient - delta, minimum)
