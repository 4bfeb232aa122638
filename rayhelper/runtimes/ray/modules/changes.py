"""What the driver has set in modules of the project since it imported them: workers import them anew, and are told.

    config.SCALE = 2                a global that the module's source gives a literal
    config.OPTIONS["lr"] = 0.1      one that holds a list or dict of literals
    Settings.lr = 0.1               an attribute that a class's body gives a literal
    config.settings.lr = 0.1        the same of an object that the module made: settings = Settings()
    config.scale = twice            a function or method in the place of another one

Only what the source says is compared. What it computes (``DEVICE = "cuda" if torch.cuda.is_available() else "cpu"``)
may be otherwise on a worker, and right there. What a function of the module both reads and sets is a counter or a
cache.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

Place = tuple[str, ...]  # a module, and the names that lead from it to what was set
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()
AS_WRITTEN = "<the function that the source defines>"  # it would be pickled by its name, which is the other one's now
_as_imported: dict[Place, Any] = {}  # on a worker: what stood in a place before something was set there
_CHANGING = frozenset(
    ("append", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)


class Changes:
    """What was set, by place. Pickled with the class; ``apply`` sets it where that has been imported."""

    def __init__(self, values: dict[Place, Any]) -> None:
        self.values = values

    def apply(self) -> None:
        """Sets this process's modules as the driver's are. A list or dict stays the one that others have imported."""
        for (module, *names, last), value in self.values.items():
            owner: Any = importlib.import_module(module)
            for name in names:
                owner = getattr(owner, name)
            held = vars(owner).get(last, _MISSING)
            written = _as_imported.setdefault((module, *names, last), held)
            if value == AS_WRITTEN:
                setattr(owner, last, written)
            elif type(held) is type(value) and isinstance(held, (dict, set)):
                held.clear()
                held.update(value)
            elif type(held) is type(value) and isinstance(held, list):
                held[:] = value
            else:
                setattr(owner, last, value)


def changes_in(modules: Iterable[str], told_before: Iterable[Place]) -> Changes:
    """What the driver has set in loaded modules, and what is now where workers were told something before."""
    found: dict[Place, Any] = {}
    for name in modules:
        module = sys.modules.get(name)
        written = None if module is None else _written_in(module)
        if module is not None and written is not None:
            found |= dict(_changes_of(module, written))
    for place in told_before:
        if place not in found and (value := _at(place)) is not _MISSING:
            is_own = isinstance(value, FunctionType) and (value.__module__, *value.__qualname__.split(".")) == place
            found[place] = AS_WRITTEN if is_own else value
    return Changes(found)


def _at(place: Place) -> Any:
    owner: Any = sys.modules.get(place[0])
    for name in place[1:]:
        owner = getattr(owner, name, _MISSING)
    return owner


def _changes_of(module: ModuleType, written: Written) -> Iterator[tuple[Place, Any]]:
    here = module.__name__
    for name, literal in written.literals.items():
        yield from _changed((here, name), vars(module).get(name, _MISSING), literal)
    for name, (source, original) in written.imported.items():
        other = sys.modules.get(source)
        known = None if other is None else _written_in(other)
        if known is not None and original in known.literals:
            yield from _changed((here, name), vars(module).get(name, _MISSING), known.literals[original])
    yield from _replaced((here,), vars(module), written.functions, here)
    for name, of_class in written.classes.items():
        cls = vars(module).get(name)
        if isinstance(cls, type) and cls.__module__ == here:
            for attribute, literal in of_class.literals.items():
                yield from _changed((here, name, attribute), vars(cls).get(attribute, _MISSING), literal)
            yield from _replaced((here, name), vars(cls), of_class.functions, here)
    for name, class_name in written.objects.items():
        made = vars(module).get(name)
        if type(made) is vars(module).get(class_name):
            for attribute, literal in written.classes[class_name].literals.items():
                value = getattr(made, "__dict__", {}).get(attribute, _MISSING)
                yield from _changed((here, name, attribute), value, literal)


def _changed(place: Place, held: Any, literal: Any) -> Iterator[tuple[Place, Any]]:
    if held is not _MISSING and _is_plain(held) and (type(held) is not type(literal) or held != literal):
        yield place, held


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _replaced(place: Place, held: Any, names: dict[str, str], module: str) -> Iterator[tuple[Place, Any]]:
    """The functions of another name, or of another module, that stand where the source defines one."""
    for name, qualified in names.items():
        value = held.get(name)
        if isinstance(value, FunctionType) and (value.__module__, value.__qualname__) != (module, qualified):
            yield (*place, name), value


# What a source says


@dataclass
class Body:
    """What the body of a module or a class says."""

    literals: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # without decorators: the qualified name


@dataclass
class Written(Body):
    """What a module's source says."""

    classes: dict[str, Body] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)  # by name the class, of this module, of which it is made
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # by name the module and the name there


