"""One object of a user's class under torchrun: the driver's and a worker's at once, on every process.

A call is divided here as everywhere, made on this process's own slice if it belongs to the group of the role, and
settled with the other processes by ``runtime.py``. A driver's method with ``execute='first'`` is run by process 0 for
all.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from rayhelper.device_groups import DRIVER, DeviceGroup, DeviceGroups
from rayhelper.errors import CallCancelledError, RoleError
from rayhelper.roles.futures import Finished, FinishedCall, Future, finished, values_of
from rayhelper.roles.left_behind import LeftBehind
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity, check_hosts, refuse_to_travel
from rayhelper.roles.runtime import Route, acting_as, state, task_acting_as
from rayhelper.roles.stale import Snapshot
from rayhelper.runtimes.driver import undeclared
from rayhelper.runtimes.off import call_here
from rayhelper.runtimes.torchrun.exchange import Exchange, Watch
from rayhelper.runtimes.torchrun.meeting import Meeting
from rayhelper.runtimes.torchrun.outcome import Outcome, deadline_error, in_collective
from rayhelper.timeline.recording import Recording
from rayhelper.values.calls import collector, divide, layout_of, where_of
from rayhelper.values.contents import Contents, contents_of
from rayhelper.values.dispatch import Balanced, Call, Division, bare, unwrap
from rayhelper.values.lost import check_value
from rayhelper.values.shards import Layout, Reports, ShardTable
from rayhelper.values.slicing import num_items
from rayhelper.watch import watchdog as watching
from rayhelper.worker.failures import Failure, add_note
from rayhelper.worker.process_group import in_process_group
from rayhelper.worker.runtime import HostedPlacement, WorkerRuntime


class Processes(Protocol):
    """The processes of a torchrun run, as an object's calls need them (``runtime.py``)."""

    config: DeviceGroups
    rank: int
    members: dict[str, tuple[int, ...]]
    shards: dict[str, ShardTable]
    exchange: Exchange
    recording: Recording | None
    alone: str
    owed: OwedCall | None
    watcher: Any  # of what calls come to, while ``prove`` compares runtimes
    last_awaited: Meeting | None  # of the call that was awaited last
    meetings: ThreadPoolExecutor  # in which such calls are settled

    @property
    def workers(self) -> Mapping[str, WorkerRuntime]: ...

    def check_usable(self, what: str) -> None: ...

    def settle(
        self, outcome: Outcome, error: Exception | None, watch: Watch, *, of_coroutine: bool = False
    ) -> list[Any]: ...

    def settle_owed(self) -> None: ...

    def take_reports(self) -> Reports: ...


