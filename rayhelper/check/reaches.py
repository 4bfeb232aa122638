"""What a method does with each object that it can get at: its own, and those that this one or a parameter holds.

    self.policy.step(x)      reads attribute policy of its own object, calls step of the part
    policy.backend           reads attribute backend, if ``policy`` holds a part

What it does with its own object is ``reading/accesses.py``; here such a path ends at the first object that it leads to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rayhelper.check.reading.accesses import GETTERS, SETTERS, is_name
from rayhelper.check.reading.held import Frame, Instance, Value, instances, is_sure
from rayhelper.check.reading.module import Access, access_of
from rayhelper.check.reading.objects import Objects
from rayhelper.check.reading.source import Method


@dataclass(frozen=True)
class Reach:
    """An access to an attribute or method of an object."""

    instance: Instance
    access: Access
    is_sure: bool = True  # not where another object, or none, may be meant


def reaches(objects: Objects, method: Method) -> Iterator[Reach]:
    """Everything that a method, and the functions of its file that see its objects, do with objects."""
    own = objects.owner[method]
    for access in method.accesses:
        ended = _ended(objects, method, access)
        if ended is not None:
            yield Reach(own, ended)
    for frame in objects.frames(method):
        names = method.touched.names.setdefault(frame.function, frozenset())
        for node in frame.nodes:
            yield from _of_node(objects, frame, names, node)


def writes_by_name(objects: Objects, method: Method) -> Iterator[tuple[Instance, tuple[str, ...]]]:
    """The objects, and the paths of their attributes, where a method sets names that are not in its source."""
    own = objects.owner[method]
    for path in method.touched.unknown:
        held = instances(own.holds.get(path[0], ())) if len(path) == 1 else []
        yield from ((part, ()) for part in held)
        if not held:
            yield own, path
    for frame in objects.frames(method):
        for node in frame.nodes:
            if isinstance(node, ast.Call) and node.args and _called(node) in (*SETTERS, "vars"):
                is_known = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
                if not is_known or _called(node) == "vars":
                    yield from ((instance, ()) for instance in instances(objects.code.value(frame, node.args[0])))


def _of_node(objects: Objects, frame: Frame, names: frozenset[str], node: ast.AST) -> Iterator[Reach]:
    """What one node does with objects, except with the method's own under its known names."""
    if isinstance(node, ast.Attribute) and not is_name(node.value, names):
        owners = objects.code.value(frame, node.value)
        yield from _reaches(objects, frame, owners, access_of(node, node.attr, frame.method.module))
    elif isinstance(node, ast.Call):
        called = objects.code.value(frame, node.func)
        yield from _each(called, Access(("__call__",), node.func, is_write=False, call=node))
        if _called(node) not in (*GETTERS, *SETTERS) or len(node.args) < 2 or is_name(node.args[0], names):
            return
        owners, name = objects.code.value(frame, node.args[0]), node.args[1]
        if not isinstance(name, ast.Constant):
            return
        if _called(node) in SETTERS:
            yield from _each(owners, Access((str(name.value),), node, is_write=True, by=node))
        else:
            access = replace(access_of(node, str(name.value), frame.method.module), by=node)
            yield from _reaches(objects, frame, owners, access)


def _reaches(objects: Objects, frame: Frame, owners: Value, access: Access) -> Iterator[Reach]:
    yield from _each(owners, _cut(objects, frame, access))


def _each(owners: Value, access: Access) -> Iterator[Reach]:
    for instance in instances(owners):
        yield Reach(instance, access, is_sure(owners))


def _ended(objects: Objects, method: Method, access: Access) -> Access | None:
    """The access up to the first object that it leads to; None if it sets an attribute of that object by name."""
    if access.by is not None and access.is_write:
        target = access.by.args[0]
        return None if len(access.path) > 1 and instances(objects.value(method, target)) else access
    return _cut(objects, objects.frames_of(method, access.node)[0], access)


def _cut(objects: Objects, frame: Frame, access: Access) -> Access:
    """The access up to the first object that it leads to, which is then read and nothing else."""
    steps = _steps(access)
    for length, node in enumerate(steps, 1):
        if length == len(access.path) and not access.called and access.call is None:
            break  # the whole of it
        if instances(objects.code.value(frame, node)):
            return replace(access, path=access.path[:length], node=node, is_write=False, call=None, called="")
    return access


def _steps(access: Access) -> list[ast.expr]:
    """The expressions of ``self.a``, ``self.a.b`` ... up to the access's whole path."""
    node: ast.expr = access.node
    if access.called and isinstance(node, ast.Attribute):
        node = node.value
    found = [node]
    while len(found) < len(access.path) and isinstance(found[-1], (ast.Attribute, ast.Subscript)):
        found.append(found[-1].value)
    return found[::-1]


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)
