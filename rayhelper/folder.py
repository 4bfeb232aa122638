"""Where relative paths begin in a worker: in the driver's folder, also after the driver has gone to another."""

from __future__ import annotations

import logging
import os

_of_driver: str | None = None  # None: this process has a folder of its own, or is the driver's


def here() -> str | None:
    """This process's folder; None: it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


def begin_in(folder: str) -> None:
    """The driver is in ``folder``: so is this process, from now on wherever the driver goes."""
    global _of_driver
    _of_driver = folder
    _enter(folder)


def follow(folder: str | None) -> None:
    """The driver is in ``folder``. Where the driver has not moved, a role's own ``os.chdir`` stays."""
    if _of_driver is not None and folder is not None and folder != _of_driver:
        begin_in(folder)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        told = f"the driver's folder {folder} cannot be entered on this node ({error})"
        logging.getLogger(__name__).warning("%s: relative paths start at %s", told, here())
