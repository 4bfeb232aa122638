"""The driver: which group hosts which role, and the trainers constructed here.

    DriverRuntime(config, cluster)
        cluster.start(config)          one Group a device group         ray/cluster.py, inprocess.py
        construct(instance)            the same __init__ on every worker of its roles, then here; parts come with it
        DriverPlacement.submit(...)    a call to the group of its role

How a group carries a call to its workers is the group's own business.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from rayhelper.device_groups import DRIVER, DeviceGroup, DeviceGroups
from rayhelper.errors import RoleError
from rayhelper.roles.classes import build
from rayhelper.roles.futures import Future, finished
from rayhelper.roles.left_behind import LeftBehind
from rayhelper.roles.methods import RoleMethod, find_method, not_constructed
from rayhelper.roles.names import of_method
from rayhelper.roles.parts import NO_INSTANCE, Identity, Record, address_within, check_same_parts, refuse_to_travel
from rayhelper.roles.runtime import Route, Shard, WorkerInfo, state
from rayhelper.roles.stale import InPlace, Snapshot, kept_attributes
from rayhelper.roles.used_parts import UsedParts
from rayhelper.runtimes.off import call_here
from rayhelper.values.lost import check_constructor
from rayhelper.watch.watchdog import Call
from rayhelper.worker.process_group import join_process_group


class Group(Protocol):
    """The workers of one device group."""

    group: DeviceGroup

    def construct(self, address: str, construction: Any) -> Any:
        """Starts the construction of an object on every worker; what ``constructed`` waits for."""
        ...

    def constructed(self, address: str, started: Any) -> dict[str, Sequence[Record]]:
        """By worker, the parts that it built. Waits for all workers; raises what a constructor raised."""
        ...

    def submit(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Future[Any]:
        """One call on every worker (or worker 0 alone), not waited for. ``location``: of the method, as text."""
        ...

    async def awaited(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The collected value of a call of an asynchronous method. It has begun when this suspends for the first time,
        in the order in which calls are made; others run while it is suspended on the workers."""
        ...

    def states(self, address: str) -> list[Any]:
        """By worker, what an object and its parts hold (``prove/watching.py``)."""
        ...

    def abandon(self, address: str) -> None:
        """Notes that an object is used no more. May be called at any moment, as garbage is collected."""
        ...

    def drop(self, address: str) -> None:
        """Frees an object and its parts on every worker."""
        ...


class Cluster(Protocol):
    """Where the groups of a driver run."""

    def start(self, config: DeviceGroups) -> dict[str, Any]:
        """The groups by name, their workers ready. Raises PlacementError."""
        ...

    def construction(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str], groups: Sequence[Any]
    ) -> Any:
        """A class and the arguments of its constructor, fit to be given to ``construct`` of ``groups`` (``names``)."""
        ...

    def paused_s(self, last_s: float) -> float:
        """How many of the last so many seconds some worker waited at a breakpoint that this process does not see."""
        ...

    def where_all_are(self) -> str:
        """The stacks of the driver and of all workers, as text."""
        ...

    def alive(self) -> bool:
        """Whether the groups can still be reached."""
        ...

    def stop(self) -> None:
        """Ends every worker and frees what they held."""
        ...


