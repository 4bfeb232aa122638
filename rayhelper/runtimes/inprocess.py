"""N workers in this process, one after the other: to debug dispatch and collect with an ordinary debugger.

Every worker of a group has an instance of its own and is called in order of rank, in the caller's thread: breakpoints
stop, tracebacks are unbroken, exceptions are the worker's own. A deferred call is made at once. Coroutines run in the
caller's event loop, so that calls that are awaited together are in flight together. What needs processes
(collectives between workers, devices of one's own) does not exist here.

``strict``: arguments and results are packed and unpacked as on their way to a Ray worker, and what would differ there
is an error here: values that do not pickle, arguments changed in place, writes to arrays that Ray hands out read-only.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rayhelper.device_groups import DeviceGroup, DeviceGroups, all_roles
from rayhelper.errors import DispatchError, RoleError, WorkerError
from rayhelper.roles.futures import FinishedCall, Future, values_of
from rayhelper.roles.left_behind import note_changes
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity, Record, check_hosts, own_objects
from rayhelper.roles.runtime import Shard, WorkerInfo, acting_as, task_acting_as
from rayhelper.timeline.recording import Recording
from rayhelper.values.calls import collector, divide, layout_of, unsendable, where_of
from rayhelper.values.dispatch import Division
from rayhelper.values.lost import check_value
from rayhelper.values.packing import Ledger, Packed, pack, unpack
from rayhelper.values.shards import Layout, ShardTable
from rayhelper.watch.attended import attended, deadline_error, stack_of_awaited
from rayhelper.watch.watchdog import Call, Watched
from rayhelper.worker.ambient import Ambient, Inside
from rayhelper.worker.failures import add_note
from rayhelper.worker.patches import generators
from rayhelper.worker.random_streams import DriverRandom, NewRandom, RandomState
from rayhelper.worker.runtime import WorkerRuntime
from rayhelper.worker.side_door import stacks, told_stacks
from rayhelper.worker.steps import Stepped, Together


class InprocessCluster:
    """This process as a cluster of simulated workers."""

    def __init__(self, *, strict: bool, recording: Recording | None) -> None:
        self.strict = strict
        self.recording = recording
        self.lock = threading.RLock()  # what this process is changes during a call: one call at a time
        self.groups: dict[str, InprocessGroup] = {}

    def start(self, config: DeviceGroups) -> dict[str, InprocessGroup]:
        self.groups = {group.name: InprocessGroup(group, config.neighbours(group), self) for group in config.groups}
        return self.groups

    def construction(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Collection[str],
        groups: Sequence[InprocessGroup],
    ) -> Any:
        for name in names:
            check_hosts((args, kwargs), name)
        if not self.strict:
            return cls, args, kwargs, Ambient.here()
        try:
            return pack((cls, args, kwargs, Ambient.here()), stays_here=True)
        except Exception as error:
            raise DispatchError(f"an argument of {cls.__name__}(...) cannot be sent to a worker: {error}") from error

    def paused_s(self, last_s: float) -> float:
        return 0.0  # this process sees its own

    def where_all_are(self) -> str:
        return stacks()

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        for group in self.groups.values():
            group.workers.clear()
        if self.recording is not None:
            self.recording.write()


class ProcessesNeededError(RoleError):
    """Workers want to meet in a collective, and run one after the other."""

    group = ""  # whose workers they are


class SimulatedWorker(WorkerRuntime):
    """What this process is while it runs a simulated worker's method."""

    def __init__(self, info: WorkerInfo) -> None:
        super().__init__(info, "this process")
        self.ledger = Ledger()
        self.random_state: RandomState | None = None  # between its calls; None: as that of this process

    def own_random(self) -> OwnRandom:
        """Inside, the random generators of this process are those of the worker."""
        return OwnRandom(self)

    def follow(self, new: NewRandom | None) -> None:
        """The worker's random generators do what the driver's did since its last call."""
        if new is not None:
            with self.own_random():
                self.random.follow(new)

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        if self.info.world_size > 1:
            error = ProcessesNeededError(
                f"RayHelper.init_process_group was called on {self.describe()}: the {self.info.world_size} workers "
                "of runtime='inprocess' run one after another. A collective needs them at the same time. Use torchrun "
                "or Ray, or one worker per group."
            )
            error.group = self.info.group
            raise error
        super().init_process_group(backend, timeout_s)


