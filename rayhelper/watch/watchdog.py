"""One thread that looks after the calls of this process: one that comes to no end is reported, or ended.

    with Watched(Call(what, limit_s)):      after ``limit_s`` seconds it is interrupted: LateError, or ``error``
    Call(what, where=..., own_clock=True)   after ``warn_s()`` seconds without an end: one warning, again and again
    watchdog.made += 1                      a call with Ray off, which is found on the stack of its thread: see ``Off``

The main thread is interrupted by a signal, where it is. Native code is interrupted as it returns; other threads are not
interrupted. Both are reported once, with the stack. A call that waits at the prompt of a debugger is not late; its time
starts over behind it. The thread ends when nothing is to be looked after.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from rayhelper.errors import ConfigError
from rayhelper.watch.places import Place, calls_on_stacks, frames_of, stacks, summaries

_WARN_S = 300.0  # unless RAYHELPER_WARN_S says otherwise
_LOOK_S = 1.0  # the longest time between two looks
_LOOKS = 4.0  # in the time of a limit, and between two warnings
_IDLE_S = 1.5  # without calls, after which the thread ends
_AGAIN_S = 1.0  # code that swallows the interruption, or does not hear of it, is interrupted again
_IMPORTING_S = 0.1  # after this time it is looked again whether an import has ended that was not to be interrupted
_SIGNAL = signal.SIGRTMIN + 7  # no library's: judges of answers set alarms of their own
_DEBUGGERS = ("bdb", "pydevd")  # modules on the stack of a thread whose debugger waits for its user
_NUM_FRAMES = 24  # of a stack are told
_NEVER = float("inf")
_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep
_log = logging.getLogger(__name__)


def warn_s() -> float:
    """Seconds without an answer after which it is logged where a call is; 0: never. Raises ConfigError."""
    written = os.environ.get("RAYHELPER_WARN_S")
    try:
        return _WARN_S if written is None else float(written)
    except ValueError:
        raise ConfigError(
            f"RAYHELPER_WARN_S must be a number of seconds, got {written!r}. Correct or unset it."
        ) from None


class LateError(TimeoutError):
    """What was given a limit of time did not return within it."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(what, limit_s)
        self.what, self.limit_s = what, limit_s

    def __str__(self) -> str:
        return f"{self.what} did not return within {self.limit_s:g} s. Raise the limit if it needs longer."


