"""Advantages of completions from their rewards, on the driver, in NumPy.

Rewards come as a table (B, K): B completions, the G = ``num_generations`` of a prompt next to each other, and K reward
functions. None or NaN means that a function had nothing to say about a completion; a completion about which no
function had anything to say is *unscored*: it enters no statistic and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

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
) -> tuple[np.ndarray, RewardStatistics]:
    """float32 advantages (B,) and the statistics of the rewards.

    ``sum_then_normalize`` (GRPO, arXiv 2402.03300): the weighted sum r of a completion's rewards becomes
    (r - mean of its group) / (std + 1e-4), where std is the group's, the batch's (``scale_rewards`` 'batch', arXiv
    2508.08221) or left out ('none', arXiv 2503.20783). True and False mean 'group' and 'none'.
    ``normalize_then_sum`` (GDPO, arXiv 2601.05242): each function's rewards are normalised within their group, summed
    with their weights, and the sums normalised within the batch; ``scale_rewards`` then has no say.
    ``weights_K`` None: all 1. Standard deviations are those of a sample (n - 1); a completion that is the only scored
    one of what it is compared with has none, and its advantage is 0.

    Departures from TRL: computed in float64; an infinite reward is refused rather than turned into a huge advantage;
    groups of one completion do not count as groups of zero standard deviation.

    Raises: ValueError for rewards that are no such table, are infinite, or do not fill whole groups, for weights that
    do not match, and for unknown modes.
    """
    scale = _scale(scale_rewards)
    rewards_BK = _reward_table(rewards_BK, num_generations)
    weights = _weights(weights_K, rewards_BK.shape[1])
    unscored_B = np.isnan(rewards_BK).all(axis=1)
    sums_B = _weighted_sum(rewards_BK, weights, unscored_B)
    if multi_objective_aggregation == "sum_then_normalize":
        sums_PG = sums_B.reshape(-1, num_generations)
        deviations_B = (sums_PG - _mean(sums_PG, axis=1)).reshape(-1)
        std = _std(sums_B, axis=0) if scale == "batch" else _std(sums_PG, axis=1).repeat(num_generations)
        advantages_B = deviations_B if scale == "none" else deviations_B / (std + STD_FLOOR)
    elif multi_objective_aggregation == "normalize_then_sum":
        rewards_PGK = rewards_BK.reshape(-1, num_generations, rewards_BK.shape[1])
        scores_PGK = (rewards_PGK - _mean(rewards_PGK, axis=1)) / (_std(rewards_PGK, axis=1) + STD_FLOOR)
        scores_B = _weighted_sum(scores_PGK.reshape(rewards_BK.shape), weights, unscored_B)
        std = _std(scores_B, axis=0)
        advantages_B = scores_B / (std + STD_FLOOR)  # their mean is 0, because it is 0 in every group
    else:
        known = ", ".join(get_args(Aggregation))
        raise ValueError(f"multi_objective_aggregation must be one of {known}, got {multi_objective_aggregation!r}")
    statistics = RewardStatistics(
        reward=_mean(sums_B, axis=0).item(),
        reward_std=_std(sums_B, axis=0).item(),
        frac_reward_zero_std=float(np.mean(np.isclose(std, 0.0))) if len(sums_B) else np.nan,
        function_means=_mean(rewards_BK, axis=0)[0],
        function_stds=_std(rewards_BK, axis=0)[0],
    )
    return np.nan_to_num(advantages_B, nan=0.0).astype(np.float32), statistics


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


def _scale(scale_rewards: Scale | bool) -> Scale:
    if isinstance(scale_rewards, bool):
        return "group" if scale_rewards else "none"
    if scale_rewards not in get_args(Scale):
        raise ValueError(f"scale_rewards must be one of {', '.join(get_args(Scale))}, got {scale_rewards!r}")
    return scale_rewards


def _reward_table(rewards_BK: Any, num_generations: int) -> np.ndarray:
    """float64 (B, K), None as NaN."""
    table = np.array(rewards_BK, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"rewards must be a table (completions, reward functions), got an array of shape {table.shape}"
        )
    if num_generations < 1 or len(table) % num_generations:
        raise ValueError(
            f"{len(table)} completions do not fill groups of num_generations={num_generations}: "
            "pass the rewards of whole groups, the completions of a prompt next to each other"
        )
    infinite = np.argwhere(np.isinf(table))
    if len(infinite):
        row, function = infinite[0]
        raise ValueError(
            f"reward function {function} gave {table[row, function]} for completion {row}: an infinite reward has no "
            "advantage; return a finite number, or None to leave the completion unscored"
        )
    return table


def _weights(weights_K: Sequence[float] | np.ndarray | None, num_functions: int) -> np.ndarray:
    if weights_K is None:
        return np.ones(num_functions)
    if len(weights_K) != num_functions:
        raise ValueError(f"there are {num_functions} reward functions, but {len(weights_K)} reward weights")
    return np.asarray(weights_K, dtype=np.float64)


def _weighted_sum(values_BK: np.ndarray, weights_K: np.ndarray, unscored_B: np.ndarray) -> np.ndarray:
    """(B,): functions without an opinion add nothing; unscored completions are NaN."""
    sums_B: np.ndarray = np.nansum(values_BK * weights_K, axis=1)
    sums_B[unscored_B] = np.nan
    return sums_B


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean over an axis, which is kept, of what is not NaN; NaN where nothing is."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    return np.where(count > 0, np.nansum(values, axis, keepdims=True) / np.maximum(count, 1), np.nan)


def _std(values: np.ndarray, axis: int) -> np.ndarray:
    """The standard deviation (n - 1) over an axis, which is kept, of what is not NaN; NaN for fewer than two values."""
    mean = _mean(values, axis)
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum((values - mean) ** 2, axis, keepdims=True)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)
