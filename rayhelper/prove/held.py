"""What a value holds, path by path, in a form that runs can compare: ``['loss'][3]`` is one path.

Numbers are kept as sums, so that a model of any size takes little room. Of what is large, a sample is looked at. An
array or a list also keeps the sums of each of its items, which tells whether two hold the same items in another order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayhelper.roles.parts import placement_of
from rayhelper.values.contents import state_of
from rayhelper.values.slicing import instance_of

_MOST_ITEMS = 256  # of a list
_MOST_KEYS = 10_000  # of a mapping
_MOST_NUMBERS = 65536  # of an array, in its sums
_MOST_SLICES = 4096  # along one dimension, that are told apart
_MOST_DIMENSIONS = 3
_DEPTH = 8
_PLAIN = (bool, int, str, bytes, float, type(None))
_ROUNDING = {"float64": 1e-12, "complex128": 1e-12, "bfloat16": 2e-2, "float16": 2e-3}  # by type; of others:
_ROUNDING_OF_OTHERS = 1e-5  # float32, and floats of Python, which often were one

Signatures = NDArray[np.float64]  # (n, 2): of each item the sum by position, and the sum of absolute values


class Leaf(NamedTuple):
    """What lies at one path. A container has a leaf too: its type, its length and its items."""

    kind: str  # "tensor", "array", or the name of a class
    dtype: str = ""
    shape: tuple[int, ...] = ()  # of a list or a mapping: its length
    device: str = ""
    exact: bytes = b""  # of what is no real number
    sums: tuple[float, float] = (0.0, 0.0)
    slices: tuple[Signatures, ...] = ()  # by dimension
    keys: tuple[str, ...] = ()  # of a mapping, as steps of a path
    shown: str = ""  # a short text of a plain value

    @property
    def is_real(self) -> bool:
        """Whether it holds real numbers, whose last bits may differ."""
        return self.kind == "float" or "float" in self.dtype or "complex" in self.dtype

    @property
    def rounding(self) -> float:
        """How far apart sums in another order may lie, relative to the size of the numbers."""
        return _ROUNDING.get(self.dtype, _ROUNDING_OF_OTHERS)


class Unlike(NamedTuple):
    """The first thing in which two values differ."""

    path: str
    how: str  # "keys", "type", "shape", "dtype", "device", "order", "rounding", "numbers" or "items"
    told: str  # in words, after "its value"
    size: float = 0.0  # of real numbers: relative to their size
    item: int | None = None  # the first one that differs along the first dimension


@dataclass(frozen=True)
class Held:
    """What a value holds: leaves by path, in order."""

    leaves: dict[str, Leaf]

    def unlike(self, other: Held, tolerance: float = 0.0) -> Unlike | None:
        """The first thing that differs; None: nothing does. ``tolerance``: of real numbers; 0: to the last bit.

        A difference that is no rounding comes before one that may be.
        """
        small: Unlike | None = None
        for path, leaf in self.leaves.items():
            there = other.leaves.get(path)
            if there is None:
                return small or Unlike(path, "keys", "is there in run 1 only")
            found = _unlike(path, leaf, there, tolerance)
            if found is not None and found.how != "rounding":
                return found
            small = small or found
        return small


def held_of(value: Any, *, of_arrays_alone: bool = False) -> Held:
    """What a value holds; ``of_arrays_alone``: what its arrays and tensors do."""
    leaves: dict[str, Leaf] = {}
    _read(value, "", 0, leaves, of_arrays_alone)
    return Held(leaves)


def _read(value: Any, path: str, depth: int, leaves: dict[str, Leaf], of_arrays_alone: bool) -> Signatures:
    """Adds the leaves of a value; its signature, of shape (2,)."""
    children = list(_children(value, of_arrays_alone)) if depth <= _DEPTH else []
    if isinstance(value, _PLAIN):
        leaf = _of_plain(value)
        if of_arrays_alone:
            return np.zeros(2)
    elif instance_of(value, "torch", "Tensor"):
        leaf = _of_array("tensor", str(value.dtype).removeprefix("torch."), _as_array(value), value)
    elif isinstance(value, np.ndarray):
        leaf = _of_array("array", str(value.dtype), value, value)
    else:
        leaf = Leaf(type(value).__name__)
    leaves[path] = leaf
    own = _signature(leaf)
    if _is_container(value):
        of_items = [_read(item, path + step, depth + 1, leaves, of_arrays_alone) for step, item in children]
        of_items_array = np.array(of_items).reshape(-1, 2)
        has_keys = not isinstance(value, (list, tuple, range))
        leaves[path] = leaf._replace(
            shape=() if has_keys else (len(value),),
            keys=tuple(step for step, _ in children) if has_keys else (),
            slices=() if has_keys else (of_items_array,),
        )
        weights = np.cos(np.arange(len(of_items_array)) + 1.0)
        return own + (of_items_array * weights[:, None]).sum(0)  # type: ignore[no-any-return]
    return own


def _is_container(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple, range)) or state_of(value) is not None:
        return True
    return is_dataclass(value) and not isinstance(value, type) and placement_of(value) is None


def _children(value: Any, of_arrays_alone: bool) -> Iterator[tuple[str, Any]]:
    """The items of a container, each with its step of the path."""
    if isinstance(value, Mapping):
        for key, item in list(value.items())[:_MOST_KEYS]:
            yield f"[{key!r}]", item
    elif isinstance(value, (list, tuple, range)):
        for k in range(len(value))[:: max(1, len(value) // _MOST_ITEMS)]:
            yield f"[{k}]", value[k]
    elif (state := state_of(value)) is not None:
        for name, item in list(state.items())[:_MOST_KEYS]:
            yield f".{name}", item
    elif is_dataclass(value) and not isinstance(value, type) and placement_of(value) is None:
        for field in fields(value):
            yield f".{field.name}", getattr(value, field.name, None)


def _of_plain(value: Any) -> Leaf:
    kind = type(value).__name__
    if isinstance(value, float):
        return Leaf(kind, sums=(float(value), abs(float(value))), shown=f"{value:.9g}")
    text = repr(value[:4096] if isinstance(value, (str, bytes)) else value)
    return Leaf(kind, exact=_hash(text.encode()), shown=text if len(text) < 60 else "")


def _of_array(kind: str, dtype: str, array: NDArray[Any], value: Any) -> Leaf:
    device = str(value.device.type) if kind == "tensor" else ""
    shape = tuple(value.shape)
    if array.dtype.hasobject:
        return Leaf(kind, dtype, shape, device)
    flat = np.ascontiguousarray(array.reshape(-1)[:: max(1, array.size // _MOST_NUMBERS)])
    leaf = Leaf(kind, dtype, shape, device, slices=_slices(array) if array.shape == shape else ())
    if array.dtype.kind in "fc":
        numbers = np.abs(flat) if array.dtype.kind == "c" else flat.astype(np.float64)
        weights = np.cos(np.arange(numbers.size, dtype=np.float64))
        return leaf._replace(sums=(float(numbers @ weights), float(np.abs(numbers).sum())))
    return leaf._replace(exact=_hash(flat.tobytes()))


def _slices(array: NDArray[Any]) -> tuple[Signatures, ...]:
    """By dimension, the signatures of the array's slices; none of an array that is large or no array of numbers."""
    if array.size > _MOST_NUMBERS or array.size == 0 or array.dtype.kind not in "fiub":
        return ()
    found: list[Signatures] = []
    for axis in range(min(array.ndim, _MOST_DIMENSIONS)):
        if array.shape[axis] > _MOST_SLICES:
            return tuple(found)
        rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).astype(np.float64)
        weights = np.cos(np.arange(rows.shape[1], dtype=np.float64))
        found.append(np.stack([(rows * weights).sum(1), np.abs(rows).sum(1)], axis=1))
    return tuple(found)


