"""A call that runs on a group: what stands behind its future, and how futures become arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray

from rayhelper.errors import CallCancelledError, DeadlineError, DispatchError
from rayhelper.roles.futures import Finished, Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Record
from rayhelper.runtimes.ray.calls_under_way import unfinished, unfinished_ranks
from rayhelper.runtimes.ray.late_call import FuturePart, LateCall
from rayhelper.runtimes.ray.recovery import Recovery
from rayhelper.runtimes.ray.waiting import STEP_S, replies_as_they_come, replies_of
from rayhelper.values.calls import collect, parameter_names, unsendable
from rayhelper.values.dispatch import Balanced, Whole, bare, whole
from rayhelper.values.lost import check_arguments
from rayhelper.values.reply import opened
from rayhelper.values.shards import Layout
from rayhelper.worker.ambient import Mode


class GroupCall:
    """A call that runs on a group: what stands behind its future."""

    is_construction = False

    def __init__(
        self,
        recovery: Recovery,
        method: RoleMethod[..., Any],
        title: str,
        name: str,
        location: str,
        layout: Layout,
        order: list[int] | None,
        sent: list[tuple[Any, ...]],
        num_bytes: int,
        mode: Mode | None,
        sources: tuple[GroupCall, ...],
        number: int,
    ) -> None:
        self.recovery = recovery
        self.calls = recovery.calls
        self.method = method
        self.title = title  # in messages
        self.name = name  # in the recording
        self.location = location
        self.layout = layout
        self.order = order
        self.sent = sent  # by shard, or one for all
        self.num_bytes = num_bytes  # of what was sent, if it was packed
        self.mode = mode  # of the driver when it made the call
        self.sources = sources  # the calls whose values are arguments
        self.number = number  # in the recording
        self.refs: list[Any] = [None] * len(layout.shard_of)
        self.outcome: Finished | None = None
        self.answers: list[Any] | None = None  # by rank, if they were waited for before they were asked for

    def send(self, ranks: Iterable[int]) -> None:
        """Calls these ranks: for the first time, or again on workers that were replaced."""
        calls = self._remotes()
        parts = [ref for source in self.sources for ref in source.refs]
        if self.mode is not None:
            parts.insert(0, self.mode)
        shared = len(self.sent) == 1
        recording = self.calls.recording
        try:
            for rank in ranks:
                sent = self.sent[0 if shared else self.layout.shard_of[rank]]
                if parts and not sent:
                    sent = (((), {}),)
                sent_ns = time.time_ns() if recording else 0
                self.refs[rank] = calls[rank](*sent, *parts)
                if recording:
                    recording.sent(self.refs[rank].task_id(), self.number, sent_ns)
        except TypeError as error:
            raise unsendable(self.calls.where(self.title), error) from error

    def _remotes(self) -> Sequence[Callable[..., Any]]:
        """What to call, by rank."""
        return self.calls.crew.calls(self.location)

    def done(self) -> bool:
        return self.calls.stopped or self.outcome is not None or not unfinished(self.refs)

    def wait(self) -> None:
        """Returns when the workers have answered or the call has failed; collects nothing."""
        if self.outcome is None and self.answers is None:
            try:
                self.answers = self._replies(None)
            except Exception as error:
                self._end(Finished.failed(error))

    def result(self, timeout_s: float | None) -> Any:
        if self.outcome is None:
            try:
                replies = self._replies(timeout_s) if self.answers is None else self.answers
            except DeadlineError as error:
                if timeout_s is None:
                    self._end(Finished.failed(error))
                raise  # with a deadline of the caller's own, the call goes on
            except Exception as error:
                self._end(Finished.failed(error))
                raise
            recording, started_ns = self.calls.recording, time.time_ns()
            self._end(Finished(lambda: self.collected(replies)))
            if recording:
                recording.span("collect", self.name, started_ns, self.number)
        assert self.outcome is not None, "an outcome was stored above"
        return self.outcome.result(None)

    def cancel(self) -> bool:
        if self.outcome is not None or self.calls.stopped:
            return False
        waiting = unfinished_ranks(self.refs)
        if not waiting:
            return False
        self._end(Finished.failed(CallCancelledError(f"{self.calls.where(self.title)} was cancelled")))
        self.recovery.stop(waiting)
        return True

    def _end(self, outcome: Finished) -> None:
        self.outcome = outcome
        self.calls.close(self)
        self.sent, self.sources, self.answers = [], (), None

    def _replies(self, timeout_s: float | None) -> list[Any]:
        recording, started_ns = self.calls.recording, time.time_ns()
        try:
            return replies_of(self.recovery, self.title, self, timeout_s)
        except KeyboardInterrupt:
            self.cancel()  # in a notebook the next call would wait for this one
            raise
        finally:
            if recording:
                recording.span("wait", self.name, started_ns, self.number)

    def collected(self, replies: list[Any]) -> Any:
        """The caller's value, from the replies by rank."""
        for rank, reply in enumerate(replies):
            self.calls.note_shards(rank, reply)
        values = [opened(replies[rank], writable=True) for rank in self.layout.leaders]
        return collect(self.method, values, self.order, self.calls.where(self.title))

    def parts(self) -> Iterator[Any]:
        for rank, reply in replies_as_they_come(self.recovery, self, self.layout.leaders):
            yield opened(self.calls.note_shards(rank, reply), writable=True)

    def wait_any(self, others: Sequence[Any]) -> int:
        while True:
            for position, other in enumerate(others):
                if other.done():
                    return position
            refs = [ref for other in others if isinstance(other, GroupCall) for ref in other.refs]
            ray.wait(unfinished(refs), num_returns=1, timeout=STEP_S)


