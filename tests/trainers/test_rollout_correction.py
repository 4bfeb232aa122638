"""Importance ratios between engine and old policy against loops, and the mask of what is too far off policy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from trainers.batch import Ragged, Samples
from trainers.grpo.config import GRPOConfig
from trainers.grpo.loss import StepNumbers, grpo_loss
from trainers.losses.rollout_correction import accepted_tokens, add_rollout_metrics, off_policy_mask, rollout_ratios
from trainers.losses.types import RolloutCorrection, RolloutRejection
from trainers.metrics import Metrics

MODES = list(get_args(RolloutCorrection))
LENGTHS = [3, 1, 0, 2]
UNKNOWN = (0, 1)  # a token whose log-probability the engine does not know


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(4, 3, generator=generator)
    rollout = old + 0.8 * torch.randn(4, 3, generator=generator)
    rollout[UNKNOWN] = math.nan
    return {
        "old_logps_BT": old,
        "rollout_logps_BT": rollout,
        "mask_BT": torch.arange(3)[None, :] < torch.tensor(LENGTHS)[:, None],
    }


def differences(columns: dict[str, torch.Tensor]) -> list[list[float]]:
    return [
        [(columns["old_logps_BT"][i, t] - columns["rollout_logps_BT"][i, t]).item() for t in range(length)]
        for i, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(("clip_min", "clip_max"), [(None, 1.5), (0.8, 1.5), (None, None), (0.9, None)])
@pytest.mark.parametrize("mode", MODES)
def test_ratios_and_their_metrics_equal_a_loop(mode: str, clip_min: float | None, clip_max: float | None) -> None:
    columns = batch()
    ratios, diagnostics = rollout_ratios(**columns, mode=mode, clip_min=clip_min, clip_max=clip_max)

    known = [[0.0 if math.isnan(d) else d for d in row] for row in differences(columns)]
    if mode.startswith("sequence"):
        known = [[sum(row)] for row in known]
    if mode.startswith("geometric"):
        num_scored = [sum(not math.isnan(d) for d in row) for row in differences(columns)]
        known = [[sum(row) / max(count, 1)] for row, count in zip(known, num_scored, strict=True)]
    low, high = clip_min or 0.0, clip_max or math.inf
    expected = []
    for row in known:
        raw = [math.exp(d) for d in row]
        if mode.endswith("truncate"):
            expected.append([min(max(ratio, low), high) for ratio in raw])
        else:
            expected.append([ratio if low <= ratio <= high else 0.0 for ratio in raw])

    for i, row in enumerate(expected):
        assert ratios[i, : len(row)].tolist() == pytest.approx(row)
    counted = [ratio for row, length in zip(expected, LENGTHS, strict=True) if length for ratio in row]
    distances = [abs(d) for row in differences(columns) for d in row if not math.isnan(d)]
    metrics = Metrics()
    add_rollout_metrics(metrics, diagnostics)
    assert metrics.values() == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": sum(distances) / len(distances),
            "sampling/sampling_logp_difference/max": max(distances),
            "sampling/importance_sampling_ratio/min": min(counted),
            "sampling/importance_sampling_ratio/mean": sum(counted) / len(counted),
            "sampling/importance_sampling_ratio/max": max(counted),
        }
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_outside_the_mask_changes_nothing(mode: str) -> None:
    columns = batch()
    expected, _ = rollout_ratios(**columns, mode=mode)
    for poison in (math.nan, math.inf, -math.inf):
        poisoned = {
            name: column.masked_fill(~columns["mask_BT"], poison) if column.is_floating_point() else column
            for name, column in columns.items()
        }
        assert torch.equal(rollout_ratios(**poisoned, mode=mode)[0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_metrics_of_micro_batches_join_into_those_of_the_whole(mode: str) -> None:
    columns = batch()
    parts = []
    for i, j in [(0, 4), (0, 1), (1, 1), (1, 3), (3, 4)]:
        metrics = Metrics()
        part = {name: column[i:j] for name, column in columns.items()}
        add_rollout_metrics(metrics, rollout_ratios(**part, mode=mode)[1])
        parts.append(metrics)
    assert Metrics.merge(parts[1:]).values() == pytest.approx(parts[0].values(), rel=1e-5)


def test_same_engine_and_policy_change_nothing() -> None:
    columns = batch()
    columns["rollout_logps_BT"] = columns["old_logps_BT"]
    for mode in MODES:
        assert (rollout_ratios(**columns, mode=mode)[0] == 1).all()


def test_token_that_the_engine_calls_impossible_is_bounded_or_left_out() -> None:
    columns = batch()
    columns["rollout_logps_BT"][1, 0] = -math.inf
    for mode, expected in zip(MODES, [3.0, 0.0, 3.0, 0.0, 3.0, 0.0], strict=True):
        assert rollout_ratios(**columns, mode=mode)[0][1, 0].item() == expected


def test_long_completion_of_small_differences_is_far_off_as_a_sequence() -> None:
    """A hundredth of a nat a token is nothing to a token, and e^10 to a completion of a thousand."""
    old, rollout = torch.full((1, 1000), -1.0), torch.full((1, 1000), -1.01)
    columns = {"old_logps_BT": old, "rollout_logps_BT": rollout, "mask_BT": torch.ones(1, 1000, dtype=torch.bool)}
    by_token, _ = rollout_ratios(**columns, mode="token_mask")
    by_sequence, _ = rollout_ratios(**columns, mode="sequence_mask")
    torch.testing.assert_close(by_token, torch.full((1, 1000), math.exp(0.01)))
    assert by_sequence.item() == 0.0
    by_mean, _ = rollout_ratios(**columns, mode="geometric_mask", clip_min=0.98, clip_max=1.02)
    assert by_mean.item() == pytest.approx(math.exp(0.01))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "group_mask"}, "mode must be one of token_truncate, token_mask, sequence_truncate, sequence_mask"),
        ({"mode": "token_mask", "clip_min": 2.0, "clip_max": 1.0}, "clip_min=2.0 is above clip_max=1.0"),
        ({"mode": "token_mask", "old_logps_BT": torch.zeros(4, 2)}, "old_logps_BT must have the mask's shape"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rollout_ratios(**{**batch(), **options})


def test_only_what_is_bad_and_has_moved_away_is_left_out() -> None:
    """The mean distance over the loss tokens of a sequence counts; a token without one counts as not moved."""
    rollout = torch.tensor([[0.4, 0.8], [0.4, 0.8], [0.4, 9.0], [math.nan, 0.8], [0.0, 0.0]])
    kept = off_policy_mask(
        torch.zeros(5, 2),
        rollout,
        torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0]),
        torch.tensor([[True, True], [True, True], [True, False], [True, True], [False, False]]),
        threshold=0.5,
    )
    assert kept.tolist() == [[False], [True], [True], [True], [True]]


def test_token_advantages_are_judged_one_by_one() -> None:
    kept = off_policy_mask(
        torch.zeros(1, 2),
        torch.ones(1, 2),
        torch.tensor([[1.0, -1.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        threshold=0.5,
    )
    assert kept.tolist() == [[True, False]]


@pytest.mark.parametrize("statistic", get_args(RolloutRejection))
def test_what_is_accepted_equals_a_loop(statistic: str) -> None:
    random = np.random.default_rng(7)
    lengths = np.array([5, 1, 0, 4, 6, 3])
    old = Ragged.split(random.normal(-2, 1, lengths.sum()).astype(np.float32), lengths)
    engine = Ragged.split((old.values + random.normal(0, 0.5, lengths.sum())).astype(np.float32), lengths)
    engine.values[[2, 5, 12]] = math.nan
    mask = Ragged.split(random.random(lengths.sum()) < 0.8, lengths)
    level, _, kind = statistic.rpartition("_")
    low, high = (0.7, 1.6) if kind == "k1" else (None, 0.1)
    found = accepted_tokens(old, engine, mask, statistic=statistic, high=high, low=low)
    share = []
    for o, e, m, kept in zip(old, engine, mask, found, strict=True):
        gaps = [float(a) - float(b) for a, b in zip(o, e, strict=True)]
        numbers = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
        values = [numbers[kind](d) for d in gaps]
        known = [v for v, counted in zip(values, m, strict=True) if counted and not math.isnan(v)]
        whole = {"sequence_sum": sum(known), "sequence_mean": sum(known) / max(len(known), 1)}
        whole["sequence_max"] = max(known, default=0.0)
        for t, value in enumerate(values):
            number = value if level == "token" else whole[level]
            bounded = math.isnan(number) or (low <= math.exp(number) <= high if kind == "k1" else number <= high)
            assert kept[t] == (m[t] and bounded), (statistic, t)
            share.append(kept[t] != m[t])
    assert 0 < sum(share) < len(share)


def test_the_geometric_mean_rejects_what_drifts_and_not_what_is_long() -> None:
    """A thousand tokens of a hundredth of a nat stay; three of half a nat go; bounds default to 1 / high."""
    old = Ragged.split(np.zeros(1003, np.float32), [1000, 3])
    engine = Ragged.split(np.concatenate([np.full(1000, -0.01), np.full(3, 0.5)]).astype(np.float32), [1000, 3])
    mask = Ragged.split(np.ones(1003, bool), [1000, 3])
    mean = accepted_tokens(old, engine, mask, statistic="sequence_mean_k1", high=1.05)
    assert [bool(row.all()) for row in mean] == [True, False]
    product = accepted_tokens(old, engine, mask, statistic="sequence_sum_k1", high=5.0)
    assert [bool(row.any()) for row in product] == [False, True]
    with pytest.raises(ValueError, match="nothing lies between"):
        accepted_tokens(old, engine, mask, statistic="token_k1", high=0.5)


@pytest.mark.parametrize("has_old", [False, True])
def test_engine_and_trainer_are_compared_without_a_correction_too(has_old: bool) -> None:
    config = GRPOConfig(model="m", dataset=[{"prompt": "a"}], reward_funcs=["exact_answer"])
    assert config.rollout_correction is None
    trainers, engines = [[-1.0, -2.0], [-0.5]], [[-1.25, -2.0], [-0.25]]
    known = Ragged.of(trainers, np.float32)
    samples = Samples(
        Ragged.of([range(3), range(2)], np.int64),
        Ragged.of([[False, True, True], [False, True]], np.bool_),
        advantages=np.array([1.0, -1.0], np.float32),
        rollout_logps=Ragged.of(engines, np.float32),
        old_logps=known if has_old else None,
    )
    logps_BT = (torch.zeros(2, 2) if has_old else known.padded(0.0)).requires_grad_()
    mask_BT = torch.tensor([[True, True], [True, False]])
    metrics = Metrics()
    step = StepNumbers(3.0, 3, 0.0)
    loss = grpo_loss(config, step, logps_BT, torch.zeros(2, 2), mask_BT, samples, metrics)
    seen = metrics.values()
    assert seen["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5 / 3)
    assert seen["sampling/sampling_logp_difference/max"] == pytest.approx(0.25)
    assert seen["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(0.25))
    unseen = Metrics()
    without = dataclasses.replace(samples, rollout_logps=None)
    assert float(grpo_loss(config, step, logps_BT, torch.zeros(2, 2), mask_BT, without, unseen)) == float(loss)
    assert not [name for name in unseen.values() if name.startswith("sampling/")]
