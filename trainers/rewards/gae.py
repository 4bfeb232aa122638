"""From scores to advantages a token (GAE), on the driver, in NumPy: what PPO's policy and critic learn from.

A completion of n tokens has a *place* before each of them, and one more behind the last where the completion ended
before the length limit. The critic gives every place a value; the policy acts at the first n alone:

    place              0      1      2      3 (behind the end)
    acts by drawing    The    cat    <eos>
    reward             -kl    -kl    -kl    score

A completion that fills the length limit has no place behind it, and its score comes with its last token. With
``score_on_last_token``, as in verl, that holds for all completions. Rows are completions, ``Ragged``; numbers are
computed in float64. Nothing is averaged over padding, because there is none.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from trainers.batch import Ragged
from trainers.losses.types import LARGEST_LOG_RATIO

KLEstimator = Literal["k1", "k3"]
WHITENING_EPSILON = 1e-8  # added to the variance


def kl_estimates(logps: Ragged, ref_logps: Ragged, estimator: KLEstimator) -> Ragged:
    """Estimates of KL(policy || reference), one a token drawn from the policy.

    k1 = logp - ref, unbiased; k3 = exp(ref - logp) - 1 - (ref - logp), never negative
    (http://joschu.net/blog/kl-approx.html); there the difference is held within [-20, 20], as in the losses.

    Raises: ValueError for an unknown estimator, and for rows of other lengths.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"kl_estimator must be one of {', '.join(get_args(KLEstimator))}, got {estimator!r}")
    _check_rows("ref_logps", ref_logps.lengths, logps.lengths)
    log_ratio = ref_logps.values.astype(np.float64) - logps.values
    if estimator == "k3":
        held = np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        return Ragged(np.expm1(held) - held, logps.offsets)
    return Ragged(-log_ratio, logps.offsets)


def num_places(lengths_B: np.ndarray, max_completion_length: int) -> np.ndarray:
    """(B,) places of completions of so many tokens."""
    return lengths_B + (lengths_B < max_completion_length)


def place_rewards(token_rewards: Ragged, scores_B: np.ndarray, num_places_B: np.ndarray) -> Ragged:
    """The rewards of all places: those of tokens at the places before them, and each score at the last place."""
    _check_rows("scores_B", np.shape(scores_B), np.shape(num_places_B))
    rewards = Ragged.split(np.zeros(num_places_B.sum()), num_places_B)
    rewards.values[acting_places(num_places_B, token_rewards.lengths)] = token_rewards.values
    rewards.values[rewards.offsets[1:] - 1] += scores_B
    return rewards


def acting_places(num_places_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """(places,) bool: True where a token was drawn, False behind the end."""
    place = np.arange(num_places_B.sum()) - np.repeat(np.cumsum(num_places_B) - num_places_B, num_places_B)
    acting: np.ndarray = place < np.repeat(lengths_B, num_places_B)
    return acting


def adaptive_lam(lengths_B: np.ndarray, alpha: float) -> np.ndarray:
    """float64 (B,): 1 - 1 / (alpha l) of completions of l tokens: length-adaptive GAE (VAPO, arXiv 2504.05118, 4.2).

    With it the weights of the errors in an advantage, 1 + lam + lam^2 + ..., add up to alpha l, so that a reward at the
    end of a long completion reaches its beginning. The paper has alpha 0.05. Departure: it does not say what becomes of
    completions shorter than 1 / alpha; here lam is then 0.
    """
    lam_B: np.ndarray = np.maximum(0.0, 1 - 1 / (alpha * np.maximum(lengths_B, 1)))
    return lam_B


def generalized_advantages(
    rewards: Ragged, values: Ragged, *, gamma: float, lam: float | np.ndarray
) -> tuple[Ragged, Ragged]:
    """Advantages and returns of all places (GAE, arXiv 1506.02438, equations 11 and 16).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return = A + V, with V = A = 0 behind the
    last place. ``lam``: of all completions, or (B,) one each.

    Raises: ValueError for rows of other lengths.
    """
    _check_rows("values", values.lengths, rewards.lengths)
    lengths_B = rewards.lengths
    is_place_BT = np.arange(int(lengths_B.max(initial=0)))[None, :] < lengths_B[:, None]
    rewards_BT, values_BT = np.zeros(is_place_BT.shape), np.zeros(is_place_BT.shape)
    rewards_BT[is_place_BT], values_BT[is_place_BT] = rewards.values, values.values
    next_values_BT = np.pad(values_BT, ((0, 0), (0, 1)))[:, 1:]
    deltas_BT = rewards_BT + gamma * next_values_BT - values_BT
    advantages_BT = np.zeros_like(deltas_BT)
    advantage_B = np.zeros(len(rewards))
    for t in reversed(range(deltas_BT.shape[1])):
        advantage_B = deltas_BT[:, t] + gamma * lam * advantage_B
        advantages_BT[:, t] = advantage_B
    returns_BT = advantages_BT + values_BT
    return Ragged(advantages_BT[is_place_BT], rewards.offsets), Ragged(returns_BT[is_place_BT], rewards.offsets)


def whiten(values: np.ndarray, counts: np.ndarray, *, shift_mean: bool = True) -> np.ndarray:
    """``values`` with the mean 0 (or their own, without ``shift_mean``) and the variance 1 of a sample, all (N,).

    Mean and variance are those of the entries that ``counts`` is True for; the others become 0. A single entry has no
    variance and is left where ``shift_mean`` puts it.
    """
    chosen = values[counts]
    if not len(chosen):
        return np.zeros_like(values)
    mean = chosen.mean()
    variance = chosen.var(ddof=1) if len(chosen) > 1 else 0.0
    whitened = (values - mean) / np.sqrt(variance + WHITENING_EPSILON) + (0.0 if shift_mean else mean)
    return np.where(counts, whitened, 0.0)


def _check_rows(name: str, found: object, expected: object) -> None:
    if not np.array_equal(found, expected):  # type: ignore[arg-type]
        raise ValueError(f"{name} must have as many entries per row as the values: {expected}, got {found}")
