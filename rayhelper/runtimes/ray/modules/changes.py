"""What the driver has set in modules of the project since it imported them: workers import them anew, and are told.

    config.SCALE = 2                a global that the module's source gives a literal
    config.OPTIONS["lr"] = 0.1      one that holds a list or dict of literals
    Settings.lr = 0.1               an attribute that a class's body gives a literal
    config.settings.lr = 0.1        the same of an object that the module made: settings = Settings()
    config.ARGS = parser.parse_args()  what a main script makes of its command line, in the place of None
    config.scale = twice            a function, method or property in the place of another one
    config.MODEL = Model()          another object in the place of a literal

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
import pickle
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from rayhelper.errors import DispatchError
from rayhelper.roles.names import CHANGING, of_class
from rayhelper.values.packing import dumps

Place = tuple[str, ...]  # a module, and the names that lead from it to what was set
_BAGS = (SimpleNamespace, Namespace)
_KINDS = {"staticmethod", "classmethod", "property"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_MISSING = object()
REMOVED = "<nothing: the driver has removed it>"
AS_WRITTEN = "<the function that the source defines>"  # it would be pickled by its name, which is the other one's now
_as_imported: dict[Place, Any] = {}  # on a worker: what stood in a place before something was set there


class Changes:
    """What was set, by place. Pickled with the class; ``apply`` sets it where that has been imported."""

    def __init__(self, values: dict[Place, Any]) -> None:
        self.values = values

    def check(self, cls: type) -> None:
        """Raises DispatchError if methods of the class's roles read a global that does not pickle."""
        unsent = {
            place[:2]: value.why for place, value in self.values.items() if isinstance(value, Placed) and value.why
        }
        for place, name in of_class(cls).globals if unsent else ():
            module = str(of_class(cls).namespaces[place].get("__name__"))
            if (module, name) in unsent:
                raise DispatchError(
                    f"methods of {cls.__name__} read the global {module}.{name}, which the driver has set. The new "
                    f"object cannot be sent to a worker ({unsent[module, name]}). Make the object in __init__, or pass "
                    "its settings as an argument."
                )

    def apply(self) -> None:
        """Sets this process's modules as the driver's are. A list or dict stays the one that others have imported."""
        for (module, *names, last), value in self.values.items():
            owner: Any = importlib.import_module(module)
            for name in names:
                owner = getattr(owner, name)
            if value is _Stays:
                continue
            held = vars(owner).get(last, _MISSING)
            written = _as_imported.setdefault((module, *names, last), held)
            if isinstance(value, str) and value == AS_WRITTEN:
                setattr(owner, last, written)
            elif isinstance(value, str) and value == REMOVED:
                if held is not _MISSING:
                    delattr(owner, last)
            elif type(held) is type(value) and isinstance(held, (dict, set)):
                held.clear()
                held.update(value)
            elif type(held) is type(value) and isinstance(held, list):
                held[:] = value
            elif is_dataclass(owner) and not isinstance(owner, type):
                object.__setattr__(owner, last, value)  # it may be frozen
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
        if place not in found:
            value = _at(place)
            plain = _function_under(value)
            is_own = plain is not None and (plain.__module__, *plain.__qualname__.split(".")) == place
            found[place] = AS_WRITTEN if is_own else REMOVED if value is _MISSING else value
    return Changes(found)


def _at(place: Place) -> Any:
    owner: Any = sys.modules.get(place[0])
    for name in place[1:]:
        owner = getattr(owner, "__dict__", {}).get(name, _MISSING)
    return owner


