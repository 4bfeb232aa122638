"""The source that a process runs of a module, and the modules whose sources differ between driver and workers."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from rayhelper.roles.project import is_of_project

_CLOCK_S = 1.0  # by which clocks of processes and files may differ


def user_modules() -> list[str]:
    """The loaded modules that no installed package provides: candidates for travelling by value."""
    loaded = list(sys.modules.items())
    return sorted(name for name, module in loaded if name != "__main__" and is_of_project(name, module))


def imported_first() -> list[str]:
    """Names below ``rayhelper`` of packages that are no part of it, as far as this process uses them.

    Who imports them first has these packages, whatever else of their own names lies in a folder of the user's.
    """
    loaded = list(sys.modules.items())
    below = [(name, module) for name, module in loaded if name.startswith("rayhelper.") and name.count(".") == 1]
    return [name for name, module in below if getattr(module, "__name__", name) != name]


def sources_of(names: Iterable[str]) -> dict[str, str]:
    """Of loaded modules what their source is: a hash of the file, or that this process runs another source by now."""
    return {name: source_of(name) for name in names}


def unlike_modules(sources: Mapping[str, str | None]) -> list[str]:
    """Those of the driver's modules that this process could not import, or not with the same source (None: any)."""
    return [
        name
        for name, source in sources.items()
        if not _importable(name) or (source is not None and source_of(name) != source)
    ]


def _importable(name: str) -> bool:
    return name in sys.modules or _spec(name) is not None


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def source_of(name: str) -> str:
    """A hash of a module's file, or a word that this process runs another source; "" where there is no file."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) if module is not None else getattr(_spec(name), "origin", None)
    try:
        stat = os.stat(str(path))
        if module is not None and stat.st_mtime > _started() and not _runs_file(module, str(path), stat):
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


class Written(NamedTuple):
    """What stands in a file."""

    codes: frozenset[CodeType]
    literals: tuple[tuple[str, Any], ...]  # names to which the module gives a literal


@functools.lru_cache(4096)
def _written(path: str, mtime_ns: int, size: int) -> Written | None:
    """What stands in a file of this time and size; None: no Python. Parsed once: each construction asks for it."""
    try:
        text = Path(path).read_text()
        tree = ast.parse(text)
        codes = frozenset(_codes(compile(text, path, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return None
    given = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    literals = [
        (target.id, node.value.value)  # type: ignore[attr-defined]
        for node in given
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return Written(codes, tuple(literals))


def _runs_file(module: ModuleType, path: str, stat: os.stat_result) -> bool:
    """Whether a module runs what stands in its file: it was edited before it was imported, or reloaded since.

    Looked at: functions, methods, and names to which the module gives a literal.
    """
    written = _written(path, stat.st_mtime_ns, stat.st_size)
    if written is None:
        return False
    held = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    functions = [inner for value in held for inner in (vars(value).values() if isinstance(value, type) else [value])]
    for function in map(_function, functions):
        if function is not None and function.__code__.co_filename == path and function.__code__ not in written.codes:
            return False
    return all(vars(module).get(name) == value for name, value in written.literals)


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


def file_of(name: str) -> str:
    """A module's file, or its name where it has none."""
    return str(getattr(sys.modules.get(name), "__file__", None) or name)
