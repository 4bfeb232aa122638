"""Sources that travel with a class: a worker that imports a module later gets the driver's source."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rayhelper.runtimes.ray.modules.sources import imported_first, source_of


class Pins:
    """The driver's sources of modules. Where they are unpickled, later imports of the modules get these sources.

    There the packages that the driver knows by a name below ``rayhelper`` are imported at once.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.first = imported_first()
        self.sources: dict[str, bytes] = {}
        for name in names:
            path = getattr(sys.modules[name], "__file__", None) or ""
            if path.endswith(".py") and not source_of(name).startswith("as it was"):
                self.sources[name] = Path(path).read_bytes()

    def __reduce__(self) -> Any:
        return _pin, (self.sources, self.first)


def _pin(sources: dict[str, bytes], first: list[str]) -> None:
    for name in first:
        importlib.import_module(name)
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
        raise OSError(f"{path} was edited: the bytecode next to it belongs to another source")

    def get_data(self, path: Any) -> bytes:
        return _PINNED[self.name]
