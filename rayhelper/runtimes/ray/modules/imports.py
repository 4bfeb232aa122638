"""Which modules a class reaches by its imports, and the errors for those that cannot travel."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

from rayhelper.errors import RoleError
from rayhelper.runtimes.ray.modules.sources import file_of


class Imports:
    """The loaded modules of the user that a class reaches, and by which of them it does so."""

    def __init__(self, cls: type, modules: Iterable[str]) -> None:
        known = set(modules)
        self.at_top: dict[str, set[str]] = {}  # by module: what it imports when it is imported
        self.in_functions: dict[str, set[str]] = {}  # by module: what its functions import when they run
        waiting = [base.__module__ for base in cls.__mro__ if base.__module__ in (*known, "__main__")]
        while waiting:
            name = waiting.pop()
            if name not in self.at_top:
                at_top, in_functions = _imported_by(sys.modules[name])
                self.at_top[name] = (at_top & known) - {name}
                self.in_functions[name] = (in_functions & known) - {name}
                waiting += [*self.at_top[name], *self.in_functions[name]]

    def modules(self) -> list[str]:
        """All that are reached, but for the driver's main module."""
        return sorted(self.at_top.keys() - {"__main__"})

    def with_importers(self, unlike: Iterable[str]) -> set[str]:
        """The modules, and those that import them at their top: they refer to what must travel by value."""
        found = set(unlike)
        while more := {name for name, imported in self.at_top.items() if imported & found} - found - {"__main__"}:
            found |= more
        return found

    def late(self, unlike: Iterable[str]) -> dict[str, str]:
        """Those of the modules that a function imports when it runs, each with the module of the function."""
        found = set(unlike)
        return {name: who for who, imported in sorted(self.in_functions.items()) for name in sorted(imported & found)}


def _imported_by(module: ModuleType) -> tuple[set[str], set[str]]:
    """What a module imports at its top, and what within functions: names of modules, and of what may be one."""
    held = vars(module).values()
    at_top = {value.__name__ for value in held if isinstance(value, ModuleType)}
    at_top |= {str(value.__module__) for value in held if isinstance(value, (FunctionType, type))}
    try:
        path = str(module.__file__)
        stat = os.stat(path)
        written, in_functions = _imports(path, stat.st_mtime_ns, stat.st_size, getattr(module, "__package__", "") or "")
    except (AttributeError, OSError, SyntaxError, ValueError):
        return at_top, set()
    return at_top | written, set(in_functions)


@functools.lru_cache(4096)
def _imports(path: str, mtime_ns: int, size: int, package: str) -> tuple[frozenset[str], frozenset[str]]:
    at_top: set[str] = set()
    in_functions: set[str] = set()

    def look(node: ast.AST, found: set[str]) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                words = alias.name.split(".")
                found.update(".".join(words[: k + 1]) for k in range(len(words)))
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                look(statement, found)
        else:
            inner = in_functions if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else found
            for child in ast.iter_child_nodes(node):
                look(child, inner)

    look(ast.parse(Path(path).read_text()), at_top)
    return frozenset(at_top), frozenset(in_functions)


def refused_late(cls: type, name: str, importer: str) -> RoleError:
    """The error for a module that a function imports on a worker, which would get another source there."""
    return RoleError(
        f"{cls.__name__} cannot be constructed: a function of module {importer!r} imports {name!r} when it runs. "
        f"{file_of(name)} was edited after a worker had imported it, so workers would run other code than the driver. "
        f"Import {name!r} at the top of {importer!r}, or reload it and start the workers again: RayHelper.teardown(), "
        "then RayHelper.initialize(...)."
    )


def not_by_value(cls: type, names: Iterable[str], error: Exception) -> RoleError:
    """The error for modules that must travel by value and hold what cannot."""
    listed = ", ".join(f"{name!r} ({file_of(name)})" for name in sorted(names))
    return RoleError(
        f"{cls.__name__} cannot be constructed: the contents of these modules cannot be sent to workers. The "
        f"workers lack the modules, or run another source of them than the driver: {listed}: {error}. Make the "
        "modules importable on every node, or "
        "start the workers again: RayHelper.teardown(), then RayHelper.initialize(...)."
    )
