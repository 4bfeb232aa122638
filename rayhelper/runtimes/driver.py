"""The driver: which group hosts which role, and the trainers constructed here.

    DriverRuntime(config, cluster)
        cluster.start(config)          one Group a device group         runtimes/ray/cluster.py, inprocess.py
        construct(instance)            the same __init__ on every worker of its roles, then here
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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rayhelper.device_groups import DRIVER, DeviceGroups
from rayhelper.errors import RoleError
from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod, find_method, not_constructed
from rayhelper.roles.runtime import Route, Shard, WorkerInfo, state
from rayhelper.worker.process_group import join_process_group
from rayhelper.worker.runtime import refuse_to_travel

NO_INSTANCE = -1  # methods of role driver may stand in any class, and outside of one


class Group(Protocol):
    """The workers of one device group."""

    def construct(self, instance_id: int, construction: Any) -> Any:
        """Starts the construction of an instance on every worker; what ``constructed`` waits for."""
        ...

    def constructed(self, instance_id: int, started: Any) -> None:
        """Waits until every worker has constructed the instance. Raises what a constructor raised."""
        ...

    def submit(
        self,
        instance_id: int,
        method: RoleMethod[..., Any],
        address: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Future[Any]:
        """One call on every worker (or worker 0 alone), not waited for."""
        ...

    def drop(self, instance_id: int) -> None:
        """Frees an instance on every worker."""
        ...


class Cluster(Protocol):
    """Where the groups of a driver run."""

    def start(self, config: DeviceGroups) -> dict[str, Any]:
        """The groups by name, their workers ready. Raises PlacementError."""
        ...

    def construction(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], groups: Sequence[Any]) -> Any:
        """A class and the arguments of its constructor, fit to be given to each group's ``construct``."""
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
        self.ids = itertools.count()
        self.stopped = False
        self.pid = os.getpid()
        self.unused: list[DriverPlacement] = []  # of instances that are gone; freed when the next one is constructed
        atexit.register(self.teardown)
        try:
            self.groups = cluster.start(config)
        except BaseException:
            self.teardown()
            raise

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        roles = type(instance).__rayhelper_roles__
        groups = {role: self.groups[self.config.group_of(role).name] for role in roles}
        hosting = list(dict.fromkeys(groups.values()))
        while self.unused:
            self.unused.pop().drop()
        placement = DriverPlacement(self, next(self.ids), groups, type(instance))
        object.__setattr__(instance, "_rayhelper", placement)
        construction = self.cluster.construction(type(instance), args, kwargs, hosting)
        started = [(group, group.construct(placement.instance_id, construction)) for group in hosting]
        try:
            init(instance, *args, **kwargs)
            for group, waiting in started:
                group.constructed(placement.instance_id, waiting)
        except BaseException:
            placement.drop()
            raise
        placement.constructing = False
        with contextlib.suppress(TypeError):  # a class without weak references keeps its workers until teardown
            weakref.finalize(instance, self.unused.append, placement).atexit = False

    def placement(self, method: RoleMethod[..., Any], target: Any) -> Any:
        if method.role == DRIVER:
            return DriverPlacement(self, NO_INSTANCE, {}, type(target))
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        return WorkerInfo((DRIVER,), DRIVER, 0, 1, 0, 1, 0, Shard(0, 1))

    def report_shard(self, shard: Shard) -> None:
        raise RoleError("RayHelper.shard(...) is for code that runs on a worker, and was called on the driver")

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        join_process_group(self.current(), backend, timeout_s)

    def teardown(self) -> None:
        """Stops every worker; a cluster that was started for this run is stopped too."""
        if self.stopped or os.getpid() != self.pid:  # a forked child has none of it
            return
        self.stopped = True
        atexit.unregister(self.teardown)
        if state.active is self:
            state.active = None
        self.cluster.stop()


class DriverPlacement:
    """The workers of one instance, seen from the driver."""

    def __init__(self, runtime: DriverRuntime, instance_id: int, groups: dict[str, Group], cls: type) -> None:
        self.runtime = runtime
        self.instance_id = instance_id
        self.groups = groups
        self.cls = cls
        self.constructing = True

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if method.role == DRIVER:
            return "here"
        if self.runtime.stopped:
            raise RoleError(f"{method}: the workers of this {self.cls.__name__} were stopped by RayHelper.teardown().")
        return "skip" if self.constructing else "group"

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method.call(target, args, kwargs)

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        group = self.groups.get(method.role)
        if group is None:
            raise undeclared(method, self.cls)
        return group.submit(self.instance_id, method, address_of(self.instance_id, self.cls, method), args, kwargs)

    def drop(self) -> None:
        """Frees the instance on its workers."""
        if not self.runtime.stopped and self.runtime.cluster.alive():
            for group in dict.fromkeys(self.groups.values()):
                with contextlib.suppress(Exception):
                    group.drop(self.instance_id)

    __reduce__ = refuse_to_travel


def undeclared(method: RoleMethod[..., Any], cls: type) -> RoleError:
    """The error for a call to a role that the class has not."""
    declared = ", ".join(cls.__rayhelper_roles__)  # type: ignore[attr-defined]
    return RoleError(
        f"{method} belongs to a role that {cls.__name__} does not declare (declared: {declared}). "
        "Add it to @RayHelper.worker(group=[...])."
    )


@functools.lru_cache(4096)
def address_of(instance_id: int, cls: type, method: RoleMethod[..., Any]) -> str:
    """Which method of which instance, as text: the same name may stand in several classes of ``cls.__mro__``.

    So that ``super().update(...)`` runs the parent's method on the workers too.
    """
    for mro_index, base in enumerate(cls.__mro__):
        for name, entry in vars(base).items():
            with contextlib.suppress(RoleError):
                if find_method(entry) is method:
                    return f"{instance_id} {mro_index} {name}"
    raise RoleError(
        f"{method} is not an attribute of {cls.__name__}; decorated methods must stay where they are defined."
    )
