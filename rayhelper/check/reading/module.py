"""A source file as the checker reads it: its syntax tree, what its names stand for, and ways through the tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Finding:
    """One mistake: where it stands, the rule's name, and what is wrong, what will happen, what to do."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Access:
    """``self.a.b["c"]`` as the path ``("a", ".b", "['c']")``; an index that is no literal is ``"[*]"``."""

    path: tuple[str, ...]
    node: ast.expr
    is_write: bool
    call: ast.Call | None = None  # the call of the path, or of ``called`` of it
    called: str = ""  # 'append' in self.a.append(...); '' in self.a(...)
    by: ast.Call | None = None  # setattr, getattr or hasattr, where the name is an argument of it

    @property
    def has_default(self) -> bool:
        """Whether it is ``getattr`` with a value for an attribute that is missing."""
        return self.by is not None and ast.unparse(self.by.func) == "getattr" and len(self.by.args) > 2

    @property
    def is_question(self) -> bool:
        """Whether it is ``hasattr``, which does not give the value."""
        return self.by is not None and ast.unparse(self.by.func) == "hasattr"


@dataclass(eq=False)
class ModuleSource:
    """A source file with its syntax tree."""

    path: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  # name in this module -> dotted name of what it is
    functions: dict[str, Function] = field(default_factory=dict)  # of module level
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)  # of module level
    variables: dict[str, ast.expr] = field(default_factory=dict)  # of module level, with the value written last

    @classmethod
    def read(cls, path: str) -> ModuleSource:
        """Raises OSError and SyntaxError."""
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
        module = cls(path, tree)
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                module.parents[child] = node
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    module.imports[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}.{alias.name}"
        for statement in statements(tree.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                module.functions[statement.name] = statement
            elif isinstance(statement, ast.ClassDef):
                module.classes[statement.name] = statement
            for name, value in assigned(statement):
                module.variables[name] = value
        return module

    def up(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def dotted(self, node: ast.AST | None) -> str:
        """``torch.distributed.barrier`` for ``dist.barrier``, imports taken into account; '' for what is no name."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""


def own_nodes(function: ast.AST, *, closures: bool = False, shadow: str | None = None) -> Iterator[ast.AST]:
    """The nodes of a function's body; ``closures``: with nested functions, except those that rename ``shadow``."""
    body = [function.body] if isinstance(function, ast.Lambda) else cast(Any, function).body
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            args = node.args
            names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            if not closures or shadow in names:
                continue
        waiting.extend(ast.iter_child_nodes(node))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under ``if``, ``try`` and ``with`` included."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            parts: Any = statement
            inner = [*parts.body, *getattr(parts, "orelse", []), *getattr(parts, "finalbody", [])]
            inner += [line for handler in getattr(parts, "handlers", []) for line in handler.body]
            yield from statements(inner)


def assigned(statement: ast.AST) -> list[tuple[str, ast.expr]]:
    """The names that an assignment gives a value, with the value."""
    if isinstance(statement, ast.Assign):
        return [(target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, (ast.AnnAssign, ast.NamedExpr)) and isinstance(statement.target, ast.Name):
        return [(statement.target.id, statement.value)] if statement.value is not None else []
    return []


def bindings(function: Function) -> dict[str, list[ast.expr | None]]:
    """What a function gives to each of its local names, parameters included; None for what no expression says."""
    args = function.args
    given = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    found: dict[str, list[ast.expr | None]] = {}
    for arg in (*given, *(extra for extra in (args.vararg, args.kwarg) if extra is not None)):
        found.setdefault(arg.arg, []).append(None)
    values: dict[ast.AST, ast.expr] = {}
    for node in own_nodes(function, closures=True):
        if isinstance(node, ast.Assign):
            values.update(dict.fromkeys(node.targets, node.value))
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            values[node.target] = node.value
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            values[node.optional_vars] = node.context_expr
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, []).append(values.get(node))
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, []).append(None)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append(None)
    return found


def access_of(node: ast.expr, name: str, module: ModuleSource) -> Access:
    """What is done with the value that ``node`` gives and that is called ``name``."""
    path, top, parent = [name], node, module.parents[node]
    while True:
        if isinstance(parent, ast.Attribute):
            path.append(f".{parent.attr}")
        elif isinstance(parent, ast.Subscript) and parent.value is top:
            path.append(f"[{parent.slice.value!r}]" if isinstance(parent.slice, ast.Constant) else "[*]")
        else:
            break
        top, parent = parent, module.parents[parent]
    if isinstance(parent, ast.Call) and parent.func is top:
        called = path.pop()[1:] if path[-1].startswith(".") else ""
        return Access(tuple(path), top, False, parent, called)
    return Access(tuple(path), top, isinstance(getattr(top, "ctx", None), (ast.Store, ast.Del)))


def is_helper_call(module: ModuleSource, node: ast.AST, name: str) -> bool:
    """Whether the node is ``RayHelper.name(...)``."""
    return isinstance(node, ast.Call) and f".{module.dotted(node.func)}".endswith(f".RayHelper.{name}")
