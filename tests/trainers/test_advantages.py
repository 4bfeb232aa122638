"""Advantages against plain loops; against TRL in tests/golden/test_losses_trl.py."""

from __future__ import annotations

import math
import statistics as stdlib
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.batch import Ragged
from trainers.metrics import Metrics
from trainers.rewards.advantages import (
    add_reward_metrics,
    add_teacher,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    sequence_kl,
    token_advantages,
)

SCORES = [1.0, 0.0, 0.5, 2.0, -1.0, -1.0, 3.0, 0.0]  # two groups of four


def table(scores: list[Any]) -> list[list[Any]]:
    """One reward function."""
    return [[score] for score in scores]


def by_hand(scores: list[float], scale: str) -> list[float]:
    advantages = []
    for start in (0, 4):
        group = scores[start : start + 4]
        divisor = {
            "group": stdlib.stdev(group) + 1e-4,  # stdev divides by n - 1
            "batch": stdlib.stdev(scores) + 1e-4,
            "none": 1.0,
        }[scale]
        advantages += [(score - sum(group) / 4) / divisor for score in group]
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_a_loop(scale: str) -> None:
    advantages, _ = group_advantages(table(SCORES), num_generations=4, scale_rewards=scale)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx(by_hand(SCORES, scale), rel=1e-6)


@pytest.mark.parametrize(("flag", "name"), [(True, "group"), (False, "none")])
def test_true_and_false_mean_group_and_none(flag: bool, name: str) -> None:
    by_flag, _ = group_advantages(table(SCORES), num_generations=4, scale_rewards=flag)
    by_name, _ = group_advantages(table(SCORES), num_generations=4, scale_rewards=name)
    assert by_flag.tolist() == by_name.tolist()


def test_standard_deviation_is_bessels_plus_the_floor() -> None:
    advantages, _ = group_advantages([[0.0], [1.0]], num_generations=2)
    assert advantages.tolist() == pytest.approx([-0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)])


def test_functions_are_weighted_then_summed() -> None:
    both = [[score, 2.0 * i] for i, score in enumerate(SCORES)]
    advantages, statistics = group_advantages(both, num_generations=4, weights_K=[0.5, -1.0])
    sums = [0.5 * score - 2.0 * i for i, score in enumerate(SCORES)]
    assert advantages.tolist() == pytest.approx(by_hand(sums, "group"), rel=1e-6)
    assert statistics.reward == pytest.approx(sum(sums) / 8)
    assert statistics.reward_std == pytest.approx(stdlib.stdev(sums))
    assert statistics.function_means.tolist() == pytest.approx([sum(SCORES) / 8, 7.0])
    assert statistics.function_stds.tolist() == pytest.approx([stdlib.stdev(SCORES), 2 * stdlib.stdev(range(8))])


def test_normalize_then_sum_gives_every_function_one_voice() -> None:
    """A function on a scale a thousand times larger counts no more: each is z-scored in its group, then the sums."""
    second = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    rewards = [[score, 1000 * other] for score, other in zip(SCORES, second, strict=True)]
    advantages, _ = group_advantages(
        rewards, num_generations=4, weights_K=[1.0, 2.0], multi_objective_aggregation="normalize_then_sum"
    )
    first_scores, second_scores = by_hand(SCORES, "group"), by_hand([1000 * other for other in second], "group")
    sums = [one + 2 * other for one, other in zip(first_scores, second_scores, strict=True)]
    mean, std = sum(sums) / 8, stdlib.stdev(sums)
    assert advantages.tolist() == pytest.approx([(total - mean) / (std + 1e-4) for total in sums], rel=1e-5)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_unscored_completion_leaves_its_group_as_if_it_were_not_there(missing: float | None) -> None:
    scores = [1.0, missing, 0.5, 2.0]
    advantages, statistics = group_advantages(table(scores), num_generations=4)
    scored = [1.0, 0.5, 2.0]
    mean, std = sum(scored) / 3, stdlib.stdev(scored)
    assert advantages[1] == 0.0
    assert advantages[[0, 2, 3]].tolist() == pytest.approx([(s - mean) / (std + 1e-4) for s in scored])
    assert statistics.reward == pytest.approx(mean)
    assert statistics.reward_std == pytest.approx(std)


def test_function_without_an_opinion_adds_nothing_to_a_scored_completion() -> None:
    rewards = [[1.0, None], [None, 3.0], [0.0, 1.0], [2.0, 0.0]]
    advantages, statistics = group_advantages(rewards, num_generations=4)
    expected, _ = group_advantages(table([1.0, 3.0, 1.0, 2.0]), num_generations=4)
    assert advantages.tolist() == expected.tolist()
    assert statistics.function_means.tolist() == pytest.approx([1.0, 4 / 3])


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_with_one_scored_completion_teaches_nothing(scale: str, aggregation: str) -> None:
    scores = [5.0, None, None, None, 1.0, 1.0, 1.0, 1.0]
    advantages, _ = group_advantages(
        table(scores), num_generations=4, scale_rewards=scale, multi_objective_aggregation=aggregation
    )
    assert advantages.tolist() == [0.0] * 8


