"""Which of the user's modules must travel by value, because a node cannot import them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable


def user_modules() -> list[str]:
    """The loaded modules that no installed package provides: candidates for travelling by value."""
    installed = installed_modules()
    found = set()
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        file = getattr(module, "__file__", None)
        if not file or root in installed or root in sys.stdlib_module_names or root in ("__main__", "rayhelper"):
            continue
        if not any(part in ("site-packages", "dist-packages") for part in file.split(os.sep)):
            found.add(name)
    return sorted(found)


@functools.cache
def installed_modules() -> frozenset[str]:
    """The top-level modules of installed packages, as they were when first asked for: reading them takes a while."""
    return frozenset(importlib.metadata.packages_distributions())


def missing_modules(names: Iterable[str]) -> list[str]:
    """Those of the modules that this process could not import."""
    return [name for name in names if not _importable(name)]


def _importable(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
