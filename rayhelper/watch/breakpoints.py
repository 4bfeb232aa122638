"""``breakpoint()`` in a process without a terminal: it waits there for a debugger, which comes by the process's door.

    Breakpoints.stop        is ``sys.breakpointhook``: says where it stopped and how to attach, then pdb takes over
    Breakpoints.answers     of the door: "breakpoints", is there one; "debug", what pdb wrote and is told; "halts"
    rayhelper debug         asks the driver, which asks the door: ``runtimes/debugging.py``

The door answers "debug" only while the process waits at a breakpoint of its own code: nobody can make it stop from
outside. A debugger that is not heard of any more is forgotten, and the process waits for the next one.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import os
import pdb
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

from rayhelper.watch.patches import stop_at_breakpoints

_LOOK_S = 0.5  # so often a process that waits looks whether its debugger is there, and tells who waits for it
_LOST_S = 5.0  # without a word of it
_MOST_TEXT = 200_000  # characters of what pdb wrote are kept
_NUM_STOPS = 8  # that debuggers may still ask for, to be told that they are over
_NUM_HALTS = 256  # of which it is known how long they took
Halts = list[tuple[float, float]]  # each began and ended so many seconds ago


class Breakpoints:
    """Those of one process.

    name: by which a debugger is attached: ``crew:1``.
    who: the process, for messages.
    tick: called now and then while it waits.
    has_terminal: pdb uses this process's own, as with Ray off.
    """

    def __init__(
        self,
        name: str,
        who: Callable[[], str],
        tick: Callable[[], object] | None = None,
        *,
        has_terminal: bool = False,
    ) -> None:
        self.name, self.who, self.tick, self.has_terminal = name, who, tick, has_terminal
        self.current: Stop | None = None
        self.stops: collections.deque[Stop] = collections.deque(maxlen=_NUM_STOPS)
        self.numbers = itertools.count(1)
        self.changed = threading.Condition()
        self.halts: collections.deque[list[float]] = collections.deque(maxlen=_NUM_HALTS)  # begin, end (0: not yet)
        self.answers: dict[str, Callable[[Any], Any]] = {
            "breakpoints": lambda _: self.described(),
            "debug": self.debugged,
            "halts": lambda _: self.halted(),
        }

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, ``breakpoint()`` stops here."""
        before = stop_at_breakpoints(self.stop)
        try:
            yield
        finally:
            stop_at_breakpoints(before)

    def stop(self, *, header: str | None = None) -> None:
        """As ``pdb.set_trace`` in the caller; ``PYTHONBREAKPOINT=0`` switches it off."""
        frame = cast(FrameType, cast(FrameType, inspect.currentframe()).f_back)
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return
        with self.changed:
            while self.current is not None and not self.current.may_be_followed():
                self.changed.wait(_LOOK_S)  # one thread at a time
            if self.current is None or not self.current.is_of_this_thread():
                code = frame.f_code
                where = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
                self.current = Stop(self, next(self.numbers), where)
                self.stops.append(self.current)
        self.current.stop_at(frame, header)

    def leave(self) -> None:
        """The call in which this thread stopped has ended."""
        current = self.current
        if current is not None and current.is_of_this_thread():
            sys.settrace(None)
            current.end()

    def described(self) -> dict[str, Any] | None:
        """Where the process waits; None: it does not."""
        current = self.current
        if current is None or not current.is_halted or self.has_terminal:
            return None
        return {
            "where": current.where,
            "who": self.who(),
            "for_s": time.monotonic() - current.since,
            "has_debugger": current.debugger_id is not None,
        }

    def debugged(self, question: dict[str, Any]) -> dict[str, Any]:
        """What a debugger is answered: see ``Stop.debugged``. ``stop``: the number of its stop; 0: the one there is."""
        number = question.pop("stop") or (0 if self.current is None else self.current.number)
        for stop in list(self.stops):
            if stop.number == number:
                return stop.debugged(**question)
        return {"refused": f"{self.who()} does not wait at a breakpoint."}

    def halted(self) -> Halts:
        """When the process waited at breakpoints."""
        now = time.monotonic()
        return [(now - began, now - (ended or now)) for began, ended in list(self.halts)]


