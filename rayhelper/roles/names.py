"""What code does with names: the attributes of its object and the globals that methods of roles read and set.

Functions of the user's project that the methods call are looked into as well: they may read globals of their modules,
and attributes of the object, if they are given it.
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
from rayhelper.roles.project import is_of_project, is_users

PLAIN = (bool, int, float, str, type(None))  # globals that are compared: by value
MISSING = object()
TRAINING = frozenset(("backward", "step"))
FITTING = frozenset(("train", "fit"))  # whole trainings, by an object of a library
CHANGING = frozenset(
    (
        *("append", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"),
        *("appendleft", "extendleft", "popleft", "reverse", "rotate", "sort"),
    )
)  # methods that change a list, dict or set in place


@dataclass
class Names:
    """What a function does with its object's attributes and its module's globals."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    adds_to: set[str] = field(default_factory=set)  # self.count += 1
    reads_of_roles: set[str] = field(default_factory=set)  # that methods of roles set, and this one reads first
    changes: set[str] = field(default_factory=set)  # in which something is set: self.options["lr"] = 1
    globals: set[tuple[int, str]] = field(default_factory=set)  # by the id of the namespace
    set_globals: set[tuple[int, str]] = field(default_factory=set)
    changed_globals: set[tuple[int, str]] = field(default_factory=set)  # in place
    namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)  # read of whatever object, which may be a class
    set_elsewhere: set[str] = field(default_factory=set)  # attributes of other objects, which may be classes
    classes: set[type] = field(default_factory=set)  # of the project, that it refers to
    functions: set[FunctionType] = field(default_factory=set)  # itself, and those to which it gives its object
    reads_any: bool = False  # its object goes where it cannot be followed, or a name is computed

    def add(self, other: Names) -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.adds_to |= other.adds_to
        self.changes |= other.changes
        self.globals |= other.globals
        self.set_globals |= other.set_globals
        self.changed_globals |= other.changed_globals
        self.namespaces |= other.namespaces
        self.attributes |= other.attributes
        self.set_elsewhere |= other.set_elsewhere
        self.classes |= other.classes
        self.functions |= other.functions
        self.reads_any |= other.reads_any


def names_of_roles(cls: Any) -> frozenset[str]:
    """The attributes that the methods of a class's roles read or set."""
    found = of_class(cls)
    return frozenset(found.reads | found.writes)


@functools.lru_cache(4096)
def of_method(cls: Any, method: RoleMethod[..., Any]) -> Names:
    """What a role's method reads that no method of a role sets."""
    found = Names()
    if method.kind == "method":
        found.add(_of_function(cls, method.function, set()))
        _follow(found)
    found.reads_of_roles = (found.reads & of_class(cls).writes - found.writes) | found.adds_to
    found.reads -= of_class(cls).writes
    found.attributes -= of_class(cls).writes | of_class(cls).set_elsewhere | set_by(cls).set_elsewhere
    found.globals -= of_class(cls).set_globals
    return found


@functools.lru_cache(4096)
def of_use(cls: Any, used: frozenset[str], stored: frozenset[str]) -> Names:
    """What code does with an object of a class that uses these names of it: methods, properties, attributes.

    ``stored``: the attributes that it sets.
    """
    found = Names(writes=set(stored))
    for name in used:
        function = function_of(cls, name)
        if function is None:
            found.reads.add(name)
        elif not name.startswith("__"):
            found.add(_of_function(cls, function, set()))
    _follow(found)
    found.reads_of_roles = (found.reads & of_class(cls).writes - found.writes) | found.adds_to
    found.reads -= of_class(cls).writes
    return found


@functools.lru_cache(1024)
def of_class(cls: Any) -> Names:
    """What the methods of a class's roles do."""
    found = Names()
    overridden = (entry for base in cls.__mro__ for entry in vars(base).values() if isinstance(entry, RoleMethod))
    for method in (*role_methods(cls).values(), *overridden):  # an override without a role calls it by super()
        if method.role != DRIVER:
            found.add(_of_function(cls, method.function, set()))
    _follow(found)
    return found


