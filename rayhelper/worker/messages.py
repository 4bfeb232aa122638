"""What a process lets through of warnings and of lines of logging, and in which form: on workers as on the driver.

    Messages        filters of warnings, levels and formats of logging: sent with a construction, and again with the
                    next call after the driver has set them
    ToldMessages    per group: whether the driver has set them since the workers were told

Not noticed until a level is set as well: a handler or ``propagate`` of a logger other than the root.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rayhelper.roles.project import is_installed

_OWN_LOGGERS = ("ray", "rayhelper.worker")  # which Ray sets up on its workers itself


@dataclass(frozen=True)
class LoggerState:
    """How a logger is set: its level (0: not set), and the format of its handler (None: it has none)."""

    name: str  # "": the root logger
    level: int
    propagate: bool
    disabled: bool
    format: tuple[str, str | None, str] | None  # fmt, datefmt, style
    handler_level: int


class Filter(NamedTuple):
    """One entry of ``warnings.filters``. Its category by name, so that no library is imported for it."""

    action: Any
    message: str
    category: tuple[str, str]  # module and name
    module: str
    lineno: int


@dataclass(frozen=True)
class Messages:
    """What a process lets through."""

    loggers: tuple[LoggerState, ...]
    disabled_below: int  # as ``logging.disable`` was told
    warnings: tuple[Filter, ...]

    @classmethod
    def here(cls) -> Messages:
        return cls(tuple(_loggers()), logging.root.manager.disable, tuple(_filters()))

    def apply(self) -> None:
        """Lets through the same here."""
        logging.disable(self.disabled_below)
        _set_loggers(self.loggers)
        _set_filters(self.warnings)


class ToldMessages:
    """What the workers of one group have been told, and whether something else holds on the driver by now."""

    def __init__(self) -> None:
        self.told: Messages | None = None  # None: nothing is constructed
        self.filters: list[Any] = []  # as they were when one last looked, like the two below
        self.handlers: list[logging.Handler] = []  # of the root logger
        self.num_levels_set = 0

    def constructing(self) -> None:
        """The workers are told what holds now."""
        self._look()
        self.told = Messages.here()

    def of_call(self, *, again: bool) -> Messages | None:
        """What a call to the group has to tell; None: nothing. ``again``: some worker knows only the construction."""
        is_as_told = self._look()
        if self.told is None or (is_as_told and not again):
            return None
        before, self.told = self.told, Messages.here()
        return self.told if again or self.told != before else None

    def _look(self) -> bool:
        """Whether nothing was set since one last looked: what a call costs where nothing changes (0.3 us)."""
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        handlers = logging.root.handlers
        num_levels_set = _levels().num_set()
        if num_levels_set == self.num_levels_set and filters == self.filters and handlers == self.handlers:
            return True
        self.filters, self.handlers, self.num_levels_set = list(filters), list(handlers), num_levels_set
        return False


# Warnings


def _filters() -> Iterator[Filter]:
    entries: list[Any] = list(warnings.filters)
    for action, message, category, module, lineno in entries:
        patterns = [str(getattr(one, "pattern", one) or "") for one in (message, module)]
        yield Filter(action, patterns[0], (category.__module__, category.__qualname__), patterns[1], lineno)


_told: list[Filter] = []  # on a worker: what it was told last


def _set_filters(told: Sequence[Filter]) -> None:
    """Those of the driver come first. What the worker's libraries have added for categories of theirs stays."""
    here = tuple(_filters())
    own = [one for one in here if one not in told and one not in _told]
    both = (*told, *own)
    _told[:] = told
    if here == both:
        return
    warnings.resetwarnings()
    for action, message, (home, name), module, lineno in reversed(both):
        category = getattr(sys.modules.get(home), name, None)
        if isinstance(category, type) and issubclass(category, Warning):  # else its library adds it when it is loaded
            warnings.filterwarnings(action, message, category, module, lineno)


# Logging


class _Levels(logging.Logger):
    """A logger that nobody writes to. It counts how often levels of this process were set, those of others too.

    A logger asks for its level once, and again after ``setLevel`` of any logger or ``logging.disable``. One that asks
    each time, as another release of Python may, costs time and stays right.
    """

    times = 0  # of the process

    @property
    def disabled(self) -> bool:  # pyright: ignore
        return False

    @disabled.setter
    def disabled(self, _: bool) -> None:
        """``logging.config`` disables the loggers that it is not told of."""

    def getEffectiveLevel(self) -> int:  # noqa: N802  the name is that of logging
        _Levels.times += 1
        return logging.NOTSET

    def num_set(self) -> int:
        self.isEnabledFor(_ABOVE_ALL)
        return _Levels.times


_ABOVE_ALL = 1 << 70  # which no ``logging.disable`` holds back
_NAME = "rayhelper.worker.levels"


def _levels() -> _Levels:
    found = logging.root.manager.loggerDict.get(_NAME)
    if isinstance(found, _Levels):
        return found
    made = logging.root.manager.loggerDict[_NAME] = _Levels(_NAME)
    return made


def _loggers() -> Iterator[LoggerState]:
    yield _state_of("", logging.getLogger())
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and not name.startswith(_OWN_LOGGERS):
            state = _state_of(name, logger)
            if state.format is not None and is_installed(name.partition(".")[0]):
                state = replace(state, format=None)  # the package gives its logger handlers when it is imported
            if state != _unset(name):
                yield state


def _unset(name: str) -> LoggerState:
    return LoggerState(name, logging.NOTSET, True, False, None, 0)


def _state_of(name: str, logger: logging.Logger) -> LoggerState:
    handlers = [one for one in logger.handlers if not isinstance(one, logging.NullHandler)]  # which write nothing
    to_console = [one for one in handlers if getattr(one, "stream", None) in (sys.stderr, sys.stdout)]
    chosen = next(iter([*to_console, *handlers]), None)
    if chosen is None:
        return LoggerState(name, logger.level, logger.propagate, logger.disabled, None, 0)
    formatter = chosen.formatter
    written = ("%(message)s", None, "%")  # what a handler without a formatter writes
    if formatter is not None and isinstance(formatter._fmt, str):
        styles = {logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}
        written = (formatter._fmt, formatter.datefmt, styles.get(type(formatter._style), "%"))  # type: ignore[assignment]
    return LoggerState(name, logger.level, logger.propagate, logger.disabled, written, chosen.level)


_told_loggers: list[str] = []  # on a worker: the loggers of which it was told last


def _set_loggers(told: Sequence[LoggerState]) -> None:
    """Loggers that are no longer told of are as if nobody had set them."""
    names = [state.name for state in told]
    for name in _told_loggers:
        if name not in names:
            _set_logger(_unset(name))
    _told_loggers[:] = names
    for state in told:
        _set_logger(state)


def _set_logger(state: LoggerState) -> None:
    """Levels are the driver's. A handler is added where the worker has none: it writes to stderr, which Ray shows."""
    logger = logging.getLogger(state.name or None)
    logger.setLevel(state.level)
    logger.propagate, logger.disabled = state.propagate, state.disabled
    for handler in [handler for handler in logger.handlers if getattr(handler, "of_the_driver", False)]:
        logger.removeHandler(handler)
    if state.format is None or logger.handlers:
        return
    fmt, datefmt, style = state.format
    handler = logging.StreamHandler()
    handler.of_the_driver = True  # type: ignore[attr-defined]
    handler.setLevel(state.handler_level)
    handler.setFormatter(logging.Formatter(fmt, datefmt, style))  # type: ignore[arg-type]
    logger.addHandler(handler)
