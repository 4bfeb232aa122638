"""How values travel through Ray.

What is large, or holds a tensor, is packed (``values/packing.py``): pickled once, its arrays laid beside the pickle, so
that readers on the node share them without a copy. What several workers read is put into the object store once; what
one worker reads goes with its call. Small values travel as they are: putting them costs more than sending them eight
times.
"""

from __future__ import annotations

from typing import Any

import ray

from rayhelper.values.packing import LARGE_BYTES, pack, worth_packing


def sendable(value: Any, num_readers: int) -> tuple[Any, int]:
    """The value or what stands for it, an argument of ``num_readers`` remote calls; and its bytes, if it was packed."""
    if not worth_packing(value):
        return value, 0
    packed = pack(value)
    if num_readers > 1 and packed.nbytes > LARGE_BYTES:
        return ray.put(packed), packed.nbytes
    return packed, packed.nbytes
