"""Whether settings still hold what they held: dicts, lists, dataclasses, namespaces and the like, changed in place.

    trainer.options["lr"] = 0.1          an entry of a dict
    trainer.config.model.lr = 0.1        a field of a dataclass in a dataclass

Of each container a shallow copy is kept, which Python compares with it at the speed of C. Containers with other objects
in them (tensors, models) are compared by which objects these are, so that none is kept alive.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import operator
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from rayhelper.roles.names import MISSING, PLAIN, set_by
from rayhelper.roles.project import is_users

MOST_ENTRIES = 512  # of all containers of a value; a larger one is data rather than settings
_DEPTH = 6
_EMPTY = (None, list, dict, set, int, float, str, bool, tuple)  # factories of a defaultdict
_WHOLE = (*PLAIN, bytes, complex, range, PurePath, Enum, datetime.date, datetime.timedelta, type, FunctionType)


class Container(NamedTuple):
    """One container, and what it held."""

    path: str
    held: Any  # the container itself
    entries: Callable[[Any], Any]  # what is compared, of the container
    before: Any


class Inside:
    """What the containers of a value held when this was made."""

    def __init__(self, value: Any) -> None:
        self.containers: tuple[Container, ...] = ()
        found: list[Container] = []
        if _collect(value, "", found, 0, [0]):
            self.containers = tuple(found)

    def is_as_it_was(self) -> bool:
        """Fast, as each call asks."""
        try:
            for _, held, entries, before in self.containers:
                if entries(held) != before:
                    return False
        except Exception:  # values that cannot be compared, such as arrays in the place of numbers
            return False
        return True

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """By its path, each entry that is another one now: what it was, and what it is (MISSING: there is none)."""
        for path, held, entries, before in self.containers:
            try:
                now = entries(held)
            except Exception:  # a field that was deleted
                yield path, before, MISSING
                continue
            for step, was, value in _pairs(held, before, now):
                if not _is_same(was, value):
                    yield path + step, was, value


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:
        return False


def _pairs(held: Any, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict):
        for key in before.keys() | now.keys():
            step = f".{key}" if not isinstance(held, dict) else f"[{key!r}]"
            yield step, before.get(key, MISSING), now.get(key, MISSING)
    elif isinstance(before, (list, tuple)) and not isinstance(held, (list, tuple)):
        yield from ((f".{name}", was, value) for name, was, value in zip(_names(held) or (), before, now, strict=False))
    elif isinstance(before, (list, tuple)) and len(before) == len(now):
        yield from ((f"[{k}]", was, value) for k, (was, value) in enumerate(zip(before, now, strict=True)))
    else:
        yield "", before, now


def _collect(value: Any, path: str, found: list[Container], depth: int, count: list[int]) -> bool:
    """Adds the containers in a value. False: there are too many entries, or they lie too deep."""
    items = _items(value)
    if items is None:
        return True
    count[0] += len(items)
    if count[0] > MOST_ENTRIES or depth > _DEPTH:
        return False
    if any(one.held is value for one in found):
        return True
    entries = _entries(value, all(_is_whole(item) or _items(item) is not None for _, item in items))
    if entries is not None:
        found.append(Container(path, value, entries, copy.copy(entries(value))))
    return all(_collect(item, path + step, found, depth + 1, count) for step, item in items)


def _is_whole(value: Any) -> bool:
    return isinstance(value, _WHOLE)


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, by the step of the path; None: it is none."""
    if isinstance(value, dict):
        if hasattr(type(value), "__missing__") and not _adds_empty(value):  # reading it may add anything
            return None
        return [(f"[{key!r}]", item) for key, item in itertools.islice(value.items(), MOST_ENTRIES + 1)]
    if isinstance(value, (list, tuple)):
        return [(f"[{k}]", item) for k, item in enumerate(value[: MOST_ENTRIES + 1])]
    if isinstance(value, (set, frozenset)):
        return [("", None)] * len(value)
    if (names := _names(value)) is not None:
        return [(f".{name}", getattr(value, name, None)) for name in names]
    return None


def _names(value: Any) -> list[str] | None:
    """The attributes of an object of settings, without those that its own methods set; None: it is no such object."""
    if isinstance(value, (type, ModuleType, FunctionType)) or hasattr(value, "_rayhelper"):
        return None
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    elif isinstance(value, (Namespace, SimpleNamespace)) or _is_settings(value):
        names = list(vars(value))
    else:
        return None
    cls: Any = type(value)
    of_class = set_by(cls)
    return [name for name in names if not name.startswith("_") and name not in of_class.writes | of_class.changes]


def _is_settings(value: Any) -> bool:
    """Whether an object of a user's class is changed from outside only: its methods set nothing."""
    cls: Any = type(value)
    if cls.__base__ is not object or not is_users(str(cls.__module__)) or not hasattr(value, "__dict__"):
        return False
    names = set_by(cls)
    return not names.writes and not names.changes


def _entries(value: Any, is_plain: bool) -> Callable[[Any], Any] | None:
    """What gives the entries of a container for a comparison; None: it cannot change."""
    if isinstance(value, (tuple, frozenset)):
        return None
    if isinstance(value, defaultdict):
        return _filled if is_plain else _identities_of_filled
    if isinstance(value, dict):
        return _itself if is_plain else _identities_of_dict
    if isinstance(value, list):
        return _itself if is_plain else _identities_of_list
    if isinstance(value, set):
        return _itself
    names = _names(value) or []
    if not is_dataclass(value) and len(names) == len(vars(value)):
        return vars if is_plain else _identities_of_vars
    if not names or not all(hasattr(value, name) for name in names):
        return None
    if is_plain:
        return operator.attrgetter(*names, names[0])  # of one name alone it would be no tuple
    return _Identities(names)


def _adds_empty(value: Any) -> bool:
    """Whether reading a dict adds nothing to it, or an empty value."""
    return isinstance(value, Counter) or (isinstance(value, defaultdict) and value.default_factory in _EMPTY)


def _itself(value: Any) -> Any:
    return value


def _filled(value: dict[Any, Any]) -> dict[Any, Any]:
    """Without the entries that a defaultdict may have got because they were read."""
    return {key: item for key, item in value.items() if (not _is_whole(item) and _items(item) is None) or item}


def _identities_of_filled(value: dict[Any, Any]) -> dict[Any, Any]:
    return _identities_of_dict(_filled(value))


def _identity(value: Any) -> Any:
    return value if isinstance(value, _WHOLE) else id(value)


def _identities_of_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _identity(item) for key, item in value.items()}


def _identities_of_list(value: list[Any]) -> list[Any]:
    return [_identity(item) for item in value]


def _identities_of_vars(value: Any) -> dict[str, Any]:
    return _identities_of_dict(vars(value))


class _Identities:
    """The fields of a dataclass, some of which hold other objects."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, value: Any) -> tuple[Any, ...]:
        return tuple(_identity(getattr(value, name, MISSING)) for name in self.names)
