"""Code that knows that an attribute may be None or missing: it asks, or hands the value to what asks."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable
from typing import Any

from rayhelper.check.flow import Flow
from rayhelper.check.givings import givings
from rayhelper.check.reaches import Reach
from rayhelper.check.reading.held import Instance
from rayhelper.check.reading.module import Function, ModuleSource, own_nodes
from rayhelper.check.reading.names import Names
from rayhelper.check.reading.source import Method


def asks_who_it_is(method: Method, node: ast.AST) -> bool:
    """Whether code stands under a condition on ``RayHelper.current()`` or on a rank."""
    return any(names_worker(condition) for condition in deciding(method.module, node))


def asks_it(flow: Flow, method: Method, node: ast.AST, instance: Instance) -> bool:
    """Whether code stands under a condition on what an object, which is not the method's own, holds."""
    inside = {inner for condition in deciding(method.module, node) for inner in ast.walk(condition)}
    asked = (reach.instance for reach in flow.reaches[method] if reach.access.node in inside)
    return instance is not flow.instance(method) and instance in asked


def deciding(module: ModuleSource, node: ast.AST) -> list[ast.expr]:
    """What decides, within its function, whether a node is run and how often: conditions, loops, and early returns."""
    tests: list[ast.expr] = []
    inner = node
    for outer in module.up(node):
        tests += _deciding(outer, inner)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        inner = outer
    return tests


def _deciding(outer: ast.AST, inner: ast.AST) -> list[ast.expr]:
    """What of ``outer`` decides about ``inner``, which is directly within it."""
    tests: list[ast.expr] = []
    if isinstance(outer, (ast.If, ast.IfExp, ast.While)) and inner is not outer.test:
        tests.append(outer.test)
    elif isinstance(outer, (ast.For, ast.AsyncFor, ast.comprehension)) and inner is not outer.iter:
        tests.append(outer.iter)
    elif isinstance(outer, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        tests += [test for generator in outer.generators for test in (generator.iter, *generator.ifs)]
    elif isinstance(outer, ast.BoolOp):
        tests += outer.values[: next((k for k, value in enumerate(outer.values) if value is inner), 0)]
    elif isinstance(outer, ast.Match):
        tests.append(outer.subject)
    for name in ("body", "orelse"):
        block = getattr(outer, name, None)
        if isinstance(block, list) and inner in block:
            before = block[: block.index(inner)]
            tests += [line.test for line in before if isinstance(line, ast.If) and _leaves(line)]
    return tests


def _leaves(statement: ast.If) -> bool:
    """Whether the code after a condition is not run where it holds, or where it does not."""
    ends = (ast.Return, ast.Continue, ast.Break)
    return any(isinstance(line, ends) for line in (*statement.body[-1:], *statement.orelse[-1:]))


def names_worker(node: ast.AST) -> bool:
    """Whether code speaks of ``RayHelper.current()`` or of a rank."""
    text = ast.unparse(node)
    return "current()" in text or "rank" in text.lower()


def is_tested(flow: Flow, method: Method, reach: Reach, tests: set[str]) -> bool:
    """Whether the method asks if an attribute is None, under its own name or that of the variable it is put into."""
    node = reach.access.node
    statement = next((outer for outer in method.module.up(node) if isinstance(outer, ast.stmt)), node)
    given = [(target, given) for target, given in givings(statement) if given.expression is node and not given.take]
    names = {target.id for target, _ in given if isinstance(target, ast.Name)}
    return f"{flow.prefix(reach.instance)}{reach.access.path[0]}" in tests or bool(names & tests)


def none_tests(flow: Flow, method: Method) -> set[str]:
    """What a method compares with None or takes as a condition, and ``hasattr x`` for the attributes it asks about.

    Attributes have the prefix of their object. Not in ``assert``, which says that the value is there.
    """
    found: set[str] = set()
    for node in (node for function in method.functions for node in own_nodes(function, closures=True)):
        conditions = _conditions(node)
        is_hasattr = isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"
        if not (conditions or is_hasattr) or any(isinstance(outer, ast.Assert) for outer in method.module.up(node)):
            continue
        for expression in conditions:
            found.update(f"hasattr {name}" for name in _defaulted(flow, method, expression))
            if isinstance(expression, ast.NamedExpr):
                found.add(expression.target.id)
                expression = expression.value
            found.add(ast.unparse(expression))
            if isinstance(expression, ast.Attribute):
                owners = flow.instances_at(method, expression.value)
                found.update(f"{flow.prefix(owner)}{expression.attr}" for owner in owners)
        if is_hasattr and isinstance(node, ast.Call):
            found.update(f"hasattr {name.value!s}" for name in node.args[1:] if isinstance(name, ast.Constant))
    return found


def is_handed_on(flow: Flow, method: Method, reach: Reach) -> bool:
    """Whether an attribute that may be None is given to code that may ask which it is, as far as its types say."""
    node, parents = reach.access.node, method.module.parents
    word = parents[node]
    call = parents[word] if isinstance(word, ast.keyword) else word
    if not isinstance(call, ast.Call) or call.func is node or hasattr(builtins, ast.unparse(call.func)):
        return False
    key: int | str | None = word.arg if isinstance(word, ast.keyword) else call.args.index(node)
    methods = flow.methods_called(method, call)
    if methods:
        return all(_takes_none(found.node, key, skipped=0 if found.kind == "static" else 1) for found in methods)
    if isinstance(call.func, ast.Name) and call.func.id in method.module.functions:
        return _takes_none(method.module.functions[call.func.id], key)
    found = Names.of(method).value(call.func)
    return not callable(found) or _may_be_none(found, key)


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _takes_none(function: Function, key: int | str | None, *, skipped: int = 0) -> bool:
    """Whether a parameter may be None, by its type."""
    args = function.args
    positional = [*args.posonlyargs, *args.args][skipped:]
    if isinstance(key, int):
        found = positional[key] if key < len(positional) else None
    else:
        found = next((arg for arg in (*positional, *args.kwonlyargs) if arg.arg == key), None)
    return found is None or found.annotation is None or _allows_none(ast.unparse(found.annotation))


def _may_be_none(function: Callable[..., Any], key: int | str | None) -> bool:
    """As ``_takes_none``, of a function or class that is imported."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    found = parameters.get(key) if isinstance(key, str) else None
    if isinstance(key, int):
        positional = [
            one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        found = positional[key] if key < len(positional) else None
    return found is None or found.annotation is inspect.Parameter.empty or _allows_none(str(found.annotation))


def _allows_none(annotation: str) -> bool:
    return any(word in annotation for word in ("None", "Optional", "Any", "object"))


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Compare) and any(is_none(side) for side in (node.left, *node.comparators)):
        return [node.left, *node.comparators]
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _defaulted(flow: Flow, method: Method, condition: ast.expr) -> list[str]:
    """The attributes that a condition asks for by ``getattr`` with a default."""
    inside = set(ast.walk(condition))
    accesses = [reach.access for reach in flow.reaches[method]]
    return [access.path[0] for access in accesses if access.has_default and access.by in inside]
