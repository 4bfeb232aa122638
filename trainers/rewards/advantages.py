"""Advantages of completions from their rewards, on the driver, in NumPy.

Rewards come as a table (B, K): B completions, the G = ``num_generations`` of a prompt next to each other, and K reward
functions. None or NaN means that a function had nothing to say about a completion; a completion about which no
function had anything to say is *unscored*: it enters no statistic and its advantage is 0.

Four estimators: relative to the group (GRPO and its kin), to the rest of the group (RLOO), to the group and then the
batch (REINFORCE++ with baseline), or to the batch, a value a token (REINFORCE++). Each is given every completion of a
step at once. Log-probabilities are ``Ragged``, a row a completion and an entry a token of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from trainers.batch import Ragged
from trainers.metrics import Metrics

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
STD_FLOOR = 1e-4  # added to every standard deviation that divides


@dataclass(frozen=True)
class RewardStatistics:
    """What TRL logs of a batch of rewards; NaN where nothing was scored."""

    reward: float  # mean over completions of the weighted sum of the functions' rewards
    reward_std: float  # its standard deviation over the whole batch
    frac_reward_zero_std: float  # share of completions whose rewards do not differ within what they are scaled by
    function_means: np.ndarray  # (K,)
    function_stds: np.ndarray  # (K,)


def group_advantages(
    rewards_BK: Any,
    *,
    num_generations: int,
    weights_K: Sequence[float] | np.ndarray | None = None,
    scale_rewards: Scale | bool = "group",
    multi_objective_aggregation: Aggregation = "sum_then_normalize",
    penalties_B: np.ndarray | None = None,
) -> tuple[np.ndarray, RewardStatistics]:
    """float32 advantages (B,) and the statistics of the rewards.

    ``sum_then_normalize`` (GRPO, arXiv 2402.03300): the weighted sum r of a completion's rewards becomes
    (r - mean of its group) / (std + 1e-4), where std is the group's, the batch's (``scale_rewards`` 'batch', arXiv
    2508.08221) or left out ('none', arXiv 2503.20783). True and False mean 'group' and 'none'.
    ``normalize_then_sum`` (GDPO, arXiv 2601.05242): each function's rewards are normalised within their group, summed
    with their weights, and the sums normalised within the batch; ``scale_rewards`` then has no say.
    ``weights_K`` None: all 1. ``penalties_B`` are subtracted from the weighted sums: beta x ``sequence_kl`` puts the KL
    into the reward. Standard deviations are those of a sample (n - 1); a completion that is the only scored one of what
    it is compared with has none, and its advantage is 0. The statistics are of rewards without penalties.

    Departures from TRL: computed in float64; an infinite reward is refused rather than turned into a huge advantage;
    groups of one completion do not count as groups of zero standard deviation.

    Raises: ValueError for rewards that are no such table, are infinite, or do not fill whole groups, for weights or
    penalties that do not match, for unknown modes, and for penalties with ``normalize_then_sum``, which has no sum.
    """
    scale = _scale(scale_rewards)
    rewards_BK = reward_table(rewards_BK, num_generations)
    weights = _weights(weights_K, rewards_BK.shape[1])
    unscored_B = np.isnan(rewards_BK).all(axis=1)
    sums_B = weighted_sum(rewards_BK, weights, unscored_B)
    if multi_objective_aggregation == "sum_then_normalize":
        penalised_B = penalised(sums_B, penalties_B)
        sums_PG = penalised_B.reshape(-1, num_generations)
        deviations_B = (sums_PG - known_mean(sums_PG, axis=1)).reshape(-1)
        std = known_std(penalised_B, axis=0) if scale == "batch" else known_std(sums_PG, axis=1).repeat(num_generations)
        advantages_B = deviations_B if scale == "none" else deviations_B / (std + STD_FLOOR)
    elif multi_objective_aggregation == "normalize_then_sum":
        if penalties_B is not None:
            raise ValueError(
                "penalties_B are subtracted from one sum of rewards, which normalize_then_sum does not compute"
            )
        rewards_PGK = rewards_BK.reshape(-1, num_generations, rewards_BK.shape[1])
        scores_PGK = (rewards_PGK - known_mean(rewards_PGK, axis=1)) / (known_std(rewards_PGK, axis=1) + STD_FLOOR)
        scores_B = weighted_sum(scores_PGK.reshape(rewards_BK.shape), weights, unscored_B)
        std = known_std(scores_B, axis=0)
        advantages_B = scores_B / (std + STD_FLOOR)  # their mean is 0, because it is 0 in every group
    else:
        known = ", ".join(get_args(Aggregation))
        raise ValueError(f"multi_objective_aggregation must be one of {known}, got {multi_objective_aggregation!r}")
    return compared(advantages_B), reward_statistics(rewards_BK, sums_B, std)


def leave_one_out_advantages(
    rewards_BK: Any,
    *,
    num_generations: int,
    weights_K: Sequence[float] | np.ndarray | None = None,
    reward_clip_range: tuple[float, float] | None = None,
    penalties_B: np.ndarray | None = None,
    normalize_advantages: bool = False,
) -> tuple[np.ndarray, RewardStatistics]:
    """RLOO (arXiv 2402.14740): float32 advantages (B,) r - mean r of the others of its group, and the statistics.

    r is the weighted sum of a completion's rewards, kept within ``reward_clip_range``, less ``penalties_B``: beta x
    ``sequence_kl`` (k1) in the paper. ``normalize_advantages``: their z-score within the batch, with the sample's
    standard deviation + 1e-4. Only scored completions are averaged; one that has no scored sibling gets 0. For the rest
    see ``group_advantages``; the statistics are of rewards as they came.

    Raises: ValueError as ``group_advantages``.
    """
    rewards_BK = reward_table(rewards_BK, num_generations)
    sums_B = weighted_sum(rewards_BK, _weights(weights_K, rewards_BK.shape[1]), np.isnan(rewards_BK).all(axis=1))
    clipped_B = sums_B if reward_clip_range is None else np.clip(sums_B, *reward_clip_range)
    sums_PG = penalised(clipped_B, penalties_B).reshape(-1, num_generations)
    num_P1 = (~np.isnan(sums_PG)).sum(axis=1, keepdims=True)
    per_deviation_P1 = np.where(num_P1 > 1, num_P1 / np.maximum(num_P1 - 1, 1), np.nan)
    advantages_B = ((sums_PG - known_mean(sums_PG, axis=1)) * per_deviation_P1).reshape(-1)  # = r - mean of the others
    if normalize_advantages:
        advantages_B = (advantages_B - known_mean(advantages_B, axis=0)) / (known_std(advantages_B, axis=0) + STD_FLOOR)
    std_B = known_std(sums_PG, axis=1).repeat(num_generations)
    return compared(advantages_B), reward_statistics(rewards_BK, sums_B, std_B)


def batch_advantages(
    rewards_BK: Any,
    *,
    num_generations: int,
    weights_K: Sequence[float] | np.ndarray | None = None,
    penalties_B: np.ndarray | None = None,
) -> tuple[np.ndarray, RewardStatistics]:
    """REINFORCE++ with baseline (arXiv 2501.03262): (r - mean of the group) / std of all those differences.

    float32 advantages (B,) and the statistics. Unlike ``scale_rewards`` 'batch' of ``group_advantages``, which divides
    by the spread of the rewards themselves, prompts of unlike difficulty do not make the advantages smaller. ms-swift
    calls it reinforce_plus_plus with scale_rewards batch. The mean of the differences is 0 in every group, so that
    subtracting it again, as the paper writes, changes nothing. For the rest see ``group_advantages``.

    Raises: ValueError as ``group_advantages``.
    """
    rewards_BK = reward_table(rewards_BK, num_generations)
    sums_B = weighted_sum(rewards_BK, _weights(weights_K, rewards_BK.shape[1]), np.isnan(rewards_BK).all(axis=1))
    sums_PG = penalised(sums_B, penalties_B).reshape(-1, num_generations)
    deviations_B = (sums_PG - known_mean(sums_PG, axis=1)).reshape(-1)
    std = known_std(deviations_B, axis=0)
    return compared(deviations_B / (std + STD_FLOOR)), reward_statistics(rewards_BK, sums_B, std)


def token_advantages(
    rewards_BK: Any,
    old_logps: Ragged,
    ref_logps: Ragged | None,
    *,
    beta: float,
    loss_mask: Ragged | None = None,
    weights_K: Sequence[float] | np.ndarray | None = None,
) -> tuple[Ragged, RewardStatistics]:
    """REINFORCE++ (arXiv 2501.03262): float32 advantages, one a token, and the statistics of the rewards.

    A token's return is the reward of its completion less beta x the KL from the token to the end, k1 = old_logps -
    ref_logps of each token; its advantage is the z-score of that among all tokens of the batch. No groups are needed.
    ``loss_mask`` is True on tokens that count, None: all; the others add no KL, enter no statistic and get 0, like
    those of unscored completions. ``ref_logps`` may be None if beta is 0.

    Departure from the paper: 1e-4 is added to the standard deviation, which is that of a sample.

    Raises: ValueError as ``group_advantages``, or for log-probabilities that do not fit.
    """
    rewards_BK = reward_table(rewards_BK, 1)
    sums_B = weighted_sum(rewards_BK, _weights(weights_K, rewards_BK.shape[1]), np.isnan(rewards_BK).all(axis=1))
    if len(sums_B) != len(old_logps):
        raise ValueError(f"there are rewards of {len(sums_B)} completions, but log-probabilities of {len(old_logps)}")
    counted = _counted(old_logps, loss_mask)
    kl = _token_kl(old_logps, ref_logps, counted) if beta else np.zeros(len(counted))
    returns = np.full(len(counted), np.nan)
    for reward, start, stop in zip(sums_B, old_logps.offsets[:-1], old_logps.offsets[1:], strict=True):
        returns[start:stop] = reward - beta * np.cumsum(kl[start:stop][::-1])[::-1]
    returns[~counted] = np.nan
    advantages = (returns - known_mean(returns, axis=0)) / (known_std(returns, axis=0) + STD_FLOOR)
    return Ragged(compared(advantages), old_logps.offsets), reward_statistics(
        rewards_BK, sums_B, known_std(sums_B, axis=0)
    )


def sequence_kl(old_logps: Ragged, ref_logps: Ragged, loss_mask: Ragged | None = None) -> np.ndarray:
    """float64 (B,): old_logps - ref_logps summed over the tokens that count, the estimator k1; it may be negative."""
    counted = _counted(old_logps, loss_mask)
    rows = np.repeat(np.arange(len(old_logps)), old_logps.lengths)
    sums_B = np.zeros(len(old_logps))
    np.add.at(sums_B, rows, _token_kl(old_logps, ref_logps, counted))
    return sums_B


def add_teacher(
    advantages: np.ndarray | Ragged, teacher_logps: Ragged, old_logps: Ragged, *, teacher_kl_coef: float
) -> Ragged:
    """float32 advantages, one a token, with teacher_kl_coef x (teacher_logps - old_logps) added to each.

    That is a one-sample estimate of minus the KL from the policy to the teacher, as a reward of its own at every token
    (on-policy distillation). ``advantages``: one a completion (B,) or one a token.
    """
    _check_rows("teacher_logps", teacher_logps, old_logps)
    if isinstance(advantages, Ragged):
        _check_rows("advantages", advantages, old_logps)
        base = advantages.values
    else:
        base = np.repeat(advantages, old_logps.lengths)
    return Ragged(
        (base + teacher_kl_coef * (teacher_logps.values - old_logps.values)).astype(np.float32), old_logps.offsets
    )


def add_reward_metrics(metrics: Metrics, statistics: RewardStatistics, names: Sequence[str]) -> None:
    """Writes the statistics of one batch under TRL's names; ``names`` are those of the K reward functions.

    What is NaN, because nothing was scored, is left out. Several batches are averaged, as TRL averages them.
    """
    metrics.mean("reward", statistics.reward, 1.0)
    metrics.mean("reward_std", statistics.reward_std, 1.0)
    metrics.mean("frac_reward_zero_std", statistics.frac_reward_zero_std, 1.0)
    for name, mean, std in zip(names, statistics.function_means, statistics.function_stds, strict=True):
        metrics.mean(f"rewards/{name}/mean", mean, 1.0)
        metrics.mean(f"rewards/{name}/std", std, 1.0)


def total_rewards(rewards_BK: np.ndarray, weights_K: Sequence[float] | np.ndarray) -> np.ndarray:
    """(B,) float64 weighted sums of what rewards there are; NaN where there are none."""
    rewards_BK = np.asarray(rewards_BK, np.float64)
    return weighted_sum(rewards_BK, np.asarray(weights_K, np.float64), np.isnan(rewards_BK).all(axis=1))


def _scale(scale_rewards: Scale | bool) -> Scale:
    if isinstance(scale_rewards, bool):
        return "group" if scale_rewards else "none"
    if scale_rewards not in get_args(Scale):
        raise ValueError(f"scale_rewards must be one of {', '.join(get_args(Scale))}, got {scale_rewards!r}")
    return scale_rewards


def reward_table(rewards_BK: Any, num_generations: int) -> np.ndarray:
    """float64 (B, K), None as NaN."""
    table = np.array(rewards_BK, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"rewards must be a table (completions, reward functions), got an array of shape {table.shape}"
        )
    if num_generations < 1 or len(table) % num_generations:
        raise ValueError(
            f"{len(table)} completions do not fill groups of num_generations={num_generations}. Pass the rewards of "
            "whole groups, with the completions of a prompt next to each other"
        )
    infinite = np.argwhere(np.isinf(table))
    if len(infinite):
        row, function = infinite[0]
        raise ValueError(
            f"reward function {function} gave {table[row, function]} for completion {row}: return a finite "
            "number, or None for no reward"
        )
    return table


def _weights(weights_K: Sequence[float] | np.ndarray | None, num_functions: int) -> np.ndarray:
    if weights_K is None:
        return np.ones(num_functions)
    if len(weights_K) != num_functions:
        raise ValueError(f"there are {num_functions} reward functions, but {len(weights_K)} reward weights")
    return np.asarray(weights_K, dtype=np.float64)


def weighted_sum(values_BK: np.ndarray, weights_K: np.ndarray, unscored_B: np.ndarray) -> np.ndarray:
    """(B,): functions without an opinion add nothing; unscored completions are NaN."""
    sums_B: np.ndarray = np.nansum(values_BK * weights_K, axis=1)
    sums_B[unscored_B] = np.nan
    return sums_B


def known_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean over an axis, which is kept, of what is not NaN; NaN where nothing is.

    Rounding does not put it beyond the values: that of equal ones is theirs.
    """
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    least = np.fmin.reduce(values, axis, keepdims=True, initial=np.inf)
    most = np.fmax.reduce(values, axis, keepdims=True, initial=-np.inf)
    mean = np.clip(np.nansum(values, axis, keepdims=True) / np.maximum(count, 1), least, most)
    return np.where(count > 0, mean, np.nan)


