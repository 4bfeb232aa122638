"""Calls of asynchronous methods that are in flight on a group together, and the thread that collects their values.

    begin                          host.begin on every rank, in the order in which calls are made; not waited for
    thread, while there are any    host.collect on every rank: coroutines run on there until one ends

Between two rounds the workers make other calls. A worker that was replaced does not know a call: it begins there anew.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rayhelper.device_groups.group import CALL_S
from rayhelper.roles.futures import Finished
from rayhelper.runtimes.ray.call import GroupCall
from rayhelper.runtimes.ray.recovery import Recovery
from rayhelper.runtimes.ray.waiting import SAME_S, STEP_S, Deadline, attended, late_error, not_sent
from rayhelper.watch.watchdog import watchdog
from rayhelper.worker.failures import Failure, raise_failures

_SHORTEST_S, _LONGEST_S = 0.005, 1.0  # of a round
_OF_THE_TIME = 0.1  # a round lasts at most this part of the time since the last call began
_WORTH_WAKING_S = 0.02  # other calls wait for shorter rounds to end
_WAKING_S = 1.0


class AwaitedCall(GroupCall):
    """A call of an asynchronous method, which runs beside others."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.limit_s = self.calls.group.timeout_s or CALL_S
        self.deadline = Deadline(self.limit_s, self.calls.paused_s)
        self.attending = attended(self.recovery, self.title, lambda: self.waiting)
        self.replies: dict[int, Any] = {}  # by rank
        self.failed_s: float | None = None  # when a rank failed first
        self.is_stopped = False  # the workers were told to give it up
        self.value: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def _remotes(self) -> Sequence[Callable[..., Any]]:
        return [functools.partial(actor.begin.remote, self.location) for actor in self.calls.crew.actors]

    def token(self, rank: int) -> str:
        """The id under which a worker knows it."""
        return str(self.refs[rank].task_id().hex())

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(len(self.refs)) if rank not in self.replies]

    def settle(self, outcome: Finished) -> None:
        """The caller gets the value, or the error."""
        if self.value.done() or not self.value.set_running_or_notify_cancel():
            return
        if outcome.error is None:
            self.value.set_result(outcome.value)
        else:
            self.value.set_exception(outcome.error)

    def fail(self, error: Exception) -> None:
        """It cannot be collected any more."""
        self.outcome = Finished.failed(error)
        self.settle(self.outcome)


