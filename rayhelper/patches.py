"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

OUTDATED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)


@contextlib.contextmanager
def outdated_to_file() -> Iterator[None]:
    """Inside, that holds which ``send_outdated_to_file`` does."""
    before = warnings.showwarning
    ours = send_outdated_to_file()
    try:
        yield
    finally:
        if warnings.showwarning is ours:
            warnings.showwarning = before


def send_outdated_to_file() -> Any:
    """A library's warning that another one is outdated is a line of logging from now on, ``py.warnings``.

    It concerns those who write the library.
    """
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        is_installed = {"site-packages", "dist-packages"} & set(filename.split(os.sep))
        if file is None and is_installed and issubclass(category, OUTDATED):
            told = warnings.formatwarning(message, category, filename, lineno, line)
            logging.getLogger("py.warnings").info("%s", told.rstrip())
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    return show
