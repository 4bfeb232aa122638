"""Where the driver's time goes: the seconds of a step by phase, each moment counted once.

    with stopwatch.phase("generate"):      # waiting for workers is the driver's time too
        with stopwatch.phase("data"): ...  # counts as data, not as generate
    with stopwatch.stopped(): ...          # counts nowhere: what belongs to no step
    stopwatch.lap()                        # {"idle": 0.1, "generate": 8.0, "data": 0.2}; the next lap begins

What the workers do is not looked at: ``rayhelper``'s trace shows it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

IDLE = "idle"  # what no phase covers


class Stopwatch:
    """Runs from the start; ``clock`` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.current: str | None = IDLE  # None: stopped
        self.since = clock()
        self.begun_ns: int | None = None  # the time of day at which the first phase of this lap began

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Inside, time counts as ``name``, but for that in further phases; where the watch is stopped, nowhere."""
        if self.current is not None:
            self.begun_ns = self.begun_ns or time.time_ns()
        return self._within(None if self.current is None else name)

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """Inside, time counts nowhere, not in a phase either."""
        return self._within(None)

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap by phase, ``idle`` among them: they add up to all that counted."""
        self._turn_to(self.current)
        seconds = {IDLE: 0.0, **self.seconds}
        self.seconds, self.begun_ns = {}, None
        return seconds

    @contextlib.contextmanager
    def _within(self, name: str | None) -> Iterator[None]:
        outer = self.current
        self._turn_to(name)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, name: str | None) -> None:
        now = self.clock()
        if self.current is not None:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self.since
        self.current, self.since = name, now


def step_times(seconds: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a lap: ``time/step``, and ``time/<phase>`` in seconds and as a share of the step."""
    step = sum(seconds.values())
    times = {f"time/{phase}": value for phase, value in seconds.items()}
    shares = {f"time_share/{phase}": value / step if step else 0.0 for phase, value in seconds.items()}
    return {"time/step": step, **times, **shares}
