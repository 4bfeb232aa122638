"""Which live objects with roles the code of a method reaches, and what it does with each of them.

    self.parts["judge"][0].score(x)       parts in containers, dataclasses, namespaces and plain objects
    for part in self.parts.values(): ...  under local names, in comprehensions, through properties and closures
    helper(self)                          in functions and methods of the user's project

An expression stands for the objects of the driver that it may have as its value. Each process builds the same ones. The
order of statements is not looked at, and branches are all taken: what is found may be more than what happens.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from rayhelper.roles.names import CHANGING, MISSING, PLAIN, TRAINING, function_of, tree_of
from rayhelper.roles.project import is_users

_MOST_FRAMES = 2000  # calls that are followed, of one method
_MOST_ITEMS = 1000  # of one container
_DEPTH = 6
_CONTAINERS = (list, tuple, set, frozenset, collections.deque, dict, weakref.ref, types.MappingProxyType)


class Place(NamedTuple):
    """An attribute of an object with roles, whose value an expression stands for or has been taken from."""

    instance: int
    name: str


class Local(NamedTuple):
    """A function that is defined within another one."""

    node: Any
    env: Any


_CALLED = (FunctionType, MethodType, functools.partial, weakref.ref, Local)
Values = dict[Any, Any]  # by id or, of the three above and of methods, by key


class Touched:
    """What code does with one object with roles."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.set: set[str] = set()
        self.changed: set[str] = set()  # in place
        self.read: set[str] = set()
        self.read_by: set[tuple[str, int]] = set()  # with the object in whose method it is read


class Frame:
    """One function with the objects that its names stand for."""

    def __init__(self, function: FunctionType | None, owner: int, env: dict[str, Values]) -> None:
        self.function = function
        self.owner = owner  # the object whose method it is
        self.env = env
        self.returned: Values = {}


