"""The objects that an expression may have as its value, and what is in them."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np

from rayhelper.roles.names import MISSING, PLAIN

_MOST_ITEMS = 1000  # of one container
DEPTH = 6
CONTAINERS = (list, tuple, set, frozenset, collections.deque, dict, weakref.ref, types.MappingProxyType)


class Place(NamedTuple):
    """An attribute of an object with roles, whose value an expression stands for or has been taken from."""

    instance: int
    name: str


class Local(NamedTuple):
    """A function that is defined within another one."""

    node: Any
    env: Any


CALLED = (FunctionType, MethodType, functools.partial, weakref.ref, Local)
Values = dict[Any, Any]  # by id or, of the three above and of methods, by key


@functools.cache
def kinds_of_generators() -> tuple[type, ...]:
    """The kinds of random generators."""
    torch = sys.modules.get("torch")
    return (random.Random, np.random.Generator, np.random.RandomState, *(() if torch is None else (torch.Generator,)))


def places_in(values: Values) -> Values:
    return {key: None for key in values if isinstance(key, Place)}


def without_places(values: Values) -> Values:
    return {key: value for key, value in values.items() if not isinstance(key, Place)}


def is_module(value: Any) -> bool:
    """Whether a value has weights, as a module of torch."""
    return hasattr(value, "state_dict") and callable(getattr(value, "parameters", None))


def is_role_object(value: Any) -> bool:
    """Whether a value is an object of a class with roles."""
    return hasattr(type(value), "__rayhelper_roles__")


def one_of(value: Any, key: Any = None) -> Values:
    if value is MISSING or isinstance(value, (*PLAIN, bytes, complex)):
        return {}
    return {id(value) if key is None else key: value}


def each_of(values: Mapping[str, Any]) -> dict[str, Values]:
    return {name: one_of(value) for name, value in values.items()}


def all_of(values: Iterable[Values]) -> Values:
    found: Values = {}
    for one in values:
        found |= one
    return found


def parameters_of(names: Iterable[str], num: int, given: list[Values], named: dict[str, Values]) -> dict[str, Values]:
    """What the parameters of a function stand for."""
    found = dict(zip(list(names)[:num], given, strict=False))
    return {name: dict(found.get(name) or named.get(name) or {}) for name in names}


def items_of(container: Any, place: Any = MISSING) -> Values:
    if isinstance(container, weakref.ref):
        return one_of(container())
    if place is not MISSING and isinstance(container, (dict, list, tuple, collections.deque)):
        with contextlib.suppress(LookupError, TypeError):
            held = dict.get(container, place, MISSING) if isinstance(container, dict) else container[place]
            if held is not MISSING:
                return one_of(held)
    items = container.values() if isinstance(container, (dict, types.MappingProxyType)) else container
    return all_of(map(one_of, list(items))) if len(items) <= _MOST_ITEMS else {}  # more are data


def with_items(values: Values) -> Values:
    """The values, and what is in the containers among them, however deep, each once."""
    found, level = dict(values), values
    for _ in range(DEPTH):
        items = all_of(items_of(value) for value in level.values() if isinstance(value, CONTAINERS))
        level = {key: value for key, value in items.items() if key not in found}
        found |= level
    return found


def attributes_of(one: Any) -> Mapping[str, Any]:
    """The attributes of an object itself, and modules in a module of torch."""
    try:
        held: dict[str, Any] = object.__getattribute__(one, "__dict__")
    except (AttributeError, TypeError):
        held = {}
    modules = held.get("_modules")
    return {**held, **modules} if isinstance(modules, dict) else held
