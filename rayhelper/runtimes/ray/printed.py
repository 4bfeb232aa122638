"""The last lines that workers print, which Ray shows some time later: waited for before the workers are ended.

Ray reads the files of its workers every few tenths of a second. At the end of a short run the last lines, such as an
error or a result, would be lost with the processes that show them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rayhelper.runtimes.ray.patches import listen_to_lines

_LIMIT_S = 2.0  # for all lines; it takes a few tenths of a second
_STEP_S = 0.02
_NUM_LINES = 100  # per worker that are remembered
_NUM_CHARACTERS = 200  # of a line that are compared


class Printed:
    """What Ray has shown of the lines of workers since this was made."""

    def __init__(self) -> None:
        self.lines: dict[str, deque[str]] = {}  # by process
        self.stop = listen_to_lines(self._note)

    def _note(self, batch: Mapping[str, Any]) -> None:
        known = self.lines.setdefault(str(batch.get("pid")), deque(maxlen=_NUM_LINES))
        known.extend(str(line)[:_NUM_CHARACTERS] for line in batch.get("lines", ()))

    def wait(self, last: Iterable[tuple[int, list[str]]]) -> None:
        """Returns when all has been shown, or after two seconds. ``last``: processes, with their last lines."""
        if self.stop is None:  # Ray shows nothing here
            return
        missing = {(str(pid), line[:_NUM_CHARACTERS]) for pid, lines in last for line in lines}
        deadline = time.monotonic() + _LIMIT_S
        while missing and time.monotonic() < deadline:
            missing = {(pid, line) for pid, line in missing if line not in list(self.lines.get(pid, ()))}
            if missing:
                time.sleep(_STEP_S)

    def close(self) -> None:
        """Notes nothing any more."""
        if self.stop is not None:
            self.stop()
            self.stop = None