@pytest.mark.parametrize(("scale", "expected"), [("group", 0.5), ("none", 0.5), ("batch", 0.0)])
def test_share_of_completions_without_a_spread(scale: str, expected: float) -> None:
    scores = [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 0.0]
    advantages, statistics = group_advantages(table(scores), num_generations=4, scale_rewards=scale)
    assert statistics.frac_reward_zero_std == expected
    assert advantages[:4].tolist() == [0.0] * 4


def test_single_generations_have_no_advantage() -> None:
    advantages, _ = group_advantages(table([1.0, 2.0, 3.0]), num_generations=1)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("num_generations", [3, 7, 8])
@given(reward=st.floats(-1e3, 1e3), other=st.floats(-1e3, 1e3))
@settings(max_examples=60, deadline=None)
def test_equal_rewards_of_a_group_teach_exactly_nothing(num_generations: int, reward: float, other: float) -> None:
    """Also those whose sum no binary number is; one rounded to 1e-13 would count among what clipping could touch."""
    rewards = np.array([[reward, 0.1 * reward]] * num_generations + [[other, 1.0]] * num_generations)
    alike: dict[str, Any] = {"num_generations": num_generations, "weights_K": [1.0, 0.3]}
    for advantages, _ in (
        *(group_advantages(rewards, **alike, scale_rewards=scale) for scale in ("group", "batch", "none")),
        group_advantages(rewards, **alike, multi_objective_aggregation="normalize_then_sum"),
        leave_one_out_advantages(rewards, **alike),
        batch_advantages(rewards, **alike),
    ):
        assert not advantages.any()
    of_one_value = np.full((2 * num_generations, 1), reward)
    normalized, _ = leave_one_out_advantages(of_one_value, num_generations=num_generations, normalize_advantages=True)
    logps = Ragged.of([[-1.0] * 3] * 2 * num_generations, np.float32)
    tokens, _ = token_advantages(of_one_value, logps, None, beta=0.0)
    assert not normalized.any()
    assert not tokens.values.any()


def test_nothing_scored_is_reported_as_nothing_and_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advantages, statistics = group_advantages([[None, 1.0], [None, 0.0]], num_generations=2)
        empty, nothing = group_advantages(np.zeros((0, 2)), num_generations=2)
    metrics = Metrics()
    add_reward_metrics(metrics, statistics, ["silent", "loud"])
    add_reward_metrics(metrics, nothing, ["silent", "loud"])
    assert metrics.values() == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": math.sqrt(0.5),
            "frac_reward_zero_std": 0.0,
            "rewards/loud/mean": 0.5,
            "rewards/loud/std": math.sqrt(0.5),
        }
    )
    assert len(advantages) == 2
    assert len(empty) == 0


@settings(deadline=None, max_examples=50)
@given(
    groups=st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=5),
    shift=st.floats(-10, 10),
)
def test_advantages_of_a_group_sum_to_zero_and_ignore_a_shift_of_rewards(
    groups: list[list[float]], shift: float
) -> None:
    rewards = np.array(groups).reshape(-1, 1)
    advantages, _ = group_advantages(rewards, num_generations=4)
    shifted, _ = group_advantages(rewards + shift, num_generations=4)
    np.testing.assert_allclose(advantages.reshape(-1, 4).sum(1), 0.0, atol=1e-5)
    np.testing.assert_allclose(shifted, advantages, atol=1e-5)


@pytest.mark.parametrize(
    ("rewards", "options", "words"),
    [
        (table(SCORES), {"num_generations": 3}, "8 completions do not fill groups of num_generations=3"),
        (SCORES, {"num_generations": 4}, r"a table \(completions, reward functions\), got an array of shape \(8,\)"),
        (table(SCORES), {"num_generations": 4, "weights_K": [1.0, 1.0]}, "1 reward functions, but 2 reward weights"),
        ([[0.0], [math.inf]], {"num_generations": 2}, "reward function 0 gave inf for completion 1"),
        (table(SCORES), {"num_generations": 4, "scale_rewards": "global"}, "one of group, batch, none, got 'global'"),
        (
            table(SCORES),
            {"num_generations": 4, "multi_objective_aggregation": "sum"},
            "multi_objective_aggregation must be one of sum_then_normalize, normalize_then_sum, got 'sum'",
        ),
    ],
)
def test_mistakes_are_named(rewards: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, **options)


