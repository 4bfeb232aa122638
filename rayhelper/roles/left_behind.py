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

import ast
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import CHANGING, TRAINING, given_to, is_call_of, trains, tree_of
from rayhelper.roles.stale import Snapshot
from rayhelper.roles.used_parts import attribute_of, called_of, class_of, functions_of, held_by, local_names, reached

_STATE_DICT = "state_dict()"


class Changed(NamedTuple):
    """The attributes that a method sets or changes in place, and those that it reads as it trains."""

    names: frozenset[str]
    trained: frozenset[str]


class LeftBehind:
    """Of one object of the driver."""

    def __init__(self) -> None:
        self.seen: set[str] = set()  # names of methods
        self.changed_by: dict[str, str] = {}  # by attribute, the method as messages name it

    def note(self, method: RoleMethod[..., Any], target: Any, title: str, snapshot: Snapshot) -> None:
        """A call of the method is made: what it changes is not to be read here from now on."""
        if method.__name__ in self.seen or method.kind != "method":
            return
        self.seen.add(method.__name__)
        cls: Any = type(target)
        self.take(_changed_by(cls, method.function), target, title, snapshot)
        for instance, changed in _parts_changed_by(target, method.function):
            placement = instance._rayhelper
            placement.left.take(changed, instance, title, placement.snapshot)

    def take(self, changed: Changed, target: Any, title: str, snapshot: Snapshot) -> None:
        """What is changed on workers is not to be read here from now on."""
        held = getattr(target, "__dict__", {})
        for name in changed.names | {name for name in changed.trained if _learns(held.get(name))}:
            value = held.get(name)
            if value is None or not snapshot.is_as_constructed(name, value):
                continue
            del held[name]
            del snapshot.attributes[name]
            self.changed_by[name] = title
        modules = held.get("_modules")
        if changed.trained and isinstance(modules, dict):  # the object is a module of torch itself
            trained = {name for name in changed.trained & modules.keys() if _learns(modules[name])}
            if trained and _STATE_DICT not in self.changed_by:
                self._guard(target)
                trained.add(_STATE_DICT)
            self.changed_by |= dict.fromkeys(trained, title)

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
    parameters = getattr(value, "parameters", None)
    if callable(parameters) and hasattr(value, "state_dict"):
        return any(getattr(one, "requires_grad", False) for one in parameters())
    return bool(getattr(value, "requires_grad", False)) and getattr(value, "grad_fn", None) is None


@functools.lru_cache(4096)
def _changed_by(cls: Any, function: Callable[..., Any]) -> Changed:
    names: set[str] = set()
    read: set[str] = set()
    trained: set[str] = set()
    trains_itself = False
    for plain in functions_of(cls, function, set()):
        own, tree = plain.__code__.co_varnames[0], tree_of(plain)
        nodes = list(ast.walk(tree)) if tree is not None else []
        trained |= set(_given_to_training(plain, nodes, own))
        for node in nodes:
            trains_itself = trains_itself or is_call_of(node, TRAINING)
            name = attribute_of(node, own)
            if name is not None:
                is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                (read if is_read else names).add(name)
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                names.add(attribute_of(node.value, own) or "")
            elif is_call_of(node, CHANGING):
                names.add(attribute_of(node.func.value, own) or "")  # type: ignore[attr-defined]
    return Changed(frozenset(names - {""}), frozenset(trained | read if trains_itself else trained))


def _given_to_training(function: FunctionType, nodes: list[ast.AST], own: str) -> Iterator[str]:
    """The attributes whose values a method gives to a function of the project that trains."""
    stands_for = local_names(nodes, own)
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        for given in (*call.args, *call.keywords):
            value: Any = given.value if isinstance(given, ast.keyword) else given
            name = held_by(value, own, stands_for)
            to = None if name is None else given_to(call, given, value, function.__globals__)
            if name is not None and to is not None and trains(to[0]):
                yield name


def _parts_changed_by(target: Any, function: Callable[..., Any]) -> Iterator[tuple[Any, Changed]]:
    """The objects with roles that a method reaches by ``self.part.name``, and what it changes of them."""
    for instance, used, trains_here in reached(target, function):
        names, trained = set(used.set), set(used.read if trains_here else ())
        for called in called_of(instance, used):
            changed = _changed_by(class_of(instance), called)
            names |= changed.names
            trained |= changed.trained
        yield instance, Changed(frozenset(names), frozenset(trained))
