"""The caller's value from the values of the shards' leaders: what ``collect`` of a decorated call means.

``'none'`` is the list of values, a callable makes what it likes of that list, and ``'flatten'`` lays the values end to
end, so that a call that was cut by ``'slice'`` answers as if it had never been. One value is joined by the same rules
as many: a group of one worker behaves like a group of N.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayhelper.errors import CollectError, DecorationError, DispatchError
from rayhelper.values.dispatch import accepts, name_of
from rayhelper.values.slicing import columns_of, describe, instance_of, rebuild, take

_HUGE_BYTES = 4 * 1024 * 1024
_THREADED_BYTES = 32 * 1024 * 1024

Places = NDArray[np.int64] | None  # for each of the caller's items, where it lies in the joined values


def validate_collect(collect: Any) -> None:
    """Nothing, if ``collect`` can be used. Raises DecorationError otherwise."""
    if not (callable(collect) or collect in ("none", "flatten")):
        told = " (it is a value of execute)" if collect in ("first", "all") else ""
        raise DecorationError(
            f"collect={collect!r} is unknown{told}. Use 'none' (the list of values), 'flatten' (the values joined in "
            "order), or a callable f(values)."
        )
    if callable(collect) and not accepts(collect, []):
        raise DecorationError(
            f"collect={name_of(collect)} cannot be called as f(values). Give it one positional parameter: the list of "
            "the workers' values."
        )


def join(collect: Any, values: list[Any], *, order: list[int] | None = None, where: str = "") -> Any:
    """What the caller gets of the leaders' ``values``, which come in shard order.

    ``order`` is ``Division.order`` of the call: ``'flatten'`` then puts the items back into the caller's order; the
    other ways to collect see the shards as they are. ``where`` names the call for messages. Arrays and tensors are
    copied, also those of a single shard, so that the result can be written to.

    Raises:
        CollectError: the values cannot be joined.
    """
    assert values, "a call has at least one shard"
    if callable(collect):
        return _by_callable(collect, values, where)
    if collect == "none":
        return values
    if collect != "flatten":
        validate_collect(collect)
    return _flattened(values, None if order is None else np.argsort(order), f"{where}: value" if where else "value")


def join_first(collect: Any, value: Any, where: str = "") -> Any:
    """What the caller of an ``execute='first'`` call gets: the value, or what a callable makes of ``[value]``."""
    return _by_callable(collect, [value], where) if callable(collect) else value


def _by_callable(collect: Callable[[list[Any]], Any], values: list[Any], where: str) -> Any:
    try:
        return collect(values)
    except Exception as error:
        error.add_note(f"raised by collect={name_of(collect)} of {where or 'this call'}, for {len(values)} values")
        raise


def has_concat(kind: type) -> bool:
    """Whether values of this type are joined by a method of their own, ``concat(values)``."""
    return isinstance(inspect.getattr_static(kind, "concat", None), (classmethod, staticmethod))


def _flattened(values: list[Any], places: Places, label: str) -> Any:
    if all(value is None for value in values):
        return None
    kind = type(values[0])
    for shard, value in enumerate(values):
        if type(value) is not kind:
            raise CollectError(
                f"{label} is {describe(values[0])} on shard 0 and {describe(value)} on shard {shard} of "
                f"{len(values)}. collect='flatten' joins one type: return it for an empty slice too, or use a callable."
            )
    if has_concat(kind):
        return _reordered(kind.concat(values), places, label)
    if isinstance(values[0], tuple):
        return _tuple(values, places, label)
    if isinstance(values[0], Mapping):
        return _mapping(values, places, label)
    if isinstance(values[0], list):
        return _reordered([item for value in values for item in value], places, label)
    if isinstance(values[0], np.ndarray) and all(value.ndim for value in values):
        return _reordered(_array(values, label), places, label)
    if instance_of(values[0], "torch", "Tensor") and all(value.ndim for value in values):
        return _reordered(_tensor(values, label), places, label)
    if instance_of(values[0], "datasets", "Dataset"):
        return _reordered(_dataset(values, label), places, label)
    if instance_of(values[0], "pandas", "DataFrame") or instance_of(values[0], "pandas", "Series"):
        return _frame(values, places, label)
    raise CollectError(
        f"{label} is {describe(values[0])} on shard 0 of {len(values)}, which collect='flatten' cannot join. It joins "
        "lists, tuples of lists, tensors, arrays, mappings of columns, tables, and types with a `concat` class method. "
        "Return one of these, or a list of one value. Or pass a callable as collect, such as collect=sum. Or use "
        "collect='none' for the list of values."
    )


def _tuple(values: list[Any], places: Places, label: str) -> Any:
    """Position by position; a named tuple stays one."""
    lengths = [len(value) for value in values]
    for shard, length in enumerate(lengths):
        if length != lengths[0]:
            raise CollectError(
                f"{label} is a tuple of {lengths[0]} on shard 0 and of {length} on shard {shard} of {len(values)}. "
                "collect='flatten' joins tuples position by position: return a list if these are items."
            )
    parts = {i: _flattened([value[i] for value in values], places, f"{label}[{i}]") for i in range(lengths[0])}
    return tuple(parts.values()) if columns_of(values[0]) is None else rebuild(values[0], parts)


def _mapping(values: list[Any], places: Places, label: str) -> Any:
    """Column by column."""
    keys = list(values[0])
    for shard, value in enumerate(values):
        if set(value) != set(keys):
            raise CollectError(
                f"{label} has the keys {keys} on shard 0 and {list(value)} on shard {shard} of {len(values)}. "
                "collect='flatten' joins mappings column by column: return every key, with empty columns for no items."
            )
    columns = {key: _flattened([value[key] for value in values], places, f"{label}[{key!r}]") for key in keys}
    return rebuild(values[0], columns)


def _filled(values: list[Any], signature: Callable[[Any], Any], label: str, advice: str) -> list[Any]:
    """The values that have items, or all of them if none has; their signatures are equal.

    A value without items has no say: ``np.array([])`` is float64 whatever the other shards hold.
    """
    shards = [shard for shard, value in enumerate(values) if len(value)] or list(range(len(values)))
    first = signature(values[shards[0]])
    for shard in shards:
        other = signature(values[shard])
        if other != first:
            raise CollectError(
                f"{label} ({type(values[0]).__name__}) has {first} on shard {shards[0]} and {other} on shard {shard} "
                f"of {len(values)}: collect='flatten' does not convert. {advice}, or pass a callable as collect."
            )
    return [values[shard] for shard in shards]


def _array(values: list[Any], label: str) -> Any:
    def signature(array: Any) -> str:
        dtype = array.dtype.kind if array.dtype.kind in "US" else array.dtype  # texts of any width are joined
        return f"dtype {dtype} and trailing shape {array.shape[1:]}"

    filled = _filled(values, signature, label, "Return equal ones, or a list of arrays")
    if isinstance(values[0], np.ma.MaskedArray):
        return np.ma.concatenate(filled)  # type: ignore[no-untyped-call]
    is_huge = sum(array.nbytes for array in filled) >= _THREADED_BYTES
    if is_huge and type(values[0]) is np.ndarray:
        return _copied_together(filled)
    joined: NDArray[Any] = np.concatenate(filled)
    return joined


def _copied_together(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """As ``np.concatenate``, a thread a part: one thread does not use up what the memory can copy."""
    dtype = np.result_type(*{part.dtype for part in parts})
    joined = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype)
    ends = list(itertools.accumulate(map(len, parts)))
    places = [joined[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        list(pool.map(np.copyto, places, parts))
    return joined


def _tensor(values: list[Any], label: str) -> Any:
    def signature(tensor: Any) -> str:
        return f"dtype {tensor.dtype}, trailing shape {tuple(tensor.shape[1:])} and device {tensor.device}"

    filled = _filled(values, signature, label, "Return equal ones, or a list of tensors")
    torch = sys.modules["torch"]
    first = filled[0]
    num_bytes = sum(tensor.nbytes for tensor in filled)
    if num_bytes < _HUGE_BYTES or first.device.type != "cpu" or first.requires_grad:
        return torch.cat(filled)
    # NumPy asks for huge pages, without which new memory costs more than the copy into it
    memory = torch.from_numpy(np.empty(num_bytes, np.uint8)).view(first.dtype)
    joined = memory.view(sum(len(tensor) for tensor in filled), *first.shape[1:])
    return torch.cat([tensor.detach() for tensor in filled], out=joined)


def _dataset(values: list[Any], label: str) -> Any:
    filled = _filled(values, lambda dataset: f"columns {sorted(dataset.column_names)}", label, "Return equal columns")
    try:
        return sys.modules["datasets"].concatenate_datasets(filled)
    except ValueError as error:
        raise CollectError(f"{label}: the datasets of {len(values)} shards do not fit together. Cast them.") from error


def _frame(values: list[Any], places: Places, label: str) -> Any:
    """Row labels are kept; frames that each number their rows from 0 are numbered anew."""

    def signature(frame: Any) -> str:
        columns = zip(frame.columns, frame.dtypes, strict=True) if frame.ndim == 2 else [(frame.name, frame.dtype)]
        return "columns " + ", ".join(f"{name!r}: {dtype}" for name, dtype in columns)

    pandas = sys.modules["pandas"]
    filled = _filled(values, signature, label, "Return equal columns of equal types")
    numbered = len(filled) > 1 and all(frame.index.equals(pandas.RangeIndex(len(frame))) for frame in filled)
    joined = _reordered(pandas.concat(filled), places, label)
    return joined.reset_index(drop=True) if numbered else joined


def _reordered(joined: Any, places: Places, label: str) -> Any:
    if places is None:
        return joined
    count = len(joined)
    if count != len(places):
        raise CollectError(
            f"{label} has {count} items in all, but RayHelper.balanced divided {len(places)}. collect='flatten' "
            "puts them back into the caller's order, so return one item for each, or use dispatch='slice'."
        )
    try:
        return take(joined, places, label)
    except DispatchError as error:
        raise CollectError(f"{label} cannot be put back into the caller's order: {error}") from error
