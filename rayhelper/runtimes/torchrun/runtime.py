"""Roles under torchrun: every process runs the driver's code, and is a worker while a role's method runs.

    every process: trainer.update(batch)
        divide(batch)              the same division everywhere
        own slice -> the method    if this process belongs to the role's group
        Exchange.gather(...)       every process gets every leader's value
        collect(values)            the same value everywhere

A driver's method with ``execute='first'`` runs on process 0 alone, and every process gets its value, also while an
instance is being constructed.
The driver's code must therefore do the same on every process; a call that others do not make, or make with other
numbers of arguments or items, is noticed and named. A call that is given up leaves the processes out of step: the error
shows the stacks of all, and is raised again by every later call.
Device groups may be smaller than the run: their ranks are torchrun's. A deferred call is made at once; a process that
is not of its group does not wait for it before it makes its part of the next.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rayhelper.device_groups import DRIVER, DeviceGroup, DeviceGroups
from rayhelper.errors import ConfigError, DeadlineError, RoleError, WorkerDiedError, WorkerError
from rayhelper.roles.classes import build
from rayhelper.roles.left_behind import note_changes
from rayhelper.roles.methods import RoleMethod, not_constructed
from rayhelper.roles.parts import NO_INSTANCE, Identity, address_within, check_hosts, check_same_parts
from rayhelper.roles.runtime import Shard, WorkerInfo, state
from rayhelper.roles.stale import Snapshot
from rayhelper.runtimes.announced import Announced
from rayhelper.runtimes.debugging import Waiting
from rayhelper.runtimes.driver import forked
from rayhelper.runtimes.torchrun.exchange import Exchange, Watch, ready
from rayhelper.runtimes.torchrun.meeting import Meeting
from rayhelper.runtimes.torchrun.outcome import (
    Outcome,
    check_same_arguments,
    check_same_call,
    deadline_error,
    in_collective,
    some_failed_before,
)
from rayhelper.runtimes.torchrun.placement import OwedCall, SpmdPlacement
from rayhelper.timeline.recording import Recording
from rayhelper.values.contents import contents_of
from rayhelper.values.dispatch import bare
from rayhelper.values.lost import check_constructor
from rayhelper.values.shards import Reports, ShardTable
from rayhelper.watch.patches import stop_at_breakpoints
from rayhelper.watch.watchdog import Watched
from rayhelper.worker.changed.objects import Observed
from rayhelper.worker.failures import Failure, raise_first
from rayhelper.worker.process_group import Joined, in_process_group, join_process_group, leave_process_group, let_go
from rayhelper.worker.random_streams import NAMES, DrawingFrom, RandomState
from rayhelper.worker.runtime import HostedPlacement, WorkerRuntime

_GRACE_S = 2.0  # how long a process that failed lets the others finish before it frees those that wait for it
_LAST_S = 15.0  # and how long it waits for them in all
_TEARDOWN = "RayHelper.teardown()"  # the call of a process that leaves


class TorchrunRuntime:
    """What this process is: one of the processes that run the driver's code."""

    def __init__(self, config: DeviceGroups, recording: Recording | None) -> None:
        rank, size = torchrun_rank()
        self.config = config
        self.pid = os.getpid()
        self.rank = rank
        self.members = {group.name: members_of(group, size) for group in config.groups}
        self.recording = recording
        if recording is not None:
            recording.rank = rank
        self.exchange = Exchange(rank, size)
        self.stopped_before = stop_at_breakpoints(self.exchange.breakpoints.stop)
        self.announced: Announced | None = None
        if rank == 0:
            self.announced = Announced(self.exchange.where_each_is, Waiting(self.exchange.doors_by_name).answers)
        self.run_key = self.exchange.key  # of channels, too
        self.workers: dict[str, TorchrunWorker] = {
            group.name: TorchrunWorker(self._info(group), self)
            for group in config.groups
            if rank in self.members[group.name]
        }
        self.shards = {group.name: ShardTable(group.num_workers, group.name) for group in config.groups}
        self.num_instances = 0
        self.told_changes: set[tuple[str, str]] = set()  # methods, and what they change of arguments and classes
        self.placements: weakref.WeakValueDictionary[str, SpmdPlacement] = weakref.WeakValueDictionary()  # by address
        self.constructing: list[SpmdPlacement] = []
        self.owed: OwedCall | None = None  # the deferred call in which this process has not met the others yet
        self.last_awaited: Meeting | None = None  # of the call that was awaited last
        self.meetings = ThreadPoolExecutor(1, "meetings")  # each begins when the one before it is over
        self.ended: tuple[int, Exception] | None = None  # of a constructor that others left: how deep it is, and why
        self.thread: int | None = None  # in which calls are made; None: there was none yet
        self.watcher: Any = None  # of what calls come to, while ``prove`` compares runtimes
        self.alone = ""  # the driver's method that this process runs for all
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
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        if whole is not None:
            self._construct_part(init, instance, args, kwargs, whole._rayhelper)
            return
        self.check_usable(f"{type(instance).__name__}(...)")
        self.settle_owed()
        check_constructor(type(instance), args, kwargs)
        identity = Identity(instance, None, str(self.num_instances))
        placement = SpmdPlacement(self, identity)
        for group in placement.hosts:
            check_hosts((args, kwargs), group)
        self.num_instances += 1
        name = f"{type(instance).__name__}.__init__"
        drawing = self._drawing(name)
        self._place(instance, placement)
        self.constructing.append(placement)
        try:
            who = self.describe_host_of(placement)
            with Watched(self.exchange.attending(name)), Watch(self.exchange, None) as watch, drawing:
                outcome, error = placement.attempt(
                    name, name, who, lambda: build(init, instance, args, kwargs, identity), watch
                )
        finally:
            self.constructing.pop()
            identity.is_built = True
        given = contents_of(map(bare, (*args, *kwargs.values())))
        outcome = replace(outcome, parts=identity.records(), contents=given)
        if self.ended is not None:  # the others have settled this one already, without this process
            depth, why = self.ended
            if depth == len(self.constructing):
                self.ended = None
            raise why
        self.settle(outcome, error, watch)
        self._observe(placement)
        if self.watcher is not None:
            self.watcher.constructed(identity.name, placement.noted())

    def _observe(self, placement: SpmdPlacement) -> None:
        """Where groups are smaller than the run, what calls change is told to processes that do not host the object."""
        identity, size = placement.identity, self.driver.world_size
        if all(len(self.members[name]) == size for name in placement.hosts):
            return
        observed = Observed(identity.instances())
        for hosted in placement.hosted.values():
            known = hosted.runtime.observed
            known[str(identity.address)] = observed
            weakref.finalize(placement, known.pop, str(identity.address), None).atexit = False
        if not placement.hosted:  # this process runs no code of its roles, and only reads it
            for one in identity.instances():
                one._rayhelper.snapshot = Snapshot(one, {})

    def _drawing(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Inside, a constructor draws what it draws on process 0: otherwise replicas begin with different weights.

        Processes that were given the same seeds are left alone. Others have their own generators again afterwards.
        """
        here = RandomState.here()
        told = self._agreed(name, here.digest())
        if len(set(told)) == 1:
            return contextlib.nullcontext()
        first = self._agreed(name, here if self.rank == 0 else None)[0]
        return DrawingFrom(first, then_as_before=NAMES if self.rank > 0 else ())

    def told_by_each(self, place: str, value: Any) -> list[Any]:
        """What all processes bring to the same place of the driver's code, in order of rank."""
        self.check_usable(place)
        self.settle_owed()
        return self._agreed(place, value)

    def _agreed(self, name: str, value: Any) -> list[Any]:
        """What all processes bring to the same call, before it is made."""
        with Watched(self.exchange.attending(name)), Watch(self.exchange, None) as watch:
            pass
        return self.settle(Outcome(name, value), None, watch)

    def _construct_part(
        self,
        init: Callable[..., None],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: SpmdPlacement,
    ) -> None:
        """It is settled with its whole."""
        identity = Identity(instance, whole.identity, address_within(whole.identity))
        placement = SpmdPlacement(self, identity, whole.hosts)
        self._place(instance, placement)
        self.constructing.append(placement)
        try:
            build(init, instance, args, kwargs, identity)
        finally:
            self.constructing.pop()

    def _place(self, instance: Any, placement: SpmdPlacement) -> None:
        object.__setattr__(instance, "_rayhelper", placement)
        self.placements[str(placement.identity.address)] = placement

    def describe_host_of(self, placement: SpmdPlacement) -> str:
        """Who this process is to an object, for messages."""
        hosted = placement.first_hosted()
        return self.describe() if hosted is None else hosted.runtime.describe()

    def who(self, process: int) -> str:
        """A process as messages name it: the first worker that it is, if it is one."""
        for name, members in self.members.items():
            if process in members:
                return f"rank {members.index(process)} of group {name!r} (process {process} of torchrun)"
        return f"process {process} of torchrun"

    def describe(self) -> str:
        return f"process {self.rank} of torchrun"

    def instance_at(self, address: str) -> Any:
        placement = self.placements.get(address)
        return None if placement is None else placement.identity.reference()

    def take_reports(self) -> dict[tuple[str, str], Shard]:
        """The shards that this process reported since the last time, by address and role."""
        return {key: shard for worker in self.workers.values() for key, shard in worker.take_reports().items()}

    def settle_owed(self) -> None:
        """Meets the others in a deferred call that this process is not in. Its future tells what failed there."""
        owed, self.owed = self.owed, None
        if owed is not None:
            owed.settle()

    def settle(
        self, outcome: Outcome, error: Exception | None, watch: Watch, *, of_coroutine: bool = False
    ) -> list[Any]:
        """The values of all processes, after what they reported has been noted.

        A process that has left a constructor, having failed in it, meets those that make a call within it. What it
        raised is raised by that call, and they leave the constructor without settling it once more.

        Raises:
            What a process raised, on every process.
            RoleError: the processes do not make the same call, or not with the same arguments, or built other parts.
            WorkerDiedError, DeadlineError: a process ended, or did not come in time.
        """
        outcomes = self._exchanged(replace(outcome, depth=len(self.constructing)), error, watch, of_coroutine)
        outermost = min(other.depth for other in outcomes)
        if outermost == len(self.constructing):
            return self._settled(outcomes, error)
        try:
            return self._settled(outcomes, error)
        except Exception as why:
            self.ended = outermost, why
            raise

    def _settled(self, outcomes: list[Outcome], error: Exception | None) -> list[Any]:
        comparable = not some_failed_before(outcomes)
        if comparable:
            check_same_call(outcomes)
        if any(other.left for other in outcomes):
            for worker in self.workers.values():
                worker.rejoin()
        if comparable:
            check_same_arguments(outcomes)
        failures = [other.failure for other in outcomes if other.failure is not None]
        if failures:
            if error is not None and min(failures, key=lambda one: one.time_ns) is outcomes[self.rank].failure:
                raise error
            raise_first(failures)
        built = {self.who(rank): other.parts for rank, other in enumerate(outcomes)}
        here = next(iter(built))
        check_same_parts(outcomes[0].call.removesuffix(".__init__"), here, built.pop(here), built)
        for rank, other in enumerate(outcomes):
            self._note_shards(rank, other.shards)
            note_changes(other.changes)
        return [other.value for other in outcomes]

    def _note_shards(self, process: int, shards: Reports) -> None:
        for (address, role), shard in shards.items():
            name = self.config.group_of(role).name
            self.shards[name].note(self.members[name].index(process), {(address, role): shard})

    def _exchanged(self, outcome: Outcome, error: Exception | None, watch: Watch, of_coroutine: bool) -> list[Outcome]:
        left = [watch.left]
        try:
            packed = ready(outcome)
        except Exception as unsendable:
            title, who = outcome.call.partition(" of instance ")[0], self.who(self.rank)
            why = WorkerError(f"the value of {title} on {who} cannot be sent to the other processes: {unsendable}")
            failure = Failure.of(why, title, who, self.rank, pickle.dumps)
            outcome = replace(outcome, value=None, failure=failure)
            packed = ready(outcome)

        def leave() -> None:
            left.append(in_process_group())  # before the others are freed, and come
            let_go(error)
            leave_process_group()

        free = threading.Timer(0.0 if isinstance(error, DeadlineError) or in_collective(error) else _GRACE_S, leave)
        free.name, free.daemon = "rayhelper-free", True
        if error is not None:
            free.start()  # the others may wait for this process in a collective that it will not join
        patience_s = watch.left_s()
        if error is not None:
            patience_s = _GRACE_S if isinstance(error, DeadlineError) else min(_LAST_S, max(_GRACE_S, patience_s))
        gathered: list[tuple[Any, bool]] = []
        trouble: Exception | None = None
        try:
            gathered = self.exchange.gather(packed, lambda: any(left), patience_s, of_coroutine=of_coroutine)
        except TimeoutError as late:
            trouble = deadline_error(outcome.call, watch, str(late))
        except ConnectionError as lost:
            trouble = WorkerDiedError(f"{outcome.call} cannot end: {lost}")
        finally:
            free.cancel()
            if error is not None:
                free.join()  # leaving takes a moment, and joining anew must come after
        if trouble is not None:
            raise error or trouble
        return [
            replace(other, left=any_left) if isinstance(other, Outcome) else Outcome(_TEARDOWN)
            for other, any_left in gathered
        ]

    def check_usable(self, what: str) -> None:
        """Raises if no call can be made here and now.

        Raises:
            RoleError: process 0 is running a method that the others do not run, this is a forked child, or a thread
                other than the first that made a call.
            DeadlineError: an earlier call was given up.
        """
        if os.getpid() != self.pid:
            raise forked(what)
        self.thread = self.thread or threading.get_ident()
        if self.thread != threading.get_ident():
            raise RoleError(
                f"{what} is called in a second thread. Under torchrun every process must make the same calls in the "
                "same order, and threads have none. Make all calls in one thread: call.defer() begins several at once."
            )
        if self.alone:
            raise RoleError(
                f"{what} cannot be made by {self.alone}, which only process 0 runs under torchrun: the others would "
                "not make it. Make it in the driver's code that calls the method."
            )
        if self.ended is not None:
            raise self.ended[1]
        if self.exchange.broken:
            raise DeadlineError(
                f"{what} cannot be made: an earlier call was abandoned, and the processes are no longer "
                "synchronized. End the run, or begin a new session on every process. What was seen then: "
                f"{self.exchange.late}"
            )

    def placement(self, method: RoleMethod[..., Any], target: Any) -> Any:
        if method.role == DRIVER:
            identity = Identity(target, None, NO_INSTANCE)
            identity.is_built = True
            return SpmdPlacement(self, identity)
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        hosted = self._building()
        if hosted is None:
            return self.driver
        if hosted not in self.constructing[-1].hosted.values():  # a part of another role, whose shards are its own
            return hosted.runtime.info
        with hosted.runtime.inside(hosted, None):
            return hosted.runtime.current()

    def _building(self) -> HostedPlacement | None:
        """Of what this process is building, the innermost object that it hosts."""
        hosted = (placement.first_hosted() for placement in reversed(self.constructing))
        return next((one for one in hosted if one is not None), None)

    def report_shard(self, shard: Shard) -> None:
        if not self.constructing:
            raise RoleError("RayHelper.shard(...) is for code of a role, and was called by the driver's code")
        for hosted in self.constructing[-1].hosted.values():
            hosted.report(hosted.runtime.info.roles, shard)

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        hosted = self._building()
        if hosted is None:
            raise RoleError("RayHelper.init_process_group is for code of a role, and was called by the driver's code")
        hosted.runtime.init_process_group(backend, timeout_s)

    def where_all_are(self) -> str:
        """The stacks of all processes, as text. Any thread may call it."""
        return self.exchange.where_each_is()

    def teardown(self) -> None:
        """Leaves the other processes; with a trace, rank 0 writes what all recorded."""
        if state.active is self:
            state.active = None
        atexit.unregister(self.teardown)
        if self.exchange.closed or os.getpid() != self.pid:  # a forked child has none of it
            return
        self.settle_owed()
        if self.last_awaited is not None and self.last_awaited.is_given_up:
            self.last_awaited.wait()
        self.meetings.shutdown(wait=False)
        stop_at_breakpoints(self.stopped_before)
        if self.announced is not None:
            self.announced.close()
        if self.rank > 0:
            logging.disable(logging.NOTSET)
        if self.recording is not None:
            self.recording.write_gathered(self.exchange)
        if any(worker.joined for worker in self.workers.values()):
            leave_process_group()
        self.exchange.close()


class TorchrunWorker(WorkerRuntime):
    """What this process is while it runs a method of a role."""

    def __init__(self, info: WorkerInfo, process: TorchrunRuntime) -> None:
        super().__init__(info, f"{os.environ.get('GROUP_RANK', '0')} (torchrun rank {process.rank})")
        self.process = process
        self.exchange = process.exchange
        self.run_key = process.run_key
        self.times_joined = 0

    def where_all_are(self) -> str:
        """As ``TorchrunRuntime.where_all_are``."""
        return self.process.where_all_are()

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            if self.joined is None and dist.get_world_size() != self.info.world_size:
                raise RoleError(
                    f"{self.describe()} cannot join a process group of its {self.info.world_size} workers. This "
                    f"process is already in a group of {dist.get_world_size()}, and under torchrun a role has no "
                    "separate processes. Give the groups the same ranks, or use Ray."
                )
            self.joined = self.joined or Joined(dist.get_backend(), timeout_s)
            return
        self.times_joined += 1
        name = f"{self.info.group}/{self.times_joined}"
        store = None if self.info.world_size == 1 else self.exchange.store_of_group(name, self.info.world_size)
        self.joined = join_process_group(self.info, backend, timeout_s, store)


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
    if group.shares_devices_with is not None:
        raise ConfigError(
            f"group {group.name!r} shares devices with {group.shares_devices_with!r}; torchrun starts one process "
            "per rank. Host the roles of both in one group, or use Ray."
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
