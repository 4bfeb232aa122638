"""Tensors that would lose their graph: a value that leaves a role travels as numbers, and its gradient ends there.

With Ray off ``backward()`` goes through a call. Elsewhere the receiver has a leaf: ``backward()`` succeeds and trains
nothing. So what has a ``grad_fn`` is refused wherever there are workers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rayhelper.errors import DispatchError, WorkerError
from rayhelper.values.dispatch import bare

_DEPTH = 6  # of containers that are looked into; what is pickled is looked into to the end (``packing.py``)
_MANY = 1000  # items of a container from which on only the first is looked at


def has_graph(tensor: Any) -> bool:
    """Whether a tensor was computed from others that require gradients."""
    return tensor.grad_fn is not None


def cut_graph(what: str) -> str:
    """What is wrong with sending ``what``, and what to do."""
    return (
        f"{what} is a tensor with a grad_fn ({{0}}), whose gradient would be cut: the receiver gets its numbers alone, "
        "and backward() there trains nothing of what computed it. Send tensor.detach() (or .item()), and call "
        "backward() in the role that computed it."
    )


def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raises DispatchError if an argument holds a tensor with a graph, naming the call and the argument."""
    if "torch" not in sys.modules:
        return
    for position, value in enumerate(args):
        for place, tensor in _with_graph(bare(value)):
            name = f"argument {names[position]!r}" if position < len(names) else f"positional argument {position + 1}"
            raise DispatchError(f"{where}: {cut_graph(name + place).format(tensor.grad_fn.name())}")
    for name, value in kwargs.items():
        for place, tensor in _with_graph(bare(value)):
            raise DispatchError(f"{where}: {cut_graph(f'argument {name!r}{place}').format(tensor.grad_fn.name())}")


def check_value(value: Any, where: str) -> None:
    """Raises WorkerError if the value of a call holds a tensor with a graph."""
    if "torch" not in sys.modules:
        return
    for place, tensor in _with_graph(value):
        raise WorkerError(cut_graph(f"the value{place} of {where}").format(tensor.grad_fn.name()))


def _with_graph(value: Any, place: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The tensors with a graph in a value, each with where it lies: ``['loss'][0]``."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        if has_graph(value):
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
