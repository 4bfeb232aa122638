"""Tensors that would lose their graph: a value that leaves a role travels as numbers, and its gradient ends there.

With Ray off ``backward()`` goes through a call. Elsewhere the receiver has a leaf: ``backward()`` succeeds and trains
nothing. So what has a ``grad_fn`` is refused wherever there are workers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any

from rayhelper.errors import DispatchError, WorkerError
from rayhelper.roles.project import is_of_project
from rayhelper.values.dispatch import bare, label_of

_DEPTH = 6  # of containers that are looked into; what is pickled is looked into to the end (``packing.py``)
_MANY = 1000  # items of a container from which on only the first is looked at


def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raises DispatchError if an argument holds a tensor with a graph, naming the call and the argument."""
    if "torch" not in sys.modules:
        return
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        for inside, tensor in _with_graph(bare(value)):
            raise DispatchError(f"{where}: {_cut_graph(label_of(place, names) + inside, tensor)}")


def check_value(value: Any, where: str) -> None:
    """Raises WorkerError if the value of a call holds a tensor with a graph."""
    if "torch" not in sys.modules:
        return
    for inside, tensor in _with_graph(value):
        raise WorkerError(_cut_graph(f"the value{inside} of {where}", tensor))


def _cut_graph(what: str, tensor: Any) -> str:
    """What is wrong with sending ``what``, and what to do."""
    return (
        f"{what} is a tensor with a grad_fn ({tensor.grad_fn.name()}), whose gradient would be cut: the receiver gets "
        "its numbers alone, and backward() there trains nothing of what computed it. Send tensor.detach() (or "
        ".item()), and call backward() in the role that computed it."
    )


def _with_graph(value: Any, place: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The tensors with a graph in a value, each with where it lies: ``['loss'][0]``."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield place, value
    elif depth and not isinstance(value, torch.nn.Module):
        for at, item in _contents(value):
            yield from _with_graph(item, place + at, depth - 1)


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value[:1] if len(value) > _MANY else value):
            yield f".{names[index]}" if names else f"[{index}]", item
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif isinstance(value, functools.partial):
        yield from ((f".args[{index}]", item) for index, item in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", item) for name, item in value.keywords.items())
    elif isinstance(value, FunctionType):
        held = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" (its variable {name!r})", cell.cell_contents) for name, cell in held if _is_filled(cell))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif not isinstance(value, type) and _is_users(type(value).__module__):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable is not set yet
        return False


@functools.lru_cache(4096)
def _is_users(name: str) -> bool:
    """Whether a module is of the user's project: through objects of other classes nobody wants to look."""
    return name == "__main__" or (name in sys.modules and is_of_project(name, sys.modules[name]))