def _of_function(cls: type, function: Callable[..., Any], seen: set[Any], own_index: int = 0) -> Names:
    """What a function does that is given the object at a position (a method: the first), and those that it calls."""
    found, plain = Names(), inspect.unwrap(function)
    if (plain, own_index) in seen or not isinstance(plain, FunctionType) or plain.__code__.co_argcount <= own_index:
        return found
    seen.add((plain, own_index))
    tree = tree_of(plain)
    nodes = list(ast.walk(tree)) if tree is not None else []
    own = _aliases(nodes, plain.__code__.co_varnames[own_index])
    parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
    found.changes |= {name for place in _changed_places(nodes) if (name := _first_attribute(place, own)) is not None}
    for node in nodes:
        name = _attribute(node, own)
        if isinstance(node, ast.AugAssign) and (added_to := _attribute(node.target, own)) is not None:
            found.adds_to.add(added_to)
        if name is not None:
            called = function_of(cls, name)
            if called is not None:
                found.add(_of_function(cls, called, seen))
            if called is None and not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                found.writes.add(name)
            else:
                found.reads.add(name)
                found.attributes.add(name)
        elif (of_base := inherited(cls, plain, node)) is not None:
            found.add(_of_function(cls, of_base, seen))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "vars"):
            found.writes |= set(_constants(node))
        if isinstance(node, ast.Name) and node.id in own and isinstance(node.ctx, ast.Load):
            parent = parents.get(id(node))
            call = parents.get(id(parent)) if isinstance(parent, ast.keyword) else parent
            given = _given(call, parent, node, plain.__globals__) if isinstance(call, ast.Call) else None
            if given is not None:
                found.add(_of_function(cls, given[0], seen, given[1]))
            elif not _is_understood(node, parent, parents):
                found.reads_any = True
    found.functions.add(plain)
    return found


def _follow(found: Names) -> None:
    """Adds what the functions and classes do to which those of ``found`` refer."""
    done: set[FunctionType] = set()
    classes: set[type] = set()
    waiting = set(found.functions)
    while waiting:
        function = waiting.pop()
        done.add(function)
        reached = _of_globals(function)
        found.add(reached.names)
        waiting |= set(reached.functions)
        classes |= reached.names.classes
        if not waiting - done:
            waiting |= {one for cls in classes for name, one in _functions_in(cls) if _is_called(name, found)}
        waiting -= done


def _is_called(name: str, found: Names) -> bool:
    return name in found.attributes or (name.startswith("__") and name.endswith("__"))


_HARMLESS = frozenset(("isinstance", "issubclass", "type", "id", "super", "callable", "hash", "print", "repr", "str"))
_BY_NAME = frozenset(("getattr", "hasattr", "setattr", "delattr"))


def _aliases(nodes: list[ast.AST], own: str) -> frozenset[str]:
    """The names that an object has in a function: its parameter, and those that are assigned from it."""
    found = {own}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _attribute(node: ast.AST, own: frozenset[str]) -> str | None:
    """The attribute of an object at a node: self.name, getattr(self, "name"), vars(self)["name"]."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
        return None if node.attr in ("__dict__", "__class__", "__getattribute__") else node.attr
    if isinstance(node, ast.Call) and node.args:
        called, first, name = ast.unparse(node.func), ast.unparse(node.args[0]), node.args[-1]
        if called in ("getattr", "hasattr") and first in own and len(node.args) > 1:
            name = node.args[1]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "get" and _is_dict(node.func.value, own):
            name = node.args[0]
        elif not (called.endswith(".__getattribute__") and called.partition(".")[0] in {*own, "object"}):
            return None
        return str(name.value) if isinstance(name, ast.Constant) else None
    if isinstance(node, ast.Subscript) and _is_dict(node.value, own):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return None


def _changed_places(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """What a function changes in place: x of ``x.append(1)``, ``x[0] = 1`` and ``x.y = 1``, and what x stands for."""
    stands_for: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Attribute, ast.Subscript, ast.Name)):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    stands_for.setdefault(target.id, []).append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
            stands_for.setdefault(node.target.id, []).append(node.iter)
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            place = node.func.value
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            place = node.value
        else:
            continue
        yield place
        while isinstance(place, (ast.Attribute, ast.Subscript)):
            place = place.value
        if isinstance(place, ast.Name):
            yield from stands_for.get(place.id, ())


_READING = frozenset(
    (
        *("len", "sorted", "sum", "min", "max", "dict", "list", "set", "tuple", "enumerate", "zip", "any", "all"),
        *("isinstance", "print", "str", "repr", "bool", "iter", "reversed", "map", "filter"),
    )
)


def _passed_whole(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """What a function passes on to functions that may change it in place."""
    for node in nodes:
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _READING):
            given = (*node.args, *(keyword.value for keyword in node.keywords if keyword.arg is not None))
            yield from (one for one in given if isinstance(one, (ast.Name, ast.Attribute)))


def _first_attribute(node: ast.AST, own: frozenset[str]) -> str | None:
    """The attribute of an object in which a place lies: ``a`` of ``self.a.b[0]``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
            return node.attr
        node = node.value
    return None


