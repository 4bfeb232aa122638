"""Which modules are the user's own: no installed package, not the standard library, not RayHelper."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from typing import Any


def is_of_project(name: str, module: Any) -> bool:
    """Whether a loaded module is one of the user's project; the main module is not asked for."""
    file = getattr(module, "__file__", None)
    return bool(file) and _is_of_project(name.partition(".")[0], file)


@functools.lru_cache(65536)  # all loaded modules are asked about whenever an object is constructed
def _is_of_project(root: str, file: str) -> bool:
    if root in sys.stdlib_module_names or root == "rayhelper":
        return False
    if any(part in ("site-packages", "dist-packages") for part in file.split(os.sep)):
        return False
    return root not in installed_modules()


@functools.lru_cache(4096)
def is_users(name: str) -> bool:
    """Whether a module, by its name, is the main module or a loaded one of the user's project."""
    return name == "__main__" or (name in sys.modules and is_of_project(name, sys.modules[name]))


@functools.cache
def installed_modules() -> frozenset[str]:
    """The top-level modules of installed packages, as they were when first asked for: reading them takes a while."""
    return frozenset(importlib.metadata.packages_distributions())