class DriverRuntime:
    """What this process is: the driver of ``device_groups``."""

    def __init__(self, config: DeviceGroups, cluster: Cluster) -> None:
        self.config = config
        self.cluster = cluster
        self.groups: dict[str, Group] = {}
        self.numbers = itertools.count()
        self.stopped = False
        self.pid = os.getpid()
        self.placements: weakref.WeakValueDictionary[str, DriverPlacement] = weakref.WeakValueDictionary()  # by address
        self.told_changes: set[tuple[str, str]] = set()  # methods, and what they change of arguments and classes
        self.watcher: Any = None  # of what calls come to, while ``prove`` compares runtimes
        self.unused: list[Tenancy] = []  # of objects that are gone; freed when the next one is constructed
        atexit.register(self.teardown)
        try:
            self.groups = cluster.start(config)
        except BaseException:
            self.teardown()
            raise

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        if whole is not None:
            self._construct_part(init, instance, args, kwargs, whole._rayhelper)
            return
        if os.getpid() != self.pid:
            raise forked(f"{type(instance).__name__}(...)")
        check_constructor(type(instance), args, kwargs)
        groups = self._groups_of(type(instance))
        hosting = list(dict.fromkeys(groups.values()))
        while self.unused:
            self.unused.pop().drop()
        tenancy = Tenancy(self, str(next(self.numbers)), hosting)
        placement = self._place(instance, groups, Identity(instance, None, tenancy.address), Anchor())
        construction = self.cluster.construction(type(instance), args, kwargs, placement.hosts, hosting)
        try:
            started = [(group, group.construct(tenancy.address, construction)) for group in hosting]
            build(init, instance, args, kwargs, placement.identity)
            built: dict[str, Sequence[Record]] = {}
            for group, waiting in started:
                built |= group.constructed(tenancy.address, waiting)
            identity = placement.identity
            check_same_parts(identity.name, "the driver", identity.records(), built)
            for built_here in identity.instances():
                built_here._rayhelper.snapshot = Snapshot(built_here, built_here._rayhelper.set_here)
                built_here._rayhelper.in_place = InPlace(built_here)
        except BaseException:
            placement.identity.is_built = True
            tenancy.drop()
            raise
        if self.watcher is not None:
            self.watcher.constructed(identity.name, placement.states())
        weakref.finalize(placement.anchor, tenancy.abandon).atexit = False

    def _construct_part(
        self,
        init: Callable[..., None],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: DriverPlacement,
    ) -> None:
        """The workers build it themselves, in the ``__init__`` of the whole."""
        identity = Identity(instance, whole.identity, address_within(whole.identity))
        self._place(instance, self._groups_of(type(instance)), identity, whole.anchor, whole.hosts)
        build(init, instance, args, kwargs, identity)

    def _groups_of(self, cls: type) -> dict[str, Group]:
        roles = cls.__rayhelper_roles__  # type: ignore[attr-defined]
        return {role: self.groups[self.config.group_of(role).name] for role in roles}

    def _place(
        self, instance: Any, groups: dict[str, Group], identity: Identity, anchor: Anchor, hosts: Collection[str] = ()
    ) -> DriverPlacement:
        hosts = hosts or frozenset(self.config.group_of(role).name for role in groups)
        placement = DriverPlacement(self, identity, groups, anchor, hosts)
        object.__setattr__(instance, "_rayhelper", placement)
        self.placements[str(identity.address)] = placement
        return placement

    def instance_at(self, address: str) -> Any:
        placement = self.placements.get(address)
        return None if placement is None else placement.identity.reference()

    def describe(self) -> str:
        return "the driver"

    def placement(self, method: RoleMethod[..., Any], target: Any) -> Any:
        if method.role == DRIVER:
            return DriverPlacement(self, Identity(target, None, NO_INSTANCE), {}, Anchor(), ())
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        return WorkerInfo((DRIVER,), DRIVER, 0, 1, 0, 1, 0, Shard(0, 1))

    def report_shard(self, shard: Shard) -> None:
        raise RoleError("RayHelper.shard(...) is for code that runs on a worker, and was called on the driver")

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        join_process_group(self.current(), backend, timeout_s)

    def where_all_are(self) -> str:
        """The stacks of the driver and of all workers, as text. Any thread may call it."""
        return self.cluster.where_all_are()

    def teardown(self) -> None:
        """Stops every worker; a cluster that was started for this run is stopped too."""
        if self.stopped or os.getpid() != self.pid:  # a forked child has none of it
            return
        self.stopped = True
        atexit.unregister(self.teardown)
        if state.active is self:
            state.active = None
        self.cluster.stop()


class Anchor:
    """Lives as long as a whole or one of its parts does on the driver; then the workers may free them."""


class Tenancy:
    """A whole on its workers, until it is dropped."""

    def __init__(self, runtime: DriverRuntime, address: str, groups: Sequence[Group]) -> None:
        self.runtime = runtime
        self.address = address
        self.groups = groups

    def abandon(self) -> None:
        """The driver has it no more; it is dropped when the next one is constructed."""
        self.runtime.unused.append(self)
        for group in self.groups:
            group.abandon(self.address)

    def drop(self) -> None:
        """Frees the whole and its parts on the workers."""
        if not self.runtime.stopped and self.runtime.cluster.alive():
            for group in self.groups:
                with contextlib.suppress(Exception):
                    group.drop(self.address)