def _is_dict(node: ast.AST, own: frozenset[str]) -> bool:
    """Whether a node is the dict of an object's attributes."""
    return any(ast.unparse(node) in (f"vars({name})", f"{name}.__dict__") for name in own)


def _is_understood(node: ast.Name, parent: ast.AST | None, parents: dict[int, ast.AST]) -> bool:
    """Whether where an object stands shows what is read of it."""
    of_parent = parents.get(id(parent))
    is_by_name = isinstance(of_parent, ast.Subscript) and isinstance(of_parent.slice, ast.Constant)
    if isinstance(of_parent, ast.Attribute):  # vars(self).get("name"), vars(self).update(name=1)
        use = parents.get(id(of_parent))
        first = use.args[0] if isinstance(use, ast.Call) and use.args else None
        is_by_name = of_parent.attr == "update" or isinstance(first, ast.Constant)
    if isinstance(parent, ast.Attribute):
        if parent.attr == "__getattribute__":
            return isinstance(of_parent, ast.Call) and isinstance((*of_parent.args, None)[0], ast.Constant)
        return parent.attr != "__dict__" or is_by_name
    if isinstance(parent, ast.Call):
        called = ast.unparse(parent.func)
        if called == "vars":
            return is_by_name
        if called in _BY_NAME or called.endswith(".__getattribute__"):
            return called in ("setattr", "delattr") or (
                len(parent.args) > 1 and isinstance(parent.args[1], ast.Constant)
            )
        return called in _HARMLESS or called.endswith("__setattr__")
    return isinstance(parent, (ast.Compare, ast.Assign, ast.Return))


def _given(
    call: ast.Call, parent: ast.AST | None, node: ast.Name, namespace: dict[str, Any]
) -> tuple[FunctionType, int] | None:
    """The function of the project to which a call gives an object, and the position of its parameter there."""
    called, shift = _named(call.func, namespace), 0
    if called is MISSING and isinstance(call.func, ast.Attribute):
        owner = _named(call.func.value, namespace)
        if isinstance(owner, type):
            entry = inspect.getattr_static(owner, call.func.attr, None)
            called = entry.__func__ if isinstance(entry, staticmethod) else entry
        else:
            called, shift = inspect.getattr_static(type(owner), call.func.attr, None), 1
    helper = _unwrapped(called)
    if not isinstance(helper, FunctionType) or not _is_users(helper):
        return None
    if isinstance(parent, ast.keyword):
        names = helper.__code__.co_varnames[: helper.__code__.co_argcount]
        return (helper, names.index(parent.arg)) if parent.arg in names else None
    if node not in call.args or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    index = call.args.index(node) + shift
    return (helper, index) if index < helper.__code__.co_argcount else None


def _named(node: ast.AST, namespace: dict[str, Any]) -> Any:
    """What a name, or an attribute of a module, is in a namespace."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id, MISSING)
    owner = _named(node.value, namespace) if isinstance(node, ast.Attribute) else None
    return vars(owner).get(node.attr, MISSING) if isinstance(owner, ModuleType) else MISSING  # type: ignore[attr-defined]


def _is_users(value: FunctionType | type) -> bool:
    return is_users(str(value.__module__))


class Reached(NamedTuple):
    """The globals that a function reads and sets, and the functions of the user's project that it refers to."""

    names: Names
    functions: tuple[FunctionType, ...]