class Stop:
    """A thread that stopped at a breakpoint, until it goes on for good: its pdb reads and writes here."""

    def __init__(self, place: Breakpoints, number: int, where: str) -> None:
        self.place, self.number, self.where = place, number, where
        self.thread = threading.get_ident()
        self.since = time.monotonic()
        self.changed = place.changed
        self.text, self.dropped = "", 0  # what pdb wrote, without its first characters
        self.lines: collections.deque[str] = collections.deque()  # what it has still to read
        self.num_lines = 0  # that the debugger has sent
        self.asks = self.is_halted = self.is_over = self.is_announced = False
        self.debugger_id: str | None = None
        self.heard = 0.0
        self.pdb = _Pdb(self)

    def is_of_this_thread(self) -> bool:
        return self.thread == threading.get_ident()

    def may_be_followed(self) -> bool:
        """Whether another ``breakpoint()`` of this thread may stop: it runs on, or it is this thread's own."""
        return self.is_of_this_thread() or not self.is_halted

    def stop_at(self, frame: FrameType, header: str | None) -> None:
        self.since = time.monotonic()
        code = frame.f_code
        self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        if header is not None:
            self.pdb.message(header)
        if not self.place.has_terminal and self.debugger_id is None:
            self._announce(f"waits at a breakpoint, {self.where}")
        self.pdb.set_trace(frame)

    def _announce(self, what: str) -> None:
        self.is_announced = True
        told = f"{self.place.who()} {what}. Attach on the driver's machine: rayhelper debug {self.place.name}"
        print(told, file=sys.stderr, flush=True)

    # What pdb does

    def halt(self) -> None:
        """pdb waits for commands from now on."""
        if self.is_halted:
            return
        self.is_halted = True
        self.place.halts.append([time.monotonic(), 0.0])
        if self.place.tick is not None:
            threading.Thread(target=self._tick, args=(self.place.tick,), name="rayhelper-halt", daemon=True).start()

    def _tick(self, tick: Callable[[], object]) -> None:
        while self.is_halted:
            tick()
            with self.changed:
                self.changed.wait(_LOOK_S)

    def go_on(self) -> None:
        """The thread runs on; it may stop again where pdb has set a breakpoint."""
        with self.changed:
            if self.is_halted:
                self.is_halted = self.is_announced = False
                self.place.halts[-1][1] = time.monotonic()
            self.changed.notify_all()

    def end(self) -> None:
        """The thread runs on for good."""
        self.go_on()
        with self.changed:
            self.is_over, self.asks = True, False
            if self.place.current is self:
                self.place.current = None
            self.changed.notify_all()

    def readline(self) -> str:
        """What the debugger's user typed; waits for it."""
        with self.changed:
            if self.debugger_id is None and not self.is_announced:
                self._announce(f"waits at a breakpoint, {self.where}")
            self.asks = True
            while not self.lines:
                self.changed.wait(_LOOK_S)
                if self.debugger_id is not None and time.monotonic() - self.heard > _LOST_S:
                    self._lose("has lost its debugger, and waits at the breakpoint again")
            self.asks = False
            return self.lines.popleft()

    def write(self, text: str) -> int:
        with self.changed:
            self.text += text
            if len(self.text) > 2 * _MOST_TEXT:
                self.dropped += len(self.text) - _MOST_TEXT
                self.text = self.text[-_MOST_TEXT:]
        return len(text)

    def flush(self) -> None:
        pass

    # What a debugger does

    def debugged(self, debugger: str, seen: int, line: Sequence[Any] | None, leaves: bool) -> dict[str, Any]:
        """What pdb wrote behind the first ``seen`` characters, and whether it waits for a line.

        debugger: who asks; the first who does is attached, until it leaves or is not heard of any more.
        line: its number and text; one that came before is ignored.
        """
        with self.changed:
            if self.debugger_id not in (None, debugger):
                return {"refused": f"{self.place.who()} has a debugger already."}
            if self.debugger_id is None and not self.is_over:
                self.debugger_id, self.num_lines = debugger, 0
            self.heard = time.monotonic()
            if leaves and not self.is_over:
                self._lose("waits at the breakpoint again, as its debugger has left")
            elif line is not None and line[0] == self.num_lines and not self.is_over:
                self.num_lines += 1
                self.lines.append(line[1])
                self.asks = False
                self.changed.notify_all()
            text = self.text[max(0, seen - self.dropped) :]
            asks = self.asks and not self.lines
            told = {"stop": self.number, "text": text, "seen": self.dropped + len(self.text)}
            return {**told, "asks": asks, "over": self.is_over}

    def _lose(self, what: str) -> None:
        self.debugger_id = None
        if self.is_halted:
            self._announce(what)


class _Pdb(pdb.Pdb):
    """pdb whose terminal is a ``Stop``, or the process's own."""

    def __init__(self, stop: Stop) -> None:
        files = {} if stop.place.has_terminal else {"stdin": stop, "stdout": stop}
        super().__init__(nosigint=True, **files)  # type: ignore[arg-type]
        self.stop = stop

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """It waits for commands."""
        self.stop.halt()
        try:
            super().interaction(*args, **kwargs)
        except BaseException:  # the call was given up
            self.stop.end()
            raise

    def set_continue(self) -> None:
        """The command ``c``."""
        super().set_continue()
        if self.get_all_breaks():
            self.stop.go_on()
        else:
            self.stop.end()

    def set_quit(self) -> None:
        """The command ``q``."""
        super().set_quit()
        self.stop.end()


def paused_s(halts: Iterable[Halts], last_s: float) -> float:
    """How many of the last so many seconds some process waited at a breakpoint."""
    waited_s, until = 0.0, last_s
    for began, ended in sorted((one for each in halts for one in each), reverse=True):
        began = min(began, until)
        if began > ended:
            waited_s += began - ended
            until = ended
    return waited_s