class DriverPlacement:
    """The workers of one object, a whole or a part, seen from the driver."""

    def __init__(
        self,
        runtime: DriverRuntime,
        identity: Identity,
        groups: dict[str, Group],
        anchor: Anchor,
        hosts: Collection[str],
    ) -> None:
        self.runtime = runtime
        self.identity = identity
        self.groups = groups  # by role
        self.anchor = anchor
        self.hosts = hosts
        self.snapshot: Snapshot | None = None  # None: it is being constructed
        self.in_place: InPlace | None = None
        self.left = LeftBehind()
        self.used_parts = UsedParts()
        self.set_here: dict[str, Any] = {}  # what methods of the driver have set during construction

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if method.role == DRIVER:
            return "here"
        if os.getpid() != self.runtime.pid:
            raise forked(self.identity.title(method))
        if self.runtime.stopped:
            raise RoleError(
                f"{self.identity.title(method)}: the workers of this {self.identity.cls.__name__} were stopped by "
                "RayHelper.teardown()."
            )
        return "skip" if self.identity.is_building else "group"

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method.role != DRIVER or not self.identity.is_building or not hasattr(target, "__dict__"):
            return method.call(target, args, kwargs)
        before = kept_attributes(target)
        try:
            return method.call(target, args, kwargs)
        finally:  # workers do not run it
            now = kept_attributes(target)
            self.set_here |= {name: kept for name, kept in now.items() if before.get(name) != kept}

    def attending(self, method: RoleMethod[..., Any]) -> Call:
        call = call_here(self.runtime.config, self.identity.title(method), method.role, "on the driver")
        call.paused_s = self.runtime.cluster.paused_s
        return call

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        identity = self.identity
        group, location = self._destination(method, target)
        watcher = self.runtime.watcher
        if watcher is None:
            return group.submit(identity, method, location, args, kwargs)

        def run() -> Any:
            return group.submit(identity, method, location, args, kwargs).result()

        title = identity.title(method)
        return finished(lambda: watcher.call(method, title, args, kwargs, run, self.states))

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        group, location = self._destination(method, target)

        def run() -> Awaitable[Any]:
            return group.awaited(self.identity, method, location, args, kwargs)

        watcher = self.runtime.watcher
        if watcher is None:
            return await run()
        return await watcher.awaited(method, self.identity.title(method), args, kwargs, run, self.states)

    def _destination(self, method: RoleMethod[..., Any], target: Any) -> tuple[Group, str]:
        """The group of a method's role, and the method's location. Raises RoleError."""
        identity = self.identity
        group = self.groups.get(method.role)
        if group is None:
            raise undeclared(method, identity.cls)
        if self.snapshot is not None:
            title = identity.title(method)
            cls: Any = type(target)
            names = of_method(cls, method)
            self.snapshot.check(method, target, title)
            if self.in_place is not None:
                self.in_place.check(method, names, target, title)
            self.used_parts.check(method, target, title)
            self.snapshot.called(names, target)
        return group, location_of(str(identity.address), identity.cls, method)  # type: ignore[arg-type]

    def states(self) -> list[Any]:
        """By worker, what the outermost whole of this object and its parts hold there."""
        address = str(self.identity.outermost.address)
        groups = [group for group in self.runtime.groups.values() if group.group.name in self.hosts]
        return [state for group in groups for state in group.states(address)]

    __reduce__ = refuse_to_travel


def forked(what: str) -> RoleError:
    """The error for a call from a child process of the driver, which has no connection to the workers."""
    return RoleError(
        f"{what} was called in a process that was forked from the driver (a DataLoader worker, a Process of "
        "multiprocessing). Only the driver itself reaches the workers. Call it there, with the values of the child."
    )


def undeclared(method: RoleMethod[..., Any], cls: type) -> RoleError:
    """The error for a call to a role that the class has not."""
    declared = ", ".join(cls.__rayhelper_roles__)  # type: ignore[attr-defined]
    return RoleError(
        f"{method} belongs to a role that {cls.__name__} does not declare (declared: {declared}). "
        "Add it to @RayHelper.worker(group=[...])."
    )


@functools.lru_cache(4096)
def location_of(address: str, cls: type, method: RoleMethod[..., Any]) -> str:
    """Which method of which object, as text: the same name may stand in several classes of ``cls.__mro__``.

    So that ``super().update(...)`` runs the parent's method on the workers too.
    """
    for mro_index, base in enumerate(cls.__mro__):
        for name, entry in vars(base).items():
            with contextlib.suppress(RoleError):
                if find_method(entry) is method.origin:
                    return f"{address} {mro_index} {name}"
    raise RoleError(
        f"{method} is not an attribute of {cls.__name__}; decorated methods must stay where they are defined."
    )
