"""Values as they travel between processes: pickled once, their arrays and tensors laid beside the pickle.

    pack(value)  ->  Packed(head, table, small, large)  --any transport-->  unpack(packed)  ->  the value

``head`` is the pickle without the contents of arrays. Contents below 256 KB are joined in one buffer, ``small``; larger
ones stay where they are until the transport copies them. A list of many arrays of one dtype (token ids) is packed as
one array with its shapes: per array, pickling would cost more than copying.

What is unpacked shares memory with what was received. Arrays are then read-only, as Ray's own are. PyTorch knows no
read-only tensors: a ``Ledger`` remembers the tensors that were lent, and tells when one was written to.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import math
import operator
import pickle
import sys
import threading
import warnings
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayhelper.errors import DispatchError
from rayhelper.roles.parts import bound_values, placement_of, reference_to
from rayhelper.values.slicing import instance_of

LARGE_BYTES = 64 * 1024
_OWN_BUFFER_BYTES = 256 * 1024  # contents from here on are not copied into ``small``
_ALIGN = 64
_MANY = 32  # arrays in a list from which on they are packed as one
_DEPTH = 8  # of containers that are looked into for such lists
_MANY_LEAVES = 2000  # a container of more leaves than this counts as large without being measured
_PLAIN = frozenset((type(None), bool, int, float))
_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


@dataclass(frozen=True)
class Packed:
    """A pickled value and the contents of its arrays and tensors."""

    head: bytes
    table: NDArray[np.int64]  # of each content: (offset in small, bytes), or (-1, index in large)
    small: Any
    large: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return len(self.head) + int(self.small.nbytes) + sum(int(content.nbytes) for content in self.large)


def pack(value: Any, *, stays_here: bool = False) -> Packed:
    """The value, ready to travel. Raises what pickling raises.

    ``stays_here``: it is unpacked in this process, whose classes and functions it refers to.
    """
    contents: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _local_pickler() if stays_here else _pickler()
    pickler(stream, protocol=5, buffer_callback=contents.append).dump(_joined_lists(value, {}))
    table = np.empty((len(contents), 2), np.int64)
    parts: list[Any] = []
    large: list[Any] = []
    end = 0
    for i, content in enumerate(contents):
        raw = content.raw()
        if raw.nbytes >= _OWN_BUFFER_BYTES:
            table[i] = -1, len(large)
            large.append(np.frombuffer(raw, np.uint8))
            continue
        padding = -end % _ALIGN
        parts += [b"\0" * padding, raw]
        table[i] = end + padding, raw.nbytes
        end += padding + raw.nbytes
    return Packed(stream.getvalue(), table, np.frombuffer(b"".join(parts), np.uint8), tuple(large))


def dumps(value: Any) -> bytes:
    """The value pickled with its arrays and tensors in it. Raises what pickling raises."""
    stream = io.BytesIO()
    _referring_pickler()(stream).dump(value)
    return stream.getvalue()


def unpack(packed: Packed, *, writable: bool = False, ledger: Ledger | None = None) -> Any:
    """The value; its arrays and tensors share the memory of ``packed``.

    Args:
        writable: Arrays can be written to. For the only reader of the memory.
        ledger: Remembers the tensors, to notice writes.
    """
    view = _writable if writable else _read_only
    small, large = view(packed.small), [view(content) for content in packed.large]
    contents = [small[at : at + size] if at >= 0 else large[size] for at, size in packed.table.tolist()]
    outer, _reading.ledger = _reading.ledger, ledger
    try:
        return pickle.loads(packed.head, buffers=contents)
    finally:
        _reading.ledger = outer


def worth_packing(value: Any, *, arrays: bool = False) -> bool:
    """Whether the value is large (over LARGE_BYTES or 2,000 leaves), or holds a tensor, a decorated object or, if
    asked, an array."""
    if type(value) in _PLAIN:
        return False
    total, leaves, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        leaves += 1
        if leaves > _MANY_LEAVES or instance_of(item, "torch", "Tensor") or (arrays and type(item) is np.ndarray):
            return True
        if isinstance(item, (bytes, bytearray, str)):
            total += len(item)
        elif placement_of(item) is not None:
            return True
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            if len(item) > _MANY_LEAVES:
                return True
            if set(map(type, item)) <= _PLAIN:  # without a step of Python for each
                leaves += len(item)
            else:
                stack.extend(item)
        elif isinstance(item, (MethodType, FunctionType, functools.partial)):
            stack.extend(bound_values(item))  # a decorated object in it arrives as the worker's own
        elif isinstance(nbytes := getattr(item, "nbytes", None), int):
            total += nbytes
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            stack.extend(vars(item).values())
        if total > LARGE_BYTES:
            return True
    return leaves > _MANY_LEAVES


class Ledger:
    """The tensors that were lent to a worker: memory that others may read, and that must not be written to."""

    def __init__(self) -> None:
        self.lent: list[Any] = []  # aliases of the tensors; they share the version counter, which writing raises

    def forget_changed(self) -> list[Any]:
        """The tensors that were changed in place; they are not looked at again."""
        changed = [alias for alias in self.lent if alias._version]
        self.lent = [alias for alias in self.lent if not alias._version]
        return changed

    def check(self, where: str) -> None:
        """Forgets what is no longer used.

        Raises:
            DispatchError: a tensor was changed in place.
        """
        changed = self.forget_changed()
        self.lent = [alias for alias in self.lent if _is_used(alias)]
        if changed:
            shape = tuple(changed[0].shape)
            raise DispatchError(
                f"{where} changed a tensor of an argument (of {shape[0]} bytes) in place. Other workers read the same "
                "memory, and the caller would not get the change. Change a copy: tensor.clone()."
            )


class _Reading(threading.local):
    ledger: Ledger | None = None


_reading = _Reading()


@functools.cache
def _pickler() -> type[Any]:
    """A pickler that takes what Ray's takes (classes of __main__, lambdas), and lays out tensors and arrays."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return _reduced(value) or super().reducer_override(value)  # type: ignore[no-untyped-call]

    return Pickler


