"""What a call has changed of the objects of a worker: names of attributes, which its driver is told with the reply."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from rayhelper.roles.slots import attributes_of
from rayhelper.worker.changed.arguments import OfConstructor, behind
from rayhelper.worker.changed.classes import Shared
from rayhelper.worker.changed.marks import PLAIN, differ, is_another, is_looked_at, is_own, mark

_MISSING = object()
_CALLABLES = (functools.partial, BuiltinMethodType, MethodType, FunctionType)


class Observed:
    """The objects of one whole on a worker, each with marks of its attributes.

    What is set anew is seen in every call. What is changed in place is looked for in some (``is_looked_at``): a large
    model takes a millisecond. A change that comes later is blamed on the method after which it is seen.
    """

    def __init__(self, instances: Iterator[Any], given: OfConstructor | None = None) -> None:
        """``given``: to the constructor of the whole."""
        self.classes: dict[type, Shared] = {}
        self.counts: Counter[str] = Counter()  # calls by method
        self.objects = {str(one._rayhelper.identity.address): Attributes(one, given) for one in instances}

    def next_in_full(self, title: str) -> bool:
        """Whether values are read in full for the next call of a method."""
        return is_looked_at(self.counts[title] + 1)

    def shared(self, cls: type, *, in_full: bool) -> dict[str, Any]:
        """Marks of what objects of a class share."""
        if cls not in self.classes:
            self.classes[cls] = Shared(cls)
        return self.classes[cls].marks(in_full=in_full)

    def changes(self, title: str) -> tuple[dict[str, dict[str, str]], list[str]]:
        """By address, the attributes that were changed since the last time, each with ``title``: by whom. And what else
        the driver may read, as messages name it.
        """
        found: dict[str, dict[str, str]] = {}
        others: list[str] = []
        self.counts[title] += 1
        in_full = is_looked_at(self.counts[title])
        for address, one in self.objects.items():
            names, labels = one.changed(in_full=in_full)
            others += labels
            if names:
                found[address] = dict.fromkeys(names, title)
        return found, others


class Attributes:
    """The attributes of one object, with what they were."""

    def __init__(self, instance: Any, given: OfConstructor | None = None) -> None:
        try:
            self.instance: Callable[[], Any] = weakref.ref(instance)
        except TypeError:  # a class without weak references
            self.instance = lambda: instance
        self.marks: dict[str, Any] = {}
        self.given: dict[str, str] = {}  # by attribute, the argument of the constructor that it holds
        self.callables: dict[str, Any] = {}  # by attribute, marks of what calling such an argument may change
        self.changed(in_full=True)
        for name, value in _held(instance).items():
            if given is not None and (label := given.kept_as(value)):
                self.given[name] = label
                if isinstance(value, _CALLABLES):
                    self.callables[name] = [*map(mark, behind(value))]

    def changed(self, *, in_full: bool) -> tuple[list[str], list[str]]:
        """Those that were set, deleted or, read in full, changed in place since the last time. And what else was."""
        instance, marks = self.instance(), self.marks
        held = _held(instance)
        cls: Any = type(instance)
        found, others = [], []
        for name, value in list(held.items()):  # another thread may set some meanwhile
            before = marks.get(name, _MISSING)
            if before is value or not (in_full or type(value) in PLAIN or is_another(before, value)):
                continue
            now = value if type(value) in PLAIN else mark(value)
            if differ(before, now):
                marks[name] = now
                if before is not _MISSING or not _is_filled_when_read(cls, name):
                    found.append(name)
                if before is None and type(value) in PLAIN:
                    others.append(f"self.{name}, which {cls.__name__}.__init__ has set to None")
                if before is _MISSING and _is_default(cls, name):
                    others.append(f"self.{name}, which has a default in class {cls.__name__}")
                if name in self.given and not is_another(before, value):
                    others.append(self.given[name])
        if len(marks) > len(held):
            gone = marks.keys() - held.keys()
            for name in gone:
                del marks[name]
            found += gone
        for name, before in self.callables.items() if in_full else ():
            now = [*map(mark, behind(held.get(name)))]
            if any(map(differ, before, now)):
                self.callables[name] = now
                others.append(self.given[name])
        return [name for name in found if not name.startswith("_rayhelper")], others


def _held(instance: Any) -> dict[str, Any]:
    held = attributes_of(instance)
    if "_parameters" in held and "_modules" in held:  # a module of torch
        own = {name: value for name, value in held.items() if name not in _TORCHS}
        return {**own, **held["_parameters"], **held["_buffers"], **held["_modules"]}
    return held


_TORCHS = ("_parameters", "_buffers", "_modules", "training")


@functools.lru_cache(4096)
def _is_default(cls: Any, name: str) -> bool:
    """Whether a class of the user's has a value under a name, which objects have until they are given their own."""
    base = next((base for base in cls.__mro__ if name in vars(base)), None)
    return base is not None and is_own(base.__module__) and not hasattr(vars(base)[name], "__get__")


@functools.lru_cache(4096)
def _is_filled_when_read(cls: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
