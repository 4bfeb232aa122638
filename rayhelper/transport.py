"""How arguments travel to the workers through Ray.

What several workers get is put into the object store once if it is large, and sent by value if it is small: putting a
small value costs more than sending it eight times, sending a large one by value copies it for every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

LARGE_BYTES = 64 * 1024
_MANY_ITEMS = 2000  # a container of more leaves than this counts as large without being measured


def shared(value: Any, num_readers: int) -> Any:
    """The value itself, or an ObjectRef of it: fit to be passed to ``num_readers`` remote calls."""
    value = compact(value)
    if num_readers > 1 and is_large(value):
        return ray.put(value)
    return value


def compact(value: Any) -> Any:
    """The value with tensors that are views of larger ones copied: pickle would send the whole of what they view."""
    if type(value) in (list, tuple):
        return type(value)(compact(item) for item in value) if len(value) <= _MANY_ITEMS else value
    if type(value) is dict:
        return {name: compact(item) for name, item in value.items()}
    storage = getattr(value, "untyped_storage", None)
    if storage is not None and storage().nbytes() > value.nbytes:
        return value.detach().clone()
    return value


def is_large(value: Any) -> bool:
    """Whether the arrays, tensors, bytes and strings in a value come to more than LARGE_BYTES."""
    total, leaves, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        leaves += 1
        total += _leaf_bytes(item)
        if total > LARGE_BYTES or leaves > _MANY_ITEMS:
            return True
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            if len(item) > _MANY_ITEMS:
                return True
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            stack.extend(vars(item).values())
    return False


def _leaf_bytes(item: Any) -> int:
    if isinstance(item, (bytes, bytearray, str)):
        return len(item)
    nbytes = getattr(item, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0
