"""Which arguments a method has changed in place: with Ray off its caller sees that, and on Ray it does not.

The first calls of each method on a worker are looked at, and some of the later ones. Each argument is told once.
So are arguments of the constructor: ``net`` of ``Trainer(net)``, which the driver's code may go on using.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from rayhelper.values.attributes import attributes_of
from rayhelper.values.calls import parameter_names
from rayhelper.values.dispatch import label_of, of_constructor
from rayhelper.values.slicing import instance_of
from rayhelper.worker.changed.marks import PLAIN, Mark, differ, is_looked_at, is_own, mark, may_keep_copies

_MOST = 8192  # entries of an argument that are looked at
_MOST_HELD = 512  # values within an argument of a constructor


class Given:
    """The arguments of calls on one worker."""

    def __init__(self) -> None:
        self.num_calls: Counter[Any] = Counter()  # by method
        self.told: set[tuple[Any, int | str]] = set()  # by method, the places of arguments

    def marks(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Mark] | None:
        """Of the arguments of a call that is about to be made; None: it is not looked at."""
        if not args and not kwargs:
            return None
        self.num_calls[method] += 1
        if not is_looked_at(self.num_calls[method]):
            return None
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return {
            place: mark(value, _MOST)
            for place, value in places
            if type(value) not in PLAIN and (method, place) not in self.told
        }

    def changed(
        self, before: dict[int | str, Mark] | None, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:
        """Those that the call has changed, as messages name them."""
        found = []
        for place, was in (before or {}).items():
            value = args[place] if isinstance(place, int) else kwargs[place]
            if differ(was, mark(value, _MOST)):
                self.told.add((method, place))
                found.append("its " + label_of(place, parameter_names(method)))
        return found


class OfConstructor:
    """Where a new object keeps the arguments of its constructor, to which its driver may have other references."""

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.labels: dict[int, str] = {}  # by id, of the arguments and of what they hold
        for label, value in of_constructor(cls, args, kwargs):
            for one in (value, *_held_by(value)):
                if type(one) not in PLAIN:
                    self.labels.setdefault(id(one), f"the {label} of {cls.__name__}(...)")

    def kept_as(self, value: Any) -> str:
        """How messages call the argument that an attribute holds; empty: it holds none."""
        if not self.labels or type(value) in PLAIN:
            return ""
        modules = value.modules() if instance_of(value, "torch.nn", "Module") else (value,)
        return next((self.labels[id(one)] for one in modules if id(one) in self.labels), "")


def behind(value: Any) -> Iterator[Any]:
    """What calling a value may change: the object of a method, the variables of a function of the user's."""
    if isinstance(value, functools.partial):
        for one in (value.func, *value.args, *value.keywords.values()):
            yield from behind(one)
    elif isinstance(value, (BuiltinMethodType, MethodType)):
        yield value.__self__
    elif isinstance(value, FunctionType) and is_own(value.__module__):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if not may_keep_copies(name) and (content := _content(cell)) is not value:
                yield from behind(content)
    else:
        yield value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value[:_MOST_HELD])
    if isinstance(value, dict):
        return list(islice(value.values(), _MOST_HELD))
    is_settings = (
        is_dataclass(value) or isinstance(value, (SimpleNamespace, Namespace)) or is_own(type(value).__module__)
    )
    return list(islice(attributes_of(value).values(), _MOST_HELD)) if is_settings else []
