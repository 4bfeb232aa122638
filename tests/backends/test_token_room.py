"""``token_budget: auto``: the first micro-batch of the first step says how large the others are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.backends.batches import largest_difference, samples_of, weighted_loss, weights_of
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.token_room import ENOUGH, MOST_LOOKS, SHARE, STATES, TELLING, ScoringRoom, TokenRoom

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 10, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
KEPT = 1000  # bytes a token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


class Room(TokenRoom):
    """Memory of so many bytes, of which every pass keeps ``fixed``, and ``KEPT`` a token."""

    def __init__(self, backend: Any, free: float, fixed: int = 0) -> None:
        super().__init__(backend.module, torch.device("cpu"))
        self.bytes, self.fixed = free, fixed
        self.kept = 0
        self.passed: list[int] = []

    def before(self) -> None:
        self.kept = 0
        super().before()

    def budget(self, num_tokens: int) -> int:
        self.passed.append(num_tokens)
        self.kept = self.fixed + KEPT * num_tokens
        return super().budget(num_tokens)

    def allocated(self) -> int:
        return 5000 + self.kept

    def free(self) -> int:
        return int(self.bytes)


def needed(backend: Any, num_tokens: float) -> float:
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
    room = backend.room = Room(backend, needed(backend, 10_000))
    with caplog.at_level(logging.INFO):
        sizes = two_steps(backend)
        sizes += two_steps(backend)
    lengths = samples_of().row_lengths()
    assert sizes == [2, len(lengths) - 2, *[len(lengths)] * 3]
    assert len(small) > 4
    assert backend.token_budget == 10_000
    assert room.passed[0] == int(lengths[:2].sum() if padding_free else 2 * lengths[:2].max())
    assert caplog.text.count("token_budget: 10000") == 1
    two_steps(fixed)
    assert largest_difference(weights_of(fixed.module), weights_of(backend.module)) < 1e-6


def test_small_passes_are_measured_again_and_a_large_one_ends_it(folder: str) -> None:
    """A few tokens beside gathered weights would say that a token keeps much."""
    backend = FsdpBackend(folder, **SETTINGS)
    room = Room(backend, needed(backend, 10_000), fixed=1_000_000)
    found = []
    for num_tokens in (100, 1000, TELLING):
        assert not room.is_known
        room.before()
        found.append(room.budget(num_tokens))
    assert found == [909, 5000, 8037]
    assert room.is_known
    room = Room(backend, needed(backend, 10_000))
    for _ in range(MOST_LOOKS):
        assert not room.is_known
        room.before()
        room.budget(100)
    assert room.is_known


def test_a_budget_is_at_most_what_gains_and_at_least_what_went_well(folder: str) -> None:
    backend = FsdpBackend(folder, **SETTINGS)
    for num_tokens, budget in ((ENOUGH * 9, ENOUGH), (4321, 4321), (0, 70), (-1e9, 70)):
        room = Room(backend, needed(backend, num_tokens))
        room.before()
        assert room.budget(70) == budget
    assert room.budget(0) == ENOUGH, "a rank without rows leaves it to the others"


class Scoring(ScoringRoom):
    """On a device with so many free bytes."""

    bytes = 0

    def free(self) -> int:
        return self.bytes


def test_a_pass_that_scores_has_what_the_widest_layer_leaves_room_for(folder: str) -> None:
    backend = FsdpBackend(folder, token_budget="auto", **SETTINGS)
    assert backend.scoring_room is None, "on a CPU there is nothing to gain"
    rows = backend.token_logps(samples_of().as_sequences(), micro_batch_size=2)
    room = Scoring(500, backend.device)
    for free, budget in ((10**12, ENOUGH), (500 * 10_000 / SHARE, 10_000), (500 * TELLING / SHARE - 2000, None)):
        room.bytes = int(free)
        assert room.budget() == budget
        backend.scoring_room = room
        found = backend.token_logps(samples_of().as_sequences(), micro_batch_size=2)
        assert found.values == pytest.approx(rows.values, abs=1e-5)
    gpu = ScoringRoom.of(backend.module, torch.device("cuda"), torch.bfloat16)
    assert gpu is not None
    assert 500 < gpu.token_bytes < 10_000, "one layer of hidden 64"
