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

_MOST_TEXT = 100_000  # characters of a message or a traceback that travel


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
        summary = "".join(traceback.format_exception_only(error)).strip()[:_MOST_TEXT]
        text = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
        return cls(_pickled(error, dumps), summary, text, method, worker, rank, time.time_ns())


def _pickled(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """The exception, without what of it does not pickle; None if its type does not."""
    with contextlib.suppress(Exception):  # one with a constructor of its own may pickle and not come back
        whole = dumps(error)
        if type(pickle.loads(whole)) is type(error):
            return whole
    args = tuple(arg if _travels(arg, dumps) else repr(arg)[:_MOST_TEXT] for arg in error.args)
    attributes = {name: value for name, value in vars(error).items() if _travels(value, dumps)}
    with contextlib.suppress(Exception):
        parts = dumps(_InParts(type(error), args, attributes))
        if type(pickle.loads(parts)) is type(error):
            return parts
    return None


def _travels(value: Any, dumps: Callable[[object], bytes]) -> bool:
    try:
        pickle.loads(dumps(value))
    except Exception:
        return False
    return True


class _InParts:
    """Pickles as what is unpickled by ``_revived(*parts)``."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return _revived, self.parts


def _revived(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An exception as it was, its constructor not called again."""
    error = kind.__new__(kind, *args)
    BaseException.__setattr__(error, "args", args)  # also of a frozen dataclass
    vars(error).update(attributes)
    return error


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
    equal = sorted({failure.rank for failure in causes if failure.summary == first.summary} - {first.rank})
    other = [failure for failure in causes if failure.summary != first.summary]
    note = origin + (f"; {len(equal)} more ranks raised the same: {', '.join(runs(equal))}" if equal else "")
    note += "".join(f"; rank {failure.rank} raised {failure.summary[:200]}" for failure in other[:4])
    remote = WorkerError(f"{origin} raised {first.summary}\n[{note}]\n\nRemote traceback:\n{first.traceback}")
    original = None if first.error is None else pickle.loads(first.error)
    if not isinstance(original, Exception):  # SystemExit in a worker must not end the driver silently
        raise remote
    add_note(original, f"[{note}]")
    raise original from remote


def add_note(error: BaseException, note: str) -> None:
    """As ``error.add_note``, also for exceptions that are frozen dataclasses."""
    vars(error).setdefault("__notes__", []).append(note)


def _was_stopped(failure: Failure) -> bool:
    """Whether it is only the consequence of another one."""
    return failure.summary.startswith(f"{CallCancelledError.__module__}.{CallCancelledError.__name__}")
