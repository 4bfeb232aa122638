"""Micro-batches by rows or tokens, padded or padding-free: the same step and the same scores."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.batches import largest_difference, samples_of, weighted_loss, weights_of
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.scores.inputs import micro_batches

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 4, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
CUTS: dict[str, dict[str, Any]] = {
    "padding free": {"padding_free": True},
    "by tokens": {"token_budget": 20},
    "by tokens, padding free": {"token_budget": 20, "padding_free": True},
    "a budget below the longest": {"token_budget": 10},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def one_step(rank: int, folder: str, num_ranks: int, settings: dict[str, Any]) -> Any:
    backend = FsdpBackend(folder, **SETTINGS | settings)
    samples = samples_of()
    mine = samples[rank * 8 // num_ranks : (rank + 1) * 8 // num_ranks]
    scores = backend.token_logps(mine, micro_batch_size=3)
    metrics = backend.step(mine, partial(weighted_loss, int(samples.target_mask.values.sum())), micro_batch_size=3)
    return scores, metrics.values(), weights_of(backend.module)


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_do_not_change_scores_or_steps(folder: str, cut: str, tmp_path: Path) -> None:
    expected_scores, expected_metrics, expected_weights = one_step(0, folder, 1, {})
    scores, metrics, weights = one_step(0, folder, 1, CUTS[cut])
    assert list(scores.offsets) == list(expected_scores.offsets)
    np.testing.assert_allclose(scores.values, expected_scores.values, atol=1e-5)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    assert largest_difference(weights, expected_weights) < 1e-6
    ranks = run_ranks(2, one_step, folder, 2, CUTS[cut], folder=tmp_path)
    joined = np.concatenate([one[0].values for one in ranks])
    np.testing.assert_allclose(joined, expected_scores.values, atol=1e-5)
    assert largest_difference(ranks[0][2], expected_weights) < 1e-6


@given(
    st.lists(st.integers(1, 30), max_size=40),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 60)),
    st.booleans(),
)
def test_every_row_is_in_one_micro_batch_and_none_exceeds_its_budget(
    lengths: list[int], size: int, budget: int | None, padding_free: bool
) -> None:
    rows = micro_batches(np.array(lengths, np.int64), size, token_budget=budget, padding_free=padding_free)
    assert sorted(int(row) for part in rows for row in part) == list(range(len(lengths)))
    for part in rows:
        tokens = sum(lengths[row] for row in part) if padding_free else len(part) * max(lengths[row] for row in part)
        assert len(part) <= size if budget is None else len(part) == 1 or tokens <= budget


def test_a_budget_fills_micro_batches() -> None:
    """Twelve rows of 8 and twelve of 2 are 120 tokens: six micro-batches of 20 hold them, and no fewer can."""
    lengths = np.array([8, 2] * 12)
    assert len(micro_batches(lengths, 1, token_budget=20, padding_free=True)) == 6
