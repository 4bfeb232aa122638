"""A model on a single worker: copies in a lower dtype, and passes of fixed shapes, by a capture that runs again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.batches import largest_difference, samples_of, weighted_loss
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.one_worker.low_weights import LowWeights
from trainers.backends.fsdp.one_worker.passes import MOST, Passes, passes_of, rounded
from trainers.batch import Samples

SETTINGS: dict[str, Any] = {
    **{"learning_rate": 1e-3, "num_training_steps": 10, "adam_epsilon": 1e-4, "max_grad_norm": 0.0},
    **{"padding_free": True, "sharding": "full_shard", "model_init_kwargs": {"attn_implementation": "varlen"}},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)


class RunsAgain:
    """In place of a CUDA graph: what it holds is run at the capture, and again at every replay."""

    replays = 0

    def __init__(self, function: Callable[[], object], **_: Any) -> None:
        self.function = function
        function()

    def replay(self) -> None:
        RunsAgain.replays += 1
        self.function()

    def pool(self) -> None:
        return None


def with_passes(folder: str, capture: Any = RunsAgain, **settings: Any) -> FsdpBackend:
    """In float32 throughout, so that nothing but the way of passing differs."""
    backend = FsdpBackend(folder, **SETTINGS | settings)
    backend.low = LowWeights(backend.module, torch.float32)
    backend.passes = backend.scorer.passes = Passes(backend.scorer.hidden, backend.low, capture=capture)
    return backend


def weights_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in backend.named_weights()}


def learned(backend: FsdpBackend, seeds: tuple[int, ...] = (0, 1, 2, 3)) -> list[float]:
    """The gradient norms of steps on four batches of other lengths."""
    norms = []
    for seed in seeds:
        samples = samples_of(seed=seed)
        loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
        norms.append(backend.step(samples, loss, micro_batch_size=2).values()["grad_norm"])
    return norms


def test_passes_of_fixed_shapes_learn_what_passes_of_their_own_shapes_learn(folder: str) -> None:
    plain, fixed = FsdpBackend(folder, **SETTINGS), with_passes(folder)
    RunsAgain.replays = 0
    assert learned(fixed) == pytest.approx(learned(plain), rel=1e-5)
    assert RunsAgain.replays > 8, "most passes are replays, of which each is two"
    assert largest_difference(weights_of(fixed), weights_of(plain)) < 1e-5
    assert fixed.low is not None
    assert fixed.low.total is None, "gradients are gone with the step"


def test_few_short_rows_run_in_the_shape_of_longer_ones(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last batch of an epoch; a shape takes seconds to compile and capture."""
    monkeypatch.setattr(f"{Passes.__module__}.OFTEN", 6)
    plain, fixed = FsdpBackend(folder, **SETTINGS), with_passes(folder)
    passes = fixed.passes
    assert passes is not None
    long, short = samples_of([40] * 8), samples_of([40])

    def norms(backend: FsdpBackend, samples: Samples, micro_batch_size: int) -> list[float]:
        loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
        return [backend.step(samples, loss, micro_batch_size=micro_batch_size).values()["grad_norm"] for _ in range(4)]

    num_shapes = []
    for samples, size in ((long, len(long)), (short, 1), (short, 1)):
        assert norms(fixed, samples, size) == pytest.approx(norms(plain, samples, size), rel=1e-5)
        num_shapes.append(len(passes.passes))
    assert num_shapes == [1, 1, 2], "the seventh short row gets a shape of its own"
    assert largest_difference(weights_of(fixed), weights_of(plain)) < 1e-5


def test_a_value_head_learns_by_passes_of_fixed_shapes(folder: str) -> None:
    def loss(num: int, values_BT: torch.Tensor, mask_BT: torch.Tensor, *_: Any) -> torch.Tensor:
        return (values_BT.square() * mask_BT).sum() / num

    found = []
    for make in (FsdpBackend, with_passes):
        backend = make(folder, **SETTINGS, head="value") if make is FsdpBackend else make(folder, head="value")
        for seed in (0, 1, 2):
            samples = samples_of(seed=seed)
            backend.step(samples, partial(loss, int(samples.target_mask.values.sum())), micro_batch_size=2)
        found.append(weights_of(backend))
    assert largest_difference(*found) < 1e-5


