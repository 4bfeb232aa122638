"""The objects of a program, and which of them a value is or holds.

    Policy()                      ((), policy)
    [Policy(), Judge()]           (("[0]",), policy), (("[1]",), judge)
    {role: Scorer() for ...}      (("{*}",), scorer)          a key that is no literal
    open(path)                    ((), None)                  something that is not known
    None, 3, "a"                  nothing

A step of a path is as an ``Access`` has it; that of mappings with other keys than text is ``{*}``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rayhelper.check.reading.module import Function, own_nodes
from rayhelper.check.reading.names import Names
from rayhelper.check.reading.source import Lineage, Method

CONSTRUCTORS = ("__init__", "__post_init__")
ANY_ITEM, ANY_KEY = "[*]", "{*}"
MOST_HELD, LONGEST_PATH = 100, 4  # what lies deeper, or among more, is not followed


@dataclass(eq=False)
class Instance:
    """One object of a decorated class, or the object of the class that is checked."""

    lineage: Lineage
    name: str  # as a user writes it
    frame: Frame | None = None  # the code that builds it; None: it was there before
    call: ast.Call | None = None  # the call that does
    holds: dict[str, Value] = field(default_factory=dict)  # by attribute

    @property
    def builder(self) -> Instance | None:
        """The object whose method builds it."""
        return None if self.frame is None else self.frame.instance

    @property
    def constructors(self) -> list[Method]:
        return [method for method in map(self.lineage.find, CONSTRUCTORS) if method is not None]


@dataclass(eq=False)
class Frame:
    """A function's code with what its parameters hold: a method's, or that of a function that a method calls."""

    instance: Instance
    method: Method
    function: Function
    names: Names
    given: Mapping[str, Value]
    calls: tuple[ast.Call, ...] = ()  # by which the method gets there

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return own_nodes(self.function, closures=True)


class Held(NamedTuple):
    """An object at a path below a value; None: something that is not known."""

    path: tuple[str, ...]
    instance: Instance | None


Value = tuple[Held, ...]
NOTHING: Value = ()
UNKNOWN: Value = (Held((), None),)


def only(instance: Instance) -> Value:
    """The value that is this object."""
    return (Held((), instance),)


def joined(*values: Value) -> Value:
    """What is one of these values."""
    found = tuple(dict.fromkeys(held for value in values for held in value))
    return found if len(found) <= MOST_HELD else UNKNOWN


def instances(value: Value) -> list[Instance]:
    """The objects that the value itself may be."""
    return [held.instance for held in value if not held.path and held.instance is not None]


def is_sure(value: Value) -> bool:
    """Whether the value is one of ``instances``, or None."""
    return all(held.instance is not None for held in value if not held.path)


def held_in(value: Value) -> list[Instance]:
    """The objects that the value is, or holds at any path."""
    return list(dict.fromkeys(held.instance for held in value if held.instance is not None))


def put(step: str, value: Value) -> Value:
    """A container that holds the value."""
    return tuple(Held((step, *held.path), held.instance) for held in value if len(held.path) < LONGEST_PATH)


def take(value: Value, step: str) -> Value:
    """What a container holds at an index; where nobody knows at which of several, something unknown is among it."""
    inside = [held.path[0] for held in value if held.path]
    is_exact = step in inside and step != ANY_ITEM
    steps = {step} if is_exact else {one for one in inside if step == ANY_ITEM or one in (ANY_ITEM, ANY_KEY)}
    found = _below(value, steps)
    return found if is_exact or len(held_in(found)) <= 1 else joined(found, UNKNOWN)


def items_of(value: Value) -> Value:
    """What each item of a container may be. The items of a mapping are its keys, which are no objects."""
    return _below(value, {held.path[0] for held in value if held.path and not _is_key(held.path[0])})


def values_of(value: Value) -> Value:
    """What the values of a mapping may be."""
    return _below(value, {held.path[0] for held in value if held.path and _is_key(held.path[0])})


def _below(value: Value, steps: set[str]) -> Value:
    found = tuple(Held(held.path[1:], held.instance) for held in value if held.path and held.path[0] in steps)
    is_known = bool(found) and is_sure(value)
    return found if is_known or not value else joined(found, UNKNOWN)


def _is_key(step: str) -> bool:
    return step == ANY_KEY or step[1:2] in ("'", '"')
