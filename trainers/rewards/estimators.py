"""The advantage estimators that ``advantage_estimator`` names, in NumPy, on the driver: bundled ones, and the form of
yours.

    @register_advantage("centred")
    def centred(batch: RewardBatch) -> np.ndarray:
        return batch.sums_PG - batch.sums_PG.mean(axis=1, keepdims=True)

An estimator sees every completion of a generation at once and returns an advantage per completion, (P, G) or (B,), or
per loss target, ``Ragged`` with the rows of ``old_logps``; NaN becomes 0. It may return ``(advantages,
RewardStatistics)`` where what it divides by is not the spread of the group. P prompts have G completions each, B = P x
G in all, the G of a prompt next to each other. The formulas of the GRPO family are in ``advantages.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainers.batch import Ragged
from trainers.plugins import ADVANTAGES, constants, named, register_advantage
from trainers.rewards.advantages import (
    STD_FLOOR,
    Aggregation,
    RewardStatistics,
    Scale,
    batch_advantages,
    compared,
    group_advantages,
    known_mean,
    known_std,
    leave_one_out_advantages,
    penalised,
    reward_statistics,
    reward_table,
    token_advantages,
    total_rewards,
)

Advantages = np.ndarray | Ragged


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of a generation, and what else is known of its completions.

    Raises: ValueError for rewards that are no table of whole groups, or infinite.
    """

    rewards_BK: np.ndarray  # of K reward functions, NaN where one had nothing to say
    weights_K: np.ndarray  # of the functions
    num_generations: int  # completions per prompt, G
    lengths_B: np.ndarray  # loss tokens of each completion
    penalties_B: np.ndarray | None = None  # beta x KL, where it is in the reward; None: it is not
    old_logps: Ragged | None = None  # one per target; with needs_logps
    ref_logps: Ragged | None = None  # with needs_logps and beta
    loss_mask: Ragged | None = None  # True on targets that the loss counts
    greedy_rewards_BK: np.ndarray | None = None  # of a greedy completion of the same prompt; with needs_greedy

    # float64: each completion's weighted sum of rewards, less its penalty; NaN where no function had anything to say
    sums_PG: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        table_BK = reward_table(self.rewards_BK, self.num_generations)  # which refuses what is no table of whole groups
        sums_B = penalised(total_rewards(table_BK, self.weights_K), self.penalties_B)
        object.__setattr__(self, "sums_PG", sums_B.reshape(-1, self.num_generations))

    @property
    def groups(self) -> dict[str, Any]:
        """What the functions of ``advantages.py`` that compare within groups are called with."""
        return {"num_generations": self.num_generations, "weights_K": self.weights_K, "penalties_B": self.penalties_B}


def estimated(spec: Any, config: Any, batch: RewardBatch) -> tuple[Advantages, RewardStatistics]:
    """Advantages and statistics of the registered estimator that ``spec`` names, with its keys of the configuration.

    Raises: ValueError for advantages that do not fit.
    """
    name, arguments = named(spec)
    function = ADVANTAGES[name].function
    made = function(batch, **constants(function, config, arguments))
    advantages, statistics = made if isinstance(made, tuple) else (made, _statistics(batch))
    num_completions = len(batch.rewards_BK)
    if isinstance(advantages, Ragged):
        if len(advantages) != num_completions:
            raise ValueError(
                f"advantage_estimator {name!r} gave {len(advantages)} rows of {num_completions} completions"
            )
        return Ragged(compared(advantages.values), advantages.offsets), statistics
    found = np.asarray(advantages, np.float64)
    if found.shape not in ((num_completions,), batch.sums_PG.shape):
        raise ValueError(
            f"advantage_estimator {name!r} gave advantages of shape {found.shape}; it must be {batch.sums_PG.shape} "
            f"(prompts, completions per prompt) or ({num_completions},)"
        )
    return compared(found.reshape(-1)), statistics


def _statistics(batch: RewardBatch) -> RewardStatistics:
    """Of what is scaled by the spread within the group."""
    std_B = known_std(batch.sums_PG, axis=1).repeat(batch.num_generations)
    return reward_statistics(batch.rewards_BK, total_rewards(batch.rewards_BK, batch.weights_K), std_B)


