"""Which objects an expression is or holds: through names, attributes, containers, and functions that return them.

A call of a decorated class is an object of its own, one for each way that leads to the call. Values of what is not
read here (functions of other files that build nothing, objects without roles) are not known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from rayhelper.check.givings import Given, key_of, led_to, names_given
from rayhelper.check.reading.held import (
    ANY_ITEM,
    ANY_KEY,
    NOTHING,
    UNKNOWN,
    Frame,
    Instance,
    Value,
    held_in,
    instances,
    items_of,
    joined,
    only,
    put,
    take,
    values_of,
)
from rayhelper.check.reading.module import Function, is_helper_call, own_nodes
from rayhelper.check.reading.names import Sources
from rayhelper.check.reading.source import Lineage, Method
from rayhelper.device_groups import DRIVER

WAYS = ("defer", "stream")  # of calling a decorated method
PLAIN = (ast.Constant, ast.JoinedStr, ast.Compare, ast.UnaryOp, ast.Lambda)  # no object, and none inside
MOST_CALLS, MOST_BUILDERS = 3, 8  # from function to function; from a whole to parts of parts


class Expressions:
    """The values of expressions, as far as they are known in one round of ``Objects``."""

    def __init__(self, sources: Sources, add: Callable[[Instance], None]) -> None:
        self.sources = sources
        self.add = add  # called with every object that is new
        self.frames: dict[Method, list[Frame]] = {}  # the method's own first, then of functions that see an object
        self._built: dict[tuple[object, ...], Instance | None] = {}
        self._local: dict[Function, dict[str, list[Given]]] = {}
        self._values: dict[tuple[Frame, ast.AST], Value] = {}
        self._inner: dict[tuple[Frame, ast.Call], Frame] = {}

    def begin_round(self) -> None:
        """Forgets values, which follow from what attributes and parameters hold."""
        self.frames, self._values, self._inner = {}, {}, {}

    def value(self, frame: Frame, node: ast.AST | None) -> Value:
        """The objects that an expression is or holds."""
        if node is None:
            return UNKNOWN
        key = (frame, node)
        if key not in self._values:
            self._values[key] = NOTHING  # while it is found out, for what refers to itself
            self._values[key] = self._found(frame, node)
        return self._values[key]

    def given(self, frame: Frame, given: Given) -> Value:
        """The objects that a target is given."""
        value = led_to(self.value(frame, given.expression), given.take)
        for step in reversed(given.put):
            value = put(step, value)
        return value

    def arguments(self, frame: Frame, call: ast.Call, function: Function, *, skipped: int = 0) -> dict[str, Value]:
        """What a call gives to the parameters of a function, the first ``skipped`` of which it does not name."""
        args = function.args
        positional = [arg.arg for arg in (*args.posonlyargs, *args.args)][skipped:]
        defaults: dict[str, ast.expr | None] = dict.fromkeys([*positional, *(arg.arg for arg in args.kwonlyargs)])
        defaults.update(zip(reversed(positional), reversed(args.defaults), strict=False))
        defaults.update({arg.arg: value for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)})
        hides = any(isinstance(value, ast.Starred) for value in call.args) or any(
            not word.arg for word in call.keywords
        )
        found = {
            name: NOTHING if isinstance(default, PLAIN) and not hides else UNKNOWN for name, default in defaults.items()
        }
        for name, value in zip(positional, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            found[name] = self.value(frame, value)
        found.update({word.arg: self.value(frame, word.value) for word in call.keywords if word.arg in found})
        return found

    def methods_called(self, frame: Frame, call: ast.Call) -> list[Method]:
        """The methods of objects that a call may be of: ``x.step(...)``, ``x.step.defer(...)``, ``x(...)``."""
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr in WAYS and isinstance(func.value, ast.Attribute):
            func = func.value
        found = [instance.lineage.find("__call__") for instance in instances(self.value(frame, func))]
        if isinstance(func, ast.Attribute):
            found += [owner.lineage.find(func.attr) for owner in instances(self.value(frame, func.value))]
            if isinstance(func.value, ast.Call) and ast.unparse(func.value.func) == "super":
                found.append(frame.instance.lineage.find(func.attr, after=frame.method.owner))
        return [method for method in found if method is not None]

    def built(self, frame: Frame, call: ast.Call) -> Instance | None:
        """The object that a call of a decorated class builds."""
        key = (frame.method, *frame.calls, call)
        if key in self._built:
            return self._built[key]
        builders = [builder.call for builder in _builders(frame.instance)]
        if call in builders or len(builders) > MOST_BUILDERS:
            return None  # a class that builds itself
        lineage = self._lineage(frame, call.func)
        self._built[key] = None if lineage is None else Instance(lineage, lineage.name, frame, call)
        if self._built[key] is not None:
            self.add(self._built[key])  # type: ignore[arg-type]
        return self._built[key]

    def annotated(self, frame: Frame, argument: ast.arg) -> Instance | None:
        """The object, built outside of what is read, that a parameter's annotation speaks of."""
        key = (frame.method, argument)
        if key not in self._built:
            lineages = [self._lineage(frame, node) for node in _alternatives(argument.annotation)]
            found = [Instance(lineage, lineage.name) for lineage in lineages if lineage is not None]
            self._built[key] = found[0] if len(found) == 1 else None
            if len(found) == 1:
                self.add(found[0])
        return self._built[key]

    def _found(self, frame: Frame, node: ast.AST) -> Value:
        if isinstance(node, ast.Name):
            return self._named(frame, node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self.value(frame, node.value), node.attr)
        if isinstance(node, ast.Subscript):
            container = self.value(frame, node.value)
            is_slice = isinstance(node.slice, ast.Slice)
            return put(ANY_ITEM, items_of(container)) if is_slice else take(container, key_of(node.slice))
        if isinstance(node, ast.Call):
            return self._called(frame, node)
        if isinstance(node, ast.IfExp):
            return joined(self.value(frame, node.body), self.value(frame, node.orelse))
        if isinstance(node, ast.BoolOp):
            return joined(*(self.value(frame, value) for value in node.values))
        if isinstance(node, ast.NamedExpr):
            return self.value(frame, node.value)
        return self._display(frame, node)

    def _display(self, frame: Frame, node: ast.AST) -> Value:
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return joined(*(self._entry(frame, k, entry) for k, entry in enumerate(node.elts)))
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return joined(*(put(_key(key), self.value(frame, value)) for key, value in pairs if key is not None))
        if isinstance(node, ast.DictComp):
            return put(ANY_KEY, self.value(frame, node.value))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return put(ANY_ITEM, self.value(frame, node.elt))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [items_of(self.value(frame, side)) for side in (node.left, node.right)]
            return put(ANY_ITEM, joined(*sides))
        return NOTHING if isinstance(node, PLAIN) else UNKNOWN

    def _entry(self, frame: Frame, k: int, node: ast.expr) -> Value:
        if isinstance(node, ast.Starred):
            return put(ANY_ITEM, items_of(self.value(frame, node.value)))
        return put(f"[{k}]", self.value(frame, node))

    def _named(self, frame: Frame, name: str) -> Value:
        values = [self.given(frame, given) for given in self._local_names(frame).get(name, [])]
        if name in frame.given:
            values.append(frame.given[name])
        return joined(*values) if values else UNKNOWN

    def _local_names(self, frame: Frame) -> dict[str, list[Given]]:
        if frame.function not in self._local:
            self._local[frame.function] = names_given(frame.function)
        return self._local[frame.function]

    def _attribute(self, owners: Value, name: str) -> Value:
        found = NOTHING if owners and all(held.instance is not None for held in owners) else UNKNOWN
        for instance in instances(owners):
            method = instance.lineage.find(name)
            if method is None:
                found = joined(found, instance.holds.get(name, UNKNOWN))
            else:
                is_read = method.kind == "property"
                found = joined(found, self._returned(self.frames[method][0]) if is_read else UNKNOWN)
        return found

    def _called(self, frame: Frame, call: ast.Call) -> Value:
        instance = self.built(frame, call)
        if instance is not None:
            return only(instance)
        func = call.func
        if isinstance(func, ast.Name) and (func.id in BUILTINS or func.id in ("getattr", "zip")):
            return self._called_builtin(frame, func.id, call)
        if is_helper_call(frame.names.module, call, "whole") and call.args:
            return self.value(frame, call.args[0])
        if isinstance(func, ast.Attribute) and func.attr in ("values", "items") and not call.args:
            values = values_of(self.value(frame, func.value))
            return put(ANY_ITEM, values if func.attr == "values" else put("[1]", values))
        return self._returned_by(frame, call)

    def _called_builtin(self, frame: Frame, name: str, call: ast.Call) -> Value:
        values = [self.value(frame, value) for value in call.args]
        if name == "getattr":
            is_known = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
            return joined(self._attribute(values[0], _text(call.args[1])), *values[2:]) if is_known else UNKNOWN
        if name == "zip":
            return joined(*(put(ANY_ITEM, put(f"[{k}]", items_of(value))) for k, value in enumerate(values)))
        if call.keywords and name == "dict":
            return UNKNOWN
        return BUILTINS[name](values[0]) if values else NOTHING

    def _returned_by(self, frame: Frame, call: ast.Call) -> Value:
        """What a method gives back, or a function whose source is read too."""
        methods = self.methods_called(frame, call)
        if methods:
            return joined(*(self._returned(self.frames[method][0]) for method in methods))
        inner = self._frame_within(frame, call)
        if inner is None:
            return UNKNOWN
        value = self._returned(inner)
        sees = any(held_in(given) for given in inner.given.values()) or held_in(value)
        walked = self.frames[frame.method]
        if sees and inner not in walked and inner.names.module is frame.method.module:
            walked.append(inner)
        return value

    def _frame_within(self, frame: Frame, call: ast.Call) -> Frame | None:
        """That of the function which a call is of."""
        key = (frame, call)
        if key in self._inner:
            return self._inner[key]
        if len(frame.calls) >= MOST_CALLS or self._is_local(frame, call.func):
            return None
        found = self.sources.function(frame.names, call.func)
        if found is None or found[0] is frame.function:
            return None
        given = self.arguments(frame, call, found[0])
        self._inner[key] = Frame(frame.instance, frame.method, *found, given, (*frame.calls, call))
        return self._inner[key]

    def _returned(self, frame: Frame) -> Value:
        """What a function returns; what a decorated method returns goes through ``collect``, except that of one."""
        settings = frame.method.settings if frame.function is frame.method.node else None
        is_collected = settings is not None and settings.execute != "first" and settings.role != DRIVER
        nodes = list(own_nodes(frame.function))
        if is_collected or any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
            return UNKNOWN
        return joined(*(self.value(frame, node.value) for node in nodes if isinstance(node, ast.Return) and node.value))

    def _lineage(self, frame: Frame, node: ast.expr) -> Lineage | None:
        """That of the decorated class that an expression names, or of ``Policy`` for its class method ``Policy.of``."""
        if self._is_local(frame, node):
            return None
        found = self.sources.lineage(frame.names, node)
        if found is None and isinstance(node, ast.Attribute):
            owner = self.sources.lineage(frame.names, node.value)
            method = None if owner is None else owner.find(node.attr)
            return owner if method is not None and method.kind == "class" and _calls_its_class(method) else None
        return found

    def _is_local(self, frame: Frame, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and (node.id in frame.given or node.id in self._local_names(frame))


def _each(value: Value) -> Value:
    return put(ANY_ITEM, items_of(value))


BUILTINS: dict[str, Callable[[Value], Value]] = {
    **dict.fromkeys(("list", "tuple", "dict"), lambda value: value),
    **dict.fromkeys(("sorted", "reversed", "iter", "set"), _each),
    "enumerate": lambda value: put(ANY_ITEM, put("[1]", items_of(value))),
}


def _builders(instance: Instance | None) -> Iterator[Instance]:
    while instance is not None:
        yield instance
        instance = instance.builder


def _key(node: ast.expr) -> str:
    return f"[{node.value!r}]" if isinstance(node, ast.Constant) and isinstance(node.value, str) else ANY_KEY


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _alternatives(annotation: ast.expr | None) -> list[ast.expr]:
    """``Policy`` of ``Policy | None``, ``Optional[Policy]`` or ``"Policy"``."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return _alternatives(ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return []
    if isinstance(annotation, ast.BinOp):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Optional"):
        return _alternatives(annotation.slice)
    return [annotation] if isinstance(annotation, (ast.Name, ast.Attribute)) else []


def _calls_its_class(method: Method) -> bool:
    calls = (node for node in own_nodes(method.node) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id == method.self_name for call in calls)
