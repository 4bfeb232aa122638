"""Calls of asynchronous methods that are in flight on a worker together, in the main thread's event loop.

    driver: host.begin(...)           runs a coroutine to its first suspension; the reply is not what it comes to
    driver: host.collect(calls, s)    runs all of them on until one has ended; the replies of those that have

In between, other calls of the worker run, as other code does with Ray off while a coroutine is suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from rayhelper.watch.attended import told_coroutines
from rayhelper.worker.process_group import in_process_group


class Coroutines:
    """By the id of the task that began each: what has not ended, and the replies that were not collected."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.running: dict[str, asyncio.Task[Any]] = {}  # in the order in which they began
        self.replies: dict[str, Any] = {}
        self.changed = asyncio.Event()  # one has ended, or the worker is asked for something else

    def begin(self, call: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine, which gives the reply and raises nothing, to its first suspension.

        Where processes share a process group it begins after the earlier ones have ended: their collectives would meet
        in another order on each process.
        """
        task = self.loop.create_task(self._in_turn(coroutine, list(self.running.values())), name=call)
        self.running[call] = task
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    async def _in_turn(self, coroutine: Coroutine[Any, Any, Any], earlier: Sequence[asyncio.Task[Any]]) -> None:
        for other in earlier:
            if in_process_group() and not other.done():
                await asyncio.wait([other])
        task = asyncio.current_task()
        assert task is not None, "a task runs this"
        try:
            self.replies[task.get_name()] = await coroutine
        finally:
            del self.running[task.get_name()]
            self.changed.set()

    def collect(self, calls: Iterable[str], wait_s: float) -> tuple[dict[str, Any], list[str]]:
        """The replies of those of the calls that have ended, and those that never began here.

        Returns when one of them has ended, ``wake`` was called, or ``wait_s`` have passed.
        """
        wanted = list(calls)
        self.loop.run_until_complete(self._until_changed(wanted, wait_s))
        unknown = [call for call in wanted if call not in self.replies and call not in self.running]
        return {call: self.replies.pop(call) for call in wanted if call in self.replies}, unknown

    async def _until_changed(self, wanted: Sequence[str], wait_s: float) -> None:
        await asyncio.sleep(0)  # all have a turn, however often this is woken
        if any(call in self.running for call in wanted) and not any(call in self.replies for call in wanted):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), wait_s)
        self.changed.clear()

    def finish(self) -> None:
        """Returns when all have ended."""
        if self.running:
            self.loop.run_until_complete(asyncio.wait(list(self.running.values())))

    def wake(self) -> None:
        """``collect`` returns, now or at once when it is called next. From any thread."""
        self.loop.call_soon_threadsafe(self.changed.set)

    def cancel(self, calls: Iterable[str]) -> None:
        """As ``asyncio.Task.cancel`` does, the next time they run. From any thread."""
        for call in calls:
            task = self.running.get(call)
            if task is not None:
                self.loop.call_soon_threadsafe(task.cancel)

    def stacks(self) -> str:
        """Where those are that are suspended. From any thread."""
        return told_coroutines([task.get_coro() for task in list(self.running.values())])

    def is_cancelled(self) -> bool:
        """Whether the call whose code runs in the main thread was cancelled, and does not only raise CancelledError."""
        task = asyncio.current_task(self.loop)
        return task is not None and task.cancelling() > 0

    def current(self) -> str | None:
        """The call whose code runs in the main thread."""
        task = asyncio.current_task(self.loop)
        return None if task is None or task.get_name() not in self.running else task.get_name()