@register_advantage("grpo")
def grpo(
    batch: RewardBatch, *, scale_rewards: Scale | bool, multi_objective_aggregation: Aggregation
) -> tuple[Advantages, RewardStatistics]:
    """Relative to the group: see ``group_advantages``."""
    return group_advantages(
        batch.rewards_BK,
        **batch.groups,
        scale_rewards=scale_rewards,
        multi_objective_aggregation=multi_objective_aggregation,
    )


@register_advantage("rloo", kl_in_reward=True)
def rloo(
    batch: RewardBatch, *, reward_clip_range: Sequence[float] | None, normalize_advantages: bool
) -> tuple[Advantages, RewardStatistics]:
    """Relative to the others of the group: see ``leave_one_out_advantages``."""
    clip = None if reward_clip_range is None else (reward_clip_range[0], reward_clip_range[1])
    return leave_one_out_advantages(
        batch.rewards_BK, **batch.groups, reward_clip_range=clip, normalize_advantages=normalize_advantages
    )


@register_advantage("reinforce_plus_plus", kl_in_reward=True)
def reinforce_plus_plus(batch: RewardBatch) -> tuple[Advantages, RewardStatistics]:
    """Relative to the group and then the batch: see ``batch_advantages``."""
    return batch_advantages(batch.rewards_BK, **batch.groups)


register_advantage("reinforce_plus_plus_baseline", kl_in_reward=True)(reinforce_plus_plus)


@register_advantage("reinforce_plus_plus_token", needs_group=False, needs_logps=True, kl_in_reward=True)
def reinforce_plus_plus_token(batch: RewardBatch, *, beta: float) -> tuple[Advantages, RewardStatistics]:
    """A value per token, relative to the batch: see ``token_advantages``."""
    assert batch.old_logps is not None, "needs_logps"
    return token_advantages(
        batch.rewards_BK,
        batch.old_logps,
        batch.ref_logps,
        beta=beta,
        loss_mask=batch.loss_mask,
        weights_K=batch.weights_K,
    )


@register_advantage("gpg")
def gpg(batch: RewardBatch) -> Advantages:
    """alpha (r - mean of the group), alpha = B / (B - M): GPG (arXiv 2504.02546, section 3, with F_norm = 1).

    M completions of the B scored ones have no gradient, because their group is rewarded alike; alpha makes up for them.
    Departure from verl, whose M is the number of completions with a reward of 0.
    """
    deviations_PG = batch.sums_PG - known_mean(batch.sums_PG, axis=1)
    has_gradient_PG = ~np.isclose(known_std(batch.sums_PG, axis=1), 0.0) & ~np.isnan(deviations_PG)
    num_scored, num_learned = (~np.isnan(deviations_PG)).sum(), has_gradient_PG.sum()
    advantages_PG: np.ndarray = deviations_PG * (num_scored / max(num_learned, 1))
    return advantages_PG


@register_advantage("opo")
def opo(batch: RewardBatch) -> Advantages:
    """r - b, b the mean of the group's rewards weighed by length: OPO (arXiv 2505.23585, section 3).

    b is the baseline of least variance if the squared norm of a completion's gradient grows with its length. Lengths
    are loss tokens. The method is exact on policy: one optimizer step per generation.
    """
    lengths_PG = np.where(np.isnan(batch.sums_PG), 0, batch.lengths_B.reshape(batch.sums_PG.shape))
    totals_P1 = np.nansum(lengths_PG * batch.sums_PG, axis=1, keepdims=True)
    advantages_PG: np.ndarray = batch.sums_PG - totals_P1 / np.maximum(lengths_PG.sum(axis=1, keepdims=True), 1)
    return advantages_PG


@register_advantage("remax", needs_group=False, needs_greedy=True, kl_in_reward=True)
def remax(batch: RewardBatch) -> Advantages:
    """r - reward of a greedy completion of the prompt: ReMax (arXiv 2310.10505, Algorithm 1).

    Departures: a KL in the reward is summed over the whole completion rather than from each token on, and the greedy
    completion has none. A completion whose greedy one is unscored gets 0.
    """
    assert batch.greedy_rewards_BK is not None, "needs_greedy"
    greedy_B = total_rewards(batch.greedy_rewards_BK, batch.weights_K)
    advantages_PG: np.ndarray = batch.sums_PG - greedy_B.reshape(batch.sums_PG.shape)
    return advantages_PG


