"""A limit of time for code that a user wrote and that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rayhelper.watch.watchdog import Call, LateError, Watched

ValueT = TypeVar("ValueT")


def within(limit_s: float | None, what: str, function: Callable[..., ValueT], *args: Any, **kwargs: Any) -> ValueT:
    """What ``function`` returns; it is interrupted after ``limit_s`` seconds, None: never. Errors call it ``what``.

    In the main thread a signal interrupts it where it is. In another thread it is left behind in one more, which does
    not keep the process alive. Native code is interrupted when it returns to Python.

    Raises:
        LateError: it did not return in time. In the main thread its traceback shows where it was.
    """
    if limit_s is None:
        return function(*args, **kwargs)
    if threading.current_thread() is not threading.main_thread():
        return _left_behind(LateError(what, limit_s), function, args, kwargs)
    with Watched(Call(what, limit_s, warns=False)):
        return function(*args, **kwargs)


async def awaited_within(
    limit_s: float | None, what: str, awaitable: Awaitable[ValueT], late: Callable[[], Exception] | None = None
) -> ValueT:
    """``within`` for what is awaited, and is cancelled when it is late. ``late``: another error than LateError."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await awaitable
    except TimeoutError as error:
        if limit_s is None or not limit.expired():  # its own
            raise
        raise (LateError(what, limit_s) if late is None else late()) from error


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