@functools.cache
def _local_pickler() -> type[Any]:
    """As ``_pickler``, but that a class or function which has a name is that name.

    One that another session sends by value would be rebuilt in place, without what its module holds.
    """

    class Pickler(_pickler()):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, (type, FunctionType)) and _is_named(value):
                return value.__qualname__
            return super().reducer_override(value)

    return Pickler


def _is_named(value: Any) -> bool:
    """Whether a class or function is what its module has under its name."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


@functools.cache
def _referring_pickler() -> type[Any]:
    """Ray's pickler, for which decorated objects are references."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return reference_to(value) or _foreign(value) or super().reducer_override(value)  # type: ignore[no-untyped-call]

    return Pickler


def _foreign(value: Any) -> tuple[Any, ...] | None:
    """How two kinds of objects are pickled that cloudpickle does not know.

    Modules of a class of their own (``torch.backends.cudnn``), and cached properties, which hold a lock in Python 3.11.
    """
    if type(value) is functools.cached_property:
        return _cached_property, (value.func, value.attrname)
    if not isinstance(value, ModuleType) or type(value) is ModuleType or sys.modules.get(value.__name__) is not value:
        return None
    return importlib.import_module, (value.__name__,)


def _cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    found = functools.cached_property(function)
    if name is not None:
        found.__set_name__(object, name)
    return found


def _reduced(value: Any) -> tuple[Any, ...] | None:
    """How arrays, tensors, lists of them and decorated objects are pickled; None: as they themselves say."""
    kind = type(value)
    if kind is np.ndarray:
        if value.dtype.hasobject or value.nbytes == 0:
            return None
        return _array, (pickle.PickleBuffer(_writable(_flat(value))), value.dtype, value.shape)
    if kind is _Joined:
        split = _split_tensors if value.of_tensors else _split_arrays
        contents = _bytes_of(value.joined) if value.of_tensors else _flat(value.joined)
        return split, (pickle.PickleBuffer(contents), value.dtype, value.shapes, value.kind)
    if instance_of(value, "torch", "Tensor") and value.grad_fn is not None:
        raise DispatchError(f"it holds a tensor with a grad_fn ({value.grad_fn.name()}), whose gradient would be cut")
    if _is_plain_tensor(value):
        plain = value.detach().resolve_conj().resolve_neg()
        return _tensor, (
            pickle.PickleBuffer(_bytes_of(plain)),
            _name_of(value.dtype),
            tuple(value.shape),
            value.requires_grad,
        )
    return reference_to(value)


def _is_plain_tensor(value: Any) -> bool:
    if not instance_of(value, "torch", "Tensor"):
        return False
    import torch

    plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided
    return plain and not value.is_quantized and value.numel() > 0 and not value.__dict__


def _flat(array: NDArray[Any]) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bytes_of(tensor: Any) -> Any:
    import torch

    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # of one element any stride counts as contiguous
    return flat.view(torch.uint8).numpy()


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _array(content: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(content, dtype).reshape(shape)


def _tensor(content: Any, name: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    flat = _lent(content)
    return flat.view(getattr(torch, name)).view(shape).requires_grad_(requires_grad)


def _lent(content: Any) -> Any:
    """The bytes as a tensor that shares their memory."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory is read-only: the ledger sees to it
        flat = torch.frombuffer(content, dtype=torch.uint8)
    if _reading.ledger is not None:
        _reading.ledger.lent.append(flat.detach())
    return flat


def _is_used(alias: Any) -> bool:
    """Whether somebody beside the ledger still holds the memory of the tensor."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = alias.untyped_storage()
    return count is None or count(storage._cdata) > 2  # the alias, and ``storage`` here


class _Joined:
    """Many arrays or tensors of one dtype, laid end to end."""

    def __init__(self, items: Any, of_tensors: bool) -> None:
        self.of_tensors = of_tensors
        self.kind = type(items)
        flat = set(map(len, map(_SHAPE, items))) == {1}
        self.shapes = np.array(list(map(len, items))) if flat else [tuple(item.shape) for item in items]
        self.dtype = _name_of(items[0].dtype) if of_tensors else items[0].dtype
        parts = items if flat else [item.reshape(-1) for item in items]
        # the dtype is said because concatenate would give the machine's own byte order
        self.joined = sys.modules["torch"].cat(parts) if of_tensors else np.concatenate(parts, dtype=self.dtype)


def _joined_lists(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """The value with its lists of many arrays joined, wherever lists, tuples and dicts lead to one within a few steps.

    ``known``: what became of the containers seen before, by their identity, so that what is one object stays one.
    """
    kind = type(value)
    if depth > _DEPTH or (kind is not list and kind is not tuple and kind is not dict):
        return value
    if id(value) not in known:
        known[id(value)] = value  # what it is while it is looked into, should it hold itself
        known[id(value)] = _with_joined(value, kind, known, depth)
    return known[id(value)]


def _with_joined(value: Any, kind: type[Any], known: dict[int, Any], depth: int) -> Any:
    if kind is dict:
        replaced: Any = {name: _joined_lists(item, known, depth + 1) for name, item in value.items()}
        return replaced if any(replaced[name] is not value[name] for name in value) else value
    if len(value) >= _MANY:
        of_tensors = _is_plain_tensor(value[0])
        if not of_tensors and type(value[0]) is not np.ndarray:
            return value
        is_repeating = len(set(map(id, value))) < len(value)  # pickle sends such items once
        if is_repeating or not (_are_tensors if of_tensors else _are_arrays)(value):
            return value
        return _Joined(value, of_tensors)
    items = [_joined_lists(item, known, depth + 1) for item in value]
    return kind(items) if any(one is not other for one, other in zip(items, value, strict=True)) else value


def _are_arrays(items: Any) -> bool:
    """Whether all are arrays of one dtype."""
    dtype = items[0].dtype
    return (
        set(map(type, items)) == {np.ndarray}
        and not dtype.hasobject
        and dtype.itemsize > 0
        and set(map(_DTYPE, items)) == {dtype}
    )


def _are_tensors(items: Any) -> bool:
    """Whether all are tensors of one dtype, with nothing about them but their values."""
    if not _is_plain_tensor(items[0]):
        return False
    dtype = items[0].dtype
    return all(
        _is_plain_tensor(item) and item.dtype == dtype and not item.requires_grad and not item.is_conj()
        for item in items
    )


def _split_arrays(content: Any, dtype: Any, shapes: Any, kind: type[Any]) -> Any:
    joined = np.frombuffer(content, dtype)
    flat = isinstance(shapes, np.ndarray)
    ends = np.cumsum(shapes if flat else [math.prod(shape) for shape in shapes]).tolist()
    items: Any = [joined[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    if not flat:
        items = [item.reshape(shape) for item, shape in zip(items, shapes, strict=True)]
    return items if kind is list else tuple(items)


def _split_tensors(content: Any, name: str, shapes: Any, kind: type[Any]) -> Any:
    import torch

    flat = isinstance(shapes, np.ndarray)
    sizes = shapes.tolist() if flat else [math.prod(shape) for shape in shapes]
    pieces = _lent(content).view(getattr(torch, name)).split(sizes)
    return kind(pieces if flat else [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])


def _read_only(content: Any) -> memoryview:
    return memoryview(content).toreadonly()


def _writable(content: Any) -> memoryview:
    """The memory as one that may be written to; the memory lives as long as what is made of it."""
    if content.flags.writeable or content.nbytes == 0:
        return memoryview(content)
    alias = (ctypes.c_uint8 * content.nbytes).from_address(content.ctypes.data)
    alias.owner = content
    return memoryview(alias).cast("B")
