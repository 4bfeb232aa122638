"""Where relative paths begin in a worker, and where it finds modules: as in the driver, also after that has changed."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import NamedTuple

_of_driver: str | None = None  # None: this process has a folder of its own, or is the driver's
_paths: list[str] = []  # of ``sys.path``, those that the driver has and this process had not


class Where(NamedTuple):
    """The folder of a process (None: it was deleted), and the user's own entries of ``sys.path``."""

    folder: str | None
    paths: tuple[str, ...]


def here() -> Where:
    """Where this process is."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = None
    return Where(folder, _own(tuple(sys.path)))


@functools.lru_cache(64)
def _own(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Those that the interpreter and its packages do not have by themselves."""
    installed = {os.path.realpath(one) for one in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found: list[str] = []
    for entry in entries:
        path = os.path.realpath(entry) if entry and isinstance(entry, str) else ""
        if os.path.isabs(entry) and not any(path.startswith(f"{one}{os.sep}") for one in installed):
            found.append(entry)
    return tuple(found)


def begin_in(folder: str) -> None:
    """The driver is in ``folder``: so is this process, from now on wherever the driver goes."""
    global _of_driver
    _of_driver = folder
    _enter(folder)


def follow(where: Where | None) -> None:
    """The driver is there. Where the driver has not moved, a role's own ``os.chdir`` stays."""
    if _of_driver is None or where is None:
        return
    if where.folder is not None and where.folder != _of_driver:
        begin_in(where.folder)
    for path in [path for path in _paths if path not in where.paths]:
        _paths.remove(path)
        if path in sys.path:
            sys.path.remove(path)
    for path in reversed(where.paths):
        if path not in sys.path and os.path.isdir(path):
            sys.path.insert(0, path)
            _paths.append(path)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        told = f"the driver's folder {folder} cannot be entered on this node ({error})"
        logging.getLogger(__name__).warning("%s: relative paths start at %s", told, here().folder)
