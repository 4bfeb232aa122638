"""What a worker cannot know: attributes and globals that the driver's process has set since an object was constructed.

    trainer.temperature = 0.5        the workers still have what __init__ set
    sampling.TOP_P = 0.9             and what the module had when it was imported there
    Trainer.helper = another         and the functions that the class and its modules had

Functions of the user's project that the methods call are looked into as well: they may read globals of their modules,
and attributes of the object, if they are given it.
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
    of_class: set[str] = field(default_factory=set)  # methods that are called, and attributes that the class has
    set_elsewhere: set[str] = field(default_factory=set)  # attributes of other objects, which may be classes

    def add(self, other: Names) -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.globals |= other.globals
        self.set_globals |= other.set_globals
        self.namespaces |= other.namespaces
        self.of_class |= other.of_class
        self.set_elsewhere |= other.set_elsewhere


class Snapshot:
    """What an object's attributes, and the globals that its roles' methods read, were when it was constructed."""

    def __init__(self, instance: Any) -> None:
        self.attributes = {name: _kept(value) for name, value in vars(instance).items()}
        cls: Any = type(instance)
        found = _of_class(cls)
        self.globals = {key: found.namespaces[key[0]].get(key[1], _MISSING) for key in found.globals}
        self.of_class = {name: _entry(cls, name) for name in found.of_class}

    def is_as_constructed(self, name: str, value: Any) -> bool:
        """Whether an attribute is what the constructor has set."""
        return _is_kept(self.attributes.get(name, _MISSING), value)

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
        for name in names.of_class:
            entry, before = _entry(cls, name), self.of_class.get(name, _MISSING)
            if entry is not before and not _is_same(entry, before):
                raise RoleError(
                    f"{title} reads self.{name}, which was set in class {cls.__name__} on the driver after the object "
                    f"was constructed. The workers of role {method.role!r} still have what it was. Set it before you "
                    "construct the object."
                )
        for key in names.globals:
            value = names.namespaces[key[0]].get(key[1], _MISSING)
            before = self.globals.get(key, value)
            if value is not before and not _is_same(value, before):
                owner = names.namespaces[key[0]].get("__name__")
                known = key[1] if owner in (cls.__module__, method.function.__module__) else f"{owner}.{key[1]}"
                now, then = (f" to {value!r}", repr(before)) if _is_short(value, before) else ("", "what it was")
                raise RoleError(
                    f"{title} reads the global {known!r}, which was set{now} on the driver after the object "
                    f"was constructed. The workers of role {method.role!r} still have {then}. Pass the value as an "
                    "argument, or set it before you construct the object."
                )


def _is_same(value: Any, before: Any) -> bool:
    """Whether a global is what it was: equal, where it is plain or a list or dict; with functions the same code."""
    if isinstance(value, FunctionType) and isinstance(before, FunctionType):
        return value.__code__ == before.__code__ and value.__closure__ is before.__closure__
    if type(value) is type(before) and isinstance(value, (*_PLAIN, dict, list, tuple, set)):
        try:
            return bool(value == before) or value != value
        except Exception:  # of arrays in them
            return False
    return False


def _is_short(value: Any, before: Any) -> bool:
    return isinstance(value, _PLAIN) and isinstance(before, _PLAIN)


def _entry(cls: type, name: str) -> Any:
    """What a class has under a name."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)


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
    found.of_class -= _of_class(cls).writes | _of_class(cls).set_elsewhere
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


def _of_function(cls: type, function: Callable[..., Any], seen: set[Any], own_index: int = 0) -> Names:
    """What a function does that is given the object at a position (a method: the first), and those that it calls."""
    found, plain = Names(), inspect.unwrap(function)
    if (plain, own_index) in seen or not isinstance(plain, FunctionType) or plain.__code__.co_argcount <= own_index:
        return found
    seen.add((plain, own_index))
    own, tree = plain.__code__.co_varnames[own_index], _tree(plain)
    for node in ast.walk(tree) if tree is not None else ():
        name = _attribute(node, own)
        if name is not None:
            called = _function_of(cls, name)
            if called is not None:
                found.add(_of_function(cls, called, seen))
            if _entry(cls, name) is not _MISSING:
                found.of_class.add(name)
            if called is None and not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                found.writes.add(name)
            else:
                found.reads.add(name)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.set_elsewhere.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "vars"):
            found.writes |= set(_constants(node))
        elif isinstance(node, ast.Call):
            helper = _unwrapped(_named(node.func, plain.__globals__))
            if isinstance(helper, FunctionType) and _is_users(helper):
                given = [k for k, one in enumerate(node.args) if isinstance(one, ast.Name) and one.id == own]
                for k in given:
                    found.add(_of_function(cls, helper, seen, k))
    waiting = [plain]
    while waiting:
        reached = _of_globals(waiting.pop())
        found.add(reached.names)
        waiting += [function for function in reached.functions if function not in seen]
        seen.update(reached.functions)
    return found


def _attribute(node: ast.AST, own: str) -> str | None:
    """The attribute of the object ``own`` at a node: self.name, getattr(self, "name"), vars(self)["name"]."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
        return None if node.attr == "__dict__" else node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
        name = node.args[1]
        if ast.unparse(node.args[0]) == own and isinstance(name, ast.Constant):
            return str(name.value)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in (f"vars({own})", f"{own}.__dict__"):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return None


def _named(node: ast.AST, namespace: dict[str, Any]) -> Any:
    """What a name, or an attribute of a module, is in a namespace."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id, _MISSING)
    owner = _named(node.value, namespace) if isinstance(node, ast.Attribute) else None
    return vars(owner).get(node.attr, _MISSING) if isinstance(owner, ModuleType) else _MISSING  # type: ignore[attr-defined]


def _is_users(function: FunctionType) -> bool:
    module = sys.modules.get(function.__module__)
    return module is not None and (module.__name__ == "__main__" or is_of_project(module.__name__, module))


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
            continue
        if not isinstance(value, (type, ModuleType)) and value is not _MISSING and place is not imported:
            owner_module = sys.modules.get(str(place.get("__name__")))
            is_users = owner_module is not None and is_of_project(owner_module.__name__, owner_module)
            is_users = is_users or place.get("__name__") == "__main__" or isinstance(value, _PLAIN)
            is_counter = not isinstance(value, FunctionType) and name in _counters(str(place.get("__name__")))
            if is_users and not is_counter:
                found.globals.add(key)
                found.namespaces[id(place)] = place
        if isinstance(plain := _unwrapped(value), FunctionType):
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