def _written_in(module: ModuleType) -> Written | None:
    """None: it has no source, or its file was edited since this process started (and it travels by value)."""
    try:
        path = str(module.__file__)
        stat = os.stat(path)
        return _written(path, stat.st_mtime_ns, stat.st_size, getattr(module, "__package__", "") or "")
    except (AttributeError, OSError, SyntaxError, ValueError):
        return None


@functools.lru_cache(4096)
def _written(path: str, mtime_ns: int, size: int, package: str) -> Written:
    tree = ast.parse(Path(path).read_text())
    found = Written()
    own = _counters(tree)
    _read_body(found, tree.body, own, "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not _decorated_beyond(node):
            found.classes[node.name] = Body()
            _read_body(found.classes[node.name], node.body, own, f"{node.name}.")
        elif isinstance(node, ast.ImportFrom) and node.module:
            base = "." * node.level + node.module
            source = importlib.util.resolve_name(base, package) if node.level else base
            found.imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    for name, value in _assigned_once(tree.body).items():
        cls = ast.unparse(value).removesuffix("()") if isinstance(value, ast.Call) else ""
        if name not in own and cls in found.classes:
            found.objects[name] = cls
    return found


def _decorated_beyond(node: ast.ClassDef) -> bool:
    """Whether its body may not be what the class has: a decorator may change it, except for dataclasses and roles."""
    names = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    return any(name.rpartition(".")[2] not in ("dataclass", "worker", "total_ordering", "final") for name in names)


def _read_body(found: Body, body: list[ast.stmt], own: set[str], prefix: str) -> None:
    for name, value in _assigned_once(body).items():
        if name in own or (prefix and name.startswith("__")):
            continue
        try:
            found.literals[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    once = _bound(body)
    for node in body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        if once.count(node.name) == 1 and not (prefix and node.name.startswith("__")):
            found.functions[node.name] = prefix + node.name


def _assigned_once(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """The names to which a body gives a value in one place alone, under no condition."""
    once = _bound(body)
    found: dict[str, ast.expr] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return {name: value for name, value in found.items() if once.count(name) == 1}


def _bound(body: list[ast.stmt]) -> list[str]:
    """The names that a body binds, once for each place, those of functions and classes in it excepted."""
    found: list[str] = []
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node.name)
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.append(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.append(node.attr)  # a statement of the module sets it
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.append(ast.unparse(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            found.append(ast.unparse(node.func.value))
        waiting += ast.iter_child_nodes(node)
    return found


def _counters(tree: ast.Module) -> set[str]:
    """What some function of a module both reads and sets, or changes in place: counters, and caches of this process."""
    found: set[str] = set()
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            read, changed = set[str](), set[str]()
            for node in ast.walk(function):
                if isinstance(node, ast.AugAssign):
                    read.add(_last_name(node.target))
                    changed.add(_last_name(node.target))
                elif (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING
                ):
                    changed.add(_last_name(node.func.value))
                elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                    changed.add(_last_name(node.value))
                elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    changed |= {node.attr} if ast.unparse(node.value) != "self" else set()
                elif isinstance(node, ast.Global):
                    changed.update(node.names)
            read |= {name for node in ast.walk(function) for name in _read_at(node)}
            found |= read & changed
    return found


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _read_at(node: ast.AST) -> Iterator[str]:
    """The names that a node reads; a list that is only changed in place is not read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            is_changed = child.attr in _CHANGING and isinstance(node, ast.Call) and node.func is child
            yield "" if is_changed else child.attr
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            in_place = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and node.value is child
            if not in_place and not (isinstance(node, ast.Attribute) and node.attr in _CHANGING):
                yield child.id