def ragged(*rows: list[float], dtype: Any = np.float32) -> Ragged:
    return Ragged.of(rows, dtype)


def test_penalties_come_before_everything_else() -> None:
    """A KL in the reward is as if the reward functions had been that much stricter; what is logged is the reward."""
    penalties = np.array([0.1, 0.0, -0.2, 0.5, 0.0, 0.3, 0.3, 1.0])
    stricter = [score - penalty for score, penalty in zip(SCORES, penalties, strict=True)]
    for scale in ("group", "batch", "none"):
        advantages, statistics = group_advantages(
            table(SCORES), num_generations=4, scale_rewards=scale, penalties_B=penalties
        )
        assert advantages.tolist() == pytest.approx(by_hand(stricter, scale), rel=1e-6)
        assert statistics.reward == pytest.approx(sum(SCORES) / 8)
    expected, _ = leave_one_out_advantages(table(stricter), num_generations=4)
    advantages, _ = leave_one_out_advantages(table(SCORES), num_generations=4, penalties_B=penalties)
    assert advantages.tolist() == pytest.approx(expected.tolist())
    expected, _ = batch_advantages(table(stricter), num_generations=4)
    advantages, _ = batch_advantages(table(SCORES), num_generations=4, penalties_B=penalties)
    assert advantages.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("clip_range", [None, (0.0, 1.5)])
def test_leave_one_out_equals_a_loop(normalize: bool, clip_range: tuple[float, float] | None) -> None:
    low, high = clip_range or (-math.inf, math.inf)
    clipped = [min(max(score, low), high) for score in SCORES]
    expected = []
    for i, score in enumerate(clipped):
        others = [clipped[j] for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i]
        expected.append(score - sum(others) / 3)
    if normalize:
        mean, std = sum(expected) / 8, stdlib.stdev(expected)
        expected = [(advantage - mean) / (std + 1e-4) for advantage in expected]
    advantages, statistics = leave_one_out_advantages(
        table(SCORES), num_generations=4, reward_clip_range=clip_range, normalize_advantages=normalize
    )
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert statistics.reward == pytest.approx(sum(SCORES) / 8)


def test_leave_one_out_is_the_group_mean_scaled_up() -> None:
    """r - mean of the others = G / (G - 1) x (r - mean of the group)."""
    others, _ = leave_one_out_advantages(table(SCORES), num_generations=4)
    group, _ = group_advantages(table(SCORES), num_generations=4, scale_rewards="none")
    np.testing.assert_allclose(others, group * 4 / 3, rtol=1e-6)


