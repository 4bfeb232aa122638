"""A few bytes of a tensor of the CPU: what changes ``tensor.data`` or shared memory counts no version of torch's."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def bytes_of(tensor: Any) -> list[bytes]:
    """Some of a tensor's contents; none where they may lie elsewhere.

    From memory, as an operation of torch lets other threads run first, which may take long.
    """
    if type(tensor).__name__ not in ("Tensor", "Parameter") or tensor.device.type != "cpu":
        return []
    if tensor.layout is not sys.modules["torch"].strided or not tensor.is_contiguous():
        return []
    num_bytes, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if not address or not 0 < num_bytes <= held:
        return []
    if num_bytes < 8:
        return [ctypes.string_at(address, num_bytes)]
    return [ctypes.string_at(address + at, 8) for at in range(0, num_bytes - 7, max(8, num_bytes // 6 & ~7))]


def some_of(tensors: list[Any], most: int) -> list[Any]:
    """At most so many of the tensors, from everywhere in the list."""
    return tensors[:: -(-len(tensors) // most)] if tensors else []