class Interrupted(BaseException):
    """Raised inside a call that is late. No Exception, which `except Exception` in it would swallow."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


class Call:
    """Something that runs here, or that this process waits for, and that should come to an end.

    what: as messages name it; a function where it takes time to say, or changes.
    limit_s: seconds after which it is interrupted; None: never.
    error: what is raised then.
    on_late: called by the thread instead, which interrupts nothing.
    warns: whether it is reported if it does not end.
    where: says who has not answered, and where they are (empty: all have); None: it is the stack of the thread in which
        it began, whose innermost call alone is reported.
    paused_s: how many of the last so many seconds were spent at breakpoints elsewhere.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        limit_s: float | None = None,
        error: Callable[[Call], Exception] | None = None,
        *,
        warns: bool = True,
        where: Callable[[], str] | None = None,
        paused_s: Callable[[float], float] | None = None,
        on_late: Callable[[], object] | None = None,
    ) -> None:
        self.what, self.limit_s, self.error = what, limit_s, error
        self.warns, self.where, self.paused_s, self.on_late = warns, where, paused_s, on_late
        self.thread = threading.get_ident()
        self.began = self.quiet_since = time.monotonic()
        self.due = _NEVER if limit_s is None else self.began + limit_s
        self.num_interrupted = self.num_heard = 0
        self.is_late = self.is_reported = False
        self.stack = ""  # where it was when it was late

    @property
    def title(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    @property
    def is_of_main_thread(self) -> bool:
        return self.thread == threading.main_thread().ident

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ends it."""
        return self.limit_s is not None and self.on_late is None and self.is_of_main_thread

    def late(self) -> Exception:
        """The error for it, which is late."""
        return LateError(self.title, self.limit_s or 0.0) if self.error is None else self.error(self)


class Off:
    """How calls with Ray off are found, which announce nothing: by the code that makes them, on a thread's stack.

    title: says from the local variables of a frame of this code which call it is; None: none that runs here.
    """

    def __init__(self, code: CodeType, title: Callable[[dict[str, Any]], str | None]) -> None:
        self.code, self.title = code, title


class Watchdog:
    """The thread, and what it looks after."""

    def __init__(self) -> None:
        self.made = 0  # calls with Ray off
        self.is_awake = False
        self.calls: dict[int, Call] = {}  # that have not ended, in the order in which they began
        self.off: list[Off] = []
        self.handled: Any = None  # the handler before ours; None: ours is not set
        self.num_limited = 0  # calls of the main thread with a limit
        self._forget()

    def _forget(self) -> None:
        """In a forked child there is no thread."""
        self.is_awake = False
        self.calls = {}
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # from a signal's handler, too
        self.firing, self.starting = threading.Lock(), threading.Lock()
        self.last_made = -1
        self.quiet_since = self.warned = self.busy = time.monotonic()

    def begin(self, call: Call) -> None:
        """From now on it is looked after."""
        if call.is_interrupted:
            if self.num_limited == 0:
                self.handled = signal.signal(_SIGNAL, self._interrupt)
            self.num_limited += 1
        self.made += 1
        self.calls[id(call)] = call
        if self.is_awake:
            self.woken.put(None)
        else:
            self.wake()

    def end(self, call: Call) -> None:
        """It has ended. Again is harmless."""
        if self.calls.pop(id(call), None) is None:
            return
        self.made += 1
        if call.is_interrupted:
            with self.firing:  # no signal comes after the handler has gone
                self.num_limited -= 1
            if self.num_limited == 0:
                signal.signal(_SIGNAL, signal.SIG_DFL if self.handled is None else self.handled)

    def wake(self) -> None:
        """Starts the thread, if there is none."""
        with self.starting:
            if not self.is_awake:
                self.is_awake = True
                self.busy = time.monotonic()
                self.last_made = -1
                threading.Thread(target=self._run, name="rayhelper-watchdog", daemon=True).start()

    def _run(self) -> None:
        woken = self.woken
        while self.is_awake:
            try:
                wait_s = self._look()
            except Exception:  # calls must not be left without the thread
                _log.exception("the watchdog could not watch the calls")
                wait_s = _LOOK_S
            with contextlib.suppress(queue.Empty):
                woken.get(timeout=wait_s)

    def _look(self) -> float:
        """Looks after all; seconds until the next look. It reads stacks only if something may be late or idle."""
        now, every_s = time.monotonic(), _every_s()
        calls = list(self.calls.values())
        if self.made != self.last_made:
            self.last_made, self.quiet_since, self.warned, self.busy = self.made, now, now, now
        innermost = {call.thread: call for call in calls if call.where is None and call.warns}
        for call in calls:
            quiet_since = call.quiet_since if call.where else max(call.quiet_since, self.quiet_since)
            is_told = call.warns and (call.where is not None or innermost.get(call.thread) is call)
            is_quiet = is_told and now - quiet_since >= every_s
            if (now >= call.due or is_quiet) and call.where is None and _in_debugger(stacks().get(call.thread)):
                call.due = max(call.due, now + (call.limit_s or 0.0))  # its time starts over behind the prompt
                call.quiet_since = now
                continue
            if now >= call.due:
                self._late(call, now)
            if is_quiet:
                self._warn(call, now)
        if now - max(self.quiet_since, self.warned) >= every_s:
            self.warned = now
            for places, title in self._found():
                if not _in_debugger(places):
                    _report(title, now - self.quiet_since, _here(stack_of_frames(places[::-1])))
        if calls:
            self.busy = now
        elif now - self.busy > _IDLE_S:
            codes = {off.code for off in self.off}
            if codes and any(one.code in codes for places in stacks().values() for one in places):
                self.busy = now
            else:
                with self.starting:
                    self.is_awake = False  # a call that is made from now on starts another thread
                    self.is_awake = bool(self.calls) or self.made != self.last_made  # this one was made before
        due_s = min((call.due - time.monotonic() for call in calls), default=_LOOK_S)
        limits = [call.limit_s for call in calls if call.limit_s is not None]
        return max(0.001, min(_LOOK_S, due_s, min([every_s, *limits]) / _LOOKS))

    def _found(self) -> list[tuple[list[Place], str]]:
        """The calls with Ray off: of each thread, its stack and the innermost one's title."""
        return calls_on_stacks({off.code: off.title for off in self.off})

    def _late(self, call: Call, now: float) -> None:
        if call.paused_s is not None and not call.is_late:
            call.due = call.began + (call.limit_s or 0.0) + call.paused_s(now - call.began)
            if call.due > now:
                return
        call.is_late = True
        call.due = now + _AGAIN_S
        if call.on_late is not None:
            call.due = _NEVER
            call.on_late()
            return
        if not call.is_of_main_thread:
            call.due = _NEVER
            self._report_deaf(call, "it runs in a thread that is not the main one")
            return
        if call.num_interrupted > call.num_heard:
            self._report_deaf(call, "native code has not returned to Python")
        with self.firing:
            if id(call) in self.calls:
                call.num_interrupted = call.num_heard + 1
                signal.pthread_kill(call.thread, _SIGNAL)

    def _report_deaf(self, call: Call, why: str) -> None:
        if not call.is_reported:
            call.is_reported = True
            call.stack = stack_of_frames(stacks().get(call.thread, ())[::-1])
            _log.warning(
                "%s did not end within %g s and cannot be interrupted: %s. It ends when it returns. Where it is:\n%s",
                call.title,
                call.limit_s,
                why,
                call.stack,
            )

    def _warn(self, call: Call, now: float) -> None:
        if call.paused_s is not None and (paused_s := call.paused_s(now - call.quiet_since)) > 0:
            call.quiet_since += paused_s
            return
        call.quiet_since = now
        where = call.where() if call.where else _here(stack_of_frames(stacks().get(call.thread, ())[::-1]))
        if where:
            _report(call.title, now - call.began, where)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        late = [call for call in self.calls.values() if call.num_interrupted > call.num_heard]
        for call in late:
            if is_importing(frame):  # a module that is interrupted half-way cannot be imported again
                call.num_heard += 1
                call.due = time.monotonic() + _IMPORTING_S
                self.woken.put(None)
                continue
            call.num_heard += 1
            call.stack = stack_of(frame)
            raise Interrupted(call)


class Watched:
    """Inside, a call is looked after. Raises ``call.late()`` if it was late. No generator: see ``acting_as``."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __enter__(self) -> Call:
        watchdog.begin(self.call)
        return self.call

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            watchdog.end(self.call)
        except Interrupted as own:  # it ended in the very moment in which it was late
            if own.call is not self.call:
                raise
            watchdog.end(self.call)
            error = error or own
        if isinstance(error, Interrupted) and error.call is self.call:
            raise self.call.late() from error
        if error is None and self.call.is_late:  # it was not interrupted, or went on
            raise self.call.late()


def _report(title: str, seconds: float, where: str) -> None:
    _log.warning("%s: no answer for %.0f s%s", title, seconds, where)


def _here(stack: str) -> str:
    return f". Where it is:\n{stack}"


def _every_s() -> float:
    try:
        return warn_s() or _NEVER
    except ConfigError:  # raised where a session begins
        return _NEVER


def _in_debugger(places: Sequence[Place] | None) -> bool:
    """Whether a debugger waits for its user on this stack."""
    return any(one.module.startswith(_DEBUGGERS) for one in itertools.islice(places or (), 64))


def is_importing(frame: FrameType | None) -> bool:
    """Whether the code at this frame runs because a module is being imported."""
    return any(one.f_code.co_filename == "<frozen importlib._bootstrap>" for one in frames_of(frame))


def stack_of(frame: FrameType | None) -> str:
    """The innermost frames of a stack as text, most recent call last; of a thread that has ended: empty."""
    return stack_of_frames(list(frames_of(frame))[::-1])


def stack_of_frames(frames: Sequence[FrameType | Place]) -> str:
    """As text, without those of this library: how a call came to where it is, is known."""
    stack = summaries(frames)
    shown = [one for one in stack if not one.filename.startswith(_LIBRARY)]
    return "".join(traceback.format_list((shown or stack)[-_NUM_FRAMES:]))


watchdog = Watchdog()
os.register_at_fork(after_in_child=watchdog._forget)
