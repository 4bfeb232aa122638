"""What a worker cannot know: attributes and globals that the driver's process has set since an object was constructed.

    trainer.temperature = 0.5        the workers still have what __init__ set
    sampling.TOP_P = 0.9             and what the module had when it was imported there

Functions of the user's project that the methods call are looked into as well: they may read globals of their modules.
A call of a role's method that reads such a name is refused. What a role's method sets itself is the role's own, and may
differ. So may a global that a function of its module both reads and sets: a counter, a cache. Values that are changed
in place (``self.options["top_p"] = 0.9``) are not seen.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from rayhelper.device_groups import DRIVER
from rayhelper.errors import RoleError
from rayhelper.roles.classes import role_methods
from rayhelper.roles.methods import RoleMethod, find_method
from rayhelper.roles.project import is_of_project

_PLAIN = (bool, int, float, str, type(None))  # globals that are compared: by value
_MISSING = object()


@dataclass
class Names:
    """What a function does with its object's attributes and its module's globals."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    globals: set[tuple[int, str]] = field(default_factory=set)  # by the id of the namespace
    set_globals: set[tuple[int, str]] = field(default_factory=set)
    namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, other: Names) -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.globals |= other.globals
        self.set_globals |= other.set_globals
        self.namespaces |= other.namespaces


class Snapshot:
    """What an object's attributes, and the globals that its roles' methods read, were when it was constructed."""

    def __init__(self, instance: Any) -> None:
        self.attributes = {name: _kept(value) for name, value in vars(instance).items()}
        cls: Any = type(instance)
        found = _of_class(cls)
        self.globals = {key: found.namespaces[key[0]].get(key[1], _MISSING) for key in found.globals}

    def check(self, method: RoleMethod[..., Any], target: Any, title: str) -> None:
        """Raises RoleError if the method reads what was set since."""
        cls: Any = type(target)
        names = _of_method(cls, method)
        for name in names.reads:
            value = vars(target).get(name, _MISSING)
            if not _is_kept(self.attributes.get(name, _MISSING), value):
                raise RoleError(
                    f"{title} reads self.{name}, which was set on the driver after the object was constructed. The "
                    f"workers of role {method.role!r} still have what __init__ set. Pass the value as an argument, or "
                    f"set it in a method of role {method.role!r}."
                )
        for key in names.globals:
            value = names.namespaces[key[0]].get(key[1], _MISSING)
            before = self.globals.get(key, value)
            if isinstance(value, _PLAIN) and isinstance(before, _PLAIN) and before != value:
                owner = names.namespaces[key[0]].get("__name__")
                known = key[1] if owner in (cls.__module__, method.function.__module__) else f"{owner}.{key[1]}"
                raise RoleError(
                    f"{title} reads the global {known!r}, which was set to {value!r} on the driver after the object "
                    f"was constructed. The workers of role {method.role!r} still have {before!r}. Pass the value as an "
                    "argument."
                )


def _kept(value: Any) -> Any:
    """What tells later whether an attribute is still the same: plain values themselves, of others who they are."""
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _is_kept(kept: Any, value: Any) -> bool:
    if value is _MISSING or kept is _MISSING:
        return value is kept
    now = _kept(value)
    return bool(now == kept) or now != now


def names_of_roles(cls: Any) -> frozenset[str]:
    """The attributes that the methods of a class's roles read or set."""
    found = _of_class(cls)
    return frozenset(found.reads | found.writes)


@functools.lru_cache(4096)
def _of_method(cls: Any, method: RoleMethod[..., Any]) -> Names:
    """What a role's method reads that no method of a role sets."""
    found = Names()
    if method.kind == "method":
        found.add(_of_function(cls, method.function, set()))
    found.reads -= _of_class(cls).writes
    found.globals -= _of_class(cls).set_globals
    return found


@functools.lru_cache(1024)
def _of_class(cls: Any) -> Names:
    """What the methods of a class's roles do."""
    found = Names()
    for method in role_methods(cls).values():
        if method.role != DRIVER:
            found.add(_of_function(cls, method.function, set()))
    return found


