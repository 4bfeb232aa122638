"""Roles under torchrun: every process runs the driver's code, and is a worker while a role's method runs.

    every process: trainer.update(batch)
        divide(batch)              the same division everywhere
        own slice -> the method    if this process belongs to the role's group
        Exchange.gather(...)       every process gets every leader's value
        collect(values)            the same value everywhere

The driver's code must therefore do the same on every process; a call that others do not make is noticed and named.
Device groups may be smaller than the run: their ranks are torchrun's. A deferred call is made at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rayhelper.calls import collector, divide, layout_of, where_of
from rayhelper.device_groups import DRIVER, DeviceGroup, DeviceGroups
from rayhelper.driver import undeclared
from rayhelper.errors import ConfigError, DeadlineError, RoleError, WorkerDiedError
from rayhelper.exchange import Exchange
from rayhelper.failures import Failure, raise_first
from rayhelper.futures import FinishedCall, Future, values_of
from rayhelper.process_group import Joined, in_process_group, join_process_group, leave_process_group, let_go
from rayhelper.recording import Recording
from rayhelper.roles import RoleMethod, not_constructed
from rayhelper.runtime import Route, Shard, WorkerInfo, acting_as, state
from rayhelper.shards import ShardTable
from rayhelper.worker_runtime import HostedPlacement, WorkerRuntime, refuse_to_travel

_GRACE_S = 2.0  # how long a process that failed lets the others finish before it frees those that wait for it
_LAST_S = 15.0  # and how long it waits for them in all
_PATIENCE_S = 3600.0  # for the slowest process of a call without a deadline


@dataclass(frozen=True)
class Outcome:
    """What a call came to on one process, as the others are told."""

    call: str
    value: Any = None
    failure: Failure | None = None
    shards: tuple[tuple[str, Shard], ...] = ()
    left: bool = False  # it left its process group, to free those that waited for it


class TorchrunRuntime:
    """What this process is: one of the processes that run the driver's code."""

    def __init__(self, config: DeviceGroups, recording: Recording | None) -> None:
        rank, size = torchrun_rank()
        self.config = config
        self.rank = rank
        self.members = {group.name: members_of(group, size) for group in config.groups}
        self.recording = recording
        if recording is not None:
            recording.rank = rank
        self.exchange = Exchange(rank, size)
        self.workers = {
            group.name: TorchrunWorker(self._info(group), self.exchange)
            for group in config.groups
            if rank in self.members[group.name]
        }
        self.shards = {group.name: ShardTable(group.num_workers, group.name) for group in config.groups}
        self.num_instances = 0
        self.constructing: list[SpmdPlacement] = []
        self.driver = WorkerInfo((DRIVER,), DRIVER, rank, size, _local_rank(), _local_size(), _node(), Shard(0, 1))
        if rank > 0:
            logging.disable(logging.WARNING)  # what every process would say, rank 0 says; errors are each one's own
        atexit.register(self.teardown)

    def _info(self, group: DeviceGroup) -> WorkerInfo:
        members = self.members[group.name]
        rank, size = members.index(self.rank), len(members)
        return WorkerInfo(
            group.roles, group.name, rank, size, _local_rank(), min(size, _local_size()), _node(), Shard(rank, size)
        )

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        placement = SpmdPlacement(self, self.num_instances, type(instance))
        self.num_instances += 1
        object.__setattr__(instance, "_rayhelper", placement)
        self.constructing.append(placement)
        name = f"{type(instance).__name__}.__init__"
        try:
            hosted = placement.first_hosted()
            who = f"process {self.rank} of torchrun" if hosted is None else hosted.runtime.describe()
            outcome, error = placement.attempt(name, name, who, lambda: init(instance, *args, **kwargs))
        finally:
            self.constructing.pop()
        self.settle(placement, outcome, error, None)
        placement.is_constructing = False

    def settle(
        self, placement: SpmdPlacement, outcome: Outcome, error: Exception | None, timeout_s: float | None
    ) -> list[Any]:
        """The values of all processes, after what they reported has been noted.

        Raises:
            What a process raised, on every process.
            RoleError: the processes do not make the same call.
            WorkerDiedError, DeadlineError: a process ended, or did not come within ``timeout_s``.
        """
        outcomes = self._exchanged(outcome, error, timeout_s)
        calls = {other.call for other in outcomes}
        if len(calls) > 1:
            told = ", ".join(f"rank {rank} {other.call}" for rank, other in enumerate(outcomes[:8]))
            raise RoleError(
                f"under torchrun every process runs the driver's code and must make the same calls, but now came "
                f"{told}. Look for a branch, an order or a random number that differs between processes."
            )
        if any(other.left for other in outcomes):
            for worker in self.workers.values():
                worker.rejoin()
        failures = [other.failure for other in outcomes if other.failure is not None]
        if failures:
            if error is not None and min(failures, key=lambda one: one.time_ns) is outcome.failure:
                raise error
            raise_first(failures)
        for rank, other in enumerate(outcomes):
            placement.note(rank, dict(other.shards))
        return [other.value for other in outcomes]

    def _exchanged(self, outcome: Outcome, error: Exception | None, timeout_s: float | None) -> list[Outcome]:
        left: list[bool] = []

        def leave() -> None:
            left.append(in_process_group())  # before the others are freed, and come
            let_go(error)
            leave_process_group()

        free = threading.Timer(0.0 if _in_collective(error) else _GRACE_S, leave)
        free.daemon = True
        if error is not None:
            free.start()  # the others may wait for this process in a collective that it will not join
        try:
            patience_s = timeout_s or _PATIENCE_S
            return [
                replace(other, left=any_left)
                for other, any_left in self.exchange.gather(
                    outcome, lambda: any(left), min(_LAST_S, patience_s) if error is not None else patience_s
                )
            ]
        except TimeoutError as late:
            if error is not None:
                raise error from None
            raise DeadlineError(f"{outcome.call} did not finish on every process: {late}") from None
        except ConnectionError as lost:
            if error is not None:
                raise error from None
            raise WorkerDiedError(f"another process ended during {outcome.call}: {lost}") from None
        finally:
            free.cancel()
            if error is not None:
                free.join()  # leaving takes a moment, and joining anew must come after

    def placement(self, method: RoleMethod[..., Any], target: Any) -> Any:
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        if self.constructing:
            hosted = self.constructing[-1].first_hosted()
            if hosted is not None:
                with hosted.runtime.inside(hosted, None):
                    return hosted.runtime.current()
        return self.driver

    def report_shard(self, shard: Shard) -> None:
        if not self.constructing:
            raise RoleError("RayHelper.shard(...) is for code of a role, and was called by the driver's code")
        for hosted in self.constructing[-1].hosted.values():
            hosted.report(hosted.runtime.info.roles, shard)

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        hosted = self.constructing[-1].first_hosted() if self.constructing else None
        if hosted is None:
            raise RoleError("RayHelper.init_process_group is for code of a role, and was called by the driver's code")
        hosted.runtime.init_process_group(backend, timeout_s)

    def teardown(self) -> None:
        """Leaves the other processes; with a trace, rank 0 writes what all recorded."""
        if state.active is self:
            state.active = None
        atexit.unregister(self.teardown)
        if self.exchange.closed:
            return
        if self.rank > 0:
            logging.disable(logging.NOTSET)
        if self.recording is not None:
            self.recording.write_gathered(self.exchange)
        if any(worker.joined for worker in self.workers.values()):
            leave_process_group()
        self.exchange.close()


