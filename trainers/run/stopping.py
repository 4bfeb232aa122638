"""What asks a run to end before its last step: signals, and a limit of time.

    SIGTERM, SIGUSR1, SIGHUP     finish the step, save, say how to go on, exit with 143
    SIGTERM and a hang           the step or the checkpoint is given up: say where and how to go on, exit with 143
    SIGINT                       the same with ``save_on_interrupt``, exit with 130; the next one interrupts
    save_before_s                the same, exit with 0

``Run`` asks between its rounds; nothing here saves. Under torchrun all processes end after the same step, whichever of
them a signal reached; on Ray the driver is signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EXIT_CODE = 128 + signal.SIGTERM  # after each of SIGNALS, so that a scheduler looks for one code
SAME_INTERRUPT_S = 3.0  # a terminal and torchrun's launcher both pass one Ctrl-C on
STOP_GRACE_S = 20.0  # for a step, after SIGTERM; SLURM and Kubernetes send SIGKILL after 30 s
SAVE_GRACE_S = 60.0  # for saving: half a checkpoint is worth nothing
FIRST_SAVE_GRACE_S = 1800.0  # at most, while nothing shows how long saving takes
SAVED_BYTES = 32  # per parameter: weights and Adam's state in float32 are 12, copies 4, and there may be two models
SAVED_BYTES_PER_S = 1e8  # of a slow disk; behind them all is read once more, for the checksums
STEP_LOOK_S = 0.2
ASKED_S = 2.5  # within which process 0 of torchrun asks the others where they are
UNWIND_S = 8.0  # from what was given up to the end of the run; on process 0 the others end meanwhile, which frees it
LAUNCHER_LOOK_S = 1.0
LAUNCHER_GRACE_S = 120.0  # for a step and a checkpoint, once the launcher is gone


class Stopped(SystemExit):
    """A run ended before its last step, and saved a checkpoint if it had begun. ``code``: the process's exit code."""


class StepGivenUp(Stopped):
    """A run ended in a step, or in saving, that did not end in time after SIGTERM.

    Nothing was saved since the last checkpoint.
    """


class GivenUp(KeyboardInterrupt):
    """Raised inside a step, or saving, that is given up: as Ctrl-C, it passes through what runs there."""


@dataclass(frozen=True)
class Stop:
    """Why a run ends before its last step, and the exit code."""

    reason: str
    code: int


def first_save_s(num_parameters: int | None) -> float:
    """Seconds that the first checkpoint of a run has after SIGTERM: what its bytes take on a slow disk.

    ``num_parameters``: of the model; None: not known. At least SAVE_GRACE_S and at most FIRST_SAVE_GRACE_S.
    """
    if num_parameters is None:
        return FIRST_SAVE_GRACE_S
    return min(max(SAVE_GRACE_S, num_parameters * SAVED_BYTES / SAVED_BYTES_PER_S), FIRST_SAVE_GRACE_S)


