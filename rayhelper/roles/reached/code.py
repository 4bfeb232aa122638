"""Follows the code of a method through the objects of the driver."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from rayhelper.roles.names import CHANGING, FITTING, MISSING, TRAINING, function_of, of_super, tree_of
from rayhelper.roles.project import is_users
from rayhelper.roles.reached.source import (
    as_loaded,
    body_of,
    imported_by,
    is_dict_of,
    is_in_place,
    is_super,
    is_without_grad,
    name_in_dict,
    names_in,
    names_no_grad,
)
from rayhelper.roles.reached.values import (
    CALLED,
    CONTAINERS,
    DEPTH,
    Local,
    Place,
    Values,
    all_of,
    attributes_of,
    each_of,
    is_module,
    is_role_object,
    items_of,
    kinds_of_generators,
    one_of,
    parameters_of,
    places_in,
    with_items,
    without_places,
)

_MOST_FRAMES = 2000  # calls that are followed, of one method
_MOST_NESTED = 24  # calls within calls
_MOST_WORK = 3000  # expressions and calls, of one method, before calls are no longer followed: about a second
_GIVING_PARTS = frozenset(  # methods whose value lies in the object: what changes it in place changes the object
    (
        *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"),
        *("values", "items", "get", "setdefault", "pop", "popleft", "view", "detach", "copy_", "add_", "mul_"),
    )
)
_NEW = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr, ast.Starred)  # whose value is another object
_GIVING_ITEMS = frozenset(("zip", "enumerate", "iter", "next", "reversed", "sorted", "list", "tuple", "filter", "map"))


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
        self._nested = 0
        self._work = 0
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
        if not isinstance(plain, FunctionType) or self._is_too_much():
            return {}
        if own is not MISSING:
            given = [one_of(own), *given]
        code = plain.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        env = parameters_of(names, code.co_argcount, given, named)
        for name in code.co_varnames[len(names) :][: bool(code.co_flags & 4) + bool(code.co_flags & 8)]:
            env[name] = all_of([*given, *named.values()])
        key = (plain, owner, *(frozenset(env[name]) for name in sorted(env)))
        if key not in self._frames:
            frame = self._frames[key] = Frame(plain, owner, env)
            tree = tree_of(plain)
            self._nested += 1
            if tree is None:
                self._without_source(frame)
            else:
                outer, self._has_grad = self._has_grad, self._has_grad and not is_without_grad(tree)
                self._body(frame, body_of(tree, plain))
                self._has_grad = outer
            self._nested -= 1
        return self._frames[key].returned

    def _is_too_much(self) -> bool:
        """Whether further calls are not followed."""
        return len(self._frames) > _MOST_FRAMES or self._nested >= _MOST_NESTED or self._work > _MOST_WORK

    def _body(self, frame: Frame, body: list[Any]) -> None:
        for _ in range(4):  # until nothing new is found
            before = sum(map(len, frame.env.values())) + len(frame.returned)
            for node in body:
                self._statement(frame, node)
            if sum(map(len, frame.env.values())) + len(frame.returned) == before or self._is_too_much():
                break

    def _without_source(self, frame: Frame) -> None:
        """A lambda among other code, say: it may use every name that it has of all that it has, and call it."""
        assert frame.function is not None, "only a function of its own has no source"
        names = names_in(frame.function.__code__)
        every = all_of([*frame.env.values(), *(self._name(frame, name) for name in names)])
        for _ in range(DEPTH):
            before = len(every)
            every |= with_items(every)
            for name in names:
                self._changed_by_call(frame, every, name)
                every |= self._attribute(frame, every, name)
            for value in list(every.values()):
                if isinstance(value, CALLED):
                    every |= self._called(frame, value, [every] * 8, {})
            if len(every) == before:
                break
        frame.returned |= every

    def _called(
        self, frame: Frame, value: Any, given: list[Values], named: dict[str, Values], places: Values | None = None
    ) -> Values:
        """What calling one value may return. ``places``: where the object of a method lies."""
        self._work += 1
        if isinstance(value, Local):
            return self._called_local(frame, value, given, named)
        if isinstance(value, functools.partial):
            self_of = value.args[0] if value.args and hasattr(value.func, "method") else MISSING
            if self_of is not MISSING:  # a method of a role, kept
                return self._attribute_called(frame, self_of, value.func.__name__, given, named)
            bound = [one_of(one) for one in value.args]
            return self._called(frame, value.func, [*bound, *given], {**named, **each_of(value.keywords)})
        if isinstance(value, MethodType):
            if is_role_object(value.__self__):
                self._read(frame, value.__self__, value.__name__)
            owner = id(value.__self__) if is_role_object(value.__self__) else frame.owner
            if self._has_grad:
                self.calls.add((frame.owner, owner))
            own = one_of(value.__self__) | (places or {})
            return self._enter(value.__func__, MISSING, [own, *given], named, owner)
        if isinstance(value, FunctionType) and is_users(str(value.__module__)):
            return self._enter(value, MISSING, given, named, frame.owner)
        if isinstance(value, weakref.ref):
            return items_of(value)
        if isinstance(value, (type, *CONTAINERS)):
            return {}
        for name in ("__call__", "forward"):  # which a module of torch calls
            called = function_of(type(value), name)
            if called is not None and _is_followed(called, value):
                return self._attribute_called(frame, value, name, given, named)
        return {}

    def _called_local(self, frame: Frame, value: Local, given: list[Values], named: dict[str, Values]) -> Values:
        arguments = value.node.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        for name, values in parameters_of(names, len(names), given, named).items():
            value.env.setdefault(name, {}).update(values)
        inner = Frame(frame.function, frame.owner, value.env)
        body = [ast.Return(value.node.body)] if isinstance(value.node, ast.Lambda) else value.node.body
        key = (id(value.node), *(frozenset(value.env.get(name, ())) for name in names))
        if key not in self._frames and not self._is_too_much():
            self._frames[key] = inner
            self._nested += 1
            self._body(inner, body)
            self._nested -= 1
        return self._frames.get(key, inner).returned

    def _attribute_called(
        self, frame: Frame, instance: Any, name: str, given: list[Values], named: dict[str, Values]
    ) -> Values:
        found = self._attribute(frame, one_of(instance), name)
        return all_of(self._called(frame, value, given, named) for value in list(found.values()))

    # Statements

    def _statement(self, frame: Frame, node: Any) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._put(frame, node.name, one_of(Local(node, frame.env), ("local", id(node))))
        elif isinstance(node, ast.Assign):
            value = self._value(frame, node.value)
            for target in node.targets:
                self._assign(frame, target, value)
        elif isinstance(node, ast.AnnAssign):
            self._assign(frame, node.target, self._value(frame, node.value))
        elif isinstance(node, ast.AugAssign):
            place = ast.copy_location(as_loaded(node.target), node.target)
            self._assign(frame, node.target, all_of([self._value(frame, place), self._value(frame, node.value)]))
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
            outer, self._has_grad = self._has_grad, self._has_grad and not any(map(names_no_grad, node.items))
            self._statements(frame, node.body)
            self._has_grad = outer
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, imported in imported_by(node):
                self._put(frame, name, one_of(imported))
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
                self._assign(frame, one, value | with_items(value))
        elif isinstance(target, ast.Starred):
            self._assign(frame, target.value, value)
        elif isinstance(target, ast.Attribute):
            owners = self._value(frame, target.value)
            self._set(owners, target.attr, value)
        elif isinstance(target, ast.Subscript):
            self._value(frame, target.slice)
            owners = self._value(frame, target.value)
            if name := name_in_dict(target):
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

    def _change(self, owners: Values, applies: Callable[[Any], bool] | None = None) -> None:
        """The places among the values are changed. ``applies``: to what they hold on the driver."""
        for key in owners:
            if isinstance(key, Place):
                touched = self.touched[key.instance]
                if applies is None or applies(attributes_of(touched.instance).get(key.name)):
                    touched.changed.add(key.name)

    # Expressions

    def _value(self, frame: Frame, node: Any) -> Values:
        """The objects that an expression may have as its value."""
        self._work += 1
        if isinstance(node, ast.Name):
            return self._name(frame, node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(frame, self._value(frame, node.value), node.attr)
        if isinstance(node, ast.Subscript):
            owners = self._value(frame, node.value)
            self._value(frame, node.slice)
            if name := name_in_dict(node):
                return self._attribute(frame, owners, name)
            return self._items(frame, owners, node.slice.value if isinstance(node.slice, ast.Constant) else MISSING)
        if isinstance(node, ast.Call):
            return self._call(frame, node)
        if isinstance(node, ast.Lambda):
            return one_of(Local(node, frame.env), ("local", id(node)))
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
        found = all_of([self._value(frame, one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.AST)])
        return without_places(with_items(found)) if isinstance(node, _NEW) else found

    def _name(self, frame: Frame, name: str) -> Values:
        if name in frame.env:
            return frame.env[name]
        if frame.function is None:
            return {}
        cells = dict(zip(frame.function.__code__.co_freevars, frame.function.__closure__ or (), strict=False))
        if name in cells:
            try:
                return one_of(cells[name].cell_contents)
            except ValueError:  # not set yet
                return {}
        space = frame.function.__globals__
        return one_of(space.get(name, getattr(builtins, name, MISSING)))

    def _items(self, frame: Frame, owners: Values, place: Any = MISSING) -> Values:
        """What is in containers, or in one place of them. What is none of those stands for what is in it."""
        found: Values = {}
        for key, value in owners.items():
            if isinstance(value, CONTAINERS):
                found |= items_of(value, place)
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
        given = [with_items(one) if is_star else one for one, is_star in zip(given, starred, strict=True)]
        named = {one.arg or "**": self._value(frame, one.value) for one in node.keywords}
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "delattr") and len(given) > 1:
            return self._by_name(frame, node, given)
        if isinstance(node.func, ast.Name) and node.func.id == "vars" and given:
            return given[0]
        if isinstance(node.func, ast.Attribute) and is_super(node.func.value):
            return self._call_of_super(frame, node.func.attr, given, named)
        owners: Values = {}
        if isinstance(node.func, ast.Attribute):
            owners = self._value(frame, node.func.value)
            self._changed_by_call(frame, owners, node.func.attr)
            called = self._attribute(frame, owners, node.func.attr)
            plain = {key: one for key, one in without_places(owners).items() if not is_role_object(one)}
            found = with_items(plain) | (places_in(owners) if node.func.attr in _GIVING_PARTS else {})
            if is_dict_of(node.func.value) and node.func.attr == "update":
                for name, value in named.items():
                    self._set(owners, name, value)
        else:
            called, found = self._value(frame, node.func), {}
        if not any(isinstance(one, FunctionType) and is_users(str(one.__module__)) for one in called.values()):
            self._changed_by_giving(node, given, named)
        if any(starred) or "**" in named:
            given = [all_of([*given, *named.values()])] * 16
        places = {} if any(map(is_role_object, owners.values())) else places_in(owners)
        results = [self._called(frame, value, given, named, places) for value in list(called.values())]
        if not any(isinstance(value, CALLED) for value in called.values()):
            every = with_items(all_of([*given, *named.values()]))  # of a library: it may give back what it was given
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            found |= every if name in _GIVING_ITEMS else without_places(every)
            for value in list(every.values()):  # or call it
                if isinstance(value, CALLED):
                    results.append(self._called(frame, value, [every] * 8, {}))
        return all_of([found, *results])

    def _call_of_super(self, frame: Frame, name: str, given: list[Values], named: dict[str, Values]) -> Values:
        found: Values = {}
        if frame.function is None or not frame.function.__code__.co_varnames:
            return found
        for value in list(frame.env.get(frame.function.__code__.co_varnames[0], {}).values()):
            inherited = of_super(type(value), frame.function, name)
            if inherited is not None:
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
        names = {name for one in given[0].values() for name in (*attributes_of(one), *vars(type(one)))}
        names = {name for name in names if not name.startswith(("__", "_rayhelper"))}
        return without_places(all_of(self._attribute(frame, given[0], one) for one in sorted(names)))

    def _changed_by_call(self, frame: Frame, owners: Values, name: str) -> None:
        if name in TRAINING:
            self.trains.add(frame.owner)
        is_changing = name in CHANGING or name == "load_state_dict" or is_in_place(name)
        if is_changing and not any(is_role_object(one) and function_of(type(one), name) for one in owners.values()):
            self._change(owners)
        for one in list(owners.values()):
            if isinstance(one, kinds_of_generators()):
                self._change(owners)
            elif name == "step" and hasattr(one, "last_epoch"):  # a scheduler, which changes its optimizer as well
                self._change(owners)
                self._change_held(owners, getattr(one, "optimizer", None))
            elif name in FITTING and _is_librarys_trainer(one, name):
                self._change(owners)
                for held in attributes_of(one).values():
                    if hasattr(held, "state_dict"):  # its model, its optimizer, but not its rows
                        self._change_held(owners, held)

    def _changed_by_giving(self, node: ast.Call, given: list[Values], named: dict[str, Values]) -> None:
        """``next(self.rows)``, ``torch.nn.init.zeros_(self.weight)``, ``torch.rand(2, generator=self.generator)``."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if given and is_in_place(name):
            self._change(given[0])
        if given and name == "next":
            self._change(given[0], lambda held: hasattr(type(held), "__next__"))
        if name in FITTING:
            for values in (*given, *named.values()):
                self._change(values, is_module)
        for values in (*given, *named.values()):
            self._change(values, lambda held: isinstance(held, kinds_of_generators()))

    def _change_held(self, owners: Values, value: Any) -> None:
        """What the object of these places holds under whatever name is changed."""
        for key in owners:
            if isinstance(key, Place) and value is not None:
                touched = self.touched[key.instance]
                touched.changed |= {name for name, held in attributes_of(touched.instance).items() if held is value}

    def _attribute(self, frame: Frame, owners: Values, name: str) -> Values:
        found: Values = {}
        for key, one in list(owners.items()):
            if isinstance(key, Place):
                if not any(is_role_object(value) for value in owners.values()):
                    found[key] = None  # self.state.step lies in self.state
                continue
            if isinstance(one, tuple) and name in getattr(one, "_fields", ()):
                found |= one_of(getattr(one, name))
            if isinstance(one, (Local, type(None), *CONTAINERS)):
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
        held = attributes_of(one)
        if name in held:
            return one_of(held[name])
        if isinstance(one, ModuleType):
            return {}
        entry = inspect.getattr_static(one if isinstance(one, type) else type(one), name, MISSING)
        function = function_of(one if isinstance(one, type) else type(one), name)
        if isinstance(entry, (property, functools.cached_property)):
            is_followed = function is not None and _is_followed(function, one)
            owner = id(one) if is_role_object(one) else frame.owner
            return self._enter(function, one, [], {}, owner) if is_followed and function is not None else {}
        if function is not None:
            if not _is_followed(function, one):
                return {}
            if isinstance(entry, staticmethod) or isinstance(one, type):
                return one_of(inspect.unwrap(function))
            return one_of(MethodType(function, one), ("method", function, id(one)))
        if isinstance(entry, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return one_of(getattr(one, name, MISSING))
        return one_of(entry)

    def _read(self, frame: Frame, instance: Any, name: str) -> None:
        touched = self._of(instance)
        touched.read.add(name)
        touched.read_by.add((name, frame.owner))

    def _of(self, instance: Any) -> Touched:
        return self.touched.setdefault(id(instance), Touched(instance))


def _is_librarys_trainer(one: Any, name: str) -> bool:
    """Whether it is no module, which ``train()`` only puts into a mode, and the method is no code of the user's."""
    method = function_of(type(one), name)
    return method is not None and not is_module(one) and not is_role_object(one) and not _is_followed(method, one)


def _is_followed(function: Callable[..., Any], instance: Any) -> bool:
    """Whether a method is looked into: the user's, and those of roles, but nothing that they inherit of torch."""
    module = str(getattr(function, "__module__", ""))
    return is_users(module) or (is_role_object(instance) and not module.startswith("torch."))