def test_passes_are_captured_only_where_each_does_the_same_as_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("trainers.backends.fsdp.backend.passes_of", lambda *_: asked.append(True))
    model = save_tiny(tmp_path)
    changes: list[dict[str, Any]] = [
        *({"cuda_graphs": False}, {"gradient_checkpointing": True}, {"neftune_noise_alpha": 5.0}),
        {"optimizer_offload": True},
    ]
    for keys in changes:
        FsdpBackend(model, **SETTINGS | keys)
        assert asked == [], keys
    FsdpBackend(model, **SETTINGS)
    assert asked == [True]


def test_a_capture_that_fails_is_told_once_and_nothing_is_lost(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(function: Callable[[], object], **_: Any) -> RunsAgain:
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for it")

    plain, failing = FsdpBackend(folder, **SETTINGS), with_passes(folder, fails)
    with caplog.at_level(logging.WARNING):
        assert learned(failing) == pytest.approx(learned(plain), rel=1e-5)
    told = [record.getMessage() for record in caplog.records if "cuda_graphs" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("(operation not permitted when stream is capturing)")
    assert largest_difference(weights_of(failing), weights_of(plain)) < 1e-5


def test_as_many_shapes_are_kept_as_there_may_be_and_none_after_an_offload(folder: str) -> None:
    backend = with_passes(folder)
    passes = backend.passes
    assert passes is not None
    for length in range(64, 64 * (MOST + 3), 64):  # each row is longer than all before
        for _ in range(2):
            backend.step(samples_of([length]), partial(weighted_loss, 50), micro_batch_size=1)
    assert len(passes.passes) == MOST
    backend.offload(model=False, optimizer=False)
    assert passes.passes == {}
    learned(backend)  # and they are made anew


def test_copies_are_those_of_the_weights_as_they_are_and_only_while_they_are_held(folder: str) -> None:
    backend = FsdpBackend(folder, **SETTINGS, dtype="bfloat16")
    low, weight = backend.low, next(iter(backend.module.parameters()))
    assert low is not None
    with torch.no_grad():
        weight.add_(1.0)
    with backend.whole_weights():
        held = next(iter(backend.module.parameters()))
        assert held.dtype == torch.bfloat16
        assert torch.equal(held, weight.bfloat16())
        with backend.whole_weights():  # in the hands of an engine, say
            assert next(iter(backend.module.parameters())) is held
    assert next(iter(backend.module.parameters())) is weight
    assert all(weight.dtype == torch.float32 for weight in weights_of(backend).values())


def test_a_weight_that_no_gradient_reaches_has_none(folder: str) -> None:
    backend = with_passes(folder)
    unused = backend.module.unused = torch.nn.Parameter(torch.ones(3))
    low = backend.low = LowWeights(backend.module, torch.float32)
    backend.passes = backend.scorer.passes = Passes(backend.scorer.hidden, low, capture=RunsAgain)
    gradients = []
    backend.optimizer.register_step_pre_hook(lambda *_: gradients.append(unused.grad))  # type: ignore[union-attr]
    learned(backend)
    assert gradients == [None] * 4, "so that the optimizer does not let it decay"


def test_graphs_are_for_gpus_and_models_that_draw_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsdpBackend(folder, **SETTINGS, dtype="bfloat16")
    assert backend.passes is None, "a CPU starts nothing"
    assert not backend.compiles_learning
    scorer, weights = backend.scorer, backend.low

    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(type(scorer), "parameters", lambda self: iter([OnGpu()]))
    assert isinstance(passes_of(scorer, weights), Passes)
    assert passes_of(scorer, None) is None, "several workers, an adapter, or float32"
    backend.module.dropout = torch.nn.Dropout(0.1)
    assert passes_of(scorer, weights) is None
    del backend.module.dropout
    backend.module.config._attn_implementation = "sdpa"
    assert passes_of(scorer, weights) is None


def test_lengths_are_rounded_up_by_an_eighth_at_most() -> None:
    assert [rounded(tokens) for tokens in (1, 64, 65, 1000, 4096, 4097, 8192)] == [64, 64, 128, 1024, 4096, 4608, 8192]
    assert all(tokens <= rounded(tokens) <= max(64, 1.125 * tokens + 64) for tokens in range(1, 9000, 7))
