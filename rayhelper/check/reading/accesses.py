"""What a method does with its object: which attributes it reads, writes and calls, under every name of the object.

    self.x    me = self; me.x    getattr(self, "x")    helper(self), a function of the same module that takes it

What lies in a container, or is handed on further, and what other objects hold, is seen by ``reaches.py``. Not seen:
helpers in other modules, and reads under a name that is no constant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rayhelper.check.reading.module import Access, Function, ModuleSource, access_of, bindings, own_nodes

SETTERS = ("setattr", "delattr", "object.__setattr__", "object.__delattr__")
GETTERS = ("getattr", "hasattr")
Path = tuple[str, ...]


@dataclass(frozen=True)
class Touched:
    """What a method does with its object."""

    accesses: list[Access] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)  # where it sets names that are not in the source; (): on itself
    super_calls: list[tuple[str, ast.Call]] = field(default_factory=list)
    names: dict[Function, frozenset[str]] = field(default_factory=dict)  # of the object, in the method and helpers


def touched(node: Function, self_name: str | None, module: ModuleSource) -> Touched:
    """Everything that a method does with its object, its nested functions and the helpers it hands it to included."""
    found = Touched(names=_names(node, self_name, module))
    for function, names in found.names.items():
        local = bindings(function)
        for inner in own_nodes(function, closures=True, shadow=self_name if function is node else None):
            if isinstance(inner, ast.Attribute) and is_name(inner.value, names):
                access = access_of(inner, inner.attr, module)
                found.accesses.append(access)
                dicts = [part.removeprefix(".") for part in access.path]
                if "__dict__" in dicts:
                    found.unknown.append(access.path[: dicts.index("__dict__")])
            elif isinstance(inner, ast.Call):
                _add_call(found, inner, names, local, module)
    return found


def is_name(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether a node is one of the names."""
    return isinstance(node, ast.Name) and node.id in names


def _names(node: Function, self_name: str | None, module: ModuleSource) -> dict[Function, frozenset[str]]:
    """The object's names in the method, and in the functions of its module that the method hands it to."""
    if self_name is None:
        return {node: frozenset()}
    local = bindings(node)
    found = {node: _aliases(self_name, local)}
    for call in own_nodes(node, closures=True, shadow=self_name):
        called = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if not isinstance(call, ast.Call) or called not in module.functions or called in local:
            continue
        helper = module.functions[called]
        inside = bindings(helper)
        for name in _given(call, helper, found[node]):
            if len(inside[name]) == 1:  # it stays what it was given
                found[helper] = found.get(helper, frozenset()) | _aliases(name, inside)
    return found


def _aliases(name: str, local: Mapping[str, list[ast.expr | None]]) -> frozenset[str]:
    """A name and those that are given its value and nothing else."""
    found = frozenset([name])
    while True:
        more = {
            alias
            for alias, values in local.items()
            if all(value is not None and is_name(value, found) for value in values)
        }
        if more <= found:
            return found
        found |= more


def _given(call: ast.Call, helper: Function, names: frozenset[str]) -> Iterator[str]:
    """The parameters of a helper that a call gives the object to."""
    positional = [arg.arg for arg in (*helper.args.posonlyargs, *helper.args.args)]
    for value, name in zip(call.args, positional, strict=False):
        if isinstance(value, ast.Starred):
            break
        if is_name(value, names):
            yield name
    keywords = {*positional, *(arg.arg for arg in helper.args.kwonlyargs)}
    for word in call.keywords:
        if word.arg in keywords and is_name(word.value, names):
            yield word.arg


def _add_call(
    found: Touched,
    call: ast.Call,
    names: frozenset[str],
    local: Mapping[str, list[ast.expr | None]],
    module: ModuleSource,
) -> None:
    """Adds what a call of setattr, getattr, hasattr, vars or super() does."""
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        if module.dotted(call.func.value.func) == "super":
            found.super_calls.append((call.func.attr, call))
        return
    called = module.dotted(call.func)
    if called not in (*SETTERS, *GETTERS, "vars") or not call.args:
        return
    path = _path(call.args[0], names, local, module)
    name = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else None
    if path is not None and called in SETTERS and isinstance(name, str):
        found.accesses.append(Access((*path, f".{name}" if path else name), call, is_write=True, by=call))
    elif path is not None and called not in GETTERS:
        found.unknown.append(path)
    elif path == () and isinstance(name, str):
        found.accesses.append(replace(access_of(call, name, module), by=call))


def _path(
    node: ast.expr, names: frozenset[str], local: Mapping[str, list[ast.expr | None]], module: ModuleSource
) -> Path | None:
    """``("config",)`` for ``self.config`` or a variable that holds it, () for the object; None for all else."""
    if is_name(node, names):
        return ()
    values = local.get(node.id, []) if isinstance(node, ast.Name) else [node]
    root = values[0] if len(values) == 1 else None
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        if isinstance(root, ast.Attribute) and is_name(root.value, names):
            access = access_of(root, root.attr, module)
            return access.path if access.call is None else None
        root = root.value
    return None
