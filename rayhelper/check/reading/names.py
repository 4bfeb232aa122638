"""What a name in a source file stands for: a decorated class, or a function whose source can be read.

A module that is imported is asked what its names are; nothing is imported to find out. In a module that must not be
imported, or cannot be, a name is a class of the same file or of the file that it is imported from.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from rayhelper.check.reading.module import Function, ModuleSource
from rayhelper.check.reading.source import Lineage, Method, lineage_of_class, lineage_of_source
from rayhelper.errors import RayHelperError


@dataclass(frozen=True)
class Names:
    """The names that code in one module sees."""

    module: ModuleSource
    spaces: tuple[Mapping[str, Any], ...] = ()  # of what is imported: closures first, then the module

    @classmethod
    def of(cls, method: Method) -> Names:
        """The names that a method sees."""
        loaded = method.owner.cls
        if loaded is None:
            return cls(method.module)
        module = sys.modules.get(loaded.__module__)
        spaces = [vars(module)] if module is not None else []
        function = _function(vars(loaded).get(method.name.partition(".")[0]))
        return cls(method.module, (*([_closure(function)] if function else []), *spaces))

    def value(self, node: ast.AST) -> Any:
        """What a name or a path of modules and classes is; None if it is not known without importing anything."""
        if isinstance(node, ast.Subscript):  # Policy[int]
            return self.value(node.value)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, ModuleType):
                return vars(owner).get(node.attr, sys.modules.get(f"{owner.__name__}.{node.attr}"))
            return inspect.getattr_static(owner, node.attr, None) if isinstance(owner, type) else None
        if not isinstance(node, ast.Name):
            return None
        for space in self.spaces:
            if node.id in space:
                return space[node.id]
        return _imported(self.module.imports.get(node.id, ""))


@dataclass
class Sources:
    """Files and classes that were read before."""

    modules: dict[str, ModuleSource] = field(default_factory=dict)
    files: dict[str, ModuleSource | None] = field(default_factory=dict)  # by name of a module that is not imported
    decorated: dict[tuple[str, str], bool] = field(default_factory=dict)  # by path and name, of what is not imported

    def lineage(self, names: Names, node: ast.expr) -> Lineage | None:
        """The decorated class that an expression names, read anew; None: it names none, or one without a source."""
        found = names.value(node)
        if isinstance(found, type):
            try:
                return lineage_of_class(found, self.modules) if hasattr(found, "__rayhelper_roles__") else None
            except RayHelperError:
                return None
        place = self._defined(names, node) if found is None and isinstance(node, ast.Name) else None
        if place is None:
            return None
        module, name = place
        known = self.decorated.get((module.path, name))
        if known is False:
            return None
        lineage = lineage_of_source(module, name)
        self.decorated[module.path, name] = any(source.worker_decorator for source in lineage.classes)
        return lineage if self.decorated[module.path, name] else None

    def function(self, names: Names, node: ast.expr) -> tuple[Function, Names] | None:
        """The function of a module that an expression names, where it may build decorated objects."""
        if isinstance(node, ast.Name) and node.id in names.module.functions:
            return names.module.functions[node.id], names
        found = names.value(node)
        if not isinstance(found, FunctionType) or not _builds(found):
            return None
        try:
            path = inspect.getsourcefile(found) or "?"
            module = self.modules.get(path) or self.modules.setdefault(path, ModuleSource.read(path))
        except (OSError, TypeError, SyntaxError):
            return None
        source = module.functions.get(found.__name__)
        return (source, Names(module, (found.__globals__,))) if source is not None else None

    def _defined(self, names: Names, node: ast.Name) -> tuple[ModuleSource, str] | None:
        """The file and name of a class in a module that is not imported."""
        if node.id in names.module.classes:
            return names.module, node.id
        where, _, name = names.module.imports.get(node.id, "").rpartition(".")
        if not where or where.startswith(".") or where in sys.modules:
            return None
        if where not in self.files:
            self.files[where] = _read(where)
        module = self.files[where]
        return (module, name) if module is not None and name in module.classes else None


def _imported(dotted: str) -> Any:
    """A module, or what a module holds, if the module is imported."""
    if dotted in sys.modules:
        return sys.modules[dotted]
    where, _, name = dotted.rpartition(".")
    return vars(sys.modules[where]).get(name) if where in sys.modules else None


def _read(dotted: str) -> ModuleSource | None:
    """The source of a module that is not imported, if it lies in a package that is."""
    package = dotted.rpartition(".")[0]
    if package and package not in sys.modules:
        return None
    try:
        spec = importlib.util.find_spec(dotted)
        origin = spec.origin if spec is not None else None
        return ModuleSource.read(origin) if origin is not None and origin.endswith(".py") else None
    except (ImportError, ValueError, OSError, SyntaxError):
        return None


def _function(entry: Any) -> FunctionType | None:
    """The function that a class attribute wraps: a method of a role, a property, a constructor of a decorated class."""
    for name in ("function", "fget", "__func__"):
        entry = getattr(entry, name, None) or entry
    entry = inspect.unwrap(entry) if callable(entry) else entry
    return entry if isinstance(entry, FunctionType) else None


def _closure(function: FunctionType) -> dict[str, Any]:
    """The names that a function has from the functions around it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet given a value
            continue
    return found


def _builds(function: FunctionType) -> bool:
    """Whether a function's code names a decorated class."""
    values = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(isinstance(value, type) and hasattr(value, "__rayhelper_roles__") for value in values)