class SpmdPlacement:
    """One instance on this process: it is the driver's, and a worker's in every role that this process hosts."""

    def __init__(self, runtime: Processes, identity: Identity, hosts: Collection[str] | None = None) -> None:
        self.runtime = runtime
        self.identity = identity
        config = runtime.config
        roles = getattr(identity.cls, "__rayhelper_roles__", ())
        self.groups = {role: config.group_of(role) for role in roles}
        names = tuple(dict.fromkeys(group.name for group in self.groups.values()))
        self.hosts = names if hosts is None else hosts
        self.compared: dict[str, int] = {}  # by name of a method: the calls that came before the last one
        self.hosted = {
            name: HostedPlacement(runtime.workers[name], identity) for name in names if name in runtime.workers
        }
        self.snapshot: Snapshot | None = None  # of an object that other processes host
        self.left = LeftBehind()

    def _observing(self, call: DividedCall) -> contextlib.AbstractContextManager[None]:
        """Inside, a call is made on this process; what it changes is noted where others do not host the object."""
        assert call.hosted is not None, "this process is called"
        if str(self.identity.outermost.address) not in call.hosted.runtime.observed:
            return contextlib.nullcontext()
        return call.hosted.runtime.observing(self.identity, call.method, *call.own)

    def noted(self) -> list[Any]:
        """What the workers that this process is have noted of their calls, for ``prove``."""
        identity = self.identity.outermost
        return [hosted.runtime.noted(identity) for hosted in self.hosted.values()]

    def first_hosted(self) -> HostedPlacement | None:
        """Of the groups that this process belongs to, the first that the class declares."""
        return next(iter(self.hosted.values()), None)

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if isinstance(state.active, WorkerRuntime):
            worker = state.active
            return (self.hosted.get(worker.info.group) or HostedPlacement(worker, self.identity)).route(method)
        if method.role == DRIVER and (method.execute == "all" or self.runtime.alone):
            return "here"
        if self.identity.is_building and method.role != DRIVER:
            return "here" if self._hosts(method) else "skip"
        if self.runtime.exchange.closed:
            raise RoleError(
                f"{self.identity.title(method)}: this {self.identity.cls.__name__} was left by RayHelper.teardown()."
            )
        return "group"

    def _hosts(self, method: RoleMethod[..., Any]) -> bool:
        group = self.groups.get(method.role)
        return group is not None and group.name in self.hosted

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method.role == DRIVER:
            return method.call(target, args, kwargs)
        hosted = self.hosted[self.groups[method.role].name]
        with acting_as(hosted.runtime), hosted.runtime.inside(hosted, method.role):
            return method.call(target, args, kwargs)

    def attending(self, method: RoleMethod[..., Any]) -> watching.Call | None:
        if method.role != DRIVER:
            return None  # the construction is looked after
        who = f"rank {self.runtime.rank} of torchrun"
        return call_here(self.runtime.config, self.identity.title(method), method.role, who)

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """The call, made now on every process of the group."""
        if method.role == DRIVER:
            return self._made_by_first(method, target, args, kwargs)
        watcher = self.runtime.watcher
        if watcher is None:
            return self._submitted(method, target, args, kwargs)

        def run() -> Any:
            return self._submitted(method, target, args, kwargs).result()

        title = self.identity.title(method)
        return finished(lambda: watcher.call(method, title, args, kwargs, run, self.noted))

    def _submitted(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        group = self.groups.get(method.role)
        if group is None:
            raise undeclared(method, self.identity.cls)
        awaited = self.runtime.last_awaited
        if awaited is not None and not awaited.done() and in_process_group():
            if not awaited.is_given_up:
                raise RoleError(
                    f"{self.identity.title(method)} is called while an awaited call is in flight, and the workers "
                    "share a process group. Each process would run their collectives in a different order. Await the "
                    "other call first."
                )
            awaited.wait()  # nobody else can
        call = self._divided(method, group, args, kwargs)

        def own_value() -> Any:
            hosted, (own_args, own_kwargs), begun_ns = call.hosted, call.own, time.time_ns()
            assert hosted is not None, "only a process of the group runs the method"
            with acting_as(hosted.runtime), self._observing(call), hosted.runtime.inside(hosted, method.role):
                value = hosted.runtime.watched(method).finished_call(target, own_args, own_kwargs)
            return call.answer(value, begun_ns)

        def leaders_values() -> list[Any]:
            return self._settled(call, own_value)

        if call.hosted is not None:
            return Future(FinishedCall(leaders_values, call.collect))
        return Future(self._owed(call))

    def _owed(self, call: DividedCall) -> OwedCall:
        """A call to a group that this process is not in."""
        self.runtime.settle_owed()  # whoever is one call behind holds nobody up, who is two behind might
        owed = self.runtime.owed = OwedCall(call.title, lambda: self._settled(call, lambda: None), call.collect)
        return owed

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Begins at once, beside others; the processes meet in the order in which the calls were made.

        Where processes share a process group, one begins when the one before it has ended: their collectives would
        meet in another order on each process. One that is cancelled meets the others all the same, later.
        """
        watcher = self.runtime.watcher
        if watcher is None or method.role == DRIVER:
            return await self._awaited(method, target, args, kwargs)

        def run() -> Any:
            return self._awaited(method, target, args, kwargs)

        return await watcher.awaited(method, self.identity.title(method), args, kwargs, run, self.noted)

    async def _awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        group = self.groups.get(method.role)
        if method.role == DRIVER or group is None:
            return await asyncio.to_thread(self.submit(method, target, args, kwargs).result)
        call = self._divided(method, group, args, kwargs)
        before = self.runtime.last_awaited
        meeting = self.runtime.last_awaited = Meeting(before)
        own = Finished(lambda: None)
        try:
            call.is_awaited = True
            if call.hosted is not None:
                if in_process_group():
                    await _settled_before(before)
                own = await self._own_coroutine(call, call.hosted, method, target)
        except asyncio.CancelledError:
            own = Finished.failed(CallCancelledError(f"{call.title} was cancelled on process {self.runtime.rank}"))
            meeting.is_given_up = True
            raise
        finally:
            meeting.begin(
                self.runtime.meetings,
                lambda: FinishedCall(lambda: self._settled(call, lambda: own.result(None)), call.collect),
            )
        try:
            await meeting.over()
        except asyncio.CancelledError:
            meeting.is_given_up = True
            raise
        return meeting.outcome.result().result(None)

    async def _own_coroutine(
        self, call: DividedCall, hosted: HostedPlacement, method: RoleMethod[..., Any], target: Any
    ) -> Finished:
        """What the coroutine of this process comes to."""
        own_args, own_kwargs = call.own
        begun_ns = time.time_ns()
        attending = self.runtime.exchange.attending(where_of(call.title, call.group.name))
        with watching.Watched(attending), Watch(self.runtime.exchange, call.group.timeout_s) as watch:
            coroutine = hosted.runtime.watched(method).coroutine(target, own_args, own_kwargs)
            self.runtime.exchange.coroutines[id(coroutine)] = coroutine
            try:
                entered = task_acting_as(hosted.runtime), hosted.runtime.task_inside(hosted, method.role)
                with self._observing(call), entered[0], entered[1]:
                    value = await coroutine
                answer = call.answer(value, begun_ns)
            except Exception as error:
                return Finished.failed(error)
            finally:
                del self.runtime.exchange.coroutines[id(coroutine)]
        if watch.late:
            return Finished.failed(deadline_error(call.title, watch, watch.late))
        return Finished(lambda: answer)

    def _divided(
        self, method: RoleMethod[..., Any], group: DeviceGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DividedCall:
        title = self.identity.title(method)
        self.runtime.check_usable(title)
        started_ns = time.time_ns()
        layout = layout_of(method, self.runtime.shards[group.name], str(self.identity.address))
        args, kwargs = values_of(args, kwargs)
        check_hosts((args, kwargs), group.name)
        where = where_of(title, group.name)
        division = divide(method, layout.num_shards, args, kwargs, where, is_copied=False)
        members = self.runtime.members[group.name][: len(layout.shard_of)]
        call = DividedCall(method, group, self.identity, division, layout, members, self.runtime.recording)
        call.given, call.contents = _given(method, args, kwargs), self._contents(method, args, kwargs)
        if self.runtime.recording:
            call.number = self.runtime.recording.dispatched(call.name, started_ns)
        if self.runtime.rank in members:
            call.rank, call.hosted = members.index(self.runtime.rank), self.hosted[group.name]
        return call

    def _settled(self, call: DividedCall, own_value: Callable[[], Any]) -> list[Any]:
        """The leaders' values, which all processes exchange."""
        with watching.Watched(self.runtime.exchange.attending(where_of(call.title, call.group.name))):
            return self._values(call, own_value)

    def _values(self, call: DividedCall, own_value: Callable[[], Any]) -> list[Any]:
        runtime = self.runtime
        who = f"process {runtime.rank}" if call.hosted is None else call.hosted.runtime.describe()
        with Watch(runtime.exchange, call.group.timeout_s) as watch:
            name = f"{call.title} of instance {self.identity.address}"
            outcome, error = self.attempt(name, call.title, who, own_value, watch)
        if call.hosted is not None and not call.is_awaited:
            runtime.settle_owed()
        begun_ns = time.time_ns()
        changes = None if call.hosted is None else call.hosted.runtime.take_changes()
        outcome = replace(outcome, given=call.given, contents=call.contents, changes=changes)
        values = runtime.settle(outcome, error, watch, of_coroutine=call.is_awaited)
        if runtime.recording:
            runtime.recording.span("wait", call.name, begun_ns, call.number, runtime.exchange.received_bytes)
        return [values[call.members[leader]] for leader in call.layout.leaders]

    def _contents(self, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contents:
        """What the arguments hold: in the first calls of a method, and now and then later, of more than a few items."""
        count = self.compared[method.__name__] = self.compared.get(method.__name__, -1) + 1
        share = _SHARE if count >= _COMPARED and count % _COMPARED_AGAIN else 1
        return contents_of(map(bare, (*args, *kwargs.values())), share=share)

    def _made_by_first(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """The value of a driver's method, which process 0 alone runs, on every process."""
        runtime, title = self.runtime, self.identity.title(method)
        runtime.check_usable(title)
        args, kwargs = unwrap(*values_of(args, kwargs))
        given = _given(method, args, kwargs)

        def own_value() -> Any:
            if runtime.rank > 0:
                return None
            runtime.alone = title
            try:
                attending = call_here(runtime.config, title, method.role, "rank 0 of torchrun")
                value = method.finished_call(target, args, kwargs, attending)
            finally:
                runtime.alone = ""
            check_value(value, f"{title} on process 0")
            return value

        def first_value() -> Any:
            with watching.Watched(runtime.exchange.attending(title)):
                return attended_value()

        def attended_value() -> Any:
            with Watch(runtime.exchange, None) as watch:
                outcome, error = self.attempt(title, title, f"process {runtime.rank}", own_value, watch)
            runtime.settle_owed()
            begun_ns = time.time_ns()
            values = runtime.settle(replace(outcome, given=given), error, watch)
            if runtime.recording:
                name = self.identity.called(method)
                runtime.recording.span("wait", name, begun_ns, 0, runtime.exchange.received_bytes)
            return values[0]

        return finished(first_value)

    def attempt(
        self, call: str, method: str, who: str, run: Callable[[], Any], watch: Watch
    ) -> tuple[Outcome, Exception | None]:
        """What ``run`` comes to on this process, for the others; and the exception itself."""
        try:
            value = self._in_time(call, run, watch)
            return Outcome(call, value, None, self.runtime.take_reports()), None
        except Exception as error:
            failure = Failure.of(error, method, who, self.runtime.rank, pickle.dumps)
            add_note(error, f"[{method} on {who}]")
            return Outcome(call, None, failure), error

    def _in_time(self, call: str, run: Callable[[], Any], watch: Watch) -> Any:
        """The value. Raises DeadlineError if the deadline passed meanwhile, here or where it freed this process."""
        try:
            value = run()
        except Exception as error:
            late = watch.expired()
            if not late and in_collective(error):
                late = self.runtime.exchange.given_up_elsewhere()
            if not late:
                raise
            raise deadline_error(call, watch, late) from error
        if late := watch.expired():
            raise deadline_error(call, watch, late)
        return value

    __reduce__ = refuse_to_travel


class DividedCall:
    """A call to a group, divided: what this process needs of it."""

    rank: int | None = None  # of this process in the group; None: it is not in it
    hosted: HostedPlacement | None = None
    number = 0  # in the recording
    is_awaited = False  # it may meet the others beside a call that is made meanwhile
    given = ""
    contents: Contents | None = None

    def __init__(
        self,
        method: RoleMethod[..., Any],
        group: DeviceGroup,
        identity: Identity,
        division: Division,
        layout: Layout,
        members: tuple[int, ...],
        recording: Recording | None,
    ) -> None:
        self.method, self.group = method, group
        self.name, self.title = identity.called(method), identity.title(method)
        self.division, self.layout, self.members, self.recording = division, layout, members, recording

    @property
    def own(self) -> Call:
        """The arguments of this process."""
        assert self.rank is not None, "this process is called"
        return self.division.calls[self.layout.shard_of[self.rank]]

    def answer(self, value: Any, begun_ns: int) -> Any:
        """What the others are told of the value that the method gave here, which began at ``begun_ns``."""
        assert self.hosted is not None, "this process is called"
        assert self.rank is not None, "this process is called"
        check_value(value, f"{self.title} on {self.hosted.runtime.describe()}")
        if self.recording:
            self.recording.ran(self.name, self.method.role, self.rank, begun_ns, self.number)
        return value if self.rank in self.layout.leaders else None

    def collect(self, values: list[Any]) -> Any:
        where = where_of(self.title, self.group.name)
        return collector(self.method, self.division.order, where, self.name, self.recording, self.number)(values)


class OwedCall:
    """A call to a group that this process is not in. It meets the others in it when it is asked for the value, or
    before it meets them in the next call: so it can do its part of that one while they are at theirs of this one.
    """

    def __init__(self, title: str, call: Callable[[], list[Any]], collect: Callable[[list[Any]], Any]) -> None:
        self.title, self.call, self.collect = title, call, collect
        self.finished: FinishedCall | None = None
        self.lock = threading.Lock()  # a coroutine waits for it in a thread, while the next call may settle it

    def settle(self) -> FinishedCall:
        """Meets the others."""
        with self.lock:
            if self.finished is None:
                self.finished = FinishedCall(self.call, self.collect)
            return self.finished

    def done(self) -> bool:
        return self.settle().done()  # as on the other processes, which must go the same way

    def result(self, timeout_s: float | None) -> Any:
        return self.settle().result(timeout_s)

    def cancel(self) -> bool:
        return self.settle().cancel()

    def parts(self) -> Iterator[Any]:
        yield from self.settle().parts()

    def wait_any(self, others: Sequence[Any]) -> int:
        return self.settle().wait_any(others)


async def _settled_before(before: Meeting | None) -> None:
    """Returns when the call before has been settled, and what was begun beside it has come to its first suspension."""
    await asyncio.sleep(0)
    if before is not None:
        await before.over()


_COMPARED = 8  # calls of a method whose arguments are compared in full
_COMPARED_AGAIN = 64  # and every so many calls after that
_SHARE = 16  # of other calls a so much smaller sample


def _given(method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How many arguments the call has and how many items are divided, as text."""
    values = (*args, *kwargs.values())
    counts: list[int] = []
    if method.dispatch == "slice" or isinstance(method.dispatch, Balanced):
        counts = [count for count in map(num_items, values) if count is not None]
    given = f"{len(values)} argument{'s' * (len(values) != 1)}"
    return f"divides {counts[0]} items ({given})" if counts else f"passes {given}"
