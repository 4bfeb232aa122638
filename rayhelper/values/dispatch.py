"""One ``(args, kwargs)`` per shard: how the arguments of a call are divided over the workers.

    caller's arguments --split_call--> Division(calls, order) --workers--> values --collect.join(order=...)--> result

``'all'`` sends everything to everyone, ``'slice'`` cuts near-equal contiguous slices, ``balanced(cost)`` shares items
out by cost, and a callable decides for itself. How a single value is cut is ``slicing.py``; nothing here moves
anything between processes.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rayhelper.errors import DecorationError, DispatchError
from rayhelper.roles.parts import placement_of
from rayhelper.values.slicing import Positions, describe, instance_of, item_at, num_items, take

T = TypeVar("T")
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Division:
    """The calls of a divided call, one a shard. ``order[k]`` is the caller's position of the k-th item of all shards
    laid end to end; None: they lie in the caller's order."""

    calls: list[Call]
    order: list[int] | None = None


@dataclass(frozen=True, eq=False)
class Whole:
    """An argument that travels uncut; see ``whole``."""

    value: Any


@dataclass(frozen=True)
class Balanced:
    """A dispatch that gives the shards items of about equal total cost; see ``balanced``."""

    cost: Callable[[Any], float] | None = None


def whole(value: T) -> T:
    """The value, marked to be sent uncut to every worker. The method receives the bare value, with Ray off as well."""
    return value if isinstance(value, Whole) else cast(T, Whole(value))


def balanced(cost: Callable[[Any], float] | None = None) -> Balanced:
    """A dispatch that balances the shards by cost; ``collect='flatten'`` restores the caller's order.

    The items of the first sliceable argument are weighed by ``cost`` (default: what its ``item_costs()`` gives, one
    number an item, if it has that method; else ``len(item)``, or 1 without a length).
    An item is an element, a row of an array, ``{column: entry}`` of columns, or a batch of one of a batch. They go,
    most expensive first, each to the least loaded shard (Graham 1969, longest processing time), so that no shard
    carries more than the mean load plus the largest cost. Within a shard items keep the caller's order; every other
    sliceable argument is divided in the same way.
    """
    return Balanced(cost)


def validate_dispatch(dispatch: Any, execute: Any) -> None:
    """Nothing, if the two can be used together. Raises DecorationError otherwise."""
    if execute not in ("first", "all"):
        raise DecorationError(f"execute={execute!r} is unknown. Use 'first' (worker 0 only) or 'all' (every worker).")
    if not (callable(dispatch) or isinstance(dispatch, Balanced) or dispatch in ("slice", "all")):
        raise DecorationError(
            f"dispatch={dispatch!r} is unknown. Use 'all', 'slice', RayHelper.balanced(cost=...), or a callable "
            "f(n, i, data) that returns shard i's data of n."
        )
    if execute == "first" and dispatch != "all":
        raise DecorationError(
            f"execute='first' calls one worker, which would get a part of the data under dispatch={name_of(dispatch)}. "
            "Use dispatch='all' to give it everything, or execute='all' to call every worker."
        )
    if callable(dispatch) and not accepts(dispatch, 2, 0, None):
        raise DecorationError(
            f"dispatch={name_of(dispatch)} cannot be called as f(n, i, data). These are the number of shards, the "
            "shard's index, and the call's argument (of several: the pair (args, kwargs)). Give it three positional "
            "parameters."
        )


def unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments with every ``whole(...)`` replaced by its value; what a call with Ray off does."""
    return tuple(map(bare, args)), {name: bare(value) for name, value in kwargs.items()}


def split_call(
    dispatch: Any,
    num_shards: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: Sequence[str] = (),
    where: str = "",
) -> Division:
    """The call of each of ``num_shards`` shards, none left out, and the order to restore.

    ``names`` are the parameter names of ``args`` and ``where`` names the call, both for messages. Arguments that go
    to everyone are the same object in every call; slices of arrays and tensors are views.

    Raises:
        DispatchError: the arguments cannot be divided as asked.
    """
    assert num_shards >= 1, f"a call is divided over {num_shards} shards"
    if isinstance(dispatch, str) and dispatch == "all":
        return Division([unwrap(args, kwargs)] * num_shards)
    if isinstance(dispatch, Balanced) or (isinstance(dispatch, str) and dispatch == "slice"):
        return _divided(dispatch, num_shards, args, kwargs, names, f"{where}: " if where else "")
    validate_dispatch(dispatch, "all")
    return Division(_by_callable(dispatch, num_shards, *unwrap(args, kwargs), where or "this call"))


def _divided(
    dispatch: Any, num_shards: int, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], prefix: str
) -> Division:
    values = [*args, *kwargs.values()]
    labels = [label_of(place, names) for place in (*range(len(args)), *kwargs)]
    counts = [num_items(value, prefix + label) for value, label in zip(values, labels, strict=True)]
    first = _first_sliceable(values, labels, counts, prefix)
    for value, label, own_count in zip(values, labels, counts, strict=True):
        if own_count is None:
            _check_no_batch(value, prefix + label, labels[first])
    count = cast(int, counts[first])
    order = None
    shards: Sequence[Positions]
    if isinstance(dispatch, Balanced):
        shards = assign(_costs(dispatch.cost, values[first], count, prefix + labels[first]), num_shards)
        order = [int(position) for shard in shards for position in shard]
    else:
        shards = slices(count, num_shards)
    calls: list[Call] = []
    for positions in shards:
        parts = [
            bare(value) if counts[i] is None else take(value, positions, prefix + labels[i])
            for i, value in enumerate(values)
        ]
        calls.append((tuple(parts[: len(args)]), dict(zip(kwargs, parts[len(args) :], strict=True))))
    return Division(calls, order)


def label_of(place: int | str, names: Sequence[str]) -> str:
    """How messages call an argument, given by position or by name; ``names``: of the parameters, as far as known."""
    if isinstance(place, int):
        if place >= len(names):
            return f"positional argument {place + 1}"
        place = names[place]
    return f"argument {place!r}"


def of_constructor(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """How messages call each argument of a constructor, and its value."""
    code = getattr(inspect.unwrap(cls.__init__), "__code__", None)  # type: ignore[misc]
    names = () if code is None else code.co_varnames[1 : code.co_argcount]
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return ((label_of(place, names), value) for place, value in places)


def _check_no_batch(value: Any, label: str, cut: str) -> None:
    """Raises DispatchError if a value that nothing says how to cut holds arrays, as a batch of a class of its own does:
    every worker would get all of it beside its share of the rest."""
    if isinstance(value, Whole) or placement_of(value) is not None or instance_of(value, "torch.nn", "Module"):
        return
    name = _array_in(value, depth=2)
    if name:
        raise DispatchError(
            f"{label} is {describe(value)} that holds arrays ({name!r}), and its type defines no way to cut it, "
            f"while {cut} is cut. Give {type(value).__name__} __len__ and a __getitem__ that takes a slice, or pass "
            "its columns as a dict. To send it whole to every worker, use RayHelper.whole(value)."
        )


def _array_in(value: Any, depth: int) -> str:
    """Under which attribute an object, or one that it holds, holds an array; empty: it holds none."""
    if isinstance(value, type) or instance_of(value, "torch.nn", "Module") or placement_of(value) is not None:
        return ""
    for name, held in getattr(value, "__dict__", {}).items():
        if (isinstance(held, np.ndarray) or instance_of(held, "torch", "Tensor")) and held.ndim > 0:
            return str(name)
        inner = _array_in(held, depth - 1) if depth > 1 else ""
        if inner:
            return f"{name}.{inner}"
    return ""


def _first_sliceable(values: list[Any], labels: list[str], counts: list[int | None], prefix: str) -> int:
    """The index of the first argument that is cut, all of them having one length."""
    cut = [i for i, count in enumerate(counts) if count is not None]
    if not cut:
        got = ", ".join(f"{label}: {describe(value)}" for label, value in zip(labels, values, strict=True))
        raise DispatchError(
            f"{prefix}no argument can be sliced (got {got or 'no arguments'}), so every worker would do all the "
            "work. Use dispatch='all' if that is meant; pass an empty list for no items."
        )
    for i in cut[1:]:
        if counts[i] != counts[cut[0]]:
            raise DispatchError(
                f"{prefix}{labels[cut[0]]} ({describe(values[cut[0]])} of length {counts[cut[0]]}) and {labels[i]} "
                f"({describe(values[i])} of length {counts[i]}) cannot be sliced together. Pass equal lengths, or "
                "send one of them uncut to every worker: RayHelper.whole(value)."
            )
    return cut[0]


def slices(count: int, num_shards: int) -> list[range]:
    """Contiguous ranges covering ``range(count)``, sizes differing by at most one, longer ones first."""
    size, longer = divmod(count, num_shards)
    starts = [i * size + min(i, longer) for i in range(num_shards + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def assign(costs: Sequence[float], num_shards: int) -> list[NDArray[np.int64]]:
    """Ascending item positions of each shard, max load <= mean load + max(costs).

    Of shards of equal load the one with fewer items is next, then the lower index.
    """
    positions: list[list[int]] = [[] for _ in range(num_shards)]
    loads = [(0.0, 0, shard) for shard in range(num_shards)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, held, shard = loads[0]
        positions[shard].append(item)
        heapq.heapreplace(loads, (load + costs[item], held + 1, shard))
    return [np.array(sorted(shard), np.int64) for shard in positions]


def _costs(cost: Callable[[Any], float] | None, value: Any, count: int, label: str) -> list[float]:
    costs: list[float] = []
    if cost is None and hasattr(type(value), "item_costs"):
        costs = [float(one) for one in value.item_costs()]
        if len(costs) != count or not all(0 <= one < math.inf for one in costs):
            raise DispatchError(f"{label}: its item_costs() must give {count} finite numbers >= 0, got {costs[:5]} ...")
        return costs
    for position in range(count):
        try:
            costs.append(float((cost or _size)(item_at(value, position))))
        except Exception as error:
            error.add_note(f"raised by cost={name_of(cost)} of RayHelper.balanced, for item {position} of {label}")
            raise
        if not 0 <= costs[-1] < math.inf:
            raise DispatchError(
                f"{label}: RayHelper.balanced got cost {costs[-1]} for item {position}. A cost is finite and >= 0."
            )
    return costs


def _size(item: Any) -> int:
    return len(item) if hasattr(type(item), "__len__") and getattr(item, "ndim", None) != 0 else 1


def _by_callable(
    function: Callable[..., Any], num_shards: int, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
) -> list[Call]:
    single = len(args) + len(kwargs) == 1
    data = next(iter((*args, *kwargs.values()))) if single else (args, kwargs)
    calls: list[Call] = []
    for shard in range(num_shards):
        try:
            part = function(num_shards, shard, data)
        except Exception as error:
            error.add_note(f"raised by dispatch={name_of(function)} of {where}, for shard {shard} of {num_shards}")
            raise
        if single:
            calls.append(unwrap((part,), {}) if args else unwrap((), dict.fromkeys(kwargs, part)))
        elif _is_call(part):
            calls.append(unwrap(tuple(part[0]), dict(part[1])))
        else:
            raise DispatchError(
                f"{where}: dispatch={name_of(function)} returned {describe(part)} for shard {shard} of {num_shards}. A "
                f"call with {len(args)} positional and {len(kwargs)} keyword arguments gives it data=(args, kwargs). "
                "Return the data of shard i in the same form: a pair of a tuple and a dict."
            )
    return calls


def _is_call(data: Any) -> bool:
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    return pair and isinstance(data[0], (tuple, list)) and isinstance(data[1], Mapping)


def accepts(function: Callable[..., Any], *args: Any) -> bool:
    """Whether the callable's signature takes these arguments; True where it has none to look at."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def bare(value: Any) -> Any:
    return value.value if isinstance(value, Whole) else value


def name_of(function: Any) -> str:
    """How messages call what was given as dispatch, cost or collect."""
    return str(getattr(function, "__qualname__", repr(function)))