class AwaitedCalls:
    """Those of one group that have not ended."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.calls: list[AwaitedCall] = []
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.asked = Asked(self)
        self.begun_s = 0.0  # when the last call began

    def begin(self, call: AwaitedCall) -> concurrent.futures.Future[Any]:
        """Begins a call on its workers. To cancel the future is to give the call up."""
        with self.recovery.calls.lock:
            call.send(range(len(call.refs)))
        self.begun_s = time.monotonic()
        watchdog.begin(call.attending)
        call.value.add_done_callback(lambda _: watchdog.end(call.attending))
        self.wake()
        with self.lock:
            self.calls.append(call)
            if self.thread is None:
                self.thread = threading.Thread(target=self._collect_all, name="rayhelper-awaited", daemon=True)
                self.thread.start()
        call.value.add_done_callback(lambda value: self.wake() if value.cancelled() else None)
        return call.value

    def wake(self) -> None:
        """Ends rounds that run, if one is long: the workers have something else to do."""
        if self.asked.longest_s > _WORTH_WAKING_S:
            self.recovery.crew.ask("wake", timeout_s=_WAKING_S)

    def _collect_all(self) -> None:
        while True:
            with self.lock:
                self.calls = [call for call in self.calls if call.waiting and call.outcome is None]
                if not self.calls:
                    self.recovery.calls.close(self.asked)
                    self.thread = None
                    return
                calls = list(self.calls)
            try:
                self._collect(calls)
            except Exception as error:  # nothing can be collected any more
                for call in calls:
                    call.fail(error)

    def _collect(self, calls: list[AwaitedCall]) -> None:
        """Takes what has come of the calls, and settles those that are known to their end.

        Every rank is asked by itself: one may wait for the others in a collective.
        """
        under_way, asked = self.recovery.calls, self.asked
        under_way.check_usable(calls[0].title)
        with under_way.lock:
            asked.send(rank for rank in asked.ranks_of(calls) if rank not in asked.running)
            under_way.note_open(asked)
        refs = {asked.refs[rank]: rank for rank in asked.running}
        for ref in ray.wait(list(refs), num_returns=1, timeout=STEP_S)[0]:
            asked.running.pop(refs[ref], None)
            try:
                reply = ray.get(ref)
            except RayActorError as error:
                self.recovery.died(error, calls[0].title, asked, refs[ref])
                break
            except RayTaskError as error:
                raise not_sent(self.recovery, refs[ref], calls[0].title, error) from None
            if not isinstance(reply, Failure):  # it was interrupted
                for call in list(self.calls):  # one that began since may have been asked for, and have ended
                    if refs[ref] in call.waiting:
                        self._note(call, refs[ref], *reply)
        for call in list(self.calls):
            self._look_after(call)

    def round_s(self, calls: list[AwaitedCall]) -> float:
        """How long a worker may run coroutines before it looks for other calls."""
        longest_s = SAME_S if any(call.failed_s for call in calls) else _LONGEST_S
        return max(_SHORTEST_S, min(longest_s, _OF_THE_TIME * (time.monotonic() - self.begun_s)))

    def _note(self, call: AwaitedCall, rank: int, ended: dict[str, Any], unknown: list[str]) -> None:
        token = call.token(rank)
        if token in ended:
            call.replies[rank] = ended[token]
            if isinstance(ended[token], Failure):
                call.failed_s = call.failed_s or time.monotonic()
        elif token in unknown:
            try:
                self._begin_anew(call, rank)
            except Exception as error:
                call.fail(error)

    def _begin_anew(self, call: AwaitedCall, rank: int) -> None:
        """On a worker that does not know the call: it was replaced, or has not got the call."""
        try:
            ray.get(call.refs[rank])
        except RayActorError as error:
            self.recovery.died(error, call.title, call, rank)
        except RayTaskError as error:
            raise not_sent(self.recovery, rank, call.title, error) from None
        else:
            call.send([rank])

    def _look_after(self, call: AwaitedCall) -> None:
        now = time.monotonic()
        if call.outcome is not None or call.is_stopped:
            return
        if not call.waiting:
            call.settle(Finished(lambda: _collected(call)))
        elif call.failed_s is not None and now > call.failed_s + SAME_S:
            call.settle(Finished(lambda: raise_failures(call.replies.values())))
            self._stop(call)
        elif call.value.cancelled():
            self._stop(call)
        elif call.deadline.has_passed():
            late = [(rank, call.refs[rank]) for rank in call.waiting]
            call.is_stopped = True
            call.settle(Finished.failed(late_error(self.recovery, late, call.title, call.limit_s, True)))

    def _stop(self, call: AwaitedCall) -> None:
        """Gives up what still runs of it; its end is waited for, so that the coroutine can clean up."""
        call.is_stopped = True
        self.recovery.stop([(rank, call.refs[rank]) for rank in call.waiting])


class Asked:
    """Which workers run coroutines on now, until one has ended there or some time has passed."""

    is_construction = False
    num_bytes = 0  # it asks for answers
    sources = ()
    title = "an asynchronous call"
    outcome: Finished | None = None

    def __init__(self, awaited: AwaitedCalls) -> None:
        self.awaited = awaited
        self.refs: list[Any] = []  # of the last round of each rank
        self.running: dict[int, float] = {}  # by rank: how long the round may last

    @property
    def longest_s(self) -> float:
        return max(list(self.running.values()), default=0.0)

    def ranks_of(self, calls: Sequence[AwaitedCall]) -> list[int]:
        """The ranks that have not answered all of the calls."""
        return sorted({rank for call in calls for rank in call.waiting})

    def send(self, ranks: Iterable[int]) -> None:
        """Begins a round on these ranks."""
        actors = self.awaited.recovery.crew.actors
        calls = list(self.awaited.calls)
        for rank in ranks:
            while len(self.refs) <= rank:  # a rank that was never asked has answered
                self.refs.append(ray.put(None))
            self.running[rank] = self.awaited.round_s(calls)
            tokens = [call.token(rank) for call in calls if rank in call.waiting]
            self.refs[rank] = actors[rank].collect.remote(tokens, self.running[rank])

    def wait(self) -> None:
        with contextlib.suppress(Exception):  # the thread that sent it is told
            ray.wait(self.refs, num_returns=len(self.refs))


def _collected(call: AwaitedCall) -> Any:
    replies = [call.replies[rank] for rank in range(len(call.refs))]
    raise_failures(replies)
    return call.collected(replies)