class StopSignals:
    """Inside, signals of ``SIGNALS`` are noted and do nothing else; ``noted`` is the first that came, or None.

    One that was ignored before, as SIGHUP is under nohup, still is. Outside of the main thread nothing is noted.
    What does not end in time after SIGTERM is given up, see ``StepWatch``: GivenUp is raised where it is. Forked
    children end by these signals.

    SIGTERM that came to another process of torchrun is noted too. ``pass_on`` tells the others of one that came here.
    ``num_parameters``: of the model that is saved, see ``first_save_s``.
    """

    def __init__(
        self,
        *,
        with_interrupt: bool,
        grace_s: float | None = None,
        where: Callable[[], str | None] = lambda: "",
        pass_on: Callable[[], Any] = lambda: None,
        num_parameters: int | None = None,
    ) -> None:
        self.signals = (*SIGNALS, signal.SIGINT) if with_interrupt else SIGNALS
        self.noted: signal.Signals | None = None
        self.noted_at = 0.0
        self.before: dict[signal.Signals, Any] = {}
        self.watch = StepWatch(grace_s, where, pass_on, first_save_s(num_parameters))

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for one in self.signals:
                if signal.getsignal(one) is not signal.SIG_IGN:
                    self.before[one] = signal.signal(one, self._note)
            if signal.SIGTERM in self.before:
                self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.end()
        for one, handler in self.before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        self.before = {}

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            self.watch.ask()
            if self.watch.has_given_up:
                raise GivenUp
        if self.noted is None:
            self.noted, self.noted_at = signal.Signals(number), now
            told = f"\n{self.noted.name}: the run finishes this step, saves a checkpoint and ends\n"
            os.write(2, told.encode())  # print may be at work when a signal comes
        elif number == signal.SIGINT and now - self.noted_at > SAME_INTERRUPT_S:
            raise KeyboardInterrupt

    def note_elsewhere(self) -> None:
        """SIGTERM has come to another process. Any thread may call it."""
        if signal.SIGTERM in self.before:
            if self.noted is None:
                self.noted, self.noted_at = signal.SIGTERM, time.monotonic()
            self.watch.ask()

    def stop(self) -> Stop | None:
        if self.noted is None:
            return None
        return Stop(self.noted.name, 128 + self.noted if self.noted == signal.SIGINT else EXIT_CODE)


@dataclass
class Work:
    """One kind of what a run does, and how long it may take after SIGTERM."""

    name: str  # as messages say it
    grace_s: float  # at least
    first_s: float  # while none has ended
    longest_s: float | None = None  # None: none has ended

    @property
    def limit_s(self) -> float:
        """Twice the time of the longest so far, or ``grace_s`` if that is longer."""
        return self.first_s if self.longest_s is None else max(self.grace_s, 2 * self.longest_s)


class StepWatch:
    """A thread that gives a step up if the step does not end in time after SIGTERM; saving and loading likewise.

    ``grace_s`` bounds a step, and loading. None: STOP_GRACE_S, or twice the longest step so far if that is longer.
    Saving has at least SAVE_GRACE_S, and ``first_s`` while nothing was saved. The thread writes ``where()`` to
    stderr (None: another process tells) and raises by a second SIGTERM. If the run has not ended ``UNWIND_S`` later, it
    ends the process. The interpreter itself writes the numbers of signals into a pipe, so that the thread hears of one
    while native code keeps the main thread, as a collective does. Before all else it calls ``pass_on``.
    """

    pipe = -1  # of the thread that runs, for forked children

    def __init__(
        self, grace_s: float | None, where: Callable[[], str | None], pass_on: Callable[[], Any], first_s: float
    ) -> None:
        self.grace_s, self.where, self.pass_on = grace_s, where, pass_on
        self.steps = Work("the step", STOP_GRACE_S, STOP_GRACE_S)
        self.savings = Work("saving", SAVE_GRACE_S, first_s)
        self.loadings = Work("loading", SAVE_GRACE_S, SAVE_GRACE_S)
        self.running: tuple[Work, float] | None = None  # and when it began
        self.has_given_up = False
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def limit_s(self, work: Work) -> float:
        """Seconds that the work has after SIGTERM."""
        if self.grace_s is None:
            return work.limit_s
        return max(self.grace_s, work.limit_s) if work is self.savings else self.grace_s

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a step runs, or an evaluation."""
        return self._runs(self.steps)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a checkpoint is written, or the model at the end."""
        return self._runs(self.savings)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a checkpoint is read, so that nothing is lost if that is given up."""
        return self._runs(self.loadings)

    @contextlib.contextmanager
    def _runs(self, work: Work) -> Iterator[None]:
        self._listen()
        outer, began = self.running, time.monotonic()
        self.running = work, began
        try:
            yield
        finally:
            self.running = outer
        work.longest_s = max(work.longest_s or 0.0, time.monotonic() - began)

    def start(self) -> None:
        """Starts the thread. The main thread calls it."""
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        StepWatch.pipe = self.writing
        self.thread = threading.Thread(target=self._run, name="rayhelper-stop-watch", daemon=True)
        self.thread.start()
        self._listen()

    def _listen(self) -> None:
        """Signals are written into the pipe, unless something else reads them, as asyncio's loop does."""
        if self.thread is not None and threading.current_thread() is threading.main_thread():
            other = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
            if other not in (-1, self.writing):
                signal.set_wakeup_fd(other, warn_on_full_buffer=False)

    def ask(self) -> None:
        """SIGTERM has come."""
        if StepWatch.pipe != -1:
            with contextlib.suppress(BlockingIOError):  # full of signals that say the same
                os.write(StepWatch.pipe, bytes([signal.SIGTERM]))

    def end(self) -> None:
        """Ends the thread."""
        if self.thread is None:
            return
        _forget_pipe()
        self.over.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self.writing, b"\0")
        self.thread.join()
        self.thread = None
        os.close(self.reading)
        os.close(self.writing)

    def _run(self) -> None:
        while signal.SIGTERM not in os.read(self.reading, 64):
            if self.over.is_set():
                return
        asked_at = time.monotonic()
        self.pass_on()
        while not self.over.wait(STEP_LOOK_S) and not self.has_given_up:
            running = self.running
            if running is None:
                continue
            work, began = running
            if time.monotonic() - max(began, asked_at) >= self.limit_s(work):
                self._give_up(running)

    def _give_up(self, running: tuple[Work, float]) -> None:
        work, _ = running
        rule = "" if work is self.savings else " (stop_grace_s)"
        where = self.where()
        if self.over.is_set() or self.running is not running:  # it has ended meanwhile
            return
        self.has_given_up = True
        if where is not None:
            told = f"\nSIGTERM: {work.name} did not end within {self.limit_s(work):g} s{rule} and is abandoned\n"
            os.write(2, f"{told}{where}\n".encode())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if not self.over.wait(UNWIND_S):
            os._exit(EXIT_CODE)