def _changes_of(module: ModuleType, written: Written) -> Iterator[tuple[Place, Any]]:
    here = module.__name__
    for name, literal in written.literals.items():
        yield from _changed((here, name), vars(module).get(name, _MISSING), literal, written)
    for name, (source, original) in written.imported.items():
        held = vars(module).get(name, _MISSING)
        other = None if _is_made_in(source, original, held) else sys.modules.get(source)
        known = None if other is None else _written_in(other)
        if known is not None and original in known.literals:
            yield from _changed((here, name), held, known.literals[original], known, original)
    yield from _replaced((here,), vars(module), written.functions, here)
    for name, body in written.classes.items():
        cls = vars(module).get(name)
        if isinstance(cls, type) and cls.__module__ == here and type(cls).__setattr__ is type.__setattr__:  # no Enum
            for attribute, literal in body.literals.items():
                yield from _changed((here, name, attribute), vars(cls).get(attribute, _MISSING), literal, written)
            yield from _replaced((here, name), vars(cls), body.functions, here)
    for name, said in written.objects.items():
        held = getattr(vars(module).get(name), "__dict__", {})
        made_of = type(vars(module).get(name))
        if made_of in _BAGS if said.is_bag else made_of is vars(module).get(said.of):
            for attribute in held if said.is_bag else said.literals:
                if attribute not in said.computed:
                    literal = said.literals.get(attribute, _MISSING)
                    value = held.get(attribute, _MISSING)
                    yield from _changed((here, name, attribute), value, literal, written, name, attribute)


def _is_made_in(source: str, name: str, held: Any) -> bool:
    """Whether it is a class, a function or a module that goes by this name in a module's package: no literal."""
    if isinstance(held, ModuleType):
        return True
    home = getattr(held, "__module__", None)
    package = source.partition(".")[0]
    return getattr(held, "__name__", None) == name and isinstance(home, str) and home.partition(".")[0] == package


def _changed(place: Place, held: Any, literal: Any, written: Written, *names: str) -> Iterator[tuple[Place, Any]]:
    """What stands where the source says a literal, if it is another; not where it counts (``names``: as which)."""
    if held is _MISSING:
        return
    if _is_plain(held):
        is_other = type(held) is not type(literal) or held != literal
    else:
        is_global = len(place) == 2  # in a class, what makes it may have put something in the place of a literal
        is_other = is_global and type(literal) in _PLAIN and not isinstance(held, (*_CONTAINERS, ModuleType))
    if is_other and written.own.isdisjoint(names or place[-1:]):
        yield place, held if _is_plain(held) else Placed(held)


class Placed:
    """An object that the driver has put in the place of a literal. It is pickled at once, or known not to pickle."""

    def __init__(self, value: Any) -> None:
        self.pickled, self.why = b"", ""
        try:
            self.pickled = dumps(value)
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"

    def __reduce__(self) -> Any:
        return (pickle.loads, (self.pickled,)) if self.pickled else (_stays, ())


class _Stays:
    """Where the driver has something that does not pickle, a worker keeps what it has."""


def _stays() -> type[_Stays]:
    return _Stays


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) in _BAGS or (is_dataclass(value) and not isinstance(value, type)):
        return all(map(_is_plain, vars(value).values())) if hasattr(value, "__dict__") else False
    return type(value) in _PLAIN or isinstance(value, (PurePath, Enum))


def _replaced(place: Place, held: Any, names: dict[str, str], module: str) -> Iterator[tuple[Place, Any]]:
    """The functions of another name, or of another module, that stand where the source defines one."""
    for name, qualified in names.items():
        value = held.get(name)
        plain = _function_under(value)
        if isinstance(value, functools.partial) or (
            plain is not None and (plain.__module__, plain.__qualname__) != (module, qualified)
        ):
            yield (*place, name), value


def _function_under(value: Any) -> FunctionType | None:
    """A function, or the one of a static method, a class method or a property that can only be read."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif type(value) is property and value.fset is None:
        value = value.fget
    return value if isinstance(value, FunctionType) else None


# What a source says


@dataclass
class Body:
    """What the body of a module or a class says."""

    literals: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # without decorators: the qualified name


@dataclass
class Made:
    """What the source says of an object that it makes."""

    of: str  # its class
    literals: dict[str, Any]
    computed: set[str] = field(default_factory=set)  # attributes whose values it does not say
    is_bag: bool = False  # it has no other attributes than those that the source gives it


@dataclass
class Written(Body):
    """What a module's source says."""

    file: tuple[str, int, int] = field(kw_only=True)  # its path, when it was written, and its size
    classes: dict[str, Body] = field(default_factory=dict)
    objects: dict[str, Made] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # by name the module and the name there

    @property
    def own(self) -> set[str]:
        """The names of counters, and of caches of this process. To be asked where something was changed: it is slow."""
        return _own_of(*self.file)


