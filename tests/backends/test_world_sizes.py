"""Data-parallel ranks give the step of one process: uneven slices, empty ones, other numbers of micro-batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.backends.batches import largest_difference, mean_loss, packed, samples_of, weighted_loss, weights_of
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.metrics import Metrics

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_training_steps": 4,
    "adam_epsilon": 1e-4,  # see test_step.py
    "max_grad_norm": 0.1,
    "weight_decay": 0.1,
}
CUTS = {1: [0, 8], 2: [0, 5, 8], 4: [0, 4, 5, 5, 8]}  # of eight samples; the third rank of four has none
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one by one": (1, {}),
    "three at once": (3, {}),
    "all at once": (8, {}),
    "checkpointing": (3, {"gradient_checkpointing": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


Steps = dict[str, tuple[dict[str, torch.Tensor], list[Metrics]]]


def two_steps(rank: int, folder: str, cuts: list[int]) -> Steps:
    """Weights and metrics of one rank after two steps, by case."""
    results = {}
    for name, (micro_batch_size, settings) in CASES.items():
        backend = FsdpBackend(folder, **SETTINGS | settings)
        metrics = []
        for step in range(2):
            samples = samples_of(seed=step)
            loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
            mine = samples[cuts[rank] : cuts[rank + 1]]
            metrics.append(backend.step(mine, loss, micro_batch_size=micro_batch_size))
        results[name] = (weights_of(backend.module), metrics)
    return results


@pytest.fixture(scope="module")
def one_process(folder: str) -> Steps:
    return two_steps(0, folder, CUTS[1])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_take_the_step_of_one_process(folder: str, one_process: Steps, num_ranks: int, tmp_path: Path) -> None:
    ranks = run_ranks(num_ranks, two_steps, folder, CUTS[num_ranks], folder=tmp_path)
    expected_weights, expected_metrics = one_process["all at once"]
    for case in CASES:
        for result in ranks:
            assert largest_difference(result[case][0], expected_weights) < 1e-6
            assert largest_difference(result[case][0], ranks[0][case][0]) == 0.0
        for step, expected in enumerate(expected_metrics):
            values = Metrics.merge([result[case][1][step] for result in ranks]).values()
            assert values == pytest.approx(expected.values(), abs=1e-5)
            assert values["grad_norm"] > 0.1, "the limit must bite"
    assert largest_difference(expected_weights, weights_of(FsdpBackend(folder).module)) > 1e-4


def packed_step(rank: int, folder: str, rows: list[slice]) -> tuple[dict[str, torch.Tensor], list[int]]:
    together = packed(samples_of(), [[0, 1, 2], [3], [4, 5, 6, 7]])
    backend = FsdpBackend(folder, **SETTINGS)
    mine = together[rows[rank]]
    backend.step(mine, partial(mean_loss, int(together.target_mask.values.sum())), micro_batch_size=1)
    return weights_of(backend.module), list(backend.token_logps(mine, micro_batch_size=2).lengths)


def test_packed_rows_may_be_uneven_too(folder: str, tmp_path: Path) -> None:
    alone, _ = packed_step(0, folder, [slice(0, 3)])
    ranks = run_ranks(3, packed_step, folder, [slice(0, 2), slice(2, 2), slice(2, 3)], folder=tmp_path)
    for weights, _ in ranks:
        assert largest_difference(weights, alone) < 1e-6
    assert [len(lengths) for _, lengths in ranks] == [2, 0, 1]


def count_reductions(rank: int, folder: str) -> list[int]:
    """How often each of two steps reduced gradients over the ranks, with one micro-batch and with four."""
    counts = []
    for micro_batch_size in (4, 1):
        backend = FsdpBackend(folder, **SETTINGS)
        seen: list[int] = []
        backend.forward.register_comm_hook(seen, _counted)
        for _ in range(2):
            mine = samples_of()[rank * 4 : rank * 4 + 4]
            backend.step(mine, partial(weighted_loss, 50), micro_batch_size=micro_batch_size)
        counts.append(len(seen))
    return counts


def _counted(seen, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    seen.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def test_gradients_travel_once_a_step_however_many_micro_batches_it_has(folder: str, tmp_path: Path) -> None:
    for with_one, with_four in run_ranks(2, count_reductions, folder, folder=tmp_path):
        assert with_one == with_four > 0


def score_on_one_rank(rank: int, folder: str) -> np.ndarray | None:
    backend = FsdpBackend(folder, **SETTINGS)
    return backend.token_logps(samples_of(), micro_batch_size=3).values if rank == 1 else None


def test_one_rank_may_score_alone(folder: str, tmp_path: Path) -> None:
    nothing, logps = run_ranks(2, score_on_one_rank, folder, folder=tmp_path)
    assert nothing is None
    np.testing.assert_array_equal(logps, score_on_one_rank(1, folder))


def resume(rank: int, folder: str, checkpoint: Path) -> tuple[list[Any], list[Any], list[str]]:
    """What two further steps gave before and after a checkpoint was loaded by fresh backends."""

    def steps(backend: FsdpBackend, start: int) -> list[Any]:
        losses: list[Any] = []
        for step in (start, start + 1):
            samples = samples_of(seed=step)[rank * 4 : rank * 4 + 4]
            losses.append(backend.step(samples, partial(mean_loss, 50), micro_batch_size=2).values())
        return losses

    settings = SETTINGS | {"disable_dropout": False, "model_init_kwargs": {"attention_dropout": 0.3}}
    first = FsdpBackend(folder, **settings)
    torch.manual_seed(rank)
    steps(first, 0)
    first.save(checkpoint)
    files = sorted(file.name for file in checkpoint.iterdir())
    expected = [*steps(first, 2), *(weight.tolist() for weight in weights_of(first.module).values())]
    second = FsdpBackend(folder, **settings)
    second.load(checkpoint)
    found = [*steps(second, 2), *(weight.tolist() for weight in weights_of(second.module).values())]
    return expected, found, files


def test_ranks_resume_bit_for_bit_each_with_its_own_dropout(folder: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, resume, folder, tmp_path / "checkpoint", folder=tmp_path)
    for expected, found, files in ranks:
        assert found == expected
        assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "scheduler.pt"} <= set(files)


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("out of cheese")
    dist.barrier()


def test_a_failing_rank_reports_its_traceback_and_its_siblings_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:[\s\S]*fail_on_one[\s\S]*out of cheese"):
        run_ranks(2, fail_on_one, folder=tmp_path)
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []


def wait_for_nobody(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    dist.barrier()


def test_ranks_that_wait_for_ever_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"did not finish in time|failed"):
        run_ranks(2, wait_for_nobody, folder=tmp_path, timeout_s=3.0)
