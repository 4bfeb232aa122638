"""Patches of other libraries, without the GPU that they are for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainers.backends.fsdp import patches


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the kernel is given to add; plain torch adds it."""
    found: list[torch.Tensor] = []

    def add(total: torch.Tensor, part: torch.Tensor) -> None:
        found.append(part)
        total += part

    kernels = SimpleNamespace(add=add)
    monkeypatch.setitem(sys.modules, "trainers.backends.fsdp.gradient_kernels", kernels)
    monkeypatch.setattr("trainers.backends.fsdp.gradient_kernels", kernels, raising=False)
    return found


def weight(size: int, total: torch.Tensor | None, part: torch.Tensor | None) -> Any:
    """As FSDP keeps it."""
    return SimpleNamespace(
        sharded_param=torch.empty(size, device="meta"),
        unsharded_accumulated_grad=total,
        unsharded_param=SimpleNamespace(grad=part),
        accumulate_unsharded_grad_if_needed=lambda: None,
    )


def test_a_large_gradient_is_added_to_the_sum_and_forgotten(added: list[torch.Tensor]) -> None:
    one = weight(patches.LARGE, torch.ones(3), torch.full((3,), 2.0, dtype=torch.bfloat16))
    patches.sums_by_kernel(one)
    one.accumulate_unsharded_grad_if_needed()
    assert one.unsharded_accumulated_grad.tolist() == [3.0, 3.0, 3.0]
    assert one.unsharded_param.grad is None
    assert len(added) == 1


def test_the_first_gradient_and_none_at_all_stay_as_they_are(added: list[torch.Tensor]) -> None:
    first = weight(patches.LARGE, None, torch.ones(3))
    none = weight(patches.LARGE, torch.ones(3), None)
    for one in (first, none):
        patches.sums_by_kernel(one)
        one.accumulate_unsharded_grad_if_needed()
    assert first.unsharded_param.grad is not None
    assert none.unsharded_accumulated_grad.tolist() == [1.0, 1.0, 1.0]
    assert added == []


def test_small_weights_and_versions_without_the_method_are_left_alone() -> None:
    small = weight(patches.LARGE - 1, None, None)
    before = small.accumulate_unsharded_grad_if_needed
    patches.sums_by_kernel(small)
    assert small.accumulate_unsharded_grad_if_needed is before
    other = weight(patches.LARGE, None, None)
    del other.accumulate_unsharded_grad_if_needed
    patches.sums_by_kernel(other)
    assert not hasattr(other, "accumulate_unsharded_grad_if_needed")