class Construction:
    """The construction of an object on every worker of a group, made again where a worker is replaced meanwhile."""

    is_construction = True
    sources = ()
    title = "__init__"
    num_bytes = 0
    outcome: Finished | None = None

    def __init__(self, recovery: Recovery, address: str, payload: Any) -> None:
        self.recovery = recovery
        self.address = address
        self.payload = payload
        self.refs: list[Any] = [None] * len(recovery.crew.actors)

    def send(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.refs[rank] = self.recovery.crew.actors[rank].construct.remote(self.address, self.payload)

    def wait(self) -> None:
        unfinished(self.refs, None)

    def built(self, limit_s: float) -> dict[str, Sequence[Record]]:
        """By worker, the parts that it built. Raises what a constructor raised."""
        calls = self.recovery.calls
        replies = replies_of(self.recovery, self.title, self, limit_s)
        return {calls.crew.describe(rank): calls.note_shards(rank, reply) for rank, reply in enumerate(replies)}


def sources_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[GroupCall, ...]:
    """The calls whose futures are among the arguments. A future that has failed raises here."""
    found = []
    for value in map(bare, (*args, *kwargs.values())):
        if isinstance(value, Future) and isinstance(value._pending, GroupCall):
            if value._pending.outcome is not None and value._pending.outcome.error is not None:
                value.result()
            found.append(value._pending)
    return tuple(found)


def late_calls(
    method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], num_shards: int, where: str
) -> list[LateCall]:
    """The arguments for each shard when some are futures: the workers put the values in and divide them.

    Raises:
        DispatchError: a balanced dispatch, which needs to see the values.
    """
    if isinstance(method.dispatch, Balanced):
        raise DispatchError(
            f"{where}: a balanced dispatch needs the values, but an argument is a Future. Pass its .result()."
        )
    check_arguments(args, kwargs, parameter_names(method), where)
    start = 0
    replaced = []
    for given in (*args, *kwargs.values()):
        value = bare(given)
        if isinstance(value, Future):
            pending = value._pending
            if isinstance(pending, GroupCall):
                stop = start + len(pending.refs)
                source = pending.method
                value = FuturePart(
                    start,
                    stop,
                    source.collect,
                    source.execute == "first",
                    pending.layout.leaders,
                    pending.order,
                    pending.calls.where(pending.title),
                )
                start = stop
            else:
                value = value.result()
        replaced.append(whole(value) if isinstance(given, Whole) else value)
    late_args = tuple(replaced[: len(args)])
    late_kwargs = dict(zip(kwargs, replaced[len(args) :], strict=True))
    return [LateCall(late_args, late_kwargs, num_shards, index, where) for index in range(num_shards)]
