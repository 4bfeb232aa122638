"""One object of a user's class under torchrun: the driver's and a worker's at once, on every process.

A call is divided here as everywhere, made on this process's own slice if it belongs to the group of the role, and
settled with the other processes by ``runtime.py``. A driver's method with ``execute='first'`` is run by process 0 for
all.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rayhelper.device_groups import DRIVER, DeviceGroups
from rayhelper.errors import RoleError
from rayhelper.roles.futures import FinishedCall, Future, finished, values_of
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity, check_hosts, refuse_to_travel
from rayhelper.roles.runtime import Route, acting_as, state
from rayhelper.runtimes.driver import undeclared
from rayhelper.runtimes.torchrun.exchange import Exchange, Watch
from rayhelper.runtimes.torchrun.outcome import Outcome, deadline_error, in_collective
from rayhelper.timeline.recording import Recording
from rayhelper.values.calls import collector, divide, layout_of, where_of
from rayhelper.values.contents import Contents, contents_of
from rayhelper.values.dispatch import Balanced, bare, unwrap
from rayhelper.values.graphs import check_value
from rayhelper.values.shards import Reports, ShardTable
from rayhelper.values.slicing import num_items
from rayhelper.worker.failures import Failure, add_note
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

    @property
    def workers(self) -> Mapping[str, WorkerRuntime]: ...

    def check_usable(self, what: str) -> None: ...

    def settle(self, outcome: Outcome, error: Exception | None, watch: Watch) -> list[Any]: ...

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

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """The call, made now on every process of the group."""
        if method.role == DRIVER:
            return self._made_by_first(method, target, args, kwargs)
        group = self.groups.get(method.role)
        if group is None:
            raise undeclared(method, self.identity.cls)
        name, title, address = self.identity.called(method), self.identity.title(method), str(self.identity.address)
        self.runtime.check_usable(title)
        where = where_of(title, group.name)
        started_ns = time.time_ns()
        layout = layout_of(method, self.runtime.shards[group.name], address)
        args, kwargs = values_of(args, kwargs)
        check_hosts((args, kwargs), group.name)
        division = divide(method, layout.num_shards, args, kwargs, where)
        given = _given(method, args, kwargs)
        contents = self._contents(method, args, kwargs)
        recording = self.runtime.recording
        call = recording.dispatched(name, started_ns) if recording else 0
        members = self.runtime.members[group.name][: len(layout.shard_of)]
        rank = members.index(self.runtime.rank) if self.runtime.rank in members else None

        def own_value() -> Any:
            if rank is None:
                return None
            hosted = self.hosted[group.name]
            begun_ns = time.time_ns()
            own_args, own_kwargs = division.calls[layout.shard_of[rank]]
            with acting_as(hosted.runtime), hosted.runtime.inside(hosted, method.role):
                value = method.finished_call(target, own_args, own_kwargs)
            check_value(value, f"{title} on {hosted.runtime.describe()}")
            if recording:
                recording.ran(name, method.role, rank, begun_ns, call)
            return value if rank in layout.leaders else None

        def leaders_values() -> list[Any]:
            who = f"process {self.runtime.rank}" if rank is None else self.hosted[group.name].runtime.describe()
            with Watch(self.runtime.exchange, group.timeout_s) as watch:
                outcome, error = self.attempt(f"{title} of instance {address}", title, who, own_value, watch)
            if rank is not None:
                self.runtime.settle_owed()
            begun_ns = time.time_ns()
            values = self.runtime.settle(replace(outcome, given=given, contents=contents), error, watch)
            if recording:
                recording.span("wait", name, begun_ns, call, self.runtime.exchange.received_bytes)
            return [values[members[leader]] for leader in layout.leaders]

        collect = collector(method, division.order, where, name, recording, call)
        if rank is not None:
            return Future(FinishedCall(leaders_values, collect))
        self.runtime.settle_owed()  # whoever is one call behind holds nobody up, who is two behind might
        self.runtime.owed = OwedCall(leaders_values, collect)
        return Future(self.runtime.owed)

    def _contents(self, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contents | None:
        """What the arguments hold, in the first calls of a method and now and then later; None: it is not compared."""
        count = self.compared[method.__name__] = self.compared.get(method.__name__, -1) + 1
        if count >= _COMPARED and count % _COMPARED_AGAIN:
            return None
        values = map(bare, (*args, *kwargs.values()))
        return contents_of(values, of_arrays_alone=method.dispatch == "all")

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
                value = method.finished_call(target, args, kwargs)
            finally:
                runtime.alone = ""
            check_value(value, f"{title} on process 0")
            return value

        def first_value() -> Any:
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


class OwedCall:
    """A call to a group that this process is not in. It meets the others in it when it is asked for the value, or
    before it meets them in the next call: so it can do its part of that one while they are at theirs of this one.
    """

    def __init__(self, call: Callable[[], list[Any]], collect: Callable[[list[Any]], Any]) -> None:
        self.call, self.collect = call, collect
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


_COMPARED = 8  # calls of a method whose arguments are compared in full
_COMPARED_AGAIN = 64  # and every so many calls after that


def _given(method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How many arguments the call has and how many items are divided, as text."""
    values = (*args, *kwargs.values())
    counts: list[int] = []
    if method.dispatch == "slice" or isinstance(method.dispatch, Balanced):
        counts = [count for count in map(num_items, values) if count is not None]
    given = f"{len(values)} argument{'s' * (len(values) != 1)}"
    return f"divides {counts[0]} items ({given})" if counts else f"passes {given}"
