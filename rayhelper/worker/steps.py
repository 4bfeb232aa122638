"""Coroutines whose steps run in a setting of their own, and coroutines of several workers in one task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from rayhelper.worker.patches import take_over

Step = Callable[[], Any]


class Stepped:
    """Awaits a coroutine. Between two of its suspensions it runs within ``setting()``.

    What belongs to a process or a thread (random generators, torch's grad mode) would otherwise be that of whichever
    coroutine was suspended last.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], setting: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self.coroutine = coroutine
        self.setting = setting

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Step = functools.partial(self.coroutine.send, None)
        while True:
            with self.setting():
                try:
                    awaits = step()
                except StopIteration as ended:
                    return ended.value
            try:
                sent = yield awaits
            except GeneratorExit:
                self.coroutine.close()
                raise
            except BaseException as error:
                step = functools.partial(self.coroutine.throw, error)
            else:
                step = functools.partial(self.coroutine.send, sent)


class Together:
    """Awaits several coroutines in the task of whoever awaits: all begin at once, in order. Gives their values.

    Tasks of their own would begin later, and calls that are made meanwhile would overtake them. If one raises, the
    others are cancelled; the first that raised something else than CancelledError is raised.
    """

    def __init__(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
        self.coroutines = coroutines
        self.values: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.awaited: dict[int, asyncio.Future[Any] | None] = {}  # None: goes on at the loop's next turn

    def __await__(self) -> Generator[Any, Any, list[Any]]:
        steps: dict[int, Step] = {k: functools.partial(one.send, None) for k, one in enumerate(self.coroutines)}
        while True:
            for number, step in steps.items():
                self._take(number, step)
            steps = self._cancelled() if self.errors and self.awaited else {}
            if not self.awaited and not steps:
                break
            if not steps:
                try:
                    yield from self._until_any_is_done()
                except asyncio.CancelledError as error:
                    steps = self._cancelled()
                    self.errors.setdefault(len(self.coroutines), error)
                else:
                    steps = self._ready()
        if self.errors:
            others = [one for one in self.errors.values() if not isinstance(one, asyncio.CancelledError)]
            raise next(iter([*others, *self.errors.values()]))
        return [self.values[k] for k in range(len(self.coroutines))]

    def _take(self, number: int, step: Step) -> None:
        self.awaited.pop(number, None)
        try:
            awaits = step()
        except StopIteration as ended:
            self.values[number] = ended.value
        except BaseException as error:
            self.errors[number] = error
        else:
            if awaits is not None:
                take_over(awaits)
            self.awaited[number] = awaits

    def _until_any_is_done(self) -> Generator[Any, Any, None]:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def wake(_: Any = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        for one in self.awaited.values():
            if one is None:
                loop.call_soon(wake)
            else:
                one.add_done_callback(wake)
        try:
            yield from waiter.__await__()
        finally:
            for one in self.awaited.values():
                if one is not None:
                    one.remove_done_callback(wake)

    def _ready(self) -> dict[int, Step]:
        return {
            number: functools.partial(self.coroutines[number].send, None)
            for number, one in self.awaited.items()
            if one is None or one.done()
        }

    def _cancelled(self) -> dict[int, Step]:
        """The steps of those that are cancelled at once; what others await is cancelled, if it was not before."""
        return {
            number: functools.partial(self.coroutines[number].throw, asyncio.CancelledError())
            for number, one in self.awaited.items()
            if one is None or not (one.cancelled() or one.cancel())
        }
