"""Values that are not there yet: ``Future``, ``as_completed``.

A future may be passed as an argument to another decorated call. Its value then goes from the workers that made it to
the workers that need it, never through the driver (``worker_group.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

R = TypeVar("R")


class Pending(Protocol):
    """What runs behind a future."""

    def done(self) -> bool: ...

    def result(self, timeout_s: float | None) -> Any:
        """The collected value. Raises what the workers raised, or DeadlineError."""
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

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""
        return self._pending.done()

    def result(self, timeout_s: float | None = None) -> R:
        """What the call would have returned. Raises what it would have raised, or DeadlineError after ``timeout_s``."""
        value: R = self._pending.result(timeout_s)
        return value

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """The exception that ``result`` raises, or None."""
        try:
            self.result(timeout_s)
        except Exception as error:
            return error
        return None

    def as_parts(self) -> Iterator[Any]:
        """The leaders' values as they finish; see ``method.stream``."""
        return self._pending.parts()


class Finished:
    """A call that was made at once: its value or its exception."""

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

    def parts(self) -> Iterator[Any]:
        yield self.result(None)

    def wait_any(self, others: Sequence[Any]) -> int:
        return 0


def finished(call: Callable[[], Any]) -> Future[Any]:
    """A future of a call made now."""
    return Future(Finished(call))


def as_completed(futures: Iterable[Future[R]]) -> Iterator[Future[R]]:
    """The futures, each as soon as it is done. Those that failed too: ``result`` raises."""
    waiting = list(futures)
    while waiting:
        ready = next((k for k, future in enumerate(waiting) if future.done()), None)
        if ready is None:
            ready = waiting[0]._pending.wait_any([future._pending for future in waiting])
        yield waiting.pop(ready)
