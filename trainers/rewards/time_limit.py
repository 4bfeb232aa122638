"""A limit of time for code that a user wrote and that may never return."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")
_AGAIN_S = 1.0  # code that swallows the interruption is interrupted again
_SIGNAL = signal.SIGRTMIN + 7  # no library's: judges of answers set alarms of their own


class LateError(TimeoutError):
    """What was given a limit of time did not return within it."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(what, limit_s)
        self.what, self.limit_s = what, limit_s

    def __str__(self) -> str:
        return f"{self.what} did not return within {self.limit_s:g} s. Raise the limit if it needs longer."


class Interrupted(BaseException):
    """Raised inside code that is late. No Exception, which `except Exception` in it would swallow."""


def within(limit_s: float | None, what: str, function: Callable[..., ValueT], *args: Any, **kwargs: Any) -> ValueT:
    """What ``function`` returns; it is interrupted after ``limit_s`` seconds, None: never. Errors call it ``what``.

    In the main thread a signal interrupts it where it is. In another thread it is left behind in one more, which does
    not keep the process alive. Native code that holds the interpreter is not interrupted.

    Raises:
        LateError: it did not return in time. In the main thread its traceback shows where it was.
    """
    if limit_s is None:
        return function(*args, **kwargs)
    late = LateError(what, limit_s)
    if threading.current_thread() is threading.main_thread():
        return _interrupted(late, function, args, kwargs)
    return _left_behind(late, function, args, kwargs)


async def awaited_within(limit_s: float | None, what: str, awaitable: Awaitable[ValueT]) -> ValueT:
    """``within`` for what is awaited, and is cancelled when it is late."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await awaitable
    except TimeoutError as error:
        if limit_s is None or not limit.expired():  # its own
            raise
        raise LateError(what, limit_s) from error


def _interrupted(late: LateError, function: Callable[..., ValueT], args: Any, kwargs: Any) -> ValueT:
    returned = threading.Event()

    def interrupt(signum: int, frame: Any) -> None:
        if not returned.is_set():
            raise Interrupted

    def watch() -> None:
        wait_s = late.limit_s
        while not returned.wait(wait_s):
            signal.pthread_kill(main, _SIGNAL)
            wait_s = _AGAIN_S

    main = threading.get_ident()
    before = signal.signal(_SIGNAL, interrupt)
    watcher = threading.Thread(target=watch, name="time-limit", daemon=True)
    watcher.start()
    try:
        try:
            return function(*args, **kwargs)
        finally:
            returned.set()
    except Interrupted as error:
        raise late from error
    finally:
        watcher.join()  # or its signal would come after the handler has gone
        signal.signal(_SIGNAL, before)


def _left_behind(late: LateError, function: Callable[..., ValueT], args: Any, kwargs: Any) -> ValueT:
    values: list[ValueT] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(function(*args, **kwargs))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="time-limit", daemon=True)
    thread.start()
    thread.join(late.limit_s)
    if thread.is_alive():
        raise late
    if errors:
        raise errors[0]
    return values[0]