def _written_in(module: ModuleType) -> Written | None:
    """None: it has no source, or its file was edited since this process started (and it travels by value)."""
    try:
        path = str(module.__file__)
        stat = os.stat(path)
        return _written(path, stat.st_mtime_ns, stat.st_size, module.__spec__.parent if module.__spec__ else "")
    except (AttributeError, ImportError, OSError, SyntaxError, TypeError, ValueError):
        return None


@functools.lru_cache(4096)
def _written(path: str, mtime_ns: int, size: int, package: str) -> Written:
    tree = ast.parse(Path(path).read_text())
    found = Written(file=(path, mtime_ns, size))
    _read_body(found, tree.body, "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not _decorated_beyond(node):
            found.classes[node.name] = Body()
            _read_body(found.classes[node.name], node.body, f"{node.name}.", not node.decorator_list)
        elif isinstance(node, ast.ImportFrom) and node.module:
            base = "." * node.level + node.module
            source = importlib.util.resolve_name(base, package) if node.level else base
            found.imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in found.classes}
    for name, value in _assigned_once(tree.body).items():
        if isinstance(value, ast.Call) and _names_its_arguments(value):
            cls = ast.unparse(value.func)
            if cls.rpartition(".")[2] in ("SimpleNamespace", "Namespace") and not value.args:
                given = {str(key.arg): _said(key.value) for key in value.keywords}
                found.objects[name] = _made(cls, given, is_bag=True)
            elif cls in classes:
                found.objects[name] = _made(cls, _attributes(classes[cls], found.classes[cls], value))
    return found


def _names_its_arguments(call: ast.Call) -> bool:
    """Whether the source says which value every argument gets: not in ``Sizes(*found, **given)``."""
    return not any(isinstance(one, ast.Starred) for one in call.args) and all(key.arg for key in call.keywords)


def _made(cls: str, given: dict[str, Any], *, is_bag: bool = False) -> Made:
    said = {name: value for name, value in given.items() if value is not _MISSING}
    return Made(cls, said, given.keys() - said.keys(), is_bag)


def _attributes(node: ast.ClassDef, body: Body, call: ast.Call) -> dict[str, Any]:
    """By name, what the attributes of an object are that a call of a class makes; missing: the source does not say."""
    found = dict(body.literals)
    given = {str(key.arg): _said(key.value) for key in call.keywords}
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        names = [ast.unparse(one.target) for one in fields]
        found |= {name: _default(one.value) for name, one in zip(names, fields, strict=True)}
        found |= dict(zip(names, map(_said, call.args), strict=False)) | given
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    if "__init__" in methods:
        spec = methods["__init__"].args
        positional = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        values = dict.fromkeys(positional, _MISSING)
        if spec.defaults:
            values |= dict(zip(positional[-len(spec.defaults) :], map(_said, spec.defaults), strict=True))
        pairs = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        values |= {one.arg: _MISSING if default is None else _said(default) for one, default in pairs}
        values |= dict(zip(positional[1:], map(_said, call.args), strict=False)) | given
        found |= _set_in_init(methods["__init__"], values)
    for method in methods.values():
        if method.name != "__init__":
            found |= dict.fromkeys(_stored_on_self(method) - _passed_on(method), _MISSING)
    return found