def known_std(values: np.ndarray, axis: int) -> np.ndarray:
    """The standard deviation (n - 1) over an axis, which is kept, of what is not NaN; NaN for fewer than two values."""
    mean = known_mean(values, axis)
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum((values - mean) ** 2, axis, keepdims=True)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)


def penalised(sums_B: np.ndarray, penalties_B: np.ndarray | None) -> np.ndarray:
    if penalties_B is None:
        return sums_B
    if np.shape(penalties_B) != sums_B.shape:
        raise ValueError(f"penalties_B must hold one value per completion ({len(sums_B)}), got {np.shape(penalties_B)}")
    penalised_B: np.ndarray = sums_B - penalties_B
    return penalised_B


def reward_statistics(rewards_BK: np.ndarray, sums_B: np.ndarray, std: np.ndarray) -> RewardStatistics:
    """``std``: what each completion's reward is, or would be, scaled by."""
    return RewardStatistics(
        reward=known_mean(sums_B, axis=0).item(),
        reward_std=known_std(sums_B, axis=0).item(),
        frac_reward_zero_std=float(np.mean(np.isclose(std, 0.0))) if len(sums_B) else np.nan,
        function_means=known_mean(rewards_BK, axis=0)[0],
        function_stds=known_std(rewards_BK, axis=0)[0],
    )


