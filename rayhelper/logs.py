"""Where lines of logging go: a process's file has all; the console has those of the project, and what is wrong.

    with apart("passive"):                 # early: libraries that are imported now show no progress
        with kept(folder, "driver"):       # folder/driver.log; workers that start now write beside it
            ...

What code prints is left alone, and so are loggers that are not of ``LIBRARIES``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rayhelper.patches import outdated_to_file, send_outdated_to_file

FOLDER, LEVEL = "RAYHELPER_LOGS", "RAYHELPER_LOG_LEVEL"  # variables, which workers inherit
LIBRARIES = frozenset(
    (
        *("vllm", "transformers", "ray", "torch", "datasets", "huggingface_hub", "accelerate", "peft", "trl"),
        *("megatron", "transformer_engine", "flashinfer", "triton", "httpx", "httpx2", "httpcore", "urllib3"),
        *("filelock", "fsspec", "absl", "asyncio", "matplotlib", "tensorboard", "wandb", "swanlab", "py"),
    )
)
WITHOUT_PROGRESS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
VLLMS = {"VLLM_CONFIGURE_LOGGING": "0"}  # its lines then come here, and not to a handler of its own
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LEVELS: dict[
    str, tuple[int, int]
] = {  # by transformers' names: the least that the project says on the console, and libraries
    "passive": (logging.INFO, logging.WARNING),
    "debug": (logging.DEBUG, logging.DEBUG),
    "info": (logging.INFO, logging.INFO),
    "warning": (logging.WARNING, logging.WARNING),
    "error": (logging.ERROR, logging.ERROR),
    "critical": (logging.CRITICAL, logging.CRITICAL),
}


class ForConsole(logging.Filter):
    """Lets pass what is to be seen at this level."""

    def __init__(self, level: str) -> None:
        super().__init__()
        self.project, self.libraries = LEVELS[level]

    def filter(self, record: logging.LogRecord) -> bool:
        is_library = record.name.partition(".")[0] in LIBRARIES
        return record.levelno >= (self.libraries if is_library else self.project)


@contextlib.contextmanager
def apart(level: str) -> Iterator[None]:
    """Inside, handlers of the root logger that write to the console show what this level says; so do new workers.

    Raises KeyError if there is no such level.
    """
    shows_all = LEVELS[level][1] < logging.WARNING
    variables = {LEVEL: level} if shows_all else {LEVEL: level, **WITHOUT_PROGRESS, **VLLMS}
    given = {name: value for name, value in variables.items() if name == LEVEL or name not in os.environ}
    root, shown = logging.getLogger(), ForConsole(level)
    before = {name: os.environ.get(name) for name in given}
    least = root.level
    handlers = [one for one in root.handlers if _is_console(one)]
    os.environ.update(given)
    if LEVELS[level][0] < logging.INFO:
        root.setLevel(LEVELS[level][0])
    for handler in handlers:
        handler.addFilter(shown)
    try:
        with contextlib.nullcontext() if shows_all else outdated_to_file():
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(shown)
        root.setLevel(least)
        _restore(before)


@contextlib.contextmanager
def kept(folder: Path, process: str) -> Iterator[None]:
    """Inside, all lines of this process go to ``folder/process.log`` too; workers that start inside have files there.

    Nothing is done where the program has not set up logging for the console, and for a folder that cannot be written.
    """
    handler = _file(folder, process) if any(map(_is_console, logging.getLogger().handlers)) else None
    if handler is None:
        yield
        return
    before = {FOLDER: os.environ.get(FOLDER)}
    os.environ[FOLDER] = str(folder.resolve())
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
        _restore(before)


def on_worker(process: str) -> None:
    """Sets a worker's process up as the driver's is, by the variables that it got; once, and again if asked again.

    Called after its logging has been set up. With no file, as on a node that lacks the folder, its console shows all.
    """
    root, folder, level = logging.getLogger(), os.environ.get(FOLDER), os.environ.get(LEVEL)
    if folder is None or level is None:
        return
    if not any(isinstance(one, _File) for one in root.handlers):
        handler = _file(Path(folder), process)
        if handler is None:
            return
        root.addHandler(handler)
        if not shows_progress():
            send_outdated_to_file()
    for one in root.handlers:
        if _is_console(one) and not any(isinstance(known, ForConsole) for known in one.filters):
            one.addFilter(ForConsole(level))


def shows_progress() -> bool:
    """Whether libraries may draw bars on the console."""
    return LEVELS[os.environ.get(LEVEL, "info")][1] < logging.WARNING


class _File(logging.FileHandler):
    """A process's file."""


def _file(folder: Path, process: str) -> _File | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = _File(folder / f"{process}.log", encoding="utf-8")
    except OSError:
        return None
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler


def _is_console(handler: logging.Handler) -> bool:
    return type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.stdout)


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