def _of_function(cls: type, function: Callable[..., Any], seen: set[Any]) -> Names:
    """What a method does, and the methods of the same object that it calls."""
    found, plain = Names(), inspect.unwrap(function)
    if plain in seen or not isinstance(plain, FunctionType) or not plain.__code__.co_argcount:
        return found
    seen.add(plain)
    own, tree = plain.__code__.co_varnames[0], _tree(plain)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
            called = _function_of(cls, node.attr)
            if called is not None:
                found.add(_of_function(cls, called, seen))
            elif isinstance(node.ctx, ast.Load):
                found.reads.add(node.attr)
            else:
                found.writes.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "vars"):
            found.writes |= set(_constants(node))
    waiting = [plain]
    while waiting:
        reached = _of_globals(waiting.pop())
        found.add(reached.names)
        waiting += [function for function in reached.functions if function not in seen]
        seen.update(reached.functions)
    return found


class Reached(NamedTuple):
    """The globals that a function reads and sets, and the functions of the user's project that it refers to."""

    names: Names
    functions: tuple[FunctionType, ...]


@functools.lru_cache(4096)
def _of_globals(function: FunctionType) -> Reached:
    found = Names()
    functions: dict[FunctionType, None] = {}
    tree, namespace = _tree(function), function.__globals__
    nodes = list(ast.walk(tree)) if tree is not None else []
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    imported = _imported(nodes)
    local = {node.arg for node in nodes if isinstance(node, ast.arg)} | imported.keys()
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local -= declared

    def value_of(node: ast.AST) -> Any:
        """What a name, or an attribute of a module, is now."""
        if isinstance(node, ast.Name):
            return imported.get(node.id, _MISSING) if node.id in local else namespace.get(node.id, _MISSING)
        owner = value_of(node.value) if isinstance(node, ast.Attribute) else None
        return vars(owner).get(node.attr, _MISSING) if isinstance(owner, ModuleType) else _MISSING  # type: ignore[attr-defined]

    for node in nodes:
        if isinstance(node, ast.Name) and node.id in imported:
            place, name = imported, node.id
        elif isinstance(node, ast.Name) and node.id not in local:
            place, name = namespace, node.id
        elif isinstance(node, ast.Attribute) and isinstance(owner := value_of(node.value), ModuleType):
            if not is_of_project(owner.__name__, owner):
                continue
            place, name = vars(owner), node.attr
        else:
            continue
        key = (id(place), name)
        value = place.get(name, _MISSING)
        if not isinstance(node.ctx, ast.Load):
            found.set_globals.add(key)
        elif isinstance(value, _PLAIN):
            if place is not imported and name not in _counters(str(place.get("__name__"))):
                found.globals.add(key)
                found.namespaces[id(place)] = place
        elif isinstance(plain := _unwrapped(value), FunctionType):
            module = sys.modules.get(plain.__module__)
            if module is not None and (plain.__globals__ is namespace or is_of_project(module.__name__, module)):
                functions[plain] = None
    return Reached(found, tuple(functions))


def _imported(nodes: list[ast.AST]) -> dict[str, Any]:
    """By name, the loaded modules and their values that a function imports when it runs."""
    found: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = sys.modules.get(name, _MISSING)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in sys.modules:
            for alias in node.names:
                found[alias.asname or alias.name] = vars(sys.modules[node.module]).get(alias.name, _MISSING)
    return found


def _unwrapped(value: Any) -> Any:
    return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value


@functools.lru_cache(1024)
def _counters(module: str) -> frozenset[str]:
    """The globals that some function of a module both reads and sets: counters and caches."""
    try:
        text = inspect.getsource(sys.modules[module])
        tree = ast.parse(text if "global " in text else "")
    except (KeyError, OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes = list(ast.walk(function))
            read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            read |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
            found |= {name for node in nodes if isinstance(node, ast.Global) for name in node.names if name in read}
    return frozenset(found)


def _constants(node: ast.Call) -> Iterator[str]:
    for argument in node.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _function_of(cls: type, name: str) -> Callable[..., Any] | None:
    """The function behind a method or property of a class; None: the name is no such thing."""
    entry = inspect.getattr_static(cls, name, None)
    if entry is None:
        return None
    if isinstance(entry, FunctionType):
        return entry
    try:
        decorated: Callable[..., Any] = find_method(entry).function  # or what wraps a decorated method
        return decorated
    except RoleError:
        inner = getattr(entry, "fget", None) or getattr(entry, "func", None) or getattr(entry, "__func__", None)
        return inner if isinstance(inner, FunctionType) else None


@functools.lru_cache(4096)
def _tree(function: FunctionType) -> ast.AST | None:
    """The function's source; None: there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
