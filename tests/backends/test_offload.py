"""Memory that is given back for a while, on the CPU, whose tensors can do the same: what comes back is what went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.tiny import save_tiny
from trainers.backends.fsdp import FsdpBackend
from trainers.backends.offload import ALIGNMENT, Offload
from trainers.batch import Ragged, Sequences


def some_tensors() -> list[torch.Tensor]:
    """Several sizes and types, views of one memory among them, and one without any."""
    torch.manual_seed(0)
    flat = torch.randn(1000)
    return [
        torch.randn(3, 7),
        torch.randn(700).bfloat16(),
        flat[:600].view(20, 30),
        flat[600:],
        torch.arange(5),
        torch.empty(0),
        torch.tensor(3.5),
    ]


def test_what_comes_back_is_what_went_and_lies_in_the_same_tensors() -> None:
    tensors = some_tensors()
    before = [tensor.clone() for tensor in tensors]
    offload = Offload("cpu", slab=4 * ALIGNMENT)
    num_bytes = 3 * 7 * 4 + 700 * 2 + 1000 * 4 + 5 * 8 + 4  # the two views are one memory
    for _ in range(2):  # the second time in the memory of the first
        assert offload.offload(tensors) == num_bytes
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert offload.offload(tensors) == 0  # what is away stays away
        num_slabs = len(offload.slabs)
        assert num_slabs == 4  # larger than a slab: over several
        assert offload.reload() == num_bytes
        assert offload.reload() == 0
        for tensor, expected in zip(tensors, before, strict=True):
            assert torch.equal(tensor, expected)
        assert tensors[2].untyped_storage().data_ptr() == tensors[3].untyped_storage().data_ptr()
        tensors[3][:] = 7.0  # and can be written as before
        before[3][:] = 7.0
        assert len(offload.slabs) == num_slabs


def test_parts_that_went_one_after_the_other_come_back_together() -> None:
    weights, states = some_tensors(), some_tensors()
    before = [tensor.clone() for tensor in [*weights, *states]]
    offload = Offload("cpu", slab=ALIGNMENT)
    assert offload.offload(states) == offload.offload(weights) > 0
    offload.reload()
    for tensor, expected in zip([*weights, *states], before, strict=True):
        assert torch.equal(tensor, expected)


def test_tensors_elsewhere_are_left_alone() -> None:
    tensor = torch.ones(4)
    offload = Offload()  # of GPUs
    assert offload.offload([tensor]) == 0
    assert tensor.tolist() == [1.0] * 4
    assert offload.reload() == 0


ROWS = Sequences(Ragged.of([[5, 6, 7]], np.int64), Ragged.of([[False, True, True]], bool))
USES: dict[str, Callable[[Any], Any]] = {
    "scores": lambda backend: backend.token_logps(ROWS, micro_batch_size=1),
    "weights": lambda backend: list(backend.named_weights()),
    "learning": lambda backend: backend.step(ROWS, lambda logps, *_: -logps.sum(), micro_batch_size=1),
}


def test_a_backend_says_that_what_it_needs_is_away(tmp_path: Path) -> None:
    backend: Any = FsdpBackend(save_tiny(tmp_path), learning_rate=1e-3, num_training_steps=9)
    backend.offloaded = Offload("cpu")
    for weight in backend.module.parameters():
        weight.data = weight.data.clone()  # memory of a file cannot be given back
    for use in USES.values():
        use(backend)
    backend.offload(model=False)  # what the optimizer remembers is away: only learning needs it
    USES["scores"](backend)
    USES["weights"](backend)
    with pytest.raises(RuntimeError, match=r"^what the optimizer remembers wait.*reload\(\) comes first"):
        USES["learning"](backend)
    backend.offload()
    for use in USES.values():
        with pytest.raises(RuntimeError, match=r"^the model's weights"):
            use(backend)
    backend.reload()
    for use in USES.values():
        use(backend)


def test_an_optimizer_that_rests_on_the_host_learns_the_same(tmp_path: Path) -> None:
    """Its states are away during a pass and after a step, and are written where they are."""
    model, seen = save_tiny(tmp_path / "model"), []
    settings: Any = {"learning_rate": 1e-3, "num_training_steps": 9}
    stays, rests = (FsdpBackend(model, **settings, optimizer_offload=away) for away in (False, True))
    rests.resting = Offload("cpu")

    def loss(logps: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(sum(state.untyped_storage().nbytes() for state in rests._remembered()))
        return -logps.sum()

    for backend in (rests, stays):
        for _ in range(2):
            backend.step(ROWS, loss, micro_batch_size=1)
    rests.offload(model=False)  # for an engine: nothing is left to move
    rests.reload()
    rests.save(tmp_path / "rests")
    for backend in (rests, stays):
        backend.step(ROWS, loss, micro_batch_size=1)
    assert seen == [0] * 6
    went_on = FsdpBackend(model, **settings, optimizer_offload=True)
    went_on.load(tmp_path / "rests")
    went_on.step(ROWS, loss, micro_batch_size=1)
    for other in (rests, went_on):
        for weight, expected in zip(other.module.parameters(), stays.module.parameters(), strict=True):
            assert torch.equal(weight, expected)