def _begin_as_child() -> None:
    """A forked child ends by the signals that its parent notes, and writes none into its parent's pipe."""
    _forget_pipe()
    for one in (*SIGNALS, signal.SIGINT):
        handler = signal.getsignal(one)
        if handler is _end or isinstance(getattr(handler, "__self__", None), StopSignals):
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)


def _forget_pipe() -> None:
    if StepWatch.pipe != -1 and (other := signal.set_wakeup_fd(-1)) != StepWatch.pipe:
        signal.set_wakeup_fd(other, warn_on_full_buffer=False)
    StepWatch.pipe = -1


os.register_at_fork(after_in_child=_begin_as_child)


@contextlib.contextmanager
def ends_by_sigterm(*, ends_process: bool = False) -> Iterator[None]:
    """Inside, each of ``SIGNALS`` that is not ignored raises ``Stopped`` with ``EXIT_CODE``.

    Without a handler process 1 of a container never gets SIGTERM, and Ray's own exits with 15, after a stack of C++.
    ``ends_process``: after ``Stopped`` SIGTERM does nothing. torchrun's launcher sends it to the other processes when
    one has ended, and it would change their exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [one for one in SIGNALS if one == signal.SIGTERM or signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, _end) for one in heard}
    try:
        yield
    except Stopped:
        if ends_process:
            before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def _end(_number: int, _frame: Any) -> NoReturn:
    raise Stopped(EXIT_CODE)


@contextlib.contextmanager
def ends_with_parent() -> Iterator[None]:
    """Inside, this process ends when the one that started it is gone, as a torchrun launcher is after kill -9.

    It sends itself SIGTERM, so that a run saves first, and is gone ``LAUNCHER_GRACE_S`` later whatever it does.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch_parent, args=(os.getppid(), ended), name="rayhelper-launcher", daemon=True)
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
