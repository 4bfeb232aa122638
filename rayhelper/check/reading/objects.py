"""The objects of a program, as the source of one class shows it: the whole, its parts, and who holds them.

    class Trainer:
        def __init__(self, config):
            self.policy = Policy(config)                      Trainer.policy, held by Trainer
            self.generator = Generator(config, self.policy)   Trainer.generator, which holds Trainer.policy too

Every call of a decorated class is one object, with a lineage of its own. All code is read again until nothing new is
found: what attributes hold, and what is given to the parameters of methods. Where several things may be meant, or
something unknown, the value says so (``held.py``). Objects inside others that have no roles are not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

from rayhelper.check.givings import givings
from rayhelper.check.reading.expressions import WAYS, Expressions
from rayhelper.check.reading.held import (
    ANY_ITEM,
    ANY_KEY,
    NOTHING,
    UNKNOWN,
    Frame,
    Instance,
    Value,
    instances,
    joined,
    only,
)
from rayhelper.check.reading.names import Names, Sources
from rayhelper.check.reading.source import Lineage, Method

MOST_ROUNDS = 12
Holds = dict[Instance, dict[str, Value]]  # by attribute
Parameters = dict[Method, dict[str, Value]]  # by name


class Objects:
    """The objects that can be reached from the object of a class."""

    def __init__(self, lineage: Lineage, sources: Sources) -> None:
        self.code = Expressions(sources, self._add)
        self.instances: list[Instance] = []
        self.owner: dict[Method, Instance] = {}
        self._given: Parameters = {}
        self.root = Instance(lineage, lineage.name)
        self._add(self.root)
        for _ in range(MOST_ROUNDS):
            if not self._round():
                break

    def frames(self, method: Method) -> list[Frame]:
        """The method's own, then those of functions of its file that it hands an object to, or that give it one."""
        return self.code.frames[method]

    def frames_of(self, method: Method, node: ast.AST) -> list[Frame]:
        """Those of ``frames`` that hold a node: several, if the method calls a function several times."""
        around = set(method.module.up(node))
        frames = self.frames(method)
        return [frame for frame in frames if frame.function in around] or frames[:1]

    def value(self, method: Method, node: ast.AST) -> Value:
        """The objects that an expression of a method is or holds."""
        return joined(*(self.code.value(frame, node) for frame in self.frames_of(method, node)))

    def name(self, parts: Collection[Instance]) -> None:
        """Names every part as its whole does: ``Trainer.policy``, ``Trainer.scorers[1]``."""
        for instance in self.instances:
            whole = instance.builder
            if whole is None or instance not in parts:
                continue
            paths = [
                f"{name}{''.join(held.path)}"
                for name, value in whole.holds.items()
                for held in value
                if held.instance is instance
            ]
            own = paths[0] if paths else instance.lineage.name
            instance.name = f"{whole.name}.{own.replace(ANY_ITEM, '[...]').replace(ANY_KEY, '[...]')}"

    def _add(self, instance: Instance) -> None:
        self.instances.append(instance)
        self.owner.update(dict.fromkeys(instance.lineage.methods, instance))
        self._add_frames(instance)

    def _add_frames(self, instance: Instance) -> None:
        for method in instance.lineage.methods:
            self.code.frames[method] = [self._frame(instance, method, self._given.get(method, {}))]

    def _frame(self, instance: Instance, method: Method, given: Mapping[str, Value]) -> Frame:
        values = {argument.arg: given.get(argument.arg, UNKNOWN) for argument in method.parameters}
        if method.self_name is not None:
            values[method.self_name] = UNKNOWN if method.kind == "class" else only(instance)
        return Frame(instance, method, method.node, Names.of(method), values)

    def _round(self) -> bool:
        """Reads all code once; whether anything new was found."""
        before = len(self.instances), [instance.holds for instance in self.instances], self._given
        self.code.begin_round()
        for instance in self.instances:
            self._add_frames(instance)
        methods = [method for instance in self.instances for method in instance.lineage.methods]
        holds: Holds = {instance: {} for instance in self.instances}
        given: Parameters = {}
        self._take_annotated(given)
        for method in methods:
            for frame in self.frames(method):  # which grow in number
                self._read(frame, holds, given)
        self._given = given
        for instance, held in holds.items():
            instance.holds = held
        return before != (len(self.instances), [instance.holds for instance in self.instances], given)

    def _take_annotated(self, given: Parameters) -> None:
        """What the parameters of the outermost constructor hold, by their annotations: objects from outside."""
        for method in self.root.constructors:
            frame = self.frames(method)[0]
            for argument in method.parameters:
                instance = self.code.annotated(frame, argument)
                if instance is not None:
                    given.setdefault(method, {})[argument.arg] = only(instance)

    def _read(self, frame: Frame, holds: Holds, given: Parameters) -> None:
        """Adds what a function's code puts into attributes and hands to methods."""
        value = self.code.value
        for node in frame.nodes:
            for target, giving in givings(node):
                if isinstance(target, ast.Attribute):
                    _put(holds, value(frame, target.value), target.attr, self.code.given(frame, giving))
            if isinstance(node, ast.Call):
                value(frame, node)
                if len(node.args) == 3 and ast.unparse(node.func) == "setattr":
                    owner, name, held = node.args
                    if isinstance(name, ast.Constant):
                        _put(holds, value(frame, owner), str(name.value), value(frame, held))
                self._read_call(frame, node, holds, given)
            elif isinstance(node, ast.Attribute) and not _is_called(frame, node):
                for instance in instances(value(frame, node.value)):
                    method = instance.lineage.find(node.attr)
                    if method is not None and method.kind != "property":  # handed on: nobody knows what it is given
                        _merge(given, method, dict.fromkeys((arg.arg for arg in method.parameters), UNKNOWN))

    def _read_call(self, frame: Frame, call: ast.Call, holds: Holds, given: Parameters) -> None:
        for method in self.code.methods_called(frame, call):
            skipped = 0 if method.kind == "static" else 1
            _merge(given, method, self.code.arguments(frame, call, method.node, skipped=skipped))
        built = self.code.built(frame, call)
        init = None if built is None else built.lineage.find("__init__")
        if init is not None:
            _merge(given, init, self.code.arguments(frame, call, init.node, skipped=1))
        elif built is not None:
            words = [*zip(_fields(built.lineage), call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
            for name, held in words:
                if name is not None:
                    _put(holds, only(built), name, self.code.value(frame, held))


def _put(holds: Holds, owners: Value, name: str, value: Value) -> None:
    for instance in instances(owners):
        known = holds.setdefault(instance, {})
        known[name] = joined(known.get(name, NOTHING), value)


def _merge(given: Parameters, method: Method, values: Mapping[str, Value]) -> None:
    """Adds what one more call gives; where two calls give different objects, it is not known which."""
    known = given.setdefault(method, {})
    for name, value in values.items():
        before = known.get(name, value)
        found = joined(before, value)
        paths = [held.path for held in found if held.instance is not None]
        is_either = set(before) != set(value) and len(set(paths)) < len(paths)
        known[name] = joined(found, UNKNOWN) if is_either else found


def _is_called(frame: Frame, node: ast.Attribute) -> bool:
    """Whether ``x.step`` stands in ``x.step(...)`` or ``x.step.defer(...)``."""
    parents = frame.names.module.parents
    outer: ast.AST = node
    above = parents[outer]
    if isinstance(above, ast.Attribute) and above.attr in WAYS:
        outer = above
    parent = parents[outer]
    return isinstance(parent, ast.Call) and parent.func is outer


def _fields(lineage: Lineage) -> list[str]:
    """The fields of a dataclass, in the order of its constructor's parameters."""
    return [
        name
        for source in reversed(lineage.classes)
        if any("dataclass" in ast.unparse(entry) for entry in source.node.decorator_list)
        for name in source.attributes
    ]