def test_leave_one_out_averages_scored_siblings_and_a_lone_one_learns_nothing() -> None:
    scores = [1.0, None, 0.0, 2.0, None, None, 5.0, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advantages, _ = leave_one_out_advantages(table(scores), num_generations=4)
    assert advantages.tolist() == [0.0, 0.0, -1.5, 1.5, 0.0, 0.0, 0.0, 0.0]


def test_batch_advantages_divide_by_the_spread_that_is_left_within_groups() -> None:
    """An easy and a hard prompt with the same spread: GRPO's batch scaling sees their distance, this does not."""
    scores = [0.0, 1.0, 0.0, 1.0, 100.0, 101.0, 100.0, 101.0]
    advantages, _ = batch_advantages(table(scores), num_generations=4)
    std = stdlib.stdev([-0.5, 0.5] * 4)
    assert advantages.tolist() == pytest.approx([-0.5 / (std + 1e-4), 0.5 / (std + 1e-4)] * 4)
    by_rewards, _ = group_advantages(table(scores), num_generations=4, scale_rewards="batch")
    assert abs(by_rewards).max() == pytest.approx(0.5 / (stdlib.stdev(scores) + 1e-4))


def test_batch_advantages_leave_unscored_completions_out() -> None:
    advantages, _ = batch_advantages(table([1.0, None, 0.0, 2.0, None, None, 5.0, None]), num_generations=4)
    deviations = [0.0, -1.0, 1.0, 0.0]  # the lone one of the second group equals its mean
    std = stdlib.stdev(deviations)
    assert advantages.tolist() == pytest.approx([0.0, 0.0, -1 / (std + 1e-4), 1 / (std + 1e-4), 0, 0, 0, 0])


OLD = [[-1.0, -2.0, -0.5], [-0.3], [], [-1.5, -0.2]]
REF = [[-1.2, -1.9, -0.9], [-0.3], [], [-1.0, -0.4]]
COUNTED = [[True, True, False], [True], [], [True, True]]


def test_sequence_kl_sums_the_tokens_that_count() -> None:
    old, ref = ragged(*OLD), ragged(*REF)
    assert sequence_kl(old, ref).tolist() == pytest.approx([0.2 - 0.1 + 0.4, 0.0, 0.0, -0.5 + 0.2], abs=1e-6)
    kl = sequence_kl(old, ref, ragged(*COUNTED, dtype=bool))
    assert kl.tolist() == pytest.approx([0.2 - 0.1, 0.0, 0.0, -0.5 + 0.2], abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_token_advantages_equal_a_loop(beta: float) -> None:
    """The reward at the end, the KL on the way: each token answers for what comes from it on."""
    scores = [1.0, 0.0, 3.0, -1.0]
    returns = []
    for i, score in enumerate(scores):
        for t, counts in enumerate(COUNTED[i]):
            if counts:
                ahead = [s for s in range(t, len(OLD[i])) if COUNTED[i][s]]
                returns.append(score - beta * sum(OLD[i][s] - REF[i][s] for s in ahead))
    mean, std = sum(returns) / len(returns), stdlib.stdev(returns)
    expected = [(value - mean) / (std + 1e-4) for value in returns]

    advantages, statistics = token_advantages(
        table(scores), ragged(*OLD), ragged(*REF), beta=beta, loss_mask=ragged(*COUNTED, dtype=bool)
    )

    assert advantages.dtype == np.float32
    assert advantages.lengths.tolist() == [3, 1, 0, 2]
    assert advantages.values[[0, 1, 3, 4, 5]].tolist() == pytest.approx(expected, rel=1e-5)
    assert advantages.values[2] == 0.0
    assert statistics.reward == pytest.approx(0.75)


def test_unscored_completion_enters_no_token_advantage() -> None:
    with_it, _ = token_advantages(table([1.0, None, 3.0, -1.0]), ragged(*OLD), ragged(*REF), beta=0.1)
    three = [0, 2, 3]
    without, _ = token_advantages(
        table([1.0, 3.0, -1.0]), ragged(*(OLD[i] for i in three)), ragged(*(REF[i] for i in three)), beta=0.1
    )
    assert with_it[1].tolist() == [0.0]
    np.testing.assert_allclose(with_it[np.array(three)].values, without.values, rtol=1e-6)


def test_what_the_mask_leaves_out_may_be_nan() -> None:
    old = [[-1.0, -2.0, math.nan], *OLD[1:]]
    mask = ragged(*COUNTED, dtype=bool)
    advantages, _ = token_advantages(table([1.0, 0, 0, 0]), ragged(*old), ragged(*REF), beta=0.5, loss_mask=mask)
    assert np.isfinite(advantages.values).all()
    assert np.isfinite(sequence_kl(ragged(*old), ragged(*REF), mask)).all()


def test_teacher_adds_its_log_ratio_to_every_token() -> None:
    base = np.array([1.0, -1.0, 0.0, 2.0], np.float32)
    once = add_teacher(base, ragged(*REF), ragged(*OLD), teacher_kl_coef=0.5)
    assert once.dtype == np.float32
    assert once.values.tolist() == pytest.approx([0.9, 1.05, 0.8, -1.0, 2.25, 1.9])
    twice = add_teacher(once, ragged(*REF), ragged(*OLD), teacher_kl_coef=0.5)
    assert twice.values.tolist() == pytest.approx([0.8, 1.1, 0.6, -1.0, 2.5, 1.8])


def test_rows_that_do_not_fit_are_named() -> None:
    short = ragged([0.0], [0.0], [], [0.0])
    with pytest.raises(ValueError, match="ref_logps must have the rows of old_logps: 4 rows of 6 tokens, got 4 of 3"):
        sequence_kl(ragged(*OLD), short)
    with pytest.raises(ValueError, match="teacher_logps must have the rows"):
        add_teacher(np.zeros(4), short, ragged(*OLD), teacher_kl_coef=1.0)
    with pytest.raises(ValueError, match="rewards of 3 completions, but log-probabilities of 4"):
        token_advantages(table([1.0, 2.0, 3.0]), ragged(*OLD), None, beta=0.0)
    with pytest.raises(ValueError, match=r"needs ref_logps; pass them, or set beta=0\.0"):
        token_advantages(table([1.0, 2.0, 3.0, 4.0]), ragged(*OLD), None, beta=0.1)
    with pytest.raises(ValueError, match=r"penalties_B must hold one value per completion \(8\), got \(2,\)"):
        group_advantages(table(SCORES), num_generations=4, penalties_B=np.zeros(2))
    with pytest.raises(ValueError, match="which normalize_then_sum does not"):
        group_advantages(
            table(SCORES),
            num_generations=4,
            multi_objective_aggregation="normalize_then_sum",
            penalties_B=np.zeros(8),
        )