def _signature(leaf: Leaf) -> Signatures:
    if leaf.is_real:
        return np.array(leaf.sums)
    told = _hash(repr((leaf.kind, leaf.dtype, leaf.shape, leaf.exact)).encode())
    return np.array([int.from_bytes(told[:3], "little") / 2**24, 1.0])


def _unlike(path: str, one: Leaf, other: Leaf, tolerance: float) -> Unlike | None:
    """How two leaves differ."""
    for how in ("kind", "dtype", "shape", "device"):
        a, b = getattr(one, how), getattr(other, how)
        if a != b:
            word = {"kind": "type", "shape": "length"}.get(how, how) if one.kind not in ("tensor", "array") else how
            shown = f" ({one.shown} and {other.shown})" if one.shown and other.shown else ""
            return Unlike(path, "type" if how == "kind" else how, f"has {word} {_plain(a)} and {_plain(b)}{shown}")
    if one.keys != other.keys:
        for number, keys, others in ((1, one.keys, other.keys), (2, other.keys, one.keys)):
            if missing := [key for key in keys if key not in others]:
                return Unlike(path + missing[0], "keys", f"is there in run {number} only")
        return Unlike(path, "order", "holds the same keys in another order")
    orders = [axis for axis, (a, b) in enumerate(zip(one.slices, other.slices, strict=False)) if _permuted(a, b)]
    own_differs = one.exact != other.exact or not _near(one.sums, other.sums, tolerance)
    is_container = one.kind not in ("tensor", "array")
    if orders and (own_differs or is_container):
        where = "" if len(one.shape) < 2 else f" along dimension {orders[0]}"
        item = _first_item(one, other, orders[0], tolerance)
        return Unlike(path, "order", f"holds the same items in another order{where}", item=item)
    if not own_differs:
        return None
    if not one.is_real:
        shown = f": {one.shown} and {other.shown}" if one.shown and other.shown else ""
        return Unlike(path, "items", f"holds other items{shown}", item=_first_item(one, other, 0, 0.0))
    size = _size(one, other)
    item = _first_item(one, other, 0, tolerance)
    if size <= one.rounding:
        return Unlike(path, "rounding", f"differs by {size:.1e} of its size", size, item)
    if one.shown:
        return Unlike(path, "numbers", f"holds other numbers ({one.shown} and {other.shown})", size, item)
    told = f"holds other numbers (their absolute values sum up to {one.sums[1]:.9g} and {other.sums[1]:.9g})"
    return Unlike(path, "numbers", told, size, item)


