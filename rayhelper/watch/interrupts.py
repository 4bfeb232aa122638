"""Ctrl-C while an event loop runs.

``asyncio.run`` answers the first Ctrl-C by cancelling its task, which code that blocks never notices. Here the first
one raises KeyboardInterrupt where the main thread is, as it does outside of a loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

ValueT = TypeVar("ValueT")


def run(coroutine: Coroutine[Any, Any, ValueT]) -> ValueT:
    """What the coroutine returns, as ``asyncio.run``; the first Ctrl-C raises KeyboardInterrupt in it.

    The other tasks of its loop are then cancelled. A handler of SIGINT that somebody else has set stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(coroutine)
    with asyncio.Runner() as runner:
        # So that a signal that comes as the loop begins to wait, or in another thread, ends its wait
        runner.get_loop().add_signal_handler(signal.SIGINT, _nothing)
        signal.signal(signal.SIGINT, _interrupt)  # asyncio replaces the default handler only
        try:
            return runner.run(coroutine)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _nothing() -> None:
    pass


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt
