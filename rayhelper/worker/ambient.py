"""What the driver's process has set beside its variables, which a worker's code must find as with Ray off.

    with the construction of an object     Ambient     seeds, torch's defaults, levels and format of logging, filters
                                                       of warnings
    with a call                            Mode        grad mode, autocast; what the driver has set since: seeds and
                                                       torch's defaults

No library is imported for it: what a process has not loaded has its defaults there. A worker that loads torch later
than it is told sets torch up at that moment (``when_loaded``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rayhelper.roles.project import is_installed
from rayhelper.worker.patches import default_device
from rayhelper.worker.random_streams import DriverRandom, NewRandom, RandomState, RandomStream
from rayhelper.worker.when_loaded import when_loaded

_DEVICE_TYPES = ("cpu", "cuda")  # of which autocast is asked
_OWN_LOGGERS = ("ray", "rayhelper.worker")  # which Ray sets up on its workers itself


@dataclass(frozen=True)
class LoggerState:
    """How a logger is set: its level (0: not set), and the format of its handler (None: it has none)."""

    name: str  # "": the root logger
    level: int
    propagate: bool
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
class Ambient:
    """What the driver's process has set when it constructs an object."""

    random: RandomState
    torch: dict[str, Any] | None  # by name in ``_TORCH``; None: torch is not loaded
    loggers: tuple[LoggerState, ...]
    disabled_below: int  # as ``logging.disable`` was told
    warnings: tuple[Filter, ...]

    @classmethod
    def here(cls) -> Ambient:
        torch = sys.modules.get("torch")
        return cls(
            RandomState.here(),
            None if torch is None else flags_of(torch),
            tuple(_loggers()),
            logging.root.manager.disable,
            tuple(_filters()),
        )

    def apply(self) -> None:
        """Sets this process up in the same way, but for its random generators."""
        if self.torch is not None:
            when_loaded("torch", functools.partial(_set_flags, self.torch))
        logging.disable(self.disabled_below)
        for state in self.loggers:
            _set_logger(state)
        _set_filters(self.warnings)


