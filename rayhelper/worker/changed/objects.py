"""What a call has changed of the objects of a worker: names of attributes, which its driver is told with the reply."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from rayhelper.worker.changed.classes import Shared
from rayhelper.worker.changed.marks import PLAIN, differ, mark

_MISSING = object()


class Observed:
    """The objects of one whole on a worker, each with marks of its attributes."""

    def __init__(self, instances: Iterator[Any]) -> None:
        self.classes: dict[type, Shared] = {}
        self.objects = {str(one._rayhelper.identity.address): Attributes(one) for one in instances}

    def shared(self, cls: type) -> dict[str, Any]:
        """Marks of what objects of a class share."""
        if cls not in self.classes:
            self.classes[cls] = Shared(cls)
        return self.classes[cls].marks()

    def changes(self, title: str) -> dict[str, dict[str, str]]:
        """By address, the attributes that were changed since the last time, each with ``title``: by whom."""
        found: dict[str, dict[str, str]] = {}
        for address, one in self.objects.items():
            if names := one.changed():
                found[address] = dict.fromkeys(names, title)
        return found


class Attributes:
    """The attributes of one object, with what they were."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.marks: dict[str, Any] = {}
        self.changed()

    def changed(self) -> list[str]:
        """Those that were set, changed in place or deleted since the last time."""
        held, marks = _held(self.instance), self.marks
        found = []
        for name, value in held.items():
            before = marks.get(name, _MISSING)
            if before is value:
                continue
            now = value if type(value) in PLAIN else mark(value)
            if differ(before, now):
                marks[name] = now
                found.append(name)
        if len(marks) > len(held):
            gone = marks.keys() - held.keys()
            for name in gone:
                del marks[name]
            found += gone
        cls: Any = type(self.instance)
        return [name for name in found if not _is_filled_when_read(cls, name)]


def _held(instance: Any) -> dict[str, Any]:
    held: dict[str, Any] = getattr(instance, "__dict__", {})
    if "_parameters" in held and "_modules" in held:  # a module of torch
        own = {name: value for name, value in held.items() if name not in _TORCHS}
        return {**own, **held["_parameters"], **held["_buffers"], **held["_modules"]}
    return held


_TORCHS = ("_parameters", "_buffers", "_modules", "training")


@functools.lru_cache(4096)
def _is_filled_when_read(cls: Any, name: str) -> bool:
    return name.startswith("_rayhelper") or isinstance(
        inspect.getattr_static(cls, name, None), functools.cached_property
    )
