"""Values that are not there yet: ``Future``, ``as_completed``.

A future may be passed as an argument to another decorated call. Its value then goes from the workers that made it to
the workers that need it, never through the driver (``runtimes/ray/group.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rayhelper.errors import RoleError
from rayhelper.values.dispatch import Whole, bare

R = TypeVar("R")


class Pending(Protocol):
    """What runs behind a future."""

    @property
    def title(self) -> str:
        """The method, for messages."""
        ...

    def done(self) -> bool: ...

    def result(self, timeout_s: float | None) -> Any:
        """The collected value. Raises what the workers raised, or DeadlineError."""
        ...

    def cancel(self) -> bool:
        """Whether the call was given up; False if it was done before."""
        ...

    def parts(self) -> Iterator[Any]:
        """The leaders' values as they finish."""
        ...

    def wait_any(self, others: Sequence[Any]) -> int:
        """Blocks until one of ``others`` (pending of the same kind) is done; its position."""
        ...


class Future(Generic[R]):
    """The value of a call that may still be running. Made by ``method.defer(...)``."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._pid = os.getpid()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Future must be a whole argument. It cannot be inside a list or a dict, and cannot be returned. Pass "
            "only the Future, or its .result()."
        )

    def _asked(self) -> Pending:
        """What runs behind it. Raises RoleError in a forked child, which would take the parent's messages."""
        if os.getpid() != self._pid and not isinstance(self._pending, Finished):
            raise RoleError(
                f"the Future of {self._pending.title} was used in a forked process, such as a DataLoader worker or a "
                "Process of multiprocessing. Only the process that made it can reach the workers. Call .result() "
                "there, before the fork, and give the value to the child."
            )
        return self._pending

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""
        return self._asked().done()

    def result(self, timeout_s: float | None = None) -> R:
        """The value of the call. Raises the exception of the call, or DeadlineError after ``timeout_s``.

        The call continues after ``timeout_s``: ask again, or ``cancel`` it.
        """
        value: R = self._asked().result(timeout_s)
        return value

    def cancel(self) -> bool:
        """Cancels the call. Workers that wait do not begin it, and workers that run it are interrupted.

        Native code is interrupted when it returns to Python, and collectives at once. ``result`` then raises
        CallCancelledError. Returns False if the call was done before, which is always so with Ray off.
        """
        return self._asked().cancel()

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """The exception that ``result`` raises, or None."""
        self._asked()
        try:
            self.result(timeout_s)
        except Exception as error:
            return error
        return None

    def as_parts(self) -> Iterator[Any]:
        """The leaders' values as they finish; see ``method.stream``."""
        return self._asked().parts()


class Finished:
    """A call that was made at once: its value or its exception."""

    title = "a call that was made"

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        try:
            self.value = call()
        except Exception as error:
            self.error = error

    @classmethod
    def failed(cls, error: Exception) -> Finished:
        """The outcome of a call that raised."""
        outcome = cls(lambda: None)
        outcome.error = error
        return outcome

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float | None) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def cancel(self) -> bool:
        return False

    def parts(self) -> Iterator[Any]:
        yield self.result(None)

    def wait_any(self, others: Sequence[Any]) -> int:
        return 0


class FinishedCall(Finished):
    """As ``Finished``, of a call to several workers: ``call`` gives the leaders' values, ``collect`` the caller's."""

    def __init__(self, call: Callable[[], list[Any]], collect: Callable[[list[Any]], Any]) -> None:
        super().__init__(call)
        self.collect = collect
        self.collected: Finished | None = None

    def result(self, timeout_s: float | None) -> Any:
        if self.collected is None:
            values = super().result(None)
            self.collected = Finished(lambda: self.collect(values))
        return self.collected.result(None)

    def parts(self) -> Iterator[Any]:
        yield from super().result(None)


def finished(call: Callable[[], Any]) -> Future[Any]:
    """A future of a call made now."""
    return Future(Finished(call))


def values_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every future replaced by its value, also those that are sent whole."""
    if any(isinstance(bare(value), Future) for value in (*args, *kwargs.values())):
        args = tuple(map(_value_of, args))
        kwargs = {name: _value_of(value) for name, value in kwargs.items()}
    return args, kwargs


def _value_of(value: Any) -> Any:
    if isinstance(value, Whole):
        return Whole(_value_of(value.value))
    return value.result() if isinstance(value, Future) else value


def as_completed(futures: Iterable[Future[R]]) -> Iterator[Future[R]]:
    """The futures, each as soon as it is done. Those that failed too: ``result`` raises."""
    waiting = list(futures)
    while waiting:
        ready = next((k for k, future in enumerate(waiting) if future.done()), None)
        if ready is None:
            ready = waiting[0]._asked().wait_any([future._pending for future in waiting])
        yield waiting.pop(ready)
