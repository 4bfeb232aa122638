"""An exception on its way from a worker to the caller: sent in a form that always travels, raised as its own type."""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayhelper.errors import CallCancelledError, WorkerError
from rayhelper.ranks import runs


@dataclass(frozen=True)
class Failure:
    """What a worker raised."""

    error: bytes | None  # the pickled exception; None if it cannot be pickled
    summary: str
    traceback: str
    method: str
    worker: str  # rank, group and node
    rank: int
    time_ns: int

    @classmethod
    def of(cls, error: BaseException, method: str, worker: str, rank: int, dumps: Callable[[object], bytes]) -> Failure:
        """The exception, which was raised by ``method`` on ``worker``."""
        pickled: bytes | None = None
        with contextlib.suppress(Exception):  # one with a constructor of its own may pickle and not come back
            attempt = dumps(error)
            pickled = attempt if type(pickle.loads(attempt)) is type(error) else None
        summary = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(error))
        return cls(pickled, summary, text, method, worker, rank, time.time_ns())


def raise_failures(replies: Iterable[Any]) -> None:
    """Raises the first of the failures among the replies, if there is one."""
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    if failures:
        raise_first(failures)


def raise_first(failures: Sequence[Failure]) -> None:
    """Raises the failure that came first, as its own type, noted with where it happened.

    Those of other ranks that say the same are counted, those that say something else are named. The cause of what is
    raised holds the remote traceback.
    """
    causes = [failure for failure in failures if not _was_stopped(failure)] or list(failures)
    first = min(causes, key=lambda failure: failure.time_ns)
    origin = f"{first.method} on {first.worker}"
    equal = sorted(failure.rank for failure in causes if failure.summary == first.summary and failure is not first)
    other = [failure for failure in causes if failure.summary != first.summary]
    note = origin + (f"; {len(equal)} more ranks raised the same: {', '.join(runs(equal))}" if equal else "")
    note += "".join(f"; rank {failure.rank} raised {failure.summary[:200]}" for failure in other[:4])
    remote = WorkerError(f"{origin} raised {first.summary}\n[{note}]\n\nRemote traceback:\n{first.traceback}")
    original = None if first.error is None else pickle.loads(first.error)
    if not isinstance(original, Exception):  # SystemExit in a worker must not end the driver silently
        raise remote
    original.add_note(f"[{note}]")
    raise original from remote


def _was_stopped(failure: Failure) -> bool:
    """Whether it is only the consequence of another one."""
    return failure.summary.startswith(f"{CallCancelledError.__module__}.{CallCancelledError.__name__}")