def _passed_on(setter: ast.FunctionDef) -> set[str]:
    """The attributes of self that a method sets to what it was given, and does not read: as a setter does.

    What it computes may go with something that is not told, such as a flag that data were loaded.
    """
    if setter.name == "__post_init__":
        return set()
    given = {one.arg for one in (*setter.args.posonlyargs, *setter.args.args, *setter.args.kwonlyargs)}
    attributes = [node for node in ast.walk(setter) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self"}
    passed, computed = set[str](), set[str]()
    for node in ast.walk(setter):
        if isinstance(node, ast.Assign):
            is_given = isinstance(node.value, ast.Name) and node.value.id in given
            names = {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
            passed, computed = (passed | names, computed) if is_given else (passed, computed | names)
    return passed - computed - read


def _set_in_init(init: ast.FunctionDef, values: dict[str, Any]) -> dict[str, Any]:
    """What __init__ sets on self: literals, and parameters whose values are known. Missing: something else."""
    found = dict.fromkeys(_stored_on_self(init), _MISSING)
    once = _bound(init.body)
    rebound = {node.id for node in ast.walk(init) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in init.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if (
            not isinstance(node, (ast.Assign, ast.AnnAssign))
            or node.value is None
            or not isinstance(target, ast.Attribute)
        ):
            continue
        if ast.unparse(target.value) == "self" and once.count(target.attr) == 1:
            is_parameter = isinstance(node.value, ast.Name) and node.value.id not in rebound
            found[target.attr] = values.get(ast.unparse(node.value), _MISSING) if is_parameter else _said(node.value)
    return found


def _stored_on_self(function: ast.FunctionDef) -> set[str]:
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self"}


def _default(node: ast.expr | None) -> Any:
    """The default of a dataclass's field."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field":
        given = {key.arg: key.value for key in node.keywords}
        empty = ast.unparse(given["default_factory"]) if "default_factory" in given else ""
        if empty in ("list", "dict", "set"):
            return {"list": [], "dict": {}, "set": set()}[empty]
        return _said(given["default"]) if "default" in given else _MISSING
    return _MISSING if node is None else _said(node)


def _said(node: ast.expr) -> Any:
    """The value of a literal, or of dict(name=literal); missing: it is computed."""
    try:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            if all(key.arg for key in node.keywords):
                return {key.arg: ast.literal_eval(key.value) for key in node.keywords}
            return _MISSING
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _MISSING


def _decorated_beyond(node: ast.ClassDef) -> bool:
    """Whether its body may not be what the class has: a decorator may change it, except for dataclasses and roles."""
    names = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    return any(name.rpartition(".")[2] not in ("dataclass", "worker", "total_ordering", "final") for name in names)


def _read_body(found: Body, body: list[ast.stmt], prefix: str, is_bare: bool = True) -> None:
    for name, value in _assigned_once(body).items():
        if prefix and name.startswith("__"):
            continue
        if (literal := _said(value)) is not _MISSING:
            found.literals[name] = literal
    once = _bound(body)
    for node in body:
        if not isinstance(node, ast.FunctionDef) or not {ast.unparse(one) for one in node.decorator_list} <= _KINDS:
            continue
        is_made_by_decorator = prefix and node.name.startswith("__") and (not is_bare or node.name == "__new__")
        if once.count(node.name) == 1 and not is_made_by_decorator:
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
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            found.append(ast.unparse(node.func.value))
        waiting += ast.iter_child_nodes(node)
    return found


@functools.lru_cache(4096)
def _own_of(path: str, mtime_ns: int, size: int) -> set[str]:
    """What some function of a module both reads and sets, or changes in place: counters, and caches of this process."""
    found: set[str] = set()
    for function in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            read, changed = set[str](), set[str]()
            for node in ast.walk(function):
                if isinstance(node, ast.AugAssign):
                    read.add(_last_name(node.target))
                    changed.add(_last_name(node.target))
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
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
            is_changed = child.attr in CHANGING and isinstance(node, ast.Call) and node.func is child
            yield "" if is_changed else child.attr
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            in_place = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and node.value is child
            if not in_place and not (isinstance(node, ast.Attribute) and node.attr in CHANGING):
                yield child.id
