"""What GRPO learns from: completions with their rewards, made into samples with advantages and masks. On the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.batch import Ragged, Rollouts, Samples
from trainers.grpo.config import GRPOConfig
from trainers.losses.entropy import clip_cov_selection, covariances, entropy_threshold, kl_cov_selection
from trainers.losses.rollout_correction import accepted_tokens
from trainers.losses.types import LARGEST_LOG_RATIO
from trainers.metrics import Metrics
from trainers.rewards.advantages import (
    Aggregation,
    add_reward_metrics,
    add_teacher,
    known_mean,
    sequence_kl,
    total_rewards,
)
from trainers.rewards.classified import classified, mean_log_ratios
from trainers.rewards.estimators import RewardBatch, estimated


@dataclass(eq=False)
class Rewarded(Rollouts):
    """Completions, the G of a prompt next to each other, with what they were asked and what they got for it."""

    prompts: list[Any] | None = None  # texts or conversations
    rewards: np.ndarray | None = None  # float32 (B, K), NaN where a reward had nothing to say
    row_ids: np.ndarray | None = None  # int64: places in the data
    greedy_rewards: np.ndarray | None = None  # float32 (B, K): of a greedy completion of the same prompt

    def samples(self, mask_truncated: bool = False) -> Samples:
        """As of all rollouts, with the places of their rows in the data."""
        return dataclasses.replace(super().samples(mask_truncated), row_ids=self.row_ids)


def differing_groups(
    rewards_BK: np.ndarray,
    weights_K: np.ndarray,
    num_generations: int,
    multi_objective_aggregation: Aggregation = "sum_then_normalize",
) -> np.ndarray:
    """(P,) bool: True for prompts whose completions are not all rewarded alike, so that they tell something.

    Alike in the weighted sum of their rewards; with ``normalize_then_sum``, which has no such sum, in each reward that
    has a weight.
    """
    if multi_objective_aggregation == "normalize_then_sum":
        values_BK = rewards_BK[:, weights_K != 0]
    else:
        unscored_B = np.isnan(rewards_BK).all(axis=1)
        values_BK = np.where(unscored_B, np.nan, np.nansum(rewards_BK * weights_K, axis=1))[:, None]
    values_PGK = values_BK.reshape(-1, num_generations, values_BK.shape[1])
    known_PGK = ~np.isnan(values_PGK)
    highest_PK = np.where(known_PGK, values_PGK, -np.inf).max(axis=1)
    lowest_PK = np.where(known_PGK, values_PGK, np.inf).min(axis=1)
    differs_P: np.ndarray = (known_PGK.any(axis=1) & ~np.isclose(highest_PK, lowest_PK)).any(axis=1)
    return differs_P


def differing_prompts(config: GRPOConfig, explored: Rewarded, names: list[str], weights_K: np.ndarray) -> np.ndarray:
    """(P,) bool: as ``differing_groups``, by all rewards or by the one that ``dynamic_sample`` names."""
    assert explored.rewards is not None
    if isinstance(config.dynamic_sample, str):
        weights_K = np.array([float(name == config.dynamic_sample) for name in names], np.float32)
    return differing_groups(explored.rewards, weights_K, config.num_generations, config.multi_objective_aggregation)


def fullest(explored: Rewarded, differs_P: np.ndarray, num_prompts: int, num_generations: int) -> Rewarded:
    """The completions of ``num_prompts`` prompts: those that tell something, in order, then others to fill up."""
    chosen_P = np.argsort(~differs_P, kind="stable")[:num_prompts]
    rows = (chosen_P[:, None] * num_generations + np.arange(num_generations)).reshape(-1)
    return explored[rows]


def credit(
    config: GRPOConfig,
    samples: Samples,
    rewards_BK: np.ndarray | None,
    weights_K: np.ndarray,
    names: list[str],
    greedy_rewards_BK: np.ndarray | None = None,
) -> tuple[Samples, Metrics]:
    """The samples of a generation with their advantages, without what no loss looks at, and what was seen."""
    assert rewards_BK is not None, "completions are rewarded first"
    metrics = Metrics()
    if config.difficulty_range is not None:  # first: a batch's statistics are of tokens that the loss counts
        samples = with_medium_prompts(config, samples, total_rewards(rewards_BK, weights_K), metrics)
    kl = None
    if config.has_kl_in_reward:
        kl_B = sequence_kl(asked(samples.old_logps), asked(samples.ref_logps), samples.loss_mask)
        metrics.mean("kl", float(kl_B.sum()), samples.num_loss_tokens)
        kl = config.beta * kl_B
    batch = RewardBatch(
        rewards_BK,
        weights_K,
        config.num_generations,
        num_loss_tokens(samples),
        penalties_B=kl,
        old_logps=samples.old_logps,
        ref_logps=samples.ref_logps,
        loss_mask=samples.loss_mask,
        greedy_rewards_BK=greedy_rewards_BK,
    )
    if greedy_rewards_BK is not None:
        greedy_B = total_rewards(greedy_rewards_BK, weights_K)
        metrics.mean("greedy_reward", float(np.nansum(greedy_B)), float((~np.isnan(greedy_B)).sum()))
    advantages, statistics = estimated(config.advantage_estimator, config, batch)
    add_reward_metrics(metrics, statistics, names)
    if config.teacher_model is not None:
        teacher_logps, old_logps = asked(samples.teacher_logps), asked(samples.old_logps)
        advantages = add_teacher(advantages, teacher_logps, old_logps, teacher_kl_coef=config.teacher_kl_coef)
        log_ratios = (teacher_logps.values - old_logps.values)[asked(samples.loss_mask).values].astype(np.float64)
        metrics.mean("teacher_kl", float((np.expm1(log_ratios) - log_ratios).sum()), len(log_ratios))  # k3
    if config.rollout_rejection is not None:
        samples = with_accepted(config, samples, metrics)
    credited = dataclasses.replace(
        samples,
        advantages=advantages,
        ref_logps=None if config.has_kl_in_reward else samples.ref_logps,
        teacher_logps=None,
    )
    return credited, metrics


def with_policy_mask(chunk: Samples, top_entropy_quantile: float) -> Samples:
    """The samples of one optimizer step, the share of their loss tokens with the highest entropy marked.

    Departure from TRL, which compares the entropies within a micro-batch.
    """
    entropies, counted = asked(chunk.entropies), asked(chunk.loss_mask).values
    threshold = entropy_threshold(entropies.values[counted], top_entropy_quantile)
    chosen = Ragged(counted & (entropies.values >= threshold), entropies.offsets)
    return dataclasses.replace(chunk, policy_mask=chosen, entropies=None)


def with_medium_prompts(config: GRPOConfig, samples: Samples, rewards_B: np.ndarray, metrics: Metrics) -> Samples:
    """The samples, where the loss counts no token of prompts whose mean reward is outside ``difficulty_range``."""
    assert config.difficulty_range is not None
    low, high = config.difficulty_range
    means_P = known_mean(rewards_B.reshape(-1, config.num_generations), axis=1)[:, 0]
    kept_P = (low < means_P) & (means_P < high)
    metrics.mean("difficulty_kept", float(kept_P.sum()), len(kept_P))
    mask = asked(samples.loss_mask)
    kept = kept_P.repeat(config.num_generations).repeat(mask.lengths)
    return dataclasses.replace(samples, loss_mask=Ragged(mask.values & kept, mask.offsets))


def with_accepted(config: GRPOConfig, samples: Samples, metrics: Metrics) -> Samples:
    """The samples without the loss tokens that are rejected, and their shares in the metrics."""
    assert config.rollout_rejection is not None
    assert config.rollout_rejection_max is not None
    before = asked(samples.loss_mask)
    accepted = accepted_tokens(
        asked(samples.old_logps),
        asked(samples.rollout_logps),
        before,
        statistic=config.rollout_rejection,
        high=config.rollout_rejection_max,
        low=config.rollout_rejection_min,
    )
    counts_B = num_loss_tokens(samples)
    samples = dataclasses.replace(samples, loss_mask=accepted)
    rejected_B = counts_B - num_loss_tokens(samples)
    metrics.mean("sampling/rejected_tokens", float(rejected_B.sum()), float(counts_B.sum()))
    metrics.mean("sampling/rejected_sequences", float((rejected_B > 0).sum()), float((counts_B > 0).sum()))
    return samples


def with_selection(config: GRPOConfig, chunk: Samples, logps: Ragged, seed: tuple[int, ...]) -> Samples:
    """The samples of one optimizer step, tokens marked that clip_cov and kl_cov treat otherwise.

    ``logps``: of the policy as it is before the step.
    """
    counted, advantages = asked(chunk.loss_mask).values, chunk.advantages
    assert advantages is not None, "credit comes first"
    by_token = advantages.values if isinstance(advantages, Ragged) else np.repeat(advantages, logps.lengths)
    covariance = covariances(by_token[counted], logps.values[counted])
    if config.loss_name == "kl_cov":
        chosen = kl_cov_selection(covariance, ratio=config.kl_cov_ratio)
    else:
        ratios = np.ones(len(covariance))
        if chunk.old_logps is not None:
            ratios = np.exp(np.clip(logps.values - chunk.old_logps.values, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))[
                counted
            ]
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        is_clipped = np.where(
            by_token[counted] > 0, ratios > 1 + high, (by_token[counted] < 0) & (ratios < 1 - config.epsilon)
        )
        bounds = {"lower": config.clip_cov_lb, "upper": config.clip_cov_ub}
        chosen = clip_cov_selection(covariance, ~is_clipped, ratio=config.clip_cov_ratio, **bounds, seed=seed)
    selected = np.zeros(len(counted), bool)
    selected[counted] = chosen
    return dataclasses.replace(chunk, selected=Ragged(selected, logps.offsets))


def with_slopes(config: GRPOConfig, chunk: Samples, score: Callable[[Samples], Ragged]) -> tuple[Samples, float]:
    """The samples of one optimizer step with the slopes of ``loss_type: real`` as their advantages, and that loss.

    Workers give its gradient alone. With another loss the samples stay as they are, and the loss is 0.
    ``score``: log-probabilities of the policy as it is before the step. The slope by the mean of a completion's
    log-ratios is shared out over its tokens; the loss divides by the tokens of the step.
    """
    if config.loss_name != "real":
        return chunk, 0.0
    advantages, logps = chunk.advantages, score(chunk)
    assert isinstance(advantages, np.ndarray), "a completion is classified as a whole"
    scores_B = mean_log_ratios(logps, chunk.old_logps, asked(chunk.loss_mask))
    loss, slopes_B = classified(scores_B, advantages, config.num_generations, config.real_tau)
    counts_B = num_loss_tokens(chunk)
    shares_B = counts_B.sum() / np.maximum(counts_B, 1)
    return dataclasses.replace(chunk, advantages=(-slopes_B * shares_B).astype(np.float32)), loss


def num_loss_tokens(samples: Samples) -> np.ndarray:
    """(B,) loss tokens of each completion."""
    counted = asked(samples.loss_mask)
    return np.array([int(row.sum()) for row in counted], np.int64)


def asked(column: Ragged | None) -> Ragged:
    assert column is not None, "the models score the samples first: with_logps"
    return column