@functools.lru_cache(4096)
def _of_globals(function: FunctionType) -> Reached:
    found = Names()
    functions: dict[FunctionType, None] = {}
    tree, namespace = tree_of(function), function.__globals__
    nodes = list(ast.walk(tree)) if tree is not None else []
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    imported = _imported(nodes)
    local = {node.arg for node in nodes if isinstance(node, ast.arg)} | imported.keys()
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local -= declared

    def value_of(node: ast.AST) -> Any:
        """What a name, or an attribute of a module, is now."""
        if isinstance(node, ast.Name):
            return imported.get(node.id, MISSING) if node.id in local else namespace.get(node.id, MISSING)
        owner = value_of(node.value) if isinstance(node, ast.Attribute) else None
        return vars(owner).get(node.attr, MISSING) if isinstance(owner, ModuleType) else MISSING  # type: ignore[attr-defined]

    found.attributes |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found.set_elsewhere |= set(_stored(nodes))
    for inner in (*_changed_places(nodes), *_passed_whole(nodes)):
        while isinstance(inner, (ast.Attribute, ast.Subscript)):
            if isinstance(inner, ast.Attribute) and isinstance(owner := value_of(inner.value), ModuleType):
                found.changed_globals.add((id(vars(owner)), inner.attr))
                break
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id not in local:
            found.changed_globals.add((id(namespace), inner.id))
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
        value = place.get(name, MISSING)
        if not isinstance(node.ctx, ast.Load):
            found.set_globals.add(key)
            continue
        if isinstance(value, type) and _is_users(value):
            found.classes |= {base for base in value.__mro__ if _is_users(base)}
        if not isinstance(value, ModuleType) and value is not MISSING and place is not imported:
            owner_module = sys.modules.get(str(place.get("__name__")))
            is_users = owner_module is not None and is_of_project(owner_module.__name__, owner_module)
            is_users = is_users or place.get("__name__") == "__main__" or isinstance(value, PLAIN)
            is_users = is_users and (not isinstance(value, type) or _is_users(value))
            if is_users:
                found.globals.add(key)
                found.namespaces[id(place)] = place
        if isinstance(plain := _unwrapped(value), FunctionType):
            module = sys.modules.get(plain.__module__)
            if module is not None and (plain.__globals__ is namespace or is_of_project(module.__name__, module)):
                functions[plain] = None
    return Reached(found, tuple(functions))


@functools.lru_cache(4096)
def _functions_in(cls: type) -> tuple[tuple[str, FunctionType], ...]:
    """By name the functions of a class of the user's project, under whatever decorators."""
    found = [(name, _unwrapped(function_of(cls, name))) for name in vars(cls)] if _is_users(cls) else []
    return tuple((name, one) for name, one in found if isinstance(one, FunctionType) and _is_users(one))


@functools.lru_cache(1024)
def set_by(cls: type) -> Names:
    """What the methods of a class set but for __init__ on the object itself: the driver's own, too."""
    found = Names()
    for base in cls.__mro__:
        for _, function in _functions_in(base):
            tree = tree_of(function)
            nodes = list(ast.walk(tree)) if tree is not None else []
            found.set_elsewhere |= set(_stored(nodes))
            if function.__name__ != "__init__" and function.__code__.co_argcount:
                own = function.__code__.co_varnames[0]
                found.writes |= {node.attr for node in nodes if _is_stored(node) and ast.unparse(node.value) == own}  # type: ignore[attr-defined]
                places = (_first_attribute(place, frozenset((own,))) for place in _changed_places(nodes))
                found.changes |= {name for name in places if name is not None}
    return found


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)


def _stored(nodes: list[ast.AST]) -> Iterator[str]:
    """The attributes that a function sets of anything but self."""
    for node in nodes:
        if _is_stored(node) and ast.unparse(node.value) != "self":  # type: ignore[attr-defined]
            yield node.attr  # type: ignore[attr-defined]


def _imported(nodes: list[ast.AST]) -> dict[str, Any]:
    """By name, the loaded modules and their values that a function imports when it runs."""
    found: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = sys.modules.get(name, MISSING)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in sys.modules:
            for alias in node.names:
                found[alias.asname or alias.name] = vars(sys.modules[node.module]).get(alias.name, MISSING)
    return found


def _unwrapped(value: Any) -> Any:
    return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value


def _constants(node: ast.Call) -> Iterator[str]:
    for argument in node.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def function_of(cls: type, name: str) -> Callable[..., Any] | None:
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


def inherited(cls: type, function: FunctionType, node: ast.AST) -> Callable[..., Any] | None:
    """The function that ``super().name`` or ``Base.name`` stands for in a method of a class; None: for nothing."""
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super":
        return of_super(cls, function, node.attr)
    base = _named(node.value, function.__globals__)
    return function_of(base, node.attr) if base in cls.__mro__[1:] and node.attr in vars(base) else None


def of_super(cls: type, function: FunctionType, name: str) -> Callable[..., Any] | None:
    """The function that ``super().name`` stands for in a method of a class."""
    places = [k for k, base in enumerate(cls.__mro__) if _is_in(base, function)]
    bases = cls.__mro__[places[0] + 1 if places else 1 :]
    return next((function_of(base, name) for base in bases if name in vars(base)), None)


def _is_in(base: type, function: FunctionType) -> bool:
    """Whether a class defines a function, under whatever decorators."""
    return function.__name__ in vars(base) and _unwrapped(function_of(base, function.__name__)) is function


@functools.lru_cache(4096)
def tree_of(function: FunctionType) -> ast.AST | None:
    """The function's source; None: there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
