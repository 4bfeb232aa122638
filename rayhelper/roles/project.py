"""Which modules are the user's own: no installed package, not the standard library, not RayHelper."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import sysconfig
from typing import Any

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


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
    if os.path.dirname(file) == _STANDARD_LIBRARY:  # what Python was built with, under a name of its platform
        return False
    return not is_installed(root)


@functools.lru_cache(4096)
def is_users(name: str) -> bool:
    """Whether a module, by its name, is the main module or a loaded one of the user's project."""
    return name == "__main__" or (name in sys.modules and is_of_project(name, sys.modules[name]))


@functools.lru_cache(4096)
def is_installed(root: str) -> bool:
    """Whether an installed package has a top-level module of that name, also one that is installed as editable.

    As ``importlib.metadata.packages_distributions`` says, which takes twenty times as long: it reads every file's name.
    """
    for package in importlib.metadata.distributions():
        names = package.read_text("top_level.txt")
        if names:
            if root in names.split():
                return True
        else:
            files = "\n" + (package.read_text("RECORD") or "")
            if f"\n{root}/" in files or f"\n{root}.py," in files:
                return True
    return False