class TorchrunWorker(WorkerRuntime):
    """What this process is while it runs a method of a role."""

    def __init__(self, info: WorkerInfo, exchange: Exchange) -> None:
        super().__init__(info, f"{os.environ.get('GROUP_RANK', '0')} (torchrun rank {exchange.rank})")
        self.exchange = exchange
        self.times_joined = 0

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            if self.joined is None and dist.get_world_size() != self.info.world_size:
                raise RoleError(
                    f"{self.describe()} cannot join a process group of its {self.info.world_size} workers: this "
                    f"process is in one of {dist.get_world_size()}, and torchrun gives a role no process of its own. "
                    "Give the groups the same ranks, or use Ray."
                )
            self.joined = self.joined or Joined(dist.get_backend(), timeout_s)
            return
        self.times_joined += 1
        store = self.exchange.store_of(f"{self.info.group}/{self.times_joined}")
        self.joined = join_process_group(self.info, backend, timeout_s, store)


class SpmdPlacement:
    """One instance on this process: it is the driver's, and a worker's in every role that this process hosts."""

    def __init__(self, runtime: TorchrunRuntime, instance_id: int, cls: type) -> None:
        self.runtime = runtime
        self.instance_id = instance_id
        self.cls = cls
        self.is_constructing = True
        config = runtime.config
        self.groups = {role: config.group_of(role) for role in cls.__rayhelper_roles__}  # type: ignore[attr-defined]
        names = dict.fromkeys(group.name for group in self.groups.values())
        self.hosted = {name: HostedPlacement(runtime.workers[name]) for name in names if name in runtime.workers}

    def first_hosted(self) -> HostedPlacement | None:
        """Of the groups that this process belongs to, the first that the class declares."""
        return next(iter(self.hosted.values()), None)

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if isinstance(state.active, WorkerRuntime):
            hosted = self.hosted.get(state.active.info.group)
            if hosted is None:
                raise RoleError(f"{method}: this {self.cls.__name__} has no role on {state.active.describe()}.")
            hosted.constructing = self.is_constructing
            return hosted.route(method)
        if method.role == DRIVER:
            return "here"
        if self.is_constructing:
            return "here" if self._hosts(method) else "skip"
        if self.runtime.exchange.closed:
            raise RoleError(f"{method}: this {self.cls.__name__} was left by RayHelper.teardown().")
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
        group = self.groups.get(method.role)
        if group is None:
            raise undeclared(method, self.cls)
        where = where_of(method, group.name)
        started_ns = time.time_ns()
        layout = layout_of(method, self.runtime.shards[group.name], self.instance_id)
        division = divide(method, layout.num_shards, *values_of(args, kwargs), where)
        recording = self.runtime.recording
        call = recording.dispatched(method, started_ns) if recording else 0
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
            if recording:
                recording.ran(method, rank, begun_ns, call)
            return value if rank in layout.leaders else None

        def leaders_values() -> list[Any]:
            who = f"process {self.runtime.rank}" if rank is None else self.hosted[group.name].runtime.describe()
            name = f"{method} of instance {self.instance_id}"
            outcome, error = self.attempt(name, str(method), who, own_value)
            begun_ns = time.time_ns()
            values = self.runtime.settle(self, outcome, error, group.timeout_s)
            if recording:
                recording.span("wait", method, begun_ns, call, self.runtime.exchange.received_bytes)
            return [values[members[leader]] for leader in layout.leaders]

        return Future(FinishedCall(leaders_values, collector(method, division.order, where, recording, call)))

    def attempt(self, call: str, method: str, who: str, run: Callable[[], Any]) -> tuple[Outcome, Exception | None]:
        """What ``run`` comes to on this process, for the others; and the exception itself."""
        try:
            value = run()
            shards = tuple((role, shard) for one in self.hosted.values() for role, shard in one.take_reports().items())
            return Outcome(call, value, None, shards), None
        except Exception as error:
            failure = Failure.of(error, method, who, self.runtime.rank, pickle.dumps)
            error.add_note(f"[{method} on {who}]")
            return Outcome(call, None, failure), error

    def note(self, process: int, shards: dict[str, Shard]) -> None:
        """Remembers the shards that another process reported."""
        for role, shard in shards.items():
            name = self.groups[role].name if role in self.groups else self.runtime.config.group_of(role).name
            rank = self.runtime.members[name].index(process)
            self.runtime.shards[name].note(self.instance_id, rank, {role: shard})

    __reduce__ = refuse_to_travel