def compared(advantages: np.ndarray) -> np.ndarray:
    """float32 advantages; what is NaN, having been compared with nothing, becomes 0."""
    result: np.ndarray = np.where(np.isnan(advantages), 0.0, advantages).astype(np.float32)
    return result


def _token_kl(old_logps: Ragged, ref_logps: Ragged | None, counted: np.ndarray) -> np.ndarray:
    """float64 old_logps - ref_logps of every token, 0 where none is counted."""
    if ref_logps is None:
        raise ValueError("a KL in the reward needs ref_logps; pass them, or set beta=0.0")
    _check_rows("ref_logps", ref_logps, old_logps)
    return np.where(counted, old_logps.values.astype(np.float64) - ref_logps.values, 0.0)


def _counted(logps: Ragged, loss_mask: Ragged | None) -> np.ndarray:
    """bool, one a token."""
    if loss_mask is None:
        return np.ones(len(logps.values), bool)
    _check_rows("loss_mask", loss_mask, logps)
    return loss_mask.values.astype(bool)


def _check_rows(name: str, column: Ragged, logps: Ragged) -> None:
    if not np.array_equal(column.offsets, logps.offsets):
        raise ValueError(
            f"{name} must have the rows of old_logps: {len(logps)} rows of {len(logps.values)} tokens, got "
            f"{len(column)} of {len(column.values)}"
        )
