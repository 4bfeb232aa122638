"""Advantage estimators against enumerations, exact gradients and loops; the GRPO family's are in test_advantages.py."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainers.rewards.estimators import RewardBatch, estimated


def advantages_of(
    estimator: str, rewards_PG: Any, *, lengths: Any = None, greedy: Any = None, penalties: Any = None, **keys: Any
) -> np.ndarray:
    """(P, G), of one reward function."""
    rewards_PG = np.asarray(rewards_PG, np.float64)
    num_prompts, num_generations = rewards_PG.shape
    batch = RewardBatch(
        rewards_PG.reshape(-1, 1),
        np.ones(1),
        num_generations,
        np.ones(rewards_PG.size, np.int64) if lengths is None else np.asarray(lengths).reshape(-1),
        penalties_B=None if penalties is None else np.asarray(penalties, np.float64).reshape(-1),
        greedy_rewards_BK=None if greedy is None else np.repeat(greedy, num_generations)[:, None],
    )
    found, _ = estimated(estimator, SimpleNamespace(**keys), batch)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    return found.reshape(num_prompts, num_generations)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("num_right", range(6))
def test_pass_at_k_is_the_mean_over_all_groups_of_k_that_a_completion_is_in(k: int, num_right: int) -> None:
    right = np.arange(5) < num_right
    groups = list(itertools.combinations(range(5), k))
    scores = np.array([float(right[list(group)].any()) for group in groups])
    normed = (scores - scores.mean()) / scores.std() if scores.std() else np.zeros(len(scores))
    expected = [np.mean([normed[i] for i, group in enumerate(groups) if one in group]) for one in range(5)]
    found = advantages_of("pass_at_k", [right.astype(float)], pass_k=k, pass_threshold=0.5)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_leaves_out_what_is_unscored_and_prompts_with_too_few_completions() -> None:
    rewards = [[1.0, 0.2, 0.2, np.nan], [1.0, np.nan, np.nan, 0.2]]
    found = advantages_of("pass_at_k", rewards, pass_k=2, pass_threshold=0.5)
    alone = advantages_of("pass_at_k", [[1.0, 0.0, 0.0]], pass_k=2, pass_threshold=0.5)
    assert found[0].tolist() == [*alone[0], 0.0]
    assert found[1].tolist() == [0.0] * 4
    far = advantages_of("pass_at_k", rewards, pass_k=2, pass_threshold=0.1)
    assert not far.any()  # all are right


def test_maxrl_is_in_expectation_the_gradient_of_the_truncated_log_likelihood() -> None:
    """Over all 2^G outcomes: sum_k (1 - (1 - p)^k)' / k, the expansion of log p to order G (its Theorem 2)."""
    p, num_generations = 0.3, 4
    expected_gradient = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=num_generations):
        probability = math.prod(p if right else 1 - p for right in outcome)
        found = advantages_of("maxrl", [outcome])[0]
        score = [1 / p if right else -1 / (1 - p) for right in outcome]  # d log P(outcome) / dp
        expected_gradient += probability * float(np.mean(found * score))
    truncated = sum((1 - p) ** (k - 1) for k in range(1, num_generations + 1))
    # the mean subtracted costs what a batch of nothing but right answers would have given: its score has mean 0 else
    assert expected_gradient == pytest.approx(truncated - baseline_share(p, num_generations), rel=1e-5)


def baseline_share(p: float, num_generations: int) -> float:
    """What subtracting the mean takes away in expectation: E[mean score; some answer is right]."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=num_generations):
        if any(outcome):
            probability = math.prod(p if right else 1 - p for right in outcome)
            total += probability * float(np.mean([1 / p if right else -1 / (1 - p) for right in outcome]))
    return total


def test_maxrl_divides_by_the_mean_and_refuses_negative_rewards() -> None:
    assert advantages_of("maxrl", [[1, 0, 0, 0], [0, 0, 0, 0]]).tolist() == [[3, -1, -1, -1], [0, 0, 0, 0]]
    with pytest.raises(ValueError, match="maxrl divides by the mean reward and got one of -1"):
        advantages_of("maxrl", [[1.0, -1.0]])


def test_gpg_makes_up_for_groups_that_are_rewarded_alike() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 3.0]]
    expected = 12 / 8 * (np.array(rewards) - np.mean(rewards, axis=1, keepdims=True))
    assert advantages_of("gpg", rewards).tolist() == expected.tolist()
    assert not advantages_of("gpg", [[1.0, 1.0]]).any()
    partly = advantages_of("gpg", [[1.0, 0.0, np.nan], [2.0, 2.0, 2.0]])
    assert partly.tolist() == [[0.5 * 5 / 2, -0.5 * 5 / 2, 0.0], [0.0, 0.0, 0.0]]


def test_opo_has_the_baseline_of_least_variance_where_gradients_grow_with_length() -> None:
    """Minimised over b: sum l (r - b)^2, the variance if the squared norm of a score is its length."""
    random = np.random.default_rng(1)
    rewards, lengths = random.normal(size=(3, 5)), random.integers(1, 90, (3, 5))
    found = advantages_of("opo", rewards, lengths=lengths)
    for p in range(3):
        baseline = torch.zeros((), dtype=torch.float64, requires_grad=True)
        squares = torch.tensor(lengths[p]) * (torch.tensor(rewards[p]) - baseline) ** 2
        (slope,) = torch.autograd.grad(squares.sum(), baseline)
        best = -slope.item() / (2 * lengths[p].sum())  # Newton's step, exact on a parabola
        assert found[p].tolist() == pytest.approx((rewards[p] - best).tolist(), abs=1e-6)
    unscored = advantages_of("opo", [[1.0, np.nan, 0.0]], lengths=[[3, 50, 1]])
    assert unscored.tolist() == [[0.25, 0.0, -0.75]]
    assert not advantages_of("opo", [[1.0, 1.0]], lengths=[[3, 4]]).any()


def test_remax_compares_with_the_greedy_completion_alone() -> None:
    rewards, penalties = [[1.0, 0.0], [0.5, np.nan], [1.0, 1.0]], [[0.25, 0.0], [0.0, 0.0], [0.0, 0.0]]
    found = advantages_of("remax", rewards, greedy=[0.5, 1.0, np.nan], penalties=penalties)
    assert found.tolist() == [[0.25, -0.5], [-0.5, 0.0], [0.0, 0.0]]


def test_grpo_passk_credits_the_best_with_its_lead() -> None:
    rewards = [[0.0, 3.0, 1.0], [2.0, 2.0, 0.0], [1.0, np.nan, np.nan], [np.nan, 4.0, 1.0]]
    found = advantages_of("grpo_passk", rewards)
    expected = [[0.0, 2 / (np.std([0, 3, 1], ddof=1) + 1e-4), 0.0], [0.0] * 3, [0.0] * 3]
    expected.append([0.0, 3 / (np.std([4, 1], ddof=1) + 1e-4), 0.0])
    for ours, theirs in zip(found.tolist(), expected, strict=True):
        assert ours == pytest.approx(theirs)