class OwnRandom:
    """Inside, the random generators are those of a worker. No generator: see ``acting_as``."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker = worker

    def __enter__(self) -> None:
        generators.paused.__enter__()  # what the worker does is not the driver's doing
        try:
            self.driver = RandomState.here()
            if self.worker.random_state is not None:
                self.worker.random_state.restore()
        except BaseException:  # an interrupt: the driver's later seeds must be noticed
            generators.paused.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.worker.random_state = RandomState.here()
            self.driver.restore()
        finally:
            generators.paused.__exit__()


class InprocessGroup:
    """The simulated workers of one device group."""

    def __init__(self, group: DeviceGroup, neighbours: Sequence[DeviceGroup], cluster: InprocessCluster) -> None:
        size, beside = group.num_workers, all_roles(neighbours)
        self.group = group
        self.cluster = cluster
        self.shards = ShardTable(size, group.name)
        self.random = DriverRandom()
        self.workers = [
            SimulatedWorker(
                WorkerInfo(
                    *(group.roles, group.name, rank, size, rank, size, 0, Shard(rank, size)),
                    gpus_per_worker=group.gpus_per_worker,
                    neighbours=beside,
                )
            )
            for rank in range(size)
        ]

    def construct(self, address: str, construction: Any) -> dict[str, Sequence[Record]]:
        built: dict[str, Sequence[Record]] = {}
        self.random.constructing()
        for worker in self.workers:
            with self.cluster.lock, acting_as(worker), worker.own_random():
                if isinstance(construction, Packed):
                    cls, args, kwargs, ambient = unpack(construction)
                else:
                    cls, args, kwargs = own_objects(construction[:3])
                    ambient = construction[3]
                name = f"{cls.__name__}.__init__"
                with _noted(name, worker), Watched(Call(f"{name} on {worker.describe()}")):
                    built[worker.describe()] = worker.build(address, cls, args, kwargs, ambient)
            self.shards.note(worker.info.rank, worker.take_reports())
        return built

    def constructed(self, address: str, started: dict[str, Sequence[Record]]) -> dict[str, Sequence[Record]]:
        return started

    def states(self, address: str) -> list[Any]:
        return [worker.state(address) for worker in self.workers]

    def abandon(self, address: str) -> None:
        pass  # no worker is replaced here

    def drop(self, address: str) -> None:
        self.shards.drop(address)
        for worker in self.workers:
            worker.drop(address)

    def submit(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Future[Any]:
        call = self._divided(identity, method, args, kwargs)

        def leaders_values() -> list[Any]:
            values = []
            for worker, own in call.of(self.workers):
                begun_ns = time.time_ns()
                values.append(self._run(worker, location, own, call))
                call.ran(worker, begun_ns)
            return [values[rank] for rank in call.layout.leaders]

        return Future(FinishedCall(leaders_values, call.collect))

    async def awaited(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = self._divided(identity, method, args, kwargs)
        coroutines = [self._awaited(worker, location, own, call) for worker, own in call.of(self.workers)]

        def place() -> str:
            return told_stacks(dict(enumerate(map(stack_of_awaited, coroutines))), range(len(coroutines)))

        values = await attended(self._attending(call.where), Together(coroutines), place)
        return call.collect([values[rank] for rank in call.layout.leaders])

    def _divided(
        self, identity: Identity, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DividedCall:
        name, title = identity.called(method), identity.title(method)
        where = where_of(title, self.group.name)
        layout = layout_of(method, self.shards, str(identity.address))
        recording = self.cluster.recording
        started_ns = time.time_ns()
        args, kwargs = values_of(args, kwargs)
        check_hosts((args, kwargs), self.group.name)
        division = divide(method, layout.num_shards, args, kwargs, where)
        number = recording.dispatched(name, started_ns) if recording else 0
        return DividedCall(method, name, title, where, layout, division, recording, number, self.random.of_call())

    def _run(self, worker: SimulatedWorker, location: str, own: Any, call: DividedCall) -> Any:
        instance, method = worker.located(location)
        on_worker = f"{call.title} on {worker.describe()}"
        with self.cluster.lock, acting_as(worker):
            args, kwargs, before = self._given(worker, own, call.where)
            worker.follow(call.random)
            observing = worker.observing(instance._rayhelper.identity, method, args, kwargs)
            entered = worker.inside(instance._rayhelper, method.role)
            with _noted(call.title, worker), observing, worker.own_random(), entered:
                try:
                    value = method.finished_call(instance, args, kwargs, self._attending(on_worker))
                except BaseException:
                    worker.ledger.forget_changed()  # or the next call would be blamed
                    raise
        return self._answer(worker, value, args, kwargs, before, on_worker)

    async def _awaited(self, worker: SimulatedWorker, location: str, own: Any, call: DividedCall) -> Any:
        """As ``_run``, for a coroutine: other code of the process runs while it is suspended."""
        instance, method = worker.located(location)
        on_worker, begun_ns = f"{call.title} on {worker.describe()}", time.time_ns()
        as_worker: list[Any] = [
            self.cluster.lock,
            task_acting_as(worker),
            worker.task_inside(instance._rayhelper, method.role),
        ]
        with _noted(call.title, worker):
            with Inside(as_worker):
                args, kwargs, before = self._given(worker, own, call.where)
                worker.follow(call.random)
                coroutine = method.coroutine(instance, args, kwargs)
            try:
                with worker.observing(instance._rayhelper.identity, method, args, kwargs):
                    value = await Stepped(coroutine, lambda: Inside([*as_worker, worker.own_random()]))
            except BaseException:
                worker.ledger.forget_changed()
                raise
        call.ran(worker, begun_ns)
        return self._answer(worker, value, args, kwargs, before, on_worker)

    def _attending(self, title: str) -> Call:
        """What looks after a call."""
        limit_s, remedy = self.group.timeout_s, f"timeout_s of group {self.group.name!r}"
        return Call(title, limit_s, lambda late: deadline_error(late, remedy))

    def _given(self, worker: SimulatedWorker, call: Any, where: str) -> tuple[Any, Any, dict[str, Any]]:
        """The worker's arguments; and with ``strict`` what they look like before the call."""
        if not self.cluster.strict:
            return *own_objects(call), {}
        args, kwargs = _sent(call, worker.ledger, where)
        return args, kwargs, _pickles(args, kwargs)

    def _answer(
        self,
        worker: SimulatedWorker,
        value: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: dict[str, Any],
        on_worker: str,
    ) -> Any:
        """The value as the caller gets it."""
        self.shards.note(worker.info.rank, worker.take_reports())
        note_changes(worker.take_changes(), worker.instance_at)
        check_value(value, on_worker)
        if not self.cluster.strict:
            return own_objects(value)
        worker.ledger.check(on_worker)
        _check_unchanged(before, _pickles(args, kwargs), on_worker)
        return _returned(value, on_worker)