def _in_collective(error: Exception | None) -> bool:
    """Whether torch.distributed raised it: the group is broken then, and others wait for this process as well."""
    if error is None or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")


def torchrun_rank() -> tuple[int, int]:
    """(rank, number of processes), as torchrun tells this process. Raises ConfigError where it was not torchrun."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ConfigError(
            "runtime='torchrun' needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment. Start the "
            "program with `torchrun --nproc-per-node N program.py`."
        ) from None


def members_of(group: DeviceGroup, num_processes: int) -> tuple[int, ...]:
    """The processes that are a group's workers, in order of their rank in it. Raises ConfigError."""
    if group.gpus_per_worker > 1:
        raise ConfigError(
            f"group {group.name!r} has gpus_per_worker {group.gpus_per_worker}; under torchrun a worker is a process "
            "with one accelerator. Leave it out, or use Ray."
        )
    members = group.ranks if group.ranks is not None else tuple(range(group.num_workers))
    if members[-1] >= num_processes:
        raise ConfigError(
            f"group {group.name!r} uses rank {members[-1]}, and torchrun started {num_processes} processes (ranks 0 to "
            f"{num_processes - 1}). Start {members[-1] + 1} of them, or give the group fewer workers."
        )
    return members


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _node() -> int:
    return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))