def _dtype(torch: Any, name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _set_cudnn(cudnn: Any, deterministic: bool, benchmark: bool) -> None:
    cudnn.deterministic, cudnn.benchmark = deterministic, benchmark


_TORCH: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "default dtype": (
        lambda torch: str(torch.get_default_dtype()),
        lambda torch, name: torch.set_default_dtype(_dtype(torch, name)),
    ),
    "default device": (
        default_device,
        lambda torch, name: torch.set_default_device(None if name == "cpu" else name),
    ),
    "matmul precision": (
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
    "deterministic algorithms": (
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "anomaly detection": (
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(value[0], check_nan=value[1]),
    ),
    "numpy's floating-point errors": (
        lambda torch: tuple(np.geterr().items()),
        lambda torch, value: np.seterr(**dict(value)),
    ),
    "cudnn": (
        lambda torch: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        lambda torch, value: _set_cudnn(torch.backends.cudnn, *value),
    ),
}


def flags_of(torch: Any) -> dict[str, Any]:
    """What ``_TORCH`` names, as it is set here."""
    return {name: get(torch) for name, (get, _) in _TORCH.items()}


def _set_flags(flags: dict[str, Any], torch: Any) -> None:
    for name, value in flags.items():
        get, put = _TORCH[name]
        if get(torch) != value:
            put(torch, value)


class Mode(NamedTuple):
    """What the driver's process has set when it makes a call."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, str], ...]  # device types for which it is on, with the dtype
    autocast_cache: bool
    random: NewRandom | None  # what became of the random generators
    torch: dict[str, Any] | None  # new defaults of torch, by name in ``_TORCH``

    def settled(self, stream: RandomStream) -> Mode:
        """The rest of the mode, after new seeds and defaults have been set: they stay. ``stream``: of the worker."""
        if self.random is not None:
            stream.follow(self.random)
        if self.torch is not None:
            when_loaded("torch", functools.partial(_set_flags, self.torch))
        return self._replace(random=None, torch=None)

    def applied(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread is in the same mode."""
        import torch

        inference = [torch.inference_mode()] if self.inference else []
        grad = torch.enable_grad() if self.grad else torch.no_grad()
        autocast = [
            torch.autocast(device, _dtype(torch, dtype), cache_enabled=self.autocast_cache)
            for device, dtype in self.autocast
        ]
        return Inside([*inference, grad, *autocast])


class DriverMode:
    """What changes in the driver's process between calls to one group."""

    def __init__(self) -> None:
        self.random = DriverRandom()
        self.flags: dict[str, Any] | None = None  # torch's defaults, as the workers were told
        self.restarts_left: int | None = None  # when they were told the flags

    def constructing(self) -> None:
        """The workers are told all seeds and defaults now."""
        torch = sys.modules.get("torch")
        self.flags = None if torch is None else flags_of(torch)
        self.random.constructing()

    def of_call(self, restarts_left: int) -> Mode | None:
        """The mode in which a call is made; None: as the workers are.

        A worker in the place of one that died was told what was set at construction, so all are told again.
        """
        torch = sys.modules.get("torch")
        new = self.random.of_call()
        if torch is None:
            return None if new is None else Mode(True, False, (), True, new, None)
        flags = flags_of(torch)
        is_told = flags == self.flags and self.restarts_left in (None, restarts_left)
        self.flags, self.restarts_left = flags, restarts_left
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        on = [device for device in _DEVICE_TYPES if torch.is_autocast_enabled(device)]
        if grad and not inference and not on and new is None and is_told:
            return None
        autocast = tuple((device, str(torch.get_autocast_dtype(device))) for device in on)
        return Mode(grad, inference, autocast, torch.is_autocast_cache_enabled(), new, None if is_told else flags)


class Inside:
    """Inside, all of several contexts hold. No generator, nor an ``ExitStack``: see ``acting_as``."""

    def __init__(self, contexts: Sequence[contextlib.AbstractContextManager[Any]]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*raised)


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


def _loggers() -> Iterator[LoggerState]:
    yield _state_of("", logging.getLogger())
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and not name.startswith(_OWN_LOGGERS):
            state = _state_of(name, logger)
            if state.format is not None and is_installed(name.partition(".")[0]):
                state = replace(state, format=None)  # the package gives its logger handlers when it is imported
            if state.level or not state.propagate or state.format is not None:
                yield state


def _state_of(name: str, logger: logging.Logger) -> LoggerState:
    handlers = [one for one in logger.handlers if not isinstance(one, logging.NullHandler)]  # which write nothing
    to_console = [one for one in handlers if getattr(one, "stream", None) in (sys.stderr, sys.stdout)]
    chosen = next(iter([*to_console, *handlers]), None)
    if chosen is None:
        return LoggerState(name, logger.level, logger.propagate, None, 0)
    formatter = chosen.formatter
    written = ("%(message)s", None, "%")  # what a handler without a formatter writes
    if formatter is not None and isinstance(formatter._fmt, str):
        styles = {logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}
        written = (formatter._fmt, formatter.datefmt, styles.get(type(formatter._style), "%"))  # type: ignore[assignment]
    return LoggerState(name, logger.level, logger.propagate, written, chosen.level)


def _set_logger(state: LoggerState) -> None:
    """Levels are the driver's. A handler is added where the worker has none: it writes to stderr, which Ray shows."""
    logger = logging.getLogger(state.name or None)
    logger.setLevel(state.level)
    own = [handler for handler in logger.handlers if getattr(handler, "of_the_driver", False)]
    if state.format is None or len(own) < len(logger.handlers):
        return
    fmt, datefmt, style = state.format
    for handler in own:
        logger.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.of_the_driver = True  # type: ignore[attr-defined]
    handler.setLevel(state.handler_level)
    handler.setFormatter(logging.Formatter(fmt, datefmt, style))  # type: ignore[arg-type]
    logger.addHandler(handler)
    logger.propagate = state.propagate
