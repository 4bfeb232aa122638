"""Where the threads of this process are, looked at by another thread while they go on.

Before Python 3.12 no frame of a running thread may be held while garbage is collected. A collection may begin while the
frame is looked up, or find it half moved as its function returns. It then reads freed memory, or clears values that are
still in use: a segmentation fault, or wrong values later. So a look takes what it needs and lets the frames go, all
without a collection.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple


class Place(NamedTuple):
    """One frame of a stack, as it was."""

    code: CodeType
    line: int
    module: str

    def summary(self) -> traceback.FrameSummary:
        """As ``traceback`` shows it; the line of source is read when it is shown."""
        return traceback.FrameSummary(self.code.co_filename, self.line, self.code.co_name, lookup_line=False)


class _NoCollection:
    """Inside, no garbage is collected. Threads that look at the same time wait for each other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pauses = sys.version_info < (3, 12)

    def __enter__(self) -> None:
        self.lock.acquire()
        self.was_on = self.pauses and gc.isenabled()
        if self.was_on:
            gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_on:
            gc.enable()
        self.lock.release()


_no_collection = _NoCollection()


def stacks() -> dict[int, list[Place]]:
    """Where every thread is, the innermost place first."""
    with _no_collection:
        return _stacks()


def calls_on_stacks(titles: dict[CodeType, Callable[[dict[str, Any]], str | None]]) -> list[tuple[list[Place], str]]:
    """Of each thread that runs such code: its stack, and what the innermost one's title says of its local variables."""
    with _no_collection:
        return _calls_on_stacks(titles)


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def summaries(frames: Sequence[FrameType | Place]) -> list[traceback.FrameSummary]:
    """As ``traceback`` shows them."""
    return [(one if isinstance(one, Place) else _place(one)).summary() for one in frames]


# Functions of their own: when they have returned, nobody holds a frame


def _stacks() -> dict[int, list[Place]]:
    return {thread: list(map(_place, frames_of(frame))) for thread, frame in sys._current_frames().items()}


def _calls_on_stacks(titles: dict[CodeType, Callable[[dict[str, Any]], str | None]]) -> list[tuple[list[Place], str]]:
    found = []
    for frame in sys._current_frames().values():
        innermost = next((one for one in frames_of(frame) if one.f_code in titles), None)
        title = None if innermost is None else titles[innermost.f_code](innermost.f_locals)
        if title is not None:
            found.append((list(map(_place, frames_of(frame))), title))
    return found


def _place(frame: FrameType) -> Place:
    return Place(frame.f_code, frame.f_lineno or 0, str(frame.f_globals.get("__name__", "")))
