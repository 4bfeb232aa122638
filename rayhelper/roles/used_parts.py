"""Objects with roles that a role's method uses on its workers, and that the driver has changed since construction.

trainer.policy.temperature = 0.5     the workers' policy has what __init__ set
trainer.explore(prompts)             whose role calls self.policy.sample() there, without a message to the driver
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import TRAINING, Names, function_of, inherited, is_call_of, of_use, tree_of


class Use(NamedTuple):
    """What a method does with an object with roles that an attribute of its own object holds."""

    instance: Any
    names: Names


class UsedParts:
    """Of one object of the driver, by method."""

    def __init__(self) -> None:
        self.of_method: dict[Any, tuple[Use, ...]] = {}  # once it has been called

    def check(self, method: RoleMethod[..., Any], target: Any, title: str) -> None:
        """Raises RoleError if the method reads what was set, or changed in place, in such an object."""
        if method not in self.of_method:
            self.of_method[method] = tuple(
                Use(instance, of_use(class_of(instance), used.read, used.set))
                for instance, used, _ in reached(target, method.function)
            )
        for instance, names in self.of_method[method]:
            placement = instance._rayhelper
            owner = placement.identity.name
            placement.snapshot.check_attributes(method, names, instance, title, owner)
            placement.in_place.check(method, names, instance, title, owner)
            placement.snapshot.called(names, instance)


def reached(
    target: Any, function: Callable[..., Any], seen: set[Any] | None = None
) -> Iterator[tuple[Any, Used, bool]]:
    """The objects with roles that a method reaches by ``self.part.name``, and what it does with them.

    The bool: whether the method trains something. What it calls there may reach others.
    """
    seen = set() if seen is None else seen
    if (id(target), function) in seen:
        return
    seen.add((id(target), function))
    uses = uses_in(class_of(target), function)
    for attribute, used in sorted(uses.of.items()):
        for instance in with_roles(vars(target).get(attribute)):
            yield instance, used, uses.trains
            for called in called_of(instance, used):
                yield from reached(instance, called, seen)


def class_of(instance: Any) -> Any:
    """Its class, as a key of caches."""
    return type(instance)


def called_of(instance: Any, used: Used) -> Iterator[Callable[..., Any]]:
    """The methods of an object among the names that are read of it."""
    for name in sorted(used.read):
        called = function_of(type(instance), name)
        if called is not None:
            yield called


def with_roles(value: Any) -> Iterator[Any]:
    """A value, or the values of a list, tuple or dict, that are objects with roles of this driver."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    for one in values:
        placement = getattr(one, "__dict__", {}).get("_rayhelper")
        if getattr(placement, "snapshot", None) is not None:
            yield one


class Used(NamedTuple):
    """What a method sets and reads of an object."""

    set: frozenset[str]
    read: frozenset[str]


class Uses(NamedTuple):
    """What a method does with the objects that the attributes of its own object hold, by attribute."""

    of: dict[str, Used]
    trains: bool


@functools.lru_cache(4096)
def uses_in(cls: Any, function: Callable[..., Any]) -> Uses:
    """What a method, and those that it calls on the same object, do with what its attributes hold."""
    set_of: dict[str, set[str]] = {}
    read_of: dict[str, set[str]] = {}
    trains = False
    for plain in functions_of(cls, function, set()):
        own, tree = plain.__code__.co_varnames[0], tree_of(plain)
        nodes = list(ast.walk(tree)) if tree is not None else []
        stands_for = local_names(nodes, own)
        for node in nodes:
            if isinstance(node, ast.Attribute) and (attribute := held_by(node.value, own, stands_for)) is not None:
                of = read_of if isinstance(node.ctx, ast.Load) else set_of
                of.setdefault(attribute, set()).add(node.attr)
            trains = trains or is_call_of(node, TRAINING)
    found = {
        name: Used(frozenset(set_of.get(name, ())), frozenset(read_of.get(name, ())))
        for name in set_of.keys() | read_of.keys()
    }
    return Uses(found, trains)


def local_names(nodes: list[ast.AST], own: str) -> dict[str, str]:
    """By local name of a function, the attribute that holds what it is: for p in self.parts, part = self.part."""
    found: dict[str, str] = {}
    for target, source in _assigned(nodes):
        attribute = held_by(source, own, found)
        if attribute is not None and isinstance(target, ast.Name):
            found[target.id] = attribute
    return found


def _assigned(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what, and what is looped over."""
    for node in nodes:
        if isinstance(node, (ast.For, ast.comprehension)):
            yield node.target, node.iter
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)  # a, b = self.a, self.b
                else:
                    yield target, node.value


def held_by(node: ast.AST, own: str, stands_for: dict[str, str]) -> str | None:
    """The attribute that holds what an expression stands for: ``parts`` of ``self.parts[0]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return stands_for.get(node.id) if isinstance(node, ast.Name) else attribute_of(node, own)


def attribute_of(node: ast.AST, own: str) -> str | None:
    """The name of an attribute of ``own``; None: the expression is something else."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own
    return node.attr if isinstance(node, ast.Attribute) and is_own else None


def functions_of(cls: type, function: Callable[..., Any], seen: set[Any]) -> Iterator[FunctionType]:
    """A method, and the methods of the same object that it calls, inherited ones included, of whatever role."""
    plain = inspect.unwrap(function)
    if plain in seen or not isinstance(plain, FunctionType) or not plain.__code__.co_argcount:
        return
    seen.add(plain)
    yield plain
    own, tree = plain.__code__.co_varnames[0], tree_of(plain)
    for node in ast.walk(tree) if tree is not None else ():
        name = attribute_of(node, own)
        called = inherited(cls, plain, node) if name is None else function_of(cls, name)
        if called is not None:
            yield from functions_of(cls, called, seen)
