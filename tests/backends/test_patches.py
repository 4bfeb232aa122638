"""Patches of other libraries, without the GPU that they are for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainers.backends import patches as allocator
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


# --- what FSDP2 keeps of a weight


def kept(**without: Any) -> Any:
    """As FSDP keeps it, with a gradient that was added up whole."""
    shard = SimpleNamespace(grad=None)
    fields = {
        "unsharded_accumulated_grad": torch.ones(2),
        "sharded_param": shard,
        "to_sharded_dtensor": lambda gradient: ("shard of", gradient.tolist()),
        "_unsharded_param": SimpleNamespace(grad=torch.ones(2)),
    }
    return SimpleNamespace(**{name: value for name, value in fields.items() if name not in without})


def test_weights_are_found_where_fsdp_has_them_and_none_elsewhere() -> None:
    part = SimpleNamespace(
        _get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=SimpleNamespace(fsdp_params=[1, 2]))
    )
    assert patches.sharded_weights(part) == [1, 2]
    empty = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=None))
    assert patches.sharded_weights(empty) == []
    other = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace())
    assert patches.sharded_weights(other) == patches.sharded_weights(SimpleNamespace()) == []


def test_a_gradient_that_was_added_up_whole_becomes_that_of_the_shard_once() -> None:
    one = kept()
    assert patches.holds_gradients(one)
    for _ in range(2):
        patches.take_gradient(one)
        assert one.sharded_param.grad == ("shard of", [1.0, 1.0])
        assert one.unsharded_accumulated_grad is None


@pytest.mark.parametrize("name", ["unsharded_accumulated_grad", "sharded_param", "to_sharded_dtensor"])
def test_a_version_that_keeps_gradients_elsewhere_is_told_apart(name: str) -> None:
    other = kept(**{name: None})
    assert not patches.holds_gradients(other)
    before = vars(other) | {}
    patches.forget_gradients(other)
    assert vars(other) == before  # and gets nothing that it had not


def test_gradients_of_a_failed_step_are_forgotten() -> None:
    one = kept()
    patches.forget_gradients(one)
    assert (one.unsharded_accumulated_grad, one._unsharded_param.grad) == (None, None)
    not_gathered_yet = kept(_unsharded_param=None)
    patches.forget_gradients(not_gathered_yet)
    assert not hasattr(not_gathered_yet, "_unsharded_param")


# --- what transformers asks the GPU, and torch's allocator


def test_rows_are_looked_at_unless_they_are_single_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: ["looked", position_ids])
    answers = [True, False]
    patches.tell_single_documents(lambda: answers.pop(0))
    assert masking_utils.find_packed_sequence_indices(position_ids=3) is None
    assert masking_utils.find_packed_sequence_indices(4) == ["looked", 4]


def test_a_transformers_that_looks_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def find(position_ids: Any, is_compiled: bool) -> None: ...

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)
    patches.tell_single_documents(lambda: True)
    assert masking_utils.find_packed_sequence_indices is find
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    patches.tell_single_documents(lambda: True)
    assert not hasattr(masking_utils, "find_packed_sequence_indices")


def test_a_torch_without_a_way_keeps_the_options_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    allocator.set_allocator("a:1")
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    allocator.set_allocator("b:2")
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    allocator.set_allocator("c:3")
    assert told == ["a:1", "b:2"]
