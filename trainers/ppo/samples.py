"""What PPO's policy and critic learn from: the same completions, as each of them sees them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from trainers.batch import Ragged, Rollouts, Sequences
from trainers.metrics import Metrics
from trainers.rewards import gae


@dataclass(eq=False)
class PolicySamples(Sequences):
    """Completions for the policy. Its targets are their tokens, one entry each in the columns below."""

    loss_mask: Ragged | None = None  # bool: True on tokens that the loss counts; None: all of them
    old_logps: Ragged | None = None  # float32: of the policy that generated
    advantages: Ragged | None = None  # float32
    ref_logps: Ragged | None = None  # float32: of the reference, where the loss has a KL to it


@dataclass(eq=False)
class ValueSamples(Sequences):
    """Completions for the critic. Its targets stand behind the places of ``rewards/gae.py``, one entry each.

    A value is read off before its target, so the place behind the end has a token of its own to be its target.
    """

    loss_mask: Ragged | None = None  # bool: True on places that the loss counts; None: all of them
    old_values: Ragged | None = None  # float32: of the critic before it learned from these completions
    returns: Ragged | None = None  # float32


def policy_samples(rollouts: Rollouts) -> PolicySamples:
    """Prompt and completion as one sequence each."""
    pairs = zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)
    return PolicySamples(
        input_ids=Ragged.of([np.concatenate(pair) for pair in pairs], np.int64),
        target_mask=_targets(rollouts.prompt_ids.lengths, rollouts.completion_ids.lengths),
        images=rollouts.images,
    )


def value_samples(rollouts: Rollouts, num_places_B: np.ndarray, end_token_id: int) -> ValueSamples:
    """As ``policy_samples``, with ``end_token_id`` behind completions that have a place behind their end.

    No value depends on which token that is.
    """
    num_behind_B = num_places_B - rollouts.completion_ids.lengths
    columns = zip(rollouts.prompt_ids, rollouts.completion_ids, num_behind_B, strict=True)
    return ValueSamples(
        input_ids=Ragged.of(
            [np.append(np.append(p, c), np.full(behind, end_token_id)) for p, c, behind in columns], np.int64
        ),
        target_mask=_targets(rollouts.prompt_ids.lengths, num_places_B),
        images=rollouts.images,
    )


def credit(
    samples: PolicySamples,
    states: ValueSamples,
    ref_logps: Ragged | None,
    scores_B: np.ndarray,
    *,
    kl_coef: float,
    kl_estimator: gae.KLEstimator,
    whiten_rewards: bool,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    length_adaptive_alpha: float | None = None,
) -> tuple[PolicySamples, ValueSamples, Metrics]:
    """Samples with advantages and states with returns, and what TRL logs of the objective.

    ``lam_critic``: of the returns that the critic learns, None: ``lam`` (decoupled GAE, VC-PPO, arXiv 2503.01491, and
    VAPO, arXiv 2504.05118). ``length_adaptive_alpha``: the policy's lambda follows from the length of each completion
    (``gae.adaptive_lam``), None: it is ``lam``. Completions whose score is NaN enter no statistic and no loss.
    """
    logps, values = samples.old_logps, states.old_values
    assert logps is not None
    assert values is not None
    lengths_B, num_places_B = logps.lengths, values.lengths
    scored_B = ~np.isnan(scores_B)
    counts_tokens, counts_places = np.repeat(scored_B, lengths_B), np.repeat(scored_B, num_places_B)
    kl = Ragged(np.zeros(len(logps.values)), logps.offsets)
    if ref_logps is not None:
        kl = gae.kl_estimates(logps, ref_logps, kl_estimator)
    token_rewards = Ragged(-kl_coef * kl.values, kl.offsets)
    rewards = gae.place_rewards(token_rewards, np.nan_to_num(scores_B), num_places_B)
    if whiten_rewards:
        rewards = Ragged(gae.whiten(rewards.values, counts_places, shift_mean=False), rewards.offsets)
    policy_lam = lam if length_adaptive_alpha is None else gae.adaptive_lam(lengths_B, length_adaptive_alpha)
    advantages, _ = gae.generalized_advantages(rewards, values, gamma=gamma, lam=policy_lam)
    _, returns = gae.generalized_advantages(rewards, values, gamma=gamma, lam=lam if lam_critic is None else lam_critic)
    acted = advantages.values[gae.acting_places(num_places_B, lengths_B)]
    metrics = Metrics()
    num_scored = float(scored_B.sum())
    totals = {
        "entropy": -logps.values[counts_tokens].sum(dtype=np.float64),
        "non_score_reward": token_rewards.values[counts_tokens].sum(),
        "scores": np.nansum(scores_B),
    }
    totals["rlhf_reward"] = totals["non_score_reward"] + totals["scores"]
    if ref_logps is not None:
        totals["kl"] = kl.values[counts_tokens].sum()
    for name, total in totals.items():
        metrics.mean(f"objective/{name}", total, num_scored)
    if length_adaptive_alpha is not None:
        lam_B = gae.adaptive_lam(lengths_B, length_adaptive_alpha)
        metrics.mean("policy/lam", float(lam_B[scored_B].sum()), num_scored)
    samples = dataclasses.replace(
        samples,
        loss_mask=Ragged(counts_tokens, logps.offsets),
        advantages=Ragged(gae.whiten(acted, counts_tokens).astype(np.float32), logps.offsets),
    )
    states = dataclasses.replace(
        states,
        loss_mask=Ragged(counts_places, values.offsets),
        returns=Ragged(returns.values.astype(np.float32), values.offsets),
    )
    return samples, states, metrics


def num_counted(samples: PolicySamples | ValueSamples) -> int:
    """Targets that the loss counts."""
    counted = samples.target_mask if samples.loss_mask is None else samples.loss_mask
    return int(counted.values.sum())


def _targets(num_prompt_B: np.ndarray, num_target_B: np.ndarray) -> Ragged:
    counts = np.stack([num_prompt_B, num_target_B], axis=1)
    flags = np.tile([False, True], len(counts)).repeat(counts.reshape(-1))
    return Ragged.split(flags, counts.sum(axis=1))
