"""How torch's allocator is told to take memory, and that it is told back. (What it then does, GPUs alone show.)"""

from __future__ import annotations

import pytest
import torch

from trainers.backends.segments import growing_segments

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told."""
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return found


def test_segments_grow_inside_and_not_afterwards(told: list[str]) -> None:
    def failing_step() -> None:
        with growing_segments(GPU):
            assert told == ["expandable_segments:True"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert told == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
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
