"""What a value holds, in a few bytes that processes can compare: equal values have equal ``Contents``.

Whole numbers, texts and bytes are hashed. Real numbers, whose last bits may differ from machine to machine, are summed
with weights by position and compared within a tolerance. Of what is large, a sample is looked at. Objects of other
classes, and objects with roles, count as equal to any object of their class.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayhelper.roles.parts import placement_of
from rayhelper.values.slicing import instance_of

_MOST_ITEMS = 256  # of a list
_MOST_KEYS = 10_000  # of a mapping
_MOST_NUMBERS = 65536  # of an array
_DEPTH = 8
_PLAIN = (bool, int, str, bytes, float, type(None))
_TOLERANCE = 1e-3  # of the sum of a real array, relative to the sum of its absolute values


class Contents(NamedTuple):
    """A hash of what is exact, one of the same items in any order, and sums of real numbers: (weighted, absolute)."""

    exact: bytes
    unordered: bytes | None  # None: there are too many items, or only a sample was looked at
    sums: tuple[tuple[float, float], ...]

    def equals(self, other: Contents, tolerance: float = _TOLERANCE) -> bool:
        """``tolerance``: of real numbers, relative to the sum of their absolute values; 0: to the last bit."""
        if self.exact != other.exact or len(self.sums) != len(other.sums):
            return False
        return all(_near(one, another, tolerance) for one, another in zip(self.sums, other.sums, strict=True))

    def is_reordered(self, other: Contents) -> bool:
        """Whether the same items lie in another order, as far as they are exact."""
        return self.exact != other.exact and self.unordered is not None and self.unordered == other.unordered


def _near(one: tuple[float, float], other: tuple[float, float], tolerance: float) -> bool:
    within = tolerance * max(one[1], other[1])
    return all(a == b or (a != a and b != b) or abs(a - b) <= within for a, b in zip(one, other, strict=True))


def contents_of(values: Iterable[Any], *, share: int = 1) -> Contents:
    """What the values hold, one after the other. ``share``: of what is large a so much smaller sample is looked at."""
    reading = _Reading(share)
    unordered: bytes | None = b""
    for value in values:
        reading.read(value, 0)
        of_value = _in_any_order(value) if share == 1 else None
        unordered = None if unordered is None or of_value is None else unordered + of_value
    return Contents(reading.digest.digest(), unordered, tuple(reading.sums))


class _Reading:
    def __init__(self, share: int = 1) -> None:
        self.share = share
        self.digest = hashlib.blake2b(digest_size=8)
        self.sums: list[tuple[float, float]] = []

    def note(self, *words: Any) -> None:
        self.digest.update(repr(words).encode())

    def read(self, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, _PLAIN):
            self.plain(value)
        elif instance_of(value, "torch", "Tensor"):
            self.note(str(value.dtype), tuple(value.shape))
            self.array(_as_array(value))
        elif isinstance(value, np.ndarray):
            self.array(value)
        elif depth > _DEPTH:
            self.note(kind.__name__)
        elif isinstance(value, Mapping):
            self.note(kind.__name__, len(value))
            for key, item in list(value.items())[: _MOST_KEYS // self.share]:
                self.read(key, depth + 1)
                self.read(item, depth + 1)
        elif isinstance(value, (list, tuple, range)):
            self.note(kind.__name__, len(value))
            for k in _sample(range(len(value)), _MOST_ITEMS // self.share):
                self.read(value[k], depth + 1)
        elif (state := state_of(value)) is not None:
            self.note(sorted(state))
            self.note(type(state).__name__, len(state))
            for name, item in list(state.items())[:_MOST_KEYS]:
                self.read(name, depth + 2)
                self.read(item, depth + 2)
        elif is_dataclass(value) and not isinstance(value, type) and placement_of(value) is None:
            self.note(kind.__name__)
            for field in fields(value):
                self.read(getattr(value, field.name, None), depth + 1)
        else:
            self.note(kind.__name__)

    def plain(self, value: Any) -> None:
        if isinstance(value, float):
            self.sums.append((value, abs(value)))
        else:
            self.note(type(value).__name__, value[:4096] if isinstance(value, (str, bytes)) else value)

    def array(self, array: NDArray[Any]) -> None:
        self.note(str(array.dtype), array.shape)
        if array.dtype.hasobject:
            return
        step = max(1, array.size * self.share // _MOST_NUMBERS)
        sample = np.ascontiguousarray(array.reshape(-1)[::step])
        if array.dtype.kind in "fc":
            numbers = np.abs(sample) if array.dtype.kind == "c" else sample.astype(np.float64)
            weights = np.cos(np.arange(numbers.size, dtype=np.float64))
            self.sums.append((float(numbers @ weights), float(np.abs(numbers).sum())))
        else:
            self.digest.update(sample.tobytes())


def state_of(value: Any) -> Mapping[str, Any] | None:
    """The weights of a module, or what an optimizer remembers; None: it is none."""
    if instance_of(value, "torch.nn", "Module"):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if instance_of(value, "torch.optim", "Optimizer"):
        params = [param for group in value.param_groups for param in group["params"]]
        return {f"{k}.{name}": item for k, param in enumerate(params) for name, item in value.state[param].items()}
    return None


def _as_array(tensor: Any) -> NDArray[Any]:
    """A tensor's numbers; bfloat16 and the like as float32."""
    plain = tensor.detach()
    plain = plain.to_local() if hasattr(plain, "to_local") else plain  # what lies here of a tensor in shards
    if plain.is_quantized or str(plain.layout) != "torch.strided" or plain.device.type == "meta":
        return np.zeros(0)
    flat = plain.reshape(-1)
    flat = flat[:: max(1, flat.numel() // _MOST_NUMBERS)].cpu().resolve_conj().resolve_neg()
    return (flat.float() if flat.is_floating_point() else flat).numpy()  # type: ignore[no-any-return]


def _sample(items: Any, most: int) -> Any:
    step = max(1, len(items) // most)
    return items[::step]


def _in_any_order(value: Any) -> bytes | None:
    """A hash of a value that is the same for the items of a list or an array in another order; None: they are many."""
    is_array = hasattr(type(value), "shape") and bool(getattr(value, "ndim", 0))
    has_items = is_array or isinstance(value, (list, tuple))
    items = value if has_items else [value]
    if len(items) > _MOST_ITEMS:
        return None
    total = 0
    for item in items:
        reading = _Reading()
        reading.read(item, 1)
        numbers = struct.pack(f"{2 * len(reading.sums)}d", *(round(x, 6) for pair in reading.sums for x in pair))
        total += int.from_bytes(hashlib.blake2b(reading.digest.digest() + numbers, digest_size=8).digest(), "little")
    return (total % 2**64).to_bytes(8, "little")
