"""How torch's allocator is told to take memory, and that it is told back. (What it then does, GPUs alone show.)"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import megatron_on_cpu
from tests.backends.batches import mean_loss, samples_of
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp import backend as fsdp
from trainers.backends.segments import VARIABLES, growing_segments

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told."""
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return found


def test_segments_grow_inside_and_not_afterwards(told: list[str]) -> None:
    def failing_step() -> None:
        with growing_segments(GPU):
            assert told == ["expandable_segments:True"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert told == ["expandable_segments:True", "expandable_segments:False"]


def test_a_torch_before_2_10_is_told_in_its_own_way(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    older: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", older.append)
    with growing_segments(GPU):
        pass
    assert (len(older), told) == (2, [])


@pytest.mark.parametrize("variable", VARIABLES)
def test_other_options_of_the_user_stay(told: list[str], variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512")
    with growing_segments(GPU):
        pass
    assert told == [f"max_split_size_mb:512,expandable_segments:{grows}" for grows in (True, False)]


def test_what_the_user_said_of_segments_holds(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    with growing_segments(GPU):
        pass
    assert told == []


def test_without_a_gpu_nothing_is_told(told: list[str]) -> None:
    with growing_segments(CPU):
        pass
    assert told == []


def steps_around_room(module: Any, build: Any) -> list[int]:
    """How many steps took growing segments before and after something else asked for room."""
    entered: list[torch.device] = []
    found = []

    @contextlib.contextmanager
    def growing(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "growing_segments", growing)
        backend = build(learning_rate=1e-3, num_training_steps=4)
        for _ in range(2):
            backend.step(samples_of(), partial(mean_loss, 50), micro_batch_size=4)
            found.append(len(entered))
            backend.offload(model=False, optimizer=False)
    return found


def steps_of_megatron(rank: int, folder: str) -> list[int]:
    from trainers.backends.megatron import backend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    return steps_around_room(backend, partial(backend.MegatronBackend, folder, settings=MegatronSettings()))


def test_a_step_takes_them_once_something_else_has_asked_for_room(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    assert steps_around_room(fsdp, partial(fsdp.FsdpBackend, folder)) == [0, 1]
    assert run_ranks(1, steps_of_megatron, folder, folder=tmp_path) == [[0, 1]]
