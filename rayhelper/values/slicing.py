"""What a value is cut into: how many items it has, and the items at given positions, in a value of the same type.

Lists, tuples, ranges, arrays and tensors (first dimension), ``datasets.Dataset``, pandas tables, mappings and named
tuples of columns, and whatever else has a length and takes slices. No optional library is imported: tensors and tables
are recognised where they are loaded. ``dispatch.py`` and ``collect.py`` decide which items go where.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rayhelper.errors import DispatchError

Positions = range | NDArray[np.int64]


def num_items(value: Any, label: str = "value") -> int | None:
    """How many items the value is cut into; None if it goes to everyone.

    Raises:
        DispatchError: it holds several items but has no order to cut along, or columns of unequal length.
    """
    kind = type(value)
    if value is None or isinstance(value, (str, bytes, bytearray, memoryview, type)):
        return None
    if (hasattr(kind, "ndim") and value.ndim == 0) or instance_of(value, "torch.nn", "Module"):
        return None
    columns = columns_of(value)
    if columns is not None:
        return _num_rows(columns, f"{label} ({kind.__name__})", label)
    if isinstance(value, Iterator) or any(base.__name__ == "IterableDataset" for base in kind.__mro__):
        raise DispatchError(_unsliceable(value, label, "can only be iterated"))
    if not hasattr(kind, "__len__"):
        return None
    if hasattr(kind, "__getitem__"):
        return len(value)
    if hasattr(kind, "__iter__"):
        raise DispatchError(_unsliceable(value, label, "has items but no order to slice them in"))
    return None


def _num_rows(columns: Mapping[Any, Any], described: str, label: str) -> int | None:
    """The length that all columns have; None if there is no column at all. A column of None stands beside any other."""
    lengths = {key: num_items(column, f"{label}[{key!r}]") for key, column in columns.items()}
    known = {length for length in lengths.values() if length is not None}
    if not known:
        return None
    if len(known) == 1 and all(lengths[key] is not None or column is None for key, column in columns.items()):
        return known.pop()
    got = ", ".join(
        f"{key!r}: {describe(columns[key])}" + ("" if length is None else f" of length {length}")
        for key, length in lengths.items()
    )
    raise DispatchError(
        f"{described} is sliced as a table, so all of its values must be columns of one length (got {got}). Give "
        "them one length, pass the others as separate arguments, or send it uncut to every worker: "
        "RayHelper.whole(value)."
    )


def take(value: Any, positions: Positions, label: str = "value") -> Any:
    """The items at ``positions`` (a contiguous range, or an array of any order), in a value of the same type."""
    if value is None:
        return None
    columns = columns_of(value)
    if columns is not None:
        taken = {key: take(column, positions, f"{label}[{key!r}]") for key, column in columns.items()}
        return rebuild(value, taken)
    if instance_of(value, "datasets", "Dataset"):
        return value.select(positions if len(positions) else range(0))
    if isinstance(value, (list, tuple, range)) and not isinstance(positions, range):
        picked = [value[position] for position in positions.tolist()]
        return tuple(picked) if isinstance(value, tuple) else picked
    index = slice(positions.start, positions.stop) if isinstance(positions, range) else positions
    is_leaf = instance_of(value, "torch", "Tensor") and value.requires_grad  # one with a graph was refused before
    try:
        piece = (value.iloc if hasattr(type(value), "iloc") else value.detach() if is_leaf else value)[index]
        piece = piece.requires_grad_() if is_leaf else piece  # as the whole of it would arrive
        count = len(piece)
    except Exception as error:  # a user's type answers an index it does not know in its own way
        how = "a slice" if isinstance(index, slice) else "an array of positions"
        raise DispatchError(_unsliceable(value, label, f"does not accept {how} as index")) from error
    if count != len(positions):
        raise DispatchError(_unsliceable(value, label, f"gave {count} items for {len(positions)}"))
    return piece


def columns_of(value: Any) -> Mapping[Any, Any] | None:
    """The columns of a mapping or a named tuple; None for every other value."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return cast(Mapping[Any, Any], value._asdict())
    return value if isinstance(value, Mapping) else None


def rebuild(like: Any, columns: dict[Any, Any]) -> Any:
    """``columns`` in a mapping or named tuple of the type of ``like``; a dict where that type takes no columns."""
    kind: Any = type(like)
    if isinstance(like, tuple):
        return kind._make(columns.values())
    if kind is dict:
        return columns
    try:
        built = kind(like.default_factory, columns) if isinstance(like, defaultdict) else kind(columns)
    except (TypeError, ValueError):
        return columns
    return built if list(built) == list(columns) else columns


def item_at(value: Any, position: int) -> Any:
    """The item at ``position``: an element, a row, ``{column: entry}``, or a table of one if the table takes slices."""
    columns = columns_of(value)
    if columns is not None:
        entries = {key: None if column is None else item_at(column, position) for key, column in columns.items()}
        return rebuild(value, entries) if isinstance(value, tuple) else entries
    if hasattr(type(value), "iloc"):
        return value.iloc[position]
    try:
        return value[position]
    except TypeError:
        return value[position : position + 1]


def instance_of(value: Any, module: str, name: str) -> bool:
    """Whether the value is a ``module.name``, without importing the module: where it is not loaded there are none."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def describe(value: Any) -> str:
    """The value's type, for a message."""
    if value is None:
        return "None"
    name = type(value).__name__
    return (
        ("an " if name[0] in "aeioAEIO" else "a ")
        + name
        + (" of no dimensions" if getattr(value, "ndim", 1) == 0 else "")
    )


def _unsliceable(value: Any, label: str, problem: str) -> str:
    return (
        f"{label} is {describe(value)}, which {problem}. Pass a list, a tensor, an array or a type whose __getitem__ "
        "takes it. To send it whole to every worker, use RayHelper.whole(value)."
    )
