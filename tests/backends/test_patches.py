"""Patches of other libraries, without the GPU that they are for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainers.backends import patches as allocator
from trainers.backends.fsdp import patches

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
