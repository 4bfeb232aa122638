"""What asks a run to end before its last step: signals, and a limit of time.

    SIGTERM, SIGUSR1, SIGHUP     finish the step, save, say how to go on, exit with 143
    SIGINT                       the same with ``save_on_interrupt``, exit with 130; the next one interrupts
    save_before_s                the same, exit with 0

``Run`` asks between its rounds; nothing here saves. Under torchrun process 0 decides for all, on Ray the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EXIT_CODE = 128 + signal.SIGTERM  # after each of SIGNALS, so that a scheduler looks for one code
SAME_INTERRUPT_S = 3.0  # a terminal and torchrun's launcher both pass one Ctrl-C on
LAUNCHER_LOOK_S = 1.0
LAUNCHER_GRACE_S = 120.0  # for a step and a checkpoint, once the launcher is gone


class Stopped(SystemExit):
    """A run ended before its last step, and saved a checkpoint if it had begun. ``code``: the process's exit code."""


@dataclass(frozen=True)
class Stop:
    """Why a run ends before its last step, and the exit code."""

    reason: str
    code: int


class StopSignals:
    """Inside, signals of ``SIGNALS`` are noted and do nothing else; ``noted`` is the first that came, or None.

    One that was ignored before, as SIGHUP is under nohup, still is. Outside of the main thread nothing is noted.
    """

    def __init__(self, *, with_interrupt: bool) -> None:
        self.signals = (*SIGNALS, signal.SIGINT) if with_interrupt else SIGNALS
        self.noted: signal.Signals | None = None
        self.noted_at = 0.0
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for one in self.signals:
                if signal.getsignal(one) is not signal.SIG_IGN:
                    self.before[one] = signal.signal(one, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self.before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        self.before = {}

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self.noted is None:
            self.noted, self.noted_at = signal.Signals(number), now
            told = f"\n{self.noted.name}: the run finishes this step, saves a checkpoint and ends\n"
            os.write(2, told.encode())  # print may be at work when a signal comes
        elif number == signal.SIGINT and now - self.noted_at > SAME_INTERRUPT_S:
            raise KeyboardInterrupt

    def stop(self) -> Stop | None:
        if self.noted is None:
            return None
        return Stop(self.noted.name, 128 + self.noted if self.noted == signal.SIGINT else EXIT_CODE)


@contextlib.contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises ``Stopped`` with ``EXIT_CODE``.

    Without a handler process 1 of a container never gets it, and Ray's own exits with 15, after a stack of C++.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_number: int, _frame: Any) -> NoReturn:
    raise Stopped(EXIT_CODE)


@contextlib.contextmanager
def ends_with_parent() -> Iterator[None]:
    """Inside, this process ends when the one that started it is gone, as a torchrun launcher is after kill -9.

    It sends itself SIGTERM, so that a run saves first, and is gone ``LAUNCHER_GRACE_S`` later whatever it does.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch_parent, args=(os.getppid(), ended), name="launcher-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch_parent(parent: int, ended: threading.Event) -> None:
    while not ended.wait(LAUNCHER_LOOK_S):
        if os.getppid() != parent:
            os.write(2, b"\nthe launcher of this process is gone\n")
            os.kill(os.getpid(), signal.SIGTERM)
            if not ended.wait(LAUNCHER_GRACE_S):
                os._exit(EXIT_CODE)
            return
