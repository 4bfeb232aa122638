"""A call some of whose arguments are futures: its values arrive on the workers, which divide them.

    driver     late_calls(...)       a LateCall for each shard, FuturePart where a future stood         call.py
    worker     divide_late(...)      the own arguments, from the replies of the workers that made the values

Of a value that was flattened and is sliced again a worker joins no more than its own slice (``Parts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayhelper.roles.methods import RoleMethod
from rayhelper.values.calls import divide
from rayhelper.values.collect import has_concat, join, join_first
from rayhelper.values.dispatch import Whole, whole
from rayhelper.values.packing import Ledger
from rayhelper.values.reply import opened
from rayhelper.values.slicing import instance_of, take


@dataclass(frozen=True)
class FuturePart:
    """Stands for a future among the arguments: its value is what ``collect`` makes of parts[start:stop]."""

    start: int
    stop: int
    collect: Any
    is_first: bool  # of a call that worker 0 alone made
    leaders: tuple[int, ...]
    order: list[int] | None
    where: str


@dataclass(frozen=True)
class LateCall:
    """Arguments that hold futures: divided here, where their values arrive, instead of on the driver."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_shards: int
    index: int
    where: str


class Parts:
    """What ``flatten`` would make of several values: cut as that would be, joined only then."""

    def __init__(self, values: Sequence[Any], where: str) -> None:
        self.values = list(values)
        self.where = where

    def __len__(self) -> int:
        return sum(map(len, self.values))

    def __getitem__(self, index: slice) -> Parts:
        start, stop, _ = index.indices(len(self))
        pieces, begin = [], 0
        for value in self.values:
            end = begin + len(value)
            if start < end and begin < stop:
                pieces.append(take(value, range(max(start, begin) - begin, min(stop, end) - begin)))
            begin = end
        if not pieces:  # nothing, of the type and shape of the rest
            pieces = [take(next((value for value in self.values if len(value)), self.values[0]), range(0))]
        return Parts(pieces, self.where)

    def joined(self) -> Any:
        """The value."""
        return join("flatten", self.values, where=self.where)


def divide_late(
    method: RoleMethod[..., Any], late: LateCall, parts: Sequence[Any], ledger: Ledger
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of this worker's shard. ``parts``: the replies behind all futures, one after the other."""
    is_cut = method.execute == "all" and method.dispatch == "slice"

    def arrived(value: Any) -> Any:
        return _future_value(value, parts, ledger, is_cut)

    args, kwargs = tuple(map(arrived, late.args)), {name: arrived(value) for name, value in late.kwargs.items()}
    own_args, own_kwargs = divide(method, late.num_shards, args, kwargs, late.where).calls[late.index]
    return tuple(map(_whole_value, own_args)), {name: _whole_value(value) for name, value in own_kwargs.items()}


def _whole_value(value: Any) -> Any:
    return value.joined() if isinstance(value, Parts) else value


def _future_value(value: Any, parts: Sequence[Any], ledger: Ledger, is_cut: bool) -> Any:
    if isinstance(value, Whole):
        return whole(_future_value(value.value, parts, ledger, False))
    if not isinstance(value, FuturePart):
        return value
    replies = parts[value.start : value.stop]
    values = [opened(replies[k], ledger=ledger) for k in value.leaders]
    if value.is_first:
        return join_first(value.collect, values[0], where=value.where)
    if is_cut and value.collect == "flatten" and value.order is None and _can_be_cut(values):
        return Parts(values, value.where)
    return join(value.collect, values, order=value.order, where=value.where)


def _can_be_cut(values: Sequence[Any]) -> bool:
    """Whether flattened values are cut where the values themselves are: lists, tensors, arrays, batches of one type."""
    if len({type(value) for value in values}) > 1:
        return False
    if isinstance(values[0], np.ndarray) or instance_of(values[0], "torch", "Tensor"):
        return all(value.ndim for value in values)
    return type(values[0]) is list or has_concat(type(values[0]))
