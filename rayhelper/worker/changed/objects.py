"""What a call has changed of the objects of a worker: names of attributes, which its driver is told with the reply."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rayhelper.worker.changed.classes import Shared
from rayhelper.worker.changed.marks import PLAIN, differ, is_another, is_looked_at, mark

_MISSING = object()


class Observed:
    """The objects of one whole on a worker, each with marks of its attributes.

    What is set anew is seen in every call. What is changed in place is looked for in some (``is_looked_at``): a large
    model takes a millisecond. A change that comes later is blamed on the method after which it is seen.
    """

    def __init__(self, instances: Iterator[Any]) -> None:
        self.classes: dict[type, Shared] = {}
        self.counts: Counter[str] = Counter()  # calls by method
        self.objects = {str(one._rayhelper.identity.address): Attributes(one) for one in instances}

    def shared(self, cls: type) -> dict[str, Any]:
        """Marks of what objects of a class share."""
        if cls not in self.classes:
            self.classes[cls] = Shared(cls)
        return self.classes[cls].marks()

    def changes(self, title: str) -> dict[str, dict[str, str]]:
        """By address, the attributes that were changed since the last time, each with ``title``: by whom."""
        found: dict[str, dict[str, str]] = {}
        self.counts[title] += 1
        in_full = is_looked_at(self.counts[title])
        for address, one in self.objects.items():
            if names := one.changed(in_full=in_full):
                found[address] = dict.fromkeys(names, title)
        return found


class Attributes:
    """The attributes of one object, with what they were."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.marks: dict[str, Any] = {}
        self.changed(in_full=True)

    def changed(self, *, in_full: bool) -> list[str]:
        """Those that were set, deleted or, read in full, changed in place since the last time."""
        held, marks = _held(self.instance), self.marks
        cls: Any = type(self.instance)
        found = []
        for name, value in list(held.items()):  # another thread may set some meanwhile
            before = marks.get(name, _MISSING)
            if before is value or not (in_full or type(value) in PLAIN or is_another(before, value)):
                continue
            now = value if type(value) in PLAIN else mark(value)
            if differ(before, now):
                marks[name] = now
                if before is not _MISSING or not _is_filled_when_read(cls, name):
                    found.append(name)
        if len(marks) > len(held):
            gone = marks.keys() - held.keys()
            for name in gone:
                del marks[name]
            found += gone
        return [name for name in found if not name.startswith("_rayhelper")]


def _held(instance: Any) -> dict[str, Any]:
    held: dict[str, Any] = getattr(instance, "__dict__", {})
    if "_parameters" in held and "_modules" in held:  # a module of torch
        own = {name: value for name, value in held.items() if name not in _TORCHS}
        return {**own, **held["_parameters"], **held["_buffers"], **held["_modules"]}
    return held


_TORCHS = ("_parameters", "_buffers", "_modules", "training")


@functools.lru_cache(4096)
def _is_filled_when_read(cls: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
