"""What a value would lose on its way to another process, and is refused for wherever there are workers.

a graph         a tensor travels as numbers: with Ray off ``backward()`` goes through a call, elsewhere it would
                succeed and train nothing
a position      a worker draws from a copy of a random generator: passed again, it would give the same numbers again
a meaning       ``RayHelper.whole(value)`` within another value is not an argument, which is what it marks
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from rayhelper.errors import DispatchError, WorkerError
from rayhelper.roles.project import is_users
from rayhelper.values.dispatch import Whole, bare, label_of, of_constructor
from rayhelper.values.slicing import instance_of

_DEPTH = 6  # of containers that are looked into; what is pickled is looked into to the end (``packing.py``)
_MANY = 1000  # items of a container from which on only the first is looked at
_PLAIN = (int, float, str, bool, type(None), bytes, np.ndarray)
_MOST_GENERATORS = 64  # that are remembered

_passed: OrderedDict[int, tuple[Any, Any]] = OrderedDict()  # generators by their ids, with the state that was sent


def check_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...], where: str, *, is_copied: bool = True
) -> None:
    """Raises DispatchError if an argument holds what would be lost, naming the call and the argument.

    ``is_copied`` False: processes that make the call draw from the argument itself, and others do not.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        if type(value) in _PLAIN:
            continue
        for inside, leaf in _leaves(bare(value)):
            what = label_of(place, names) + inside
            if isinstance(leaf, Whole):
                raise DispatchError(
                    f"{where}: {what} is RayHelper.whole(...) within another value. It marks a whole argument: pass it "
                    "as a separate argument."
                )
            if instance_of(leaf, "torch", "Tensor"):
                raise DispatchError(f"{where}: {_cut_graph(what, leaf)}")
            _pass(leaf, where, what, is_copied)


def check_constructor(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises DispatchError if an argument of a constructor holds a tensor with a graph."""
    if "torch" not in sys.modules:
        return
    for label, value in of_constructor(cls, args, kwargs):
        for inside, leaf in _leaves(bare(value)):
            if instance_of(leaf, "torch", "Tensor"):
                raise DispatchError(f"{cls.__name__}(...): {_cut_graph(label + inside, leaf)}")


def check_value(value: Any, where: str) -> None:
    """Raises WorkerError if the value of a call holds a tensor with a graph."""
    if "torch" not in sys.modules:
        return
    for inside, leaf in _leaves(value):
        if instance_of(leaf, "torch", "Tensor"):
            raise WorkerError(_cut_graph(f"the value{inside} of {where}", leaf))


def _cut_graph(what: str, tensor: Any) -> str:
    """What is wrong with sending ``what``, and what to do."""
    return (
        f"{what} is a tensor with a grad_fn ({tensor.grad_fn.name()}), whose gradient would be cut. The receiver gets "
        "only its numbers, and backward() there does not reach the code that computed it. Send tensor.detach() (or "
        ".item()), and call backward() in the role that computed it."
    )


def _pass(generator: Any, where: str, what: str, is_copied: bool) -> None:
    """Notes that a generator is sent. Raises DispatchError if it is where it was when it was sent before.

    If it is not copied, it is elsewhere on some processes alone, so that all of them raise.
    """
    state = _position(generator)
    before = _passed.pop(id(generator), (None, None))
    _passed[id(generator)] = generator, state
    if len(_passed) > _MOST_GENERATORS:
        _passed.popitem(last=False)
    if before[0] is generator and (before[1] == state or not is_copied):
        raise DispatchError(
            f"{where}: {what} is a random generator that was passed before. Workers draw from a copy, so they would "
            "draw the same numbers again. With Ray off, the generator continues. Make the generator in the role, or "
            "pass a new one, or a seed, with each call."
        )


def _position(generator: Any) -> Any:
    """Where a random generator is."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    return generator.get_state().numpy().tobytes()


def _leaves(value: Any, place: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """What may be lost of a value, each with where it lies: ``['loss'][0]``."""
    if type(value) in _PLAIN:
        return
    if instance_of(value, "torch", "Tensor"):
        if value.grad_fn is not None:
            yield place, value
    elif isinstance(value, _GENERATORS) or instance_of(value, "torch", "Generator") or isinstance(value, Whole):
        yield place, value
    elif depth and not instance_of(value, "torch.nn", "Module"):
        for at, item in _contents(value):
            yield from _leaves(item, place + at, depth - 1)


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, deque)):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(_few(value)):
            yield f".{names[index]}" if names else f"[{index}]", item
    elif isinstance(value, (set, frozenset)):
        yield from ((" (an item of the set)", item) for item in _few(value))
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
    elif isinstance(value, SimpleNamespace) or (not isinstance(value, type) and is_users(type(value).__module__)):
        # through others nobody wants to look
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _few(items: Collection[Any]) -> Iterable[Any]:
    return islice(items, 1) if len(items) > _MANY else items


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable is not set yet
        return False