class Reached:
    """What a method does with all objects with roles that it reaches from its own one, which is among them."""

    def __init__(self, target: Any, function: Callable[..., Any]) -> None:
        self.touched: dict[int, Touched] = {}
        self.trains: set[int] = set()  # ids of the objects whose methods train something
        self.calls: set[tuple[int, int]] = set()  # whose method calls whose, with gradients
        self.kept: dict[Place, Values] = {}  # what the code itself has put into attributes
        self._frames: dict[Any, Frame] = {}
        self._has_grad = True
        self._of(target)
        self._enter(function, target, [], {}, id(target))

    def trained(self, touched: Touched) -> set[str]:
        """The attributes that are read where something is trained, or in what is called there: a loss."""
        training = set(self.trains)
        while more := {called for caller, called in self.calls if caller in training} - training:
            training |= more
        return {name for name, owner in touched.read_by if owner in training}

    # Calls

    def _enter(
        self, function: Callable[..., Any], own: Any, given: list[Values], named: dict[str, Values], owner: int
    ) -> Values:
        """What a call of a function may return. ``own``: the object whose method it is; MISSING: it is none."""
        plain = inspect.unwrap(function)
        if not isinstance(plain, FunctionType) or len(self._frames) > _MOST_FRAMES:
            return {}
        if own is not MISSING:
            given = [_one(own), *given]
        code = plain.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        env = _bound(names, code.co_argcount, given, named)
        for name in code.co_varnames[len(names) :][: bool(code.co_flags & 4) + bool(code.co_flags & 8)]:
            env[name] = _union([*given, *named.values()])
        key = (plain, owner, *(frozenset(env[name]) for name in sorted(env)))
        if key not in self._frames:
            frame = self._frames[key] = Frame(plain, owner, env)
            tree = tree_of(plain)
            if tree is None:
                self._without_source(frame)
            else:
                outer, self._has_grad = self._has_grad, self._has_grad and not _is_without_grad(tree)
                self._body(frame, _body_of(tree, plain))
                self._has_grad = outer
        return self._frames[key].returned

    def _body(self, frame: Frame, body: list[Any]) -> None:
        for _ in range(4):  # until nothing new is found
            before = sum(map(len, frame.env.values())) + len(frame.returned)
            for node in body:
                self._statement(frame, node)
            if sum(map(len, frame.env.values())) + len(frame.returned) == before:
                break

    def _without_source(self, frame: Frame) -> None:
        """A lambda among other code, say: it may use every name that it has of all that it has, and call it."""
        assert frame.function is not None, "only a function of its own has no source"
        names = _names_in(frame.function.__code__)
        every = _union([*frame.env.values(), *(self._name(frame, name) for name in names)])
        for _ in range(_DEPTH):
            before = len(every)
            every |= _deep(every)
            for name in names:
                self._changed_by_call(frame, every, name)
                every |= self._attribute(frame, every, name)
            for value in list(every.values()):
                if isinstance(value, _CALLED):
                    every |= self._called(frame, value, [every] * 8, {})
            if len(every) == before:
                break
        frame.returned |= every

    def _called(self, frame: Frame, value: Any, given: list[Values], named: dict[str, Values]) -> Values:
        """What calling one value may return."""
        if isinstance(value, Local):
            return self._called_local(frame, value, given, named)
        if isinstance(value, functools.partial):
            self_of = value.args[0] if value.args and hasattr(value.func, "method") else MISSING
            if self_of is not MISSING:  # a method of a role, kept
                return self._attribute_called(frame, self_of, value.func.__name__, given, named)
            own = [_one(one) for one in value.args]
            return self._called(frame, value.func, [*own, *given], {**named, **_ones(value.keywords)})
        if isinstance(value, MethodType):
            if is_role_object(value.__self__):
                self._read(frame, value.__self__, value.__name__)
            owner = id(value.__self__) if is_role_object(value.__self__) else frame.owner
            if self._has_grad:
                self.calls.add((frame.owner, owner))
            return self._enter(value.__func__, value.__self__, given, named, owner)
        if isinstance(value, FunctionType) and is_users(str(value.__module__)):
            return self._enter(value, MISSING, given, named, frame.owner)
        if isinstance(value, weakref.ref):
            return _elements(value)
        called = None if isinstance(value, (type, *_CONTAINERS)) else function_of(type(value), "__call__")
        if called is not None and is_users(str(type(value).__module__)):
            return self._enter(called, value, given, named, frame.owner)
        return {}

    def _called_local(self, frame: Frame, value: Local, given: list[Values], named: dict[str, Values]) -> Values:
        arguments = value.node.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        for name, values in _bound(names, len(names), given, named).items():
            value.env.setdefault(name, {}).update(values)
        inner = Frame(frame.function, frame.owner, value.env)
        body = [ast.Return(value.node.body)] if isinstance(value.node, ast.Lambda) else value.node.body
        key = (id(value.node), *(frozenset(value.env.get(name, ())) for name in names))
        if key not in self._frames and len(self._frames) <= _MOST_FRAMES:
            self._frames[key] = inner
            self._body(inner, body)
        return self._frames.get(key, inner).returned

    def _attribute_called(
        self, frame: Frame, instance: Any, name: str, given: list[Values], named: dict[str, Values]
    ) -> Values:
        found = self._attribute(frame, _one(instance), name)
        return _union(self._called(frame, value, given, named) for value in list(found.values()))

    # Statements

    def _statement(self, frame: Frame, node: Any) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._put(frame, node.name, _one(Local(node, frame.env), ("local", id(node))))
        elif isinstance(node, ast.Assign):
            value = self._value(frame, node.value)
            for target in node.targets:
                self._assign(frame, target, value)
        elif isinstance(node, ast.AnnAssign):
            self._assign(frame, node.target, self._value(frame, node.value))
        elif isinstance(node, ast.AugAssign):
            place = ast.copy_location(_as_loaded(node.target), node.target)
            self._assign(frame, node.target, _union([self._value(frame, place), self._value(frame, node.value)]))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._assign(frame, node.target, self._items(frame, self._value(frame, node.iter)))
            self._statements(frame, [*node.body, *node.orelse])
        elif isinstance(node, ast.Return):
            frame.returned |= self._value(frame, node.value)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._assign(frame, target, {})
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self._value(frame, item.context_expr)
                if item.optional_vars is not None:
                    self._assign(frame, item.optional_vars, value)
            outer, self._has_grad = self._has_grad, self._has_grad and not any(map(_names_no_grad, node.items))
            self._statements(frame, node.body)
            self._has_grad = outer
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, imported in _imported(node):
                self._put(frame, name, _one(imported))
        elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            self._statements(frame, ast.iter_child_nodes(node))
        elif isinstance(node, ast.expr):
            self._value(frame, node)

    def _statements(self, frame: Frame, nodes: Iterable[Any]) -> None:
        for node in nodes:
            self._statement(frame, node)

    def _put(self, frame: Frame, name: str, value: Values) -> None:
        frame.env.setdefault(name, {}).update(value)

    def _assign(self, frame: Frame, target: ast.AST, value: Values) -> None:
        if isinstance(target, ast.Name):
            self._put(frame, target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._assign(frame, one, value | _deep(value))
        elif isinstance(target, ast.Starred):
            self._assign(frame, target.value, value)
        elif isinstance(target, ast.Attribute):
            owners = self._value(frame, target.value)
            self._set(owners, target.attr, value)
        elif isinstance(target, ast.Subscript):
            self._value(frame, target.slice)
            owners = self._value(frame, target.value)
            if name := _name_in_dict(target):
                self._set(owners, name, value)
            else:
                self._change(owners)

    def _set(self, owners: Values, name: str, value: Values) -> None:
        with_roles = [one for one in owners.values() if is_role_object(one)]
        for one in with_roles:
            self._of(one).set.add(name)
            self.kept.setdefault(Place(id(one), name), {}).update(value)
        if not with_roles:
            self._change(owners)

    def _change(self, owners: Values) -> None:
        for key in owners:
            if isinstance(key, Place):
                self.touched[key.instance].changed.add(key.name)

    # Expressions

    def _value(self, frame: Frame, node: Any) -> Values:
        """The objects that an expression may have as its value."""
        if isinstance(node, ast.Name):
            return self._name(frame, node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(frame, self._value(frame, node.value), node.attr)
        if isinstance(node, ast.Subscript):
            owners = self._value(frame, node.value)
            self._value(frame, node.slice)
            if name := _name_in_dict(node):
                return self._attribute(frame, owners, name)
            return self._items(frame, owners, node.slice.value if isinstance(node.slice, ast.Constant) else MISSING)
        if isinstance(node, ast.Call):
            return self._call(frame, node)
        if isinstance(node, ast.Lambda):
            return _one(Local(node, frame.env), ("local", id(node)))
        if isinstance(node, ast.NamedExpr):
            value = self._value(frame, node.value)
            self._assign(frame, node.target, value)
            return value
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for part in node.generators:
                self._assign(frame, part.target, self._items(frame, self._value(frame, part.iter)))
                for condition in part.ifs:
                    self._value(frame, condition)
            return self._value(frame, node.value if isinstance(node, ast.DictComp) else node.elt)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            frame.returned |= self._value(frame, node.value)
            return {}
        if isinstance(node, (ast.Constant, type(None))):
            return {}
        return _union([self._value(frame, one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.AST)])

    def _name(self, frame: Frame, name: str) -> Values:
        if name in frame.env:
            return frame.env[name]
        if frame.function is None:
            return {}
        cells = dict(zip(frame.function.__code__.co_freevars, frame.function.__closure__ or (), strict=False))
        if name in cells:
            try:
                return _one(cells[name].cell_contents)
            except ValueError:  # not set yet
                return {}
        space = frame.function.__globals__
        return _one(space.get(name, getattr(builtins, name, MISSING)))

    def _items(self, frame: Frame, owners: Values, place: Any = MISSING) -> Values:
        """What is in containers, or in one place of them. What is none of those stands for what is in it."""
        found: Values = {}
        for key, value in owners.items():
            if isinstance(value, _CONTAINERS):
                found |= _elements(value, place)
            else:
                found[key] = value
                for name in ("__getitem__", "__iter__"):
                    entry = None if isinstance(value, Local) else function_of(type(value), name)
                    if entry is not None and is_users(str(type(value).__module__)):
                        found |= self._attribute_called(frame, value, name, [], {})
        return found

    def _call(self, frame: Frame, node: ast.Call) -> Values:
        given = [self._value(frame, one.value if isinstance(one, ast.Starred) else one) for one in node.args]
        starred = [isinstance(one, ast.Starred) for one in node.args]
        given = [_deep(one) if is_star else one for one, is_star in zip(given, starred, strict=True)]
        named = {one.arg or "**": self._value(frame, one.value) for one in node.keywords}
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "delattr") and len(given) > 1:
            return self._by_name(frame, node, given)
        if isinstance(node.func, ast.Name) and node.func.id == "vars" and given:
            return given[0]
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value):
            return self._call_of_super(frame, node.func.attr, given, named)
        if isinstance(node.func, ast.Attribute):
            owners = self._value(frame, node.func.value)
            self._changed_by_call(frame, owners, node.func.attr)
            called = self._attribute(frame, owners, node.func.attr)
            found = _deep({key: value for key, value in owners.items() if not is_role_object(value)})
            found |= {key: None for key in owners if isinstance(key, Place)}
        else:
            called, found = self._value(frame, node.func), {}
        if any(starred) or "**" in named:
            given = [_union([*given, *named.values()])] * 16
        results = [self._called(frame, value, given, named) for value in list(called.values())]
        if not any(isinstance(value, _CALLED) for value in called.values()):
            every = _deep(_union([*given, *named.values()]))  # of a library: it may give back what it was given
            found |= every
            for value in list(every.values()):  # or call it
                if isinstance(value, _CALLED):
                    results.append(self._called(frame, value, [every] * 8, {}))
        return _union([found, *results])

    def _call_of_super(self, frame: Frame, name: str, given: list[Values], named: dict[str, Values]) -> Values:
        found: Values = {}
        own = frame.function.__code__.co_varnames[:1] if frame.function is not None else ()
        for value in list(_union(frame.env.get(name, {}) for name in own).values()):
            for base in type(value).__mro__[1:]:
                inherited = function_of(base, name) if name in vars(base) else None
                if inherited is not None and inspect.unwrap(inherited) is not frame.function:
                    found |= self._enter(inherited, value, given, named, frame.owner)
        return found

    def _by_name(self, frame: Frame, node: ast.Call, given: list[Values]) -> Values:
        """``getattr``, ``setattr`` and ``delattr``."""
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if node.func.id != "getattr":  # type: ignore[attr-defined]
            if isinstance(name, str):
                self._set(given[0], name, given[2] if len(given) > 2 else {})
            return {}
        if isinstance(name, str):
            return self._attribute(frame, given[0], name) | (given[2] if len(given) > 2 else {})
        names = {name for one in given[0].values() for name in (*_held(one), *vars(type(one)))}
        return _union(self._attribute(frame, given[0], one) for one in sorted(names) if not one.startswith("__"))

    def _changed_by_call(self, frame: Frame, owners: Values, name: str) -> None:
        if name in TRAINING:
            self.trains.add(frame.owner)
        if name in CHANGING and not any(function_of(type(one), name) for one in owners.values()):
            self._change(owners)

    def _attribute(self, frame: Frame, owners: Values, name: str) -> Values:
        found: Values = {}
        for key, one in list(owners.items()):
            if isinstance(key, Place):
                if not any(is_role_object(value) for value in owners.values()):
                    found[key] = None  # self.state.step lies in self.state
                continue
            if isinstance(one, tuple) and name in getattr(one, "_fields", ()):
                found |= _one(getattr(one, name))
            if isinstance(one, (Local, type(None), *_CONTAINERS)):
                continue
            if name == "__dict__":
                found[key] = one
                continue
            if is_role_object(one):
                self._read(frame, one, name)
                found[Place(id(one), name)] = None
                found |= self.kept.get(Place(id(one), name), {})
            found |= self._live(frame, one, name)
        return found

    def _live(self, frame: Frame, one: Any, name: str) -> Values:
        """What an object has under a name."""
        held = _held(one)
        if name in held:
            return _one(held[name])
        if isinstance(one, ModuleType):
            return {}
        entry = inspect.getattr_static(one if isinstance(one, type) else type(one), name, MISSING)
        function = function_of(one if isinstance(one, type) else type(one), name)
        if isinstance(entry, (property, functools.cached_property)):
            is_followed = function is not None and (is_role_object(one) or is_users(str(type(one).__module__)))
            owner = id(one) if is_role_object(one) else frame.owner
            return self._enter(function, one, [], {}, owner) if is_followed and function is not None else {}
        if function is not None:
            if not (is_role_object(one) or is_users(str(getattr(function, "__module__", "")))):
                return {}
            if isinstance(entry, staticmethod) or isinstance(one, type):
                return _one(inspect.unwrap(function))
            return _one(MethodType(function, one), ("method", function, id(one)))
        if isinstance(entry, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return _one(getattr(one, name, MISSING))
        return _one(entry)

    def _read(self, frame: Frame, instance: Any, name: str) -> None:
        touched = self._of(instance)
        touched.read.add(name)
        touched.read_by.add((name, frame.owner))

    def _of(self, instance: Any) -> Touched:
        return self.touched.setdefault(id(instance), Touched(instance))


def is_role_object(value: Any) -> bool:
    """Whether a value is an object of a class with roles."""
    return hasattr(type(value), "__rayhelper_roles__")


def _one(value: Any, key: Any = None) -> Values:
    if value is MISSING or isinstance(value, (*PLAIN, bytes, complex)):
        return {}
    return {id(value) if key is None else key: value}


def _ones(values: Mapping[str, Any]) -> dict[str, Values]:
    return {name: _one(value) for name, value in values.items()}


def _union(values: Iterable[Values]) -> Values:
    found: Values = {}
    for one in values:
        found |= one
    return found


def _bound(names: Iterable[str], num: int, given: list[Values], named: dict[str, Values]) -> dict[str, Values]:
    """What the parameters of a function stand for."""
    found = dict(zip(list(names)[:num], given, strict=False))
    return {name: dict(found.get(name) or named.get(name) or {}) for name in names}


def _elements(container: Any, place: Any = MISSING) -> Values:
    if isinstance(container, weakref.ref):
        return _one(container())
    if place is not MISSING and isinstance(container, (dict, list, tuple, collections.deque)):
        with contextlib.suppress(LookupError, TypeError):
            held = dict.get(container, place, MISSING) if isinstance(container, dict) else container[place]
            if held is not MISSING:
                return _one(held)
    items = container.values() if isinstance(container, (dict, types.MappingProxyType)) else container
    return _union(map(_one, list(items))) if len(items) <= _MOST_ITEMS else {}  # more are data


def _deep(values: Values, depth: int = _DEPTH) -> Values:
    """The values, and what is in the containers among them."""
    found = dict(values)
    for value in values.values():
        if isinstance(value, _CONTAINERS) and depth:
            found |= _deep(_elements(value), depth - 1)
    return found


def _held(one: Any) -> Mapping[str, Any]:
    """The attributes of an object itself, and modules in a module of torch."""
    try:
        held: dict[str, Any] = object.__getattribute__(one, "__dict__")
    except (AttributeError, TypeError):
        held = {}
    modules = held.get("_modules")
    return {**held, **modules} if isinstance(modules, dict) else held


def _body_of(tree: ast.AST, function: FunctionType) -> list[Any]:
    """The statements of a function, or of a lambda by its one expression; none: it is not found in its source."""
    found = next(iter(getattr(tree, "body", ())), None)
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return found.body
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return [ast.Return(lambdas[0].body)] if len(lambdas) == 1 and function.__name__ == "<lambda>" else []


def _is_without_grad(tree: ast.AST) -> bool:
    """Whether a function is decorated so that it computes no gradients."""
    found = next(iter(getattr(tree, "body", ())), None)
    return any(map(_names_no_grad, getattr(found, "decorator_list", ())))


def _names_no_grad(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return "no_grad" in text or "inference_mode" in text


def _names_in(code: types.CodeType) -> list[str]:
    """The names that code uses, those of functions in it too, and texts that may be names."""
    found = [*code.co_names, *code.co_freevars]
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found += _names_in(one)
        elif isinstance(one, str) and one.isidentifier():
            found.append(one)
    return found


def _as_loaded(target: Any) -> Any:
    kind: Any = type(target)
    fields = {name: getattr(target, name) for name in target._fields if name != "ctx"}
    return kind(**fields, ctx=ast.Load())


def _name_in_dict(node: ast.Subscript) -> str | None:
    """The attribute of ``vars(self)["name"]`` and ``self.__dict__["name"]``."""
    where = ast.unparse(node.value)
    is_dict = where.startswith("vars(") or where.endswith(".__dict__")
    return node.slice.value if is_dict and isinstance(node.slice, ast.Constant) else None  # type: ignore[return-value]


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Any]]:
    """By name, what a statement imports, as far as it is loaded."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or name, sys.modules.get(name, MISSING)
        elif node.level == 0 and node.module in sys.modules:
            yield alias.asname or alias.name, vars(sys.modules[node.module]).get(alias.name, MISSING)
