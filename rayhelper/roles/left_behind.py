"""What a role's method changes on its workers, and the driver's object no longer shows.

    self.count += 1            the driver still has what __init__ set
    self.history.append(x)     so it has here
    self.optimizer.step()      and weights that nobody trained
    self.part.step()           in a part as well, though the driver hears of no call to it

With Ray off the driver reads what the role has set. Elsewhere it would read what ``__init__`` set, without a word: a
script would save a model that was never trained. So such an attribute is taken from the driver's object with the first
call of the method: reading it raises, and names the method (``unset.py``). An attribute that the driver has set itself
is the driver's own, and one that was None is only a place for what comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from rayhelper.roles.names import PLAIN
from rayhelper.roles.reached import Reached, is_module
from rayhelper.roles.runtime import state
from rayhelper.roles.slots import attributes_of, slots_of
from rayhelper.roles.stale import Snapshot
from rayhelper.values.reply import Changes

_log = logging.getLogger(__name__)
_CHANGES = (
    "%s changes %s. With Ray off the driver sees the change. A worker changes a copy, so on Ray the driver does not. "
    "Return the changed value. If the driver does not need it, ignore this warning."
)
_STATE_DICT = "state_dict()"


class Changed(NamedTuple):
    """The attributes that a method sets or changes in place, and those that it reads as it trains."""

    names: frozenset[str]
    trained: frozenset[str]


def leave(title: str, reached: Reached) -> None:
    """A method is called for the first time: what it changes is not to be read on the driver from now on."""
    for one in reached.touched.values():
        if is_constructed(one.instance):
            placement = one.instance._rayhelper
            changed = Changed(frozenset(one.set | one.changed), frozenset(reached.trained(one)))
            placement.left.take(changed, one.instance, title, placement.snapshot)


def note_changes(changes: Changes | None, own: Callable[[str], Any] | None = None) -> None:
    """Workers have changed attributes, by address of their objects: the driver's copies are not to be read any more.

    ``own``: gives the worker's object, where it lies in this process and may share values with the driver's.
    """
    runtime: Any = state.active
    if runtime is None or changes is None:
        return
    for told in changes.others:
        if told not in runtime.told_changes:
            runtime.told_changes.add(told)
            _log.warning(_CHANGES, *told)
    for address, names in changes.attributes.items():
        instance = runtime.instance_at(address)
        if instance is not None and is_constructed(instance):
            instance._rayhelper.left.take_observed(names, instance, None if own is None else own(address))


def is_constructed(instance: Any) -> bool:
    """Whether an object with roles is one of this driver, whose construction has ended."""
    return getattr(instance._rayhelper, "snapshot", None) is not None


class LeftBehind:
    """Of one object of the driver."""

    def __init__(self) -> None:
        self.changed_by: dict[str, str] = {}  # by attribute, the method as messages name it

    def take(self, changed: Changed, target: Any, title: str, snapshot: Snapshot) -> None:
        """What is changed on workers is not to be read here from now on."""
        held = attributes_of(target)
        cls: Any = type(target)
        for name in changed.names | {name for name in changed.trained if _learns(held.get(name))}:
            value = held.get(name)
            if value is None or not snapshot.is_as_constructed(name, value):
                continue
            if slot := slots_of(cls).get(name):
                slot.__delete__(target)
            else:
                del target.__dict__[name]
            del snapshot.attributes[name]
            self.changed_by[name] = title
        modules = held.get("_modules")
        if changed.trained and isinstance(modules, dict):  # the object is a module of torch itself
            trained = {name for name in changed.trained & modules.keys() if _learns(modules[name])}
            if trained and _STATE_DICT not in self.changed_by:
                self._guard(target)
                trained.add(_STATE_DICT)
            self.changed_by |= dict.fromkeys(trained, title)

    def take_observed(self, names: dict[str, str], target: Any, own: Any) -> None:
        """A worker has seen that these attributes were changed there, each by the method that is named.

        ``own``: the worker's object, if it lies in this process. What both objects share is not left behind.
        """
        held, theirs = attributes_of(target), attributes_of(own)
        for name, title in names.items():
            value = held.get(name)
            is_shared = name in theirs and theirs[name] is value and not isinstance(value, PLAIN)
            if name not in self.changed_by and not is_shared:
                changed = Changed(frozenset((name,)), frozenset((name,)))
                self.take(changed, target, title, target._rayhelper.snapshot)

    def told(self, owner: str, name: str) -> str:
        """What is wrong with reading an attribute, and what to do."""
        return (
            f"{owner}.{name} differs from the workers' value: {self.changed_by[name]} has changed it there, and the "
            "driver has the value of __init__. Return the value from a method of the role, or read it in one."
        )

    def _guard(self, module: Any) -> None:
        """``state_dict()`` of the driver's module raises."""

        def refuse(*_: Any) -> None:
            raise AttributeError(self.told(type(module).__name__, _STATE_DICT))

        module.register_state_dict_pre_hook(refuse)


def _learns(value: Any) -> bool:
    """Whether it is a module or a tensor that has something to train."""
    if is_module(value):
        return any(getattr(one, "requires_grad", False) for one in value.parameters())
    return bool(getattr(value, "requires_grad", False)) and getattr(value, "grad_fn", None) is None