def _plain(value: Any) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)


def _near(one: tuple[float, float], other: tuple[float, float], tolerance: float) -> bool:
    within = tolerance * max(one[1], other[1])
    return all(a == b or (a != a and b != b) or abs(a - b) <= within for a, b in zip(one, other, strict=True))


def _size(one: Leaf, other: Leaf) -> float:
    """How large a difference is, relative to the size of the numbers."""
    pairs = [(np.array([one.sums]), np.array([other.sums])), *zip(one.slices, other.slices, strict=False)]
    sizes = []
    for a, b in pairs:
        scale = max(float(a[:, 1].max(initial=0.0)), float(b[:, 1].max(initial=0.0)))
        apart = float(np.abs(a - b).max(initial=0.0))
        sizes.append(apart / scale if scale else apart)
    return math.inf if any(size != size for size in sizes) else max(sizes)


def _same(one: Signatures, other: Signatures) -> bool:
    scale = max(float(np.abs(one).max(initial=0.0)), float(np.abs(other).max(initial=0.0)))
    return bool(np.allclose(one, other, rtol=1e-5, atol=1e-7 * scale, equal_nan=True))


def _permuted(one: Signatures, other: Signatures) -> bool:
    """Whether the items are the same in another order. Items that are all alike have none."""
    if one.shape != other.shape or len(one) < 2 or _same(one, other):
        return False
    in_order = [signatures[np.lexsort(np.round(signatures, 6).T)] for signatures in (one, other)]
    return _same(*in_order)


def _first_item(one: Leaf, other: Leaf, axis: int, tolerance: float) -> int | None:
    """The first item along a dimension that differs."""
    if axis >= min(len(one.slices), len(other.slices)) or one.slices[axis].shape != other.slices[axis].shape:
        return None
    a, b = one.slices[axis], other.slices[axis]
    within = tolerance * np.maximum(a[:, 1], b[:, 1])[:, None]
    unlike = np.flatnonzero(((np.abs(a - b) > within) & (a != b)).any(1))
    return int(unlike[0]) if len(unlike) else None


def _as_array(tensor: Any) -> NDArray[Any]:
    """A tensor's numbers; bfloat16 and the like as float32."""
    plain = tensor.detach()
    plain = plain.to_local() if hasattr(plain, "to_local") else plain  # what lies here of a tensor in shards
    if plain.is_quantized or str(plain.layout) != "torch.strided" or plain.device.type == "meta":
        return np.zeros(0)
    if plain.numel() > _MOST_NUMBERS:
        flat = plain.reshape(-1)
        plain = flat[:: max(1, flat.numel() // _MOST_NUMBERS)]
    plain = plain.cpu().resolve_conj().resolve_neg()
    return (plain.float() if plain.is_floating_point() and plain.element_size() < 4 else plain).numpy()  # type: ignore[no-any-return]


def _hash(told: bytes) -> bytes:
    return hashlib.blake2b(told, digest_size=8).digest()
