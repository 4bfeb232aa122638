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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainers.batch import Ragged
from trainers.plugins import ADVANTAGES, constants, named, register_advantage
from trainers.rewards.advantages import (
    Aggregation,
    RewardStatistics,
    Scale,
    batch_advantages,
    compared,
    group_advantages,
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


BUNDLED = tuple(ADVANTAGES)
