"""Coroutines and generators that are looked after: what of them runs is interrupted when it is late, what waits is
cancelled.

Between two of their suspensions other code runs in the thread, which must not be interrupted in their place.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import time
from collections.abc import Callable, Generator, Iterable
from types import FrameType
from typing import Any

from rayhelper.errors import DeadlineError
from rayhelper.watch.watchdog import Call, Watched, stack_of_frames, watchdog
from rayhelper.worker.steps import Stepped

Step = Callable[[], Any]
_SUSPENDED = inspect.CORO_SUSPENDED


def deadline_error(call: Call, remedy: str) -> DeadlineError:
    """The error for a call in this process that was late. ``remedy``: where its limit is set."""
    return DeadlineError(
        f"{call.title} did not finish within {call.limit_s:g} s. The call was given up. Raise {remedy} if it needs "
        f"longer. Where it was:\n{call.stack}"
    )


async def attended(call: Call, awaitable: Any, place: Callable[[], str] | None = None) -> Any:
    """What an awaitable gives. Raises ``call.late()`` if it takes longer than ``call.limit_s``.

    ``place``: says where it is; None: the awaitable is a coroutine, which shows it.
    """
    place = place or functools.partial(stack_of_awaited, awaitable)
    whole = Call(call.what, warns=call.warns, where=lambda: f". Where it is:\n{place()}")
    watchdog.begin(whole)
    try:
        if call.limit_s is None:
            return await awaitable
        try:
            async with asyncio.timeout(call.limit_s) as limit:
                return await _Limited(call, limit, awaitable, place)
        except TimeoutError as error:
            if not limit.expired() or isinstance(error, DeadlineError):  # its own
                raise
            raise call.late() from error
    finally:
        watchdog.end(whole)


class _Limited:
    """Awaits something each of whose steps is interrupted at the limit. ``call.stack``: where it was suspended last."""

    def __init__(self, call: Call, limit: asyncio.Timeout, awaitable: Any, place: Callable[[], str]) -> None:
        self.call, self.limit, self.place = call, limit, place
        self.awaitable = awaitable if hasattr(awaitable, "send") else awaitable.__await__()
        self.running = Call(call.what, call.limit_s, self._late, warns=False)

    def __await__(self) -> Generator[Any, Any, Any]:
        call, running = self.call, self.running
        step: Step = functools.partial(self.awaitable.send, None)
        while True:
            left_s = max(0.001, (self.limit.when() or 0.0) - asyncio.get_running_loop().time())
            running.began = time.monotonic()
            running.due = due = running.began + left_s
            with Watched(running):
                try:
                    awaits = step()
                except StopIteration as ended:
                    return ended.value
            if running.due > due:  # so long a debugger waited for its user
                self.limit.reschedule((self.limit.when() or 0.0) + running.due - due)
            try:
                sent = yield awaits
            except GeneratorExit:
                self.awaitable.close()
                raise
            except BaseException as error:
                call.stack = self.place()
                step = functools.partial(self.awaitable.throw, error)
            else:
                step = functools.partial(self.awaitable.send, sent)

    def _late(self, running: Call) -> Exception:
        if not self.limit.expired():  # else it says already where the limit found it suspended
            self.call.stack = running.stack
        return self.call.late()


class Attended:
    """The items of a generator, asynchronous or not. The limit of the call holds for the time that they take in all."""

    def __init__(self, call: Call, items: Any) -> None:
        self.call, self.items = call, items
        self.left_s = call.limit_s

    def __iter__(self) -> Attended:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        return self._stepped(functools.partial(self.items.send, value))

    def throw(self, *error: Any) -> Any:
        return self._stepped(functools.partial(self.items.throw, *error))

    def close(self) -> None:
        self.items.close()

    def _stepped(self, step: Step) -> Any:
        running = self._part()
        try:
            with Watched(running):
                return step()
        finally:
            self._spent(running)

    def __aiter__(self) -> Attended:
        return self

    async def __anext__(self) -> Any:
        running = self._part()
        try:
            return await attended(running, self.items.__anext__(), functools.partial(stack_of_awaited, self.items))
        finally:
            self._spent(running)

    def _part(self) -> Call:
        return Call(self.call.what, self.left_s, self._late)

    def _spent(self, running: Call) -> None:
        if self.left_s is not None:
            self.left_s = max(0.001, self.left_s - (time.monotonic() - running.began))

    def _late(self, running: Call) -> Exception:
        self.call.stack = running.stack
        return self.call.late()


def told_coroutines(coroutines: Iterable[Any]) -> str:
    """Where those are that are suspended, as the stacks of threads are told."""
    suspended = [one for one in coroutines if inspect.iscoroutine(one) and inspect.getcoroutinestate(one) == _SUSPENDED]
    return "".join(f"coroutine, most recent call last:\n{stack_of_awaited(one)}" for one in suspended)


def stack_of_awaited(awaited: Any) -> str:
    """Where a coroutine is suspended, and what it awaits is, most recent call last."""
    frames: list[FrameType] = []
    while awaited is not None:
        frame: FrameType | None = None
        for name in ("cr_frame", "gi_frame", "ag_frame"):
            frame = frame or getattr(awaited, name, None)
        if frame is None:  # the step of an asynchronous generator shows nothing
            awaited = next((one for one in gc.get_referents(awaited) if inspect.isasyncgen(one)), None)
            continue
        if frame.f_code is Stepped.__await__.__code__:
            awaited = frame.f_locals["self"].coroutine
            continue
        frames.append(frame)
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        awaited = next((getattr(awaited, name) for name in names if getattr(awaited, name, None) is not None), None)
    return stack_of_frames(frames)
