"""Where the processes meet in a call that is awaited. It takes place whatever becomes of the loop that awaits it.

A loop that ends, as asyncio.run does with an exception, gives up what it was about to begin. Processes that met all the
same would wait for one that never comes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Meeting:
    """One call's; ``before``: that of the call that was made before it, which comes first."""

    def __init__(self, before: Meeting | None) -> None:
        self.before = before
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.is_given_up = False  # nobody awaits it any more

    def done(self) -> bool:
        return self.outcome.done()

    def begin(self, threads: ThreadPoolExecutor, meet: Callable[[], Any]) -> None:
        """Calls ``meet`` in a thread once the meeting before is over; ``outcome`` is what it returns or raises."""
        context = contextvars.copy_context()

        def run() -> None:
            try:
                outcome = context.run(meet)
            except BaseException as error:  # raised where the outcome is asked for
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(outcome)

        before, self.before = self.before, None
        if before is None:
            threads.submit(run)
        else:
            before.outcome.add_done_callback(lambda _: threads.submit(run))

    async def over(self) -> None:
        """Returns when it has taken place. Who is cancelled here leaves the meeting as it is."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def told(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

        self.outcome.add_done_callback(told)
        await waiter

    def wait(self) -> None:
        """As ``over``, for code that is no coroutine."""
        concurrent.futures.wait([self.outcome])
