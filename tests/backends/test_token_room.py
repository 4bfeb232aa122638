"""``token_budget: auto``: the first micro-batch of the first step says how large the others are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.backends.batches import largest_difference, samples_of, weighted_loss, weights_of
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.token_room import ENOUGH, SHARE, STATES, TokenRoom

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 10, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
KEPT = 1000  # bytes a token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


class Room(TokenRoom):
    """Memory of so many bytes, of which every pass keeps ``KEPT`` a token."""

    def __init__(self, backend: FsdpBackend, free: float, first: int) -> None:
        super().__init__(backend.module, backend.device)
        self.bytes, self.kept = free, KEPT * first
        self.looks = 0

    def allocated(self) -> int:
        self.looks += 1
        return 5000 if self.looks % 2 else 5000 + self.kept

    def free(self) -> int:
        return int(self.bytes)


def needed(backend: FsdpBackend, num_tokens: float) -> float:
    """Free bytes with which a budget has so many tokens."""
    trained = sum(weight.numel() for weight in backend.module.parameters())
    return STATES * trained + num_tokens * KEPT / SHARE + 1


def two_steps(backend: FsdpBackend) -> list[int]:
    """The sequences of every micro-batch."""
    samples, sizes = samples_of(), list[int]()

    def loss(*given: Any) -> torch.Tensor:
        sizes.append(len(given[2]))
        return weighted_loss(int(samples.target_mask.values.sum()), *given)

    for _ in range(2):
        backend.step(samples, loss, micro_batch_size=2)
    return sizes


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_rows_behind_the_first_micro_batch_are_cut_by_what_it_kept(
    folder: str, padding_free: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fixed = FsdpBackend(folder, padding_free=padding_free, **SETTINGS)
    small = two_steps(fixed)
    backend = FsdpBackend(folder, padding_free=padding_free, token_budget="auto", **SETTINGS)
    assert backend.room is None, "on a CPU there is nothing to gain"
    lengths = samples_of().row_lengths()
    first = int(lengths[:2].sum() if padding_free else 2 * lengths[:2].max())
    backend.room = Room(backend, needed(backend, 10_000), first)
    with caplog.at_level(logging.INFO):
        sizes = two_steps(backend)
    assert backend.token_budget == 10_000
    assert "token_budget: 10000" in caplog.text
    assert sizes == [2, len(lengths) - 2, len(lengths)]
    assert len(small) > len(sizes)
    assert largest_difference(weights_of(fixed.module), weights_of(backend.module)) < 1e-6


def test_a_budget_is_at_most_what_gains_and_at_least_what_went_well(folder: str) -> None:
    backend = FsdpBackend(folder, **SETTINGS)
    for num_tokens, budget in ((ENOUGH * 9, ENOUGH), (4321, 4321), (0, 70), (-1e9, 70)):
        room = Room(backend, needed(backend, num_tokens), 70)
        room.before()
        assert room.budget(70) == budget
