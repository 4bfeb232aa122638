"""Memory that is given back for a while, on the CPU, whose tensors can do the same: what comes back is what went."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.resting_optimizer import RestingOptimizer
from trainers.backends.offload import ALIGNMENT, Home, Offload
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
        num_slabs = len(offload.memory.slabs)
        assert num_slabs == 4  # larger than a slab: over several
        assert offload.reload() == num_bytes
        assert offload.reload() == 0
        for tensor, expected in zip(tensors, before, strict=True):
            assert torch.equal(tensor, expected)
        assert tensors[2].untyped_storage().data_ptr() == tensors[3].untyped_storage().data_ptr()
        tensors[3][:] = 7.0  # and can be written as before
        before[3][:] = 7.0
        assert len(offload.memory.slabs) == num_slabs


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


CPU = torch.device("cpu")
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
    with pytest.raises(RuntimeError, match=r"^the optimizer's states are in the memory.*call reload\(\) first"):
        USES["learning"](backend)
    backend.offload()
    for use in USES.values():
        with pytest.raises(RuntimeError, match=r"^the model's weights"):
            use(backend)
    backend.reload()
    for use in USES.values():
        use(backend)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
@pytest.mark.parametrize("piece_bytes", [1, 3 * 64 * 64 * 4, 1 << 30])
def test_an_optimizer_that_rests_on_the_host_learns_the_same(optim: Any, piece_bytes: int, tmp_path: Path) -> None:
    """Its states are away during a pass and after a step, come in pieces, and are written where they are."""
    model, seen, here = save_tiny(tmp_path / "model"), [], []
    settings: Any = {"learning_rate": 1e-3, "num_training_steps": 9, "optim": optim}
    if optim == "sgd":
        settings["optim_kwargs"] = {"momentum": 0.9}
    stays, rests, went_on = (FsdpBackend(model, **settings, optimizer_offload=away) for away in (False, True, True))
    assert rests.optimizer is not None
    rests.resting = RestingOptimizer(rests.optimizer, CPU, piece_bytes=piece_bytes)

    def num_here(backend: FsdpBackend) -> int:
        states = backend._remembered()
        if optim == "adafactor":  # which makes a new number each step
            states = [state for state in states if state.dim()]
        return sum(state.untyped_storage().nbytes() for state in states)

    def loss(logps: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(num_here(rests))
        return -logps.sum()

    for backend in (rests, stays):
        for _ in range(2):
            backend.step(ROWS, loss, micro_batch_size=1)
    rests.optimizer.register_step_post_hook(lambda *_: here.append(num_here(rests)))
    rests.offload(model=False)  # for an engine: nothing is left to move
    rests.reload()
    rests.save(tmp_path / "rests")
    went_on.load(tmp_path / "rests")
    for backend in (rests, stays, went_on):
        backend.step(ROWS, loss, micro_batch_size=1)
    assert seen == [0] * 7
    assert num_here(rests) == 0
    all_of_them = num_here(stays)
    assert all_of_them > 0
    if piece_bytes < 1 << 30:
        assert len(here) > 3
        assert max(here) < all_of_them / 2
    else:
        assert here == [all_of_them]
    for other in (rests, went_on):
        for weight, expected in zip(other.module.parameters(), stays.module.parameters(), strict=True):
            assert torch.equal(weight, expected)


class FailsAt:
    """A function that fails when it is called for the n-th time."""

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self.function, self.number, self.count = function, number, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        if self.count == self.number:
            raise MemoryError
        return self.function(*args)


@pytest.mark.parametrize("where", ["step", "allocate"])
def test_a_step_that_fails_halfway_leaves_an_optimizer_that_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(6)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    resting = RestingOptimizer(optimizer, CPU, piece_bytes=2 * weights[0].nbytes)
    fails = FailsAt(optimizer.step, 2) if where == "step" else FailsAt(Home.allocate, 6)

    def step() -> None:
        for weight in weights:
            weight.grad = torch.ones(4)
        resting.step()

    step()
    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(optimizer, "step", fails)
        else:
            patch.setattr(Home, "allocate", lambda home: fails(home))
        with pytest.raises(MemoryError):
            step()
    states = [state for weight in weights for state in optimizer.state[weight].values()]
    assert not any(state.untyped_storage().nbytes() for state in states)
    step()
    state = resting.whole_state()["state"]
    counts = [int(state[k]["step"]) for k in range(6)]
    assert counts == ([3, 3, 2, 2, 2, 2] if where == "step" else [2, 2, 2, 2, 2, 2])
    for k, count in enumerate(counts):
        torch.testing.assert_close(state[k]["exp_avg"], torch.full((4,), 1 - 0.9**count))


def test_states_are_read_and_put_back_a_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.nn.Parameter(torch.full((8,), float(k))) for k in range(4)]
    here: list[int] = []
    first, second = (RestingOptimizer(torch.optim.AdamW(weights, lr=lr), CPU) for lr in (0.1, 0.5))
    for resting in (first, second):
        for k, weight in enumerate(weights):
            weight.grad = torch.full((8,), k + resting.optimizer.param_groups[0]["lr"])
        resting.step()

    def counting(function: Callable[[Home], None]) -> Callable[[Home], None]:
        def counted(home: Home) -> None:
            states = [one for resting in (first, second) for one in resting.optimizer.state.values()]
            here.append(sum(value.untyped_storage().nbytes() > 0 for state in states for value in state.values()))
            function(home)

        return counted

    for name in ("give", "take"):
        monkeypatch.setattr(Home, name, counting(getattr(Home, name)))
    state = first.whole_state()
    second.load_whole_state(copy.deepcopy(state))  # on a CPU what is given is taken as it is
    assert len(here) == 2 * 3 * 4
    assert max(here) == 3  # of one weight
    assert second.optimizer.param_groups[0]["lr"] == 0.1
    found = second.whole_state()["state"]
    assert found.keys() == state["state"].keys() == {0, 1, 2, 3}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            assert torch.equal(found[index][name], value), (index, name)


def test_states_that_an_optimizer_begins_with_rest_from_the_beginning() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adagrad([weight], lr=0.1)
    resting = RestingOptimizer(optimizer, CPU)
    assert not optimizer.state[weight]["sum"].untyped_storage().nbytes()
    weight.grad = torch.full((4,), 2.0)
    resting.step()
    assert resting.whole_state()["state"][0]["sum"].tolist() == [4.0] * 4
    plain = RestingOptimizer(torch.optim.SGD([weight], lr=0.1), CPU)
    weight.grad = torch.ones(4)
    plain.step()
    state = plain.whole_state()
    assert state["state"] == {}
    state["param_groups"][0]["lr"] = 0.7
    plain.load_whole_state(state)
    assert plain.optimizer.param_groups[0]["lr"] == 0.7
