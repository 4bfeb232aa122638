"""What the source of a function says by itself: its statements, decorators, names. Pure."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from rayhelper.roles.names import MISSING


def body_of(tree: ast.AST, function: FunctionType) -> list[Any]:
    """The statements of a function, or of a lambda by its one expression; none: it is not found in its source."""
    found = next(iter(getattr(tree, "body", ())), None)
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return found.body
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return [ast.Return(lambdas[0].body)] if len(lambdas) == 1 and function.__name__ == "<lambda>" else []


def is_without_grad(tree: ast.AST) -> bool:
    """Whether a function is decorated so that it computes no gradients."""
    found = next(iter(getattr(tree, "body", ())), None)
    return any(map(names_no_grad, getattr(found, "decorator_list", ())))


def names_no_grad(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return "no_grad" in text or "inference_mode" in text


def names_in(code: types.CodeType) -> list[str]:
    """The names that code uses, those of functions in it too, and texts that may be names."""
    found = [*code.co_names, *code.co_freevars]
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found += names_in(one)
        elif isinstance(one, str) and one.isidentifier():
            found.append(one)
    return found


def as_loaded(target: Any) -> Any:
    kind: Any = type(target)
    fields = {name: getattr(target, name) for name in target._fields if name != "ctx"}
    return kind(**fields, ctx=ast.Load())


def name_in_dict(node: ast.Subscript) -> str | None:
    """The attribute of ``vars(self)["name"]`` and ``self.__dict__["name"]``."""
    is_name = is_dict_of(node.value) and isinstance(node.slice, ast.Constant)
    return node.slice.value if is_name else None  # type: ignore[attr-defined]


def is_dict_of(node: ast.AST) -> bool:
    """Whether an expression is the dict of an object's attributes."""
    where = ast.unparse(node)
    return where.startswith("vars(") or where.endswith(".__dict__")


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def imported_by(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Any]]:
    """By name, what a statement imports, as far as it is loaded."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or name, sys.modules.get(name, MISSING)
        elif node.level == 0 and node.module in sys.modules:
            yield alias.asname or alias.name, vars(sys.modules[node.module]).get(alias.name, MISSING)


def is_in_place(name: str) -> bool:
    """Whether a name is, by torch's custom, of what changes a tensor."""
    return name.endswith("_") and name.strip("_") != "" and not name.startswith("_") and name != "requires_grad_"
