"""One decorated call on a group, in whatever runtime: divided before, collected after. Pure.

layout_of(method)            which ranks are called, and whose values count      shards.py
divide(method, ...)          one (args, kwargs) per shard                        dispatch.py
-- the runtime carries each rank its part and brings the values back --
collect(method, ...)         what the caller gets                                collect.py
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayhelper.errors import DispatchError
from rayhelper.values.collect import join, join_first
from rayhelper.values.dispatch import Division, split_call, unwrap
from rayhelper.values.lost import check_arguments
from rayhelper.values.shards import FIRST, Layout, ShardTable

if TYPE_CHECKING:
    from rayhelper.roles.methods import RoleMethod
    from rayhelper.timeline.recording import Recording


def layout_of(method: RoleMethod[..., Any], shards: ShardTable, address: str) -> Layout:
    """How a call of the method lies over the ranks. Raises ShardError."""
    return FIRST if method.execute == "first" else shards.layout(address, method.role)


def divide(
    method: RoleMethod[..., Any],
    num_shards: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: str,
    *,
    is_copied: bool = True,
) -> Division:
    """The call of each shard. Those that get the same share one object. Raises DispatchError.

    ``is_copied``: whether methods get copies of the arguments.
    """
    check_arguments(args, kwargs, parameter_names(method), where, is_copied=is_copied)
    if method.execute == "first" or method.dispatch == "all":
        return Division([unwrap(args, kwargs)] * num_shards)
    return split_call(method.dispatch, num_shards, args, kwargs, names=parameter_names(method), where=where)


def collect(method: RoleMethod[..., Any], values: list[Any], order: list[int] | None, where: str) -> Any:
    """The caller's value from those of the leaders, in order of their shards. Raises CollectError."""
    if method.execute == "first":
        return join_first(method.collect, values[0], where=where)
    return join(method.collect, values, order=order, where=where)


def collector(
    method: RoleMethod[..., Any],
    order: list[int] | None,
    where: str,
    name: str,
    recording: Recording | None,
    call: int,
) -> Callable[[list[Any]], Any]:
    """``collect`` as a function of the leaders' values, which notes under ``name`` the time that it takes."""

    def collected(values: list[Any]) -> Any:
        started_ns = time.time_ns()
        value = collect(method, values, order, where)
        if recording:
            recording.span("collect", name, started_ns, call)
        return value

    return collected


def where_of(title: str, group: str) -> str:
    """A call of the method that messages call ``title``, as error messages name it."""
    return f"{title} on group {group!r}"


def unsendable(where: str, error: Exception) -> DispatchError:
    """The error for arguments that do not pickle."""
    return DispatchError(f"an argument of {where} cannot be sent to another process: {error}")


@functools.cache
def parameter_names(method: RoleMethod[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters, as a caller sees them; for messages."""
    code = inspect.unwrap(method.function).__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names if method.kind == "static" else names[1:]