@register_advantage("maxrl", kl_in_reward=None)
def maxrl(batch: RewardBatch) -> Advantages:
    """(r - mean) / mean of the group, 0 where no completion is rewarded: MaxRL (arXiv 2602.02710, Algorithm 1).

    With rewards of 0 and 1, r / mean has in expectation the gradient of the log-likelihood of a right answer, expanded
    to order G (Theorem 2 there); the subtracted 1 lowers its variance. Departure from the authors' code: nothing is
    added to the mean.

    Raises: ValueError for a negative reward, with which the mean would turn the sign around.
    """
    if (batch.sums_PG < 0).any():
        raise ValueError(
            f"advantage_estimator=maxrl divides by the mean reward and got one of {np.nanmin(batch.sums_PG):g}: "
            "it needs rewards of 0 and 1"
        )
    mean_P1 = known_mean(batch.sums_PG, axis=1)
    advantages_PG: np.ndarray = (batch.sums_PG - mean_P1) / np.where(mean_P1 > 0, mean_P1, np.inf)
    return advantages_PG


@register_advantage("pass_at_k", kl_in_reward=None)
def pass_at_k(batch: RewardBatch, *, pass_k: int, pass_threshold: float) -> Advantages:
    """What a completion adds to groups of ``pass_k`` of which one at least is right (arXiv 2508.10751, section 2.4).

    A completion is right if its weighted rewards reach ``pass_threshold``. A group of k drawn from the N completions of
    a prompt is rewarded with 1 if any of it is right. With n wrong ones, R = 1 - C(n, k) / C(N, k) is the mean reward
    of groups and s = sqrt(R (1 - R)) its deviation; a completion gets the mean of (reward - R) / s over the groups
    that it is in: (1 - R) / s if it is right, (1 - R - C(n - 1, k - 1) / C(N - 1, k - 1)) / s if it is wrong. All get 0
    where s is 0, and where fewer than k are scored.
    """
    is_scored_PG = ~np.isnan(batch.sums_PG)
    is_right_PG = is_scored_PG & (batch.sums_PG >= pass_threshold)
    advantages_PG = np.full(batch.sums_PG.shape, np.nan)
    for p, (scored_G, right_G) in enumerate(zip(is_scored_PG, is_right_PG, strict=True)):
        num_scored, num_wrong = int(scored_G.sum()), int((scored_G & ~right_G).sum())
        if num_scored < pass_k:
            continue
        fails = math.comb(num_wrong, pass_k) / math.comb(num_scored, pass_k)
        if not 0 < fails < 1:
            continue
        siblings_fail = math.comb(num_wrong - 1, pass_k - 1) / math.comb(num_scored - 1, pass_k - 1)
        deviation = math.sqrt(fails * (1 - fails))
        advantages_PG[p] = np.where(right_G, fails, fails - siblings_fail) / deviation
    advantages_PG[~is_scored_PG] = np.nan
    return advantages_PG


@register_advantage("grpo_passk")
def grpo_passk(batch: RewardBatch) -> tuple[Advantages, RewardStatistics]:
    """The best of the group gets (best - second best) / std of the group, the others 0 (arXiv 2503.19595, k = G).

    Of completions with the same best reward each gets 0. The deviation is a sample's, + 1e-4; verl adds 1e-6.
    """
    ordered_PG = np.sort(np.where(np.isnan(batch.sums_PG), -np.inf, batch.sums_PG), axis=1)
    with np.errstate(invalid="ignore"):
        margins_P1 = ordered_PG[:, -1:] - ordered_PG[:, -2:-1]
    std_P1 = known_std(batch.sums_PG, axis=1)
    best_PG = batch.sums_PG == ordered_PG[:, -1:]
    return np.where(best_PG, margins_P1 / (std_P1 + STD_FLOOR), 0.0), _statistics(batch)


BUNDLED = tuple(ADVANTAGES)
