"""Which of the user's modules must travel by value: a worker cannot import them, or not what the driver runs.

user_modules, unlike_modules     which modules some worker lacks, or has otherwise
Imports                          which modules a class reaches by its imports, at the top of a file or in a function
Pins                             sources that go along: a worker that imports a module later gets the driver's source
Reloads                          refuses calls of an object whose modules were reloaded since it was constructed
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rayhelper.errors import RoleError
from rayhelper.roles.project import is_of_project

_CLOCK_S = 1.0  # by which clocks of processes and files may differ


def user_modules() -> list[str]:
    """The loaded modules that no installed package provides: candidates for travelling by value."""
    loaded = list(sys.modules.items())
    return sorted(name for name, module in loaded if name != "__main__" and is_of_project(name, module))


def sources_of(names: Iterable[str]) -> dict[str, str]:
    """Of loaded modules what their source is: a hash of the file, or that this process runs another source by now."""
    return {name: _source(name) for name in names}


def unlike_modules(sources: Mapping[str, str | None]) -> list[str]:
    """Those of the driver's modules that this process could not import, or not with the same source (None: any)."""
    return [
        name
        for name, source in sources.items()
        if not _importable(name) or (source is not None and _source(name) != source)
    ]


def _importable(name: str) -> bool:
    return name in sys.modules or _spec(name) is not None


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _source(name: str) -> str:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) if module is not None else getattr(_spec(name), "origin", None)
    try:
        stat = os.stat(str(path))
        if module is not None and stat.st_mtime > _started() and not _runs_file(module, str(path)):
            return f"as it was before {path} was edited, in process {os.getpid()}"
        return _hash(str(path), stat.st_mtime_ns, stat.st_size)
    except OSError:
        return ""


@functools.lru_cache(4096)
def _hash(path: str, mtime_ns: int, size: int) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


@functools.cache
def _started() -> float:
    """When this process started, in seconds since the epoch; 0 where there is no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK") - _CLOCK_S


def _runs_file(module: ModuleType, path: str) -> bool:
    """Whether a module runs what stands in its file: it was edited before it was imported, or reloaded since.

    Looked at: functions, methods, and names to which the module gives a literal.
    """
    try:
        text = Path(path).read_text()
        tree = ast.parse(text)
        known = set(_codes(compile(text, path, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return False
    held = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    functions = [inner for value in held for inner in (vars(value).values() if isinstance(value, type) else [value])]
    for function in map(_function, functions):
        if function is not None and function.__code__.co_filename == path and function.__code__ not in known:
            return False
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if any(vars(module).get(name) != node.value.value for name in names):
                return False
    return True


def _function(value: Any) -> FunctionType | None:
    """The function that a class or module holds, under whatever decorators."""
    for _ in range(10):
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            return value
        inner = [getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "function")]
        value = next((one for one in inner if one is not None), None)
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# What a class reaches by its imports


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
        f"{cls.__name__} cannot be constructed: a function of module {importer!r} imports {name!r} when it runs, and "
        f"workers would run another source of it than the driver, as {_file(name)} was edited since one of them "
        f"imported it. Import {name!r} at the top of {importer!r}, or reload it and start the workers anew: "
        "RayHelper.teardown(), then RayHelper.initialize(...)."
    )


def not_by_value(cls: type, names: Iterable[str], error: Exception) -> RoleError:
    """The error for modules that must travel by value and hold what cannot."""
    listed = ", ".join(f"{name!r} ({_file(name)})" for name in sorted(names))
    return RoleError(
        f"{cls.__name__} cannot be constructed: what these modules hold cannot be sent to workers, which lack them or "
        f"run another source of them than the driver: {listed}: {error}. Make the modules importable on every node, or "
        "start the workers anew: RayHelper.teardown(), then RayHelper.initialize(...)."
    )


def _file(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__file__", None) or name)


# What stays as it was when an object was constructed


class Pins:
    """The driver's sources of modules. Where they are unpickled, later imports of the modules get these sources."""

    def __init__(self, names: Iterable[str]) -> None:
        self.sources: dict[str, bytes] = {}
        for name in names:
            path = getattr(sys.modules[name], "__file__", None) or ""
            if path.endswith(".py") and not _source(name).startswith("as it was"):
                self.sources[name] = Path(path).read_bytes()

    def __reduce__(self) -> Any:
        return _pin, (self.sources,)


def _pin(sources: dict[str, bytes]) -> None:
    _PINNED.update(sources)
    if _Pinned not in sys.meta_path:
        sys.meta_path.insert(0, _Pinned)


_PINNED: dict[str, bytes] = {}  # on a worker: by name of a module, the source that the driver runs


class _Pinned(importlib.machinery.PathFinder):
    """Finds modules whose files were edited since the driver pinned their sources."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        source = _PINNED.get(fullname)
        spec = super().find_spec(fullname, path, target) if source is not None else None
        if spec is None or not spec.origin or not spec.origin.endswith(".py") or target is not None:
            return None
        if Path(spec.origin).read_bytes() == source:
            return None
        spec.loader = _PinnedLoader(fullname, spec.origin)
        spec.cached = None
        return spec


class _PinnedLoader(importlib.machinery.SourceFileLoader):
    def path_stats(self, path: Any) -> Any:
        raise OSError(f"{path} was edited: bytecode beside it is of another source")

    def get_data(self, path: Any) -> bytes:
        return _PINNED[self.name]


class Reloads:
    """Which modules an object's class reached when it was constructed, and whether they were reloaded since."""

    def __init__(self, names: Iterable[str]) -> None:
        self.specs = {name: (sys.modules[name].__spec__, _source(name)) for name in names}

    def check(self, title: str) -> None:
        """Raises RoleError if a module was reloaded since, from another source. ``title``: of the call."""
        for name, (spec, source) in self.specs.items():
            module = sys.modules.get(name)
            if module is None or module.__spec__ is spec:
                continue
            if _source(name) != source:
                raise RoleError(
                    f"{title}: module {name!r} ({_file(name)}) was edited and reloaded on the driver after the object "
                    "was constructed. The workers still run what it was. Construct the object anew."
                )
            self.specs[name] = (module.__spec__, source)  # the same source again
