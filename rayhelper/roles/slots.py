"""The attributes of an object: those in its ``__dict__``, and those in ``__slots__`` of its classes."""

from __future__ import annotations

import contextlib
import functools
from types import MemberDescriptorType
from typing import Any

_NONE: dict[str, Any] = {}


def attributes_of(instance: Any) -> dict[str, Any]:
    """By name, to be read only. Of an object without slots it is the very ``__dict__``."""
    held: dict[str, Any] = getattr(instance, "__dict__", _NONE)
    cls: Any = type(instance)
    slots = slots_of(cls)
    if not slots:
        return held
    found = dict(held)
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError):  # not set
            found[name] = slot.__get__(instance)
    return found


@functools.lru_cache(4096)
def slots_of(cls: Any) -> dict[str, MemberDescriptorType]:
    """The slots of classes that are written in Python."""
    return {
        name: value
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    }
