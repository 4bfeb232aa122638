"""Entropy: the bonus, its coefficient, and the threshold of the tokens worth learning from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.losses.entropy import (
    applied_entropy_coefficient,
    clip_cov_selection,
    covariances,
    entropy_bonus,
    entropy_threshold,
    kl_cov_selection,
    next_entropy_coefficient,
)

BOUNDS = {"target": 0.5, "delta": 0.1, "minimum": 0.0, "maximum": 0.25}


def test_entropy_bonus_is_a_mean_over_the_tokens_of_the_step() -> None:
    entropy = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.arange(4)[None, :] < torch.tensor([4, 1, 0, 3, 2])[:, None]
    parts = [entropy_bonus(entropy[i:j], mask[i:j], coefficient=0.1, num_tokens=10) for i, j in [(0, 1), (1, 5)]]
    torch.testing.assert_close(sum(parts), -0.1 * entropy[mask].mean())
    sum(parts).backward()
    torch.testing.assert_close(entropy.grad, -0.01 * mask.float())


@pytest.mark.parametrize(("share", "kept"), [(0.2, [9, 8]), (0.5, [9, 8, 7, 6, 5]), (0.0, [9]), (1.0, range(10))])
def test_share_of_highest_entropy_is_kept(share: float, kept: list[int]) -> None:
    entropies = np.arange(10, dtype=np.float32)[::-1]
    assert sorted(entropies[entropies >= entropy_threshold(entropies, share)]) == sorted(kept)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(0, 12, width=32) | st.just(math.nan), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 0.9, 1.0]),
)
def test_threshold_keeps_what_torchs_quantile_keeps(entropies: list[float], share: float) -> None:
    values = torch.tensor(entropies, dtype=torch.float64)
    threshold = entropy_threshold(np.array(entropies), share)
    if values.isnan().all():
        assert threshold == math.inf
        return
    expected = torch.nanquantile(values, 1 - share).item()
    assert threshold == pytest.approx(expected, abs=1e-9, rel=1e-9)


def test_rank_beside_a_whole_one_keeps_the_token_there() -> None:
    """1 - 0.7 is 0.30000000000000004: interpolating there would ask for a little more than the fourth of eleven."""
    entropies = np.arange(11, dtype=np.float32)
    assert entropy_threshold(entropies, 0.7) == 3.0


def test_more_tokens_than_torch_quantile_takes() -> None:
    entropies = np.arange(2**24 + 1, dtype=np.float32)  # 0 .. 2^24, each exact in float32
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.from_numpy(entropies), 0.5)
    assert entropy_threshold(entropies, 0.25) == 0.75 * 2**24


def test_nothing_reaches_the_threshold_of_no_tokens() -> None:
    assert entropy_threshold(np.array([]), 0.2) == math.inf


def test_share_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got 1.5"):
        entropy_threshold(np.array([1.0]), 1.5)


def test_coefficient_climbs_while_entropy_is_low_and_falls_after() -> None:
    coefficient, seen = 0.1, []
    for entropy in (0.4, 0.5, 0.5, 0.6, 0.9, 0.9, 0.9):
        coefficient = next_entropy_coefficient(coefficient, entropy, **BOUNDS)
        seen.append(coefficient)
    assert seen == pytest.approx([0.2, 0.25, 0.25, 0.15, 0.05, 0.0, 0.0])


def test_coefficient_applies_only_at_or_below_the_target() -> None:
    applied = [applied_entropy_coefficient(0.3, entropy, target=0.5) for entropy in (None, 0.4, 0.5, 0.6)]
    assert applied == [0.0, 0.3, 0.3, 0.0]


def test_the_mean_covariance_is_that_of_all_loss_tokens() -> None:
    random = np.random.default_rng(0)
    advantages, logps = random.normal(size=40).astype(np.float32), random.normal(size=40).astype(np.float32)
    found = covariances(advantages, logps)
    assert found.mean() == pytest.approx(np.cov(advantages, logps, ddof=0)[0, 1], rel=1e-6)
    assert not len(covariances(np.zeros(0), np.zeros(0)))


def test_clip_cov_draws_its_share_between_the_bounds_and_kl_cov_takes_the_highest() -> None:
    covariance = np.array([9.0, 2.0, 1.5, 0.5, 3.0, 4.0, -7.0, 2.5, 1.0, 5.0])
    eligible = np.arange(10) != 4
    draws = [
        clip_cov_selection(covariance, eligible, ratio=0.2, lower=1.0, upper=5.0, seed=(0, step)) for step in range(40)
    ]
    assert {int(draw.sum()) for draw in draws} == {2}
    assert np.flatnonzero(np.any(draws, axis=0)).tolist() == [1, 2, 5, 7]
    assert np.array_equal(draws[3], clip_cov_selection(covariance, eligible, ratio=0.2, lower=1, upper=5, seed=(0, 3)))
    one = clip_cov_selection(covariance, eligible, ratio=1e-4, lower=1.0, upper=5.0, seed=(0,))
    assert one.sum() == 1
    assert not clip_cov_selection(covariance, eligible, ratio=0.5, lower=10.0, upper=20.0, seed=(0,)).any()
    assert np.flatnonzero(kl_cov_selection(covariance, ratio=0.3)).tolist() == [0, 5, 9]
    assert np.flatnonzero(kl_cov_selection(covariance, ratio=1e-4)).tolist() == [0]
    assert not len(kl_cov_selection(np.zeros(0), ratio=0.5))
