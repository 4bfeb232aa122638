"""What code gives to names and attributes: by assignments, loops, ``with``, and methods that fill containers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from rayhelper.check.reading.held import ANY_ITEM, ANY_KEY, Value, items_of, take
from rayhelper.check.reading.module import Function, own_nodes

GROWING = ("append", "appendleft", "add", "extend")  # methods of containers that put their argument, or its items, in
EACH = ""  # a step to each item in turn


class Given(NamedTuple):
    """What a target is given: what ``take`` leads to in the value of an expression, put in at ``put``."""

    expression: ast.expr | None  # None: no expression says
    take: tuple[str, ...] = ()
    put: tuple[str, ...] = ()


def led_to(value: Value, steps: tuple[str, ...]) -> Value:
    """What the steps of ``Given.take`` lead to."""
    for step in steps:
        value = items_of(value) if step == EACH else take(value, step)
    return value


def key_of(node: ast.expr) -> str:
    """The step that an index of a list or a key of a mapping is."""
    is_known = isinstance(node, ast.Constant) and isinstance(node.value, (int, str))
    return f"[{node.value!r}]" if is_known and isinstance(node, ast.Constant) else ANY_ITEM


def names_given(function: Function) -> dict[str, list[Given]]:
    """What a function gives to its local names, what it puts into them included; not its own parameters."""
    found: dict[str, list[Given]] = {}
    for node in own_nodes(function, closures=True):
        for target, given in givings(node):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(given)
        for name in _named_otherwise(node):
            found.setdefault(name, []).append(Given(None))
    return found


def givings(node: ast.AST) -> Iterator[tuple[ast.expr, Given]]:
    """The targets that a statement or comprehension gives a value, and those that it puts something into."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, Given(node.value))
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield from _targets(node.target, Given(node.value))
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _targets(node.target, Given(node.iter, (EACH,)))
    elif isinstance(node, ast.AugAssign):
        yield node.target, Given(node.value, (EACH,), (ANY_ITEM,))
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _targets(node.optional_vars, Given(None))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWING:
        steps = (EACH,) if node.func.attr == "extend" else ()
        yield from ((node.func.value, Given(value, steps, (ANY_ITEM,))) for value in node.args)


def _targets(target: ast.expr, given: Given) -> Iterator[tuple[ast.expr, Given]]:
    if isinstance(target, ast.Subscript):
        key = key_of(target.slice)
        yield target.value, given._replace(put=(ANY_KEY if key == ANY_ITEM else key, *given.put))
        return
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, given
        return
    values = given.expression if isinstance(given.expression, (ast.Tuple, ast.List)) and not given.take else None
    for k, entry in enumerate(target.elts):
        if isinstance(entry, ast.Starred) or given.expression is None:
            yield getattr(entry, "value", entry), Given(None)
        elif values is not None and len(values.elts) == len(target.elts):
            yield from _targets(entry, Given(values.elts[k]))
        else:
            yield from _targets(entry, given._replace(take=(*given.take, f"[{k}]")))


def _named_otherwise(node: ast.AST) -> list[str]:
    """The names that parameters of nested functions have, nested functions and classes, and what is caught."""
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
        return [node.name] if node.name else []
    return []