class DividedCall:
    """A call to a group, divided."""

    def __init__(
        self,
        method: RoleMethod[..., Any],
        name: str,
        title: str,
        where: str,
        layout: Layout,
        division: Division,
        recording: Recording | None,
        number: int,
        random: NewRandom | None,
    ) -> None:
        self.method, self.name, self.title, self.where = method, name, title, where
        self.layout, self.division, self.random = layout, division, random
        self.recording, self.number = recording, number
        self.collect = collector(method, division.order, where, name, recording, number)

    def of(self, workers: Sequence[SimulatedWorker]) -> Iterator[tuple[SimulatedWorker, Any]]:
        """The workers that are called, in order of rank, each with its arguments."""
        for worker, shard in zip(workers, self.layout.shard_of, strict=False):
            yield worker, self.division.calls[shard]

    def ran(self, worker: SimulatedWorker, begun_ns: int) -> None:
        """Notes that a worker has made its part since ``begun_ns``."""
        if self.recording:
            self.recording.ran(self.name, self.method.role, worker.info.rank, begun_ns, self.number)


class _noted:  # noqa: N801
    """Inside, an exception is noted with the worker on which it was raised."""

    def __init__(self, what: str, worker: SimulatedWorker) -> None:
        self.what = what
        self.worker = worker

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            add_note(error, f"[{self.what} on {self.worker.describe()}]")


# What ``strict`` adds: the way to a worker and back


def _sent(call: Any, ledger: Ledger, where: str) -> Any:
    try:
        packed = _carried(call)
    except Exception as error:
        raise unsendable(where, error) from error
    return unpack(packed, ledger=ledger)


def _carried(value: Any) -> Packed:
    """The packed value as the other side has it: in memory of its own."""
    packed: Packed = pickle.loads(pickle.dumps(pack(value, stays_here=True)))
    return packed


def _returned(value: Any, where: str) -> Any:
    try:
        packed = _carried(value)
    except Exception as error:
        raise WorkerError(f"the value of {where} could not be sent back: {error}") from error
    return unpack(packed, writable=True)


def _pickles(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What each argument looks like pickled, by the name it has in messages."""
    named = {f"positional argument {i + 1}": value for i, value in enumerate(args)}
    named |= {f"argument {name!r}": value for name, value in kwargs.items()}
    packed = {name: pack(value, stays_here=True) for name, value in named.items()}
    return {
        name: (one.head, one.small.tobytes(), *(content.tobytes() for content in one.large))
        for name, one in packed.items()
    }


def _check_unchanged(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    for name in before:
        if before[name] != after[name]:
            raise DispatchError(
                f"{where} changed its {name}. A worker changes a copy, which the caller does not get: return the value."
            )
