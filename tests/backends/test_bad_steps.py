"""A step whose loss or gradient is not finite changes nothing on any rank, and the next is as if it had not been."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import megatron_on_cpu
from tests.backends.batches import samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import save as save_megatron
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Samples
from trainers.metrics import Metrics

SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "num_training_steps": 8, "warmup_steps": 2}
BAD = 5  # the row that spoils its micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def spoiled(
    factor: float, logps_BT: Any, entropy_BT: Any, mask_BT: Any, micro: Samples, metrics: Metrics
) -> torch.Tensor:
    """The loss of a micro-batch, times ``factor`` where row ``BAD`` is in it."""
    loss = weighted_loss(40.0, logps_BT, entropy_BT, mask_BT, micro, metrics)
    assert micro.row_ids is not None
    return loss * factor if BAD in micro.row_ids else loss


def numbered() -> Samples:
    samples = samples_of()
    samples.row_ids = np.arange(len(samples))
    return samples


def three_steps(rank: int, folder: str, factors: list[float], world_size: int = 1, **settings: Any) -> Any:
    """State after the steps: weights, the optimizer's and the schedule's; the metrics of each step."""
    backend = FsdpBackend(folder, **SETTINGS | settings)
    share = np.array_split(np.arange(8), world_size)[rank]
    told = []
    for factor in factors:
        metrics = backend.step(numbered()[share], partial(spoiled, factor), micro_batch_size=2)
        told.append((metrics.values(), metrics.bad_rows))
    weights = {name: weight.clone() for name, weight in backend.named_weights()}
    assert backend.optimizer is not None
    states = [value for entries in backend.optimizer.state.values() for value in entries.values()]
    finite = all(bool(torch.as_tensor(value).isfinite().all()) for value in states)
    return weights, finite, backend.scheduler.state_dict()["last_epoch"], told


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e38])
def test_a_bad_step_changes_nothing(factor: float, folder: str) -> None:
    weights, finite, clock, told = three_steps(0, folder, [1.0, factor, 1.0])
    expected, _, expected_clock, _ = three_steps(0, folder, [1.0, 1.0])
    assert finite
    assert clock == expected_clock
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert [values.get("bad_steps") for values, _ in told] == [None, 1.0, None]
    assert told[1][1] == ([4, 5] if factor != 1e38 else [])  # then the loss is finite, and the norm is not


@pytest.mark.parametrize("sharding", ["no_shard", "full_shard"])
def test_a_bad_loss_on_one_rank_is_a_bad_step_on_both(sharding: str, folder: str, tmp_path: Path) -> None:
    run = Run2(folder, sharding)
    bad = run_ranks(2, run, [1.0, float("nan"), 1.0], folder=tmp_path)
    good = run_ranks(2, run, [1.0, 1.0], folder=tmp_path)
    for (weights, finite, clock, told), (expected, _, expected_clock, _) in zip(bad, good, strict=True):
        assert finite
        assert clock == expected_clock
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        assert [values.get("bad_steps") for values, _ in told] == [None, 1.0, None]
    assert [told[1][1] for *_, told in bad] == [[], [4, 5]]


def megatron_steps(rank: int, folder: Path, factors: list[float]) -> Any:
    """Weights, the schedule's clock and the metrics of two ranks with a slice of the rows each."""
    megatron_on_cpu.install()
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    backend = MegatronBackend(folder, settings=MegatronSettings(), **SETTINGS)
    share = np.array_split(np.arange(8), 2)[rank]
    told = []
    for factor in factors:
        metrics = backend.step(numbered()[share], partial(spoiled, factor), micro_batch_size=2)
        told.append((metrics.values(), metrics.bad_rows))
    weights = {name: weight.clone() for name, weight in backend.named_weights()}
    return weights, backend.scheduler.state_dict()["last_epoch"], told


def test_megatron_skips_the_step_too(tmp_path: Path) -> None:
    path = save_megatron("qwen3", tmp_path)
    bad = run_ranks(2, megatron_steps, path, [1.0, float("nan"), 1.0], folder=tmp_path)
    good = run_ranks(2, megatron_steps, path, [1.0, 1.0], folder=tmp_path)
    for (weights, clock, told), (expected, expected_clock, _) in zip(bad, good, strict=True):
        assert clock == expected_clock
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        assert [values.get("bad_steps") for values, _ in told] == [None, 1.0, None]
    assert [told[1][1] for *_, told in bad] == [[], [4, 5]]


class Run2:
    """``three_steps`` on each of two ranks."""

    def __init__(self, folder: str, sharding: str) -> None:
        self.folder, self.sharding = folder, sharding

    def __call__(self, rank: int, factors: list[float]) -> Any:
        return three_steps(rank, self.folder, factors, 2, sharding=self.sharding)
