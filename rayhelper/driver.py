"""The driver while Ray is on: which group hosts which role, and the trainers constructed here."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import ray
from ray import cloudpickle

from rayhelper import placement as placing
from rayhelper.device_groups import DRIVER, DeviceGroups
from rayhelper.errors import RoleError
from rayhelper.futures import Future
from rayhelper.host import find_method, method_address
from rayhelper.modules import user_modules
from rayhelper.roles import RoleMethod, not_constructed
from rayhelper.runtime import Route, Shard, WorkerInfo, state
from rayhelper.worker_group import WorkerGroup

_LOCAL_WAIT_S = 0.0  # a cluster of this machine alone will not grow
_CLUSTER_WAIT_S = 120.0


class DriverRuntime:
    """What this process is: the driver of ``device_groups``."""

    def __init__(self, groups: DeviceGroups, ray_address: str | None) -> None:
        self.config = groups
        self.groups: dict[str, WorkerGroup] = {}
        self.ids = itertools.count()
        self.stopped = False
        self.unused: list[DriverPlacement] = []  # of instances that are gone; freed when the next one is constructed
        ray_address = ray_address or os.environ.get("RAY_ADDRESS")
        self.owns_ray = placing.connect(ray_address)
        atexit.register(self.teardown)
        try:
            self._start(ray_address)
        except BaseException:
            self.teardown()
            raise

    def _start(self, ray_address: str | None) -> None:
        slots = placing.place(self.config, wait_s=_CLUSTER_WAIT_S if ray_address else _LOCAL_WAIT_S)
        for group in self.config.groups:
            self.groups[group.name] = WorkerGroup(group, slots[group.name], wait_s=_CLUSTER_WAIT_S)
        for started in self.groups.values():
            started.prepare(inherits=self.owns_ray and not ray_address)

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
        payload = _construction(type(instance), args, kwargs, hosting)
        started = [(group, group.construct(placement.instance_id, payload)) for group in hosting]
        try:
            init(instance, *args, **kwargs)
            for group, refs in started:
                group.constructed(placement.instance_id, refs)
        except BaseException:
            placement.drop()
            raise
        placement.constructing = False
        with contextlib.suppress(TypeError):  # a class without weak references keeps its workers until teardown
            weakref.finalize(instance, self.unused.append, placement).atexit = False

    def placement(self, method: RoleMethod[..., Any], target: Any) -> Any:
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        return WorkerInfo((DRIVER,), DRIVER, 0, 1, 0, 1, 0, Shard(0, 1))

    def report_shard(self, shard: Shard) -> None:
        raise RoleError("RayHelper.shard(...) is for code that runs on a worker, and was called on the driver")

    def teardown(self) -> None:
        """Stops every worker; a cluster that was started for this run is stopped too."""
        if self.stopped:
            return
        self.stopped = True
        atexit.unregister(self.teardown)
        if ray.is_initialized():
            for group in self.groups.values():
                group.stop()
            if self.owns_ray:
                ray.shutdown()
        if state.active is self:
            state.active = None


class DriverPlacement:
    """The workers of one instance, seen from the driver."""

    def __init__(self, runtime: DriverRuntime, instance_id: int, groups: dict[str, WorkerGroup], cls: type) -> None:
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

    def submit(self, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        group = self.groups.get(method.role)
        if group is None:
            raise RoleError(
                f"{method} belongs to a role that {self.cls.__name__} does not declare "
                f"(declared: {', '.join(self.groups)}). Add it to @RayHelper.worker(group=[...])."
            )
        address = method_address(self.instance_id, *mro_entry(self.cls, method))
        return group.submit(self.instance_id, method, address, args, kwargs)

    def drop(self) -> None:
        """Frees the instance on its workers."""
        if not self.runtime.stopped and ray.is_initialized():
            for group in dict.fromkeys(self.groups.values()):
                with contextlib.suppress(Exception):
                    group.drop(self.instance_id)

    def __reduce__(self) -> Any:
        raise RoleError("a trainer cannot be sent to another process; send what it computed instead")


@functools.cache
def mro_entry(cls: type, method: RoleMethod[..., Any]) -> tuple[int, str]:
    """The index in ``cls.__mro__`` and the name under which the method stands.

    So that ``super().update(...)`` runs the parent's method on the workers too.
    """
    for mro_index, base in enumerate(cls.__mro__):
        for name, entry in vars(base).items():
            with contextlib.suppress(RoleError):
                if find_method(entry) is method:
                    return mro_index, name
    raise RoleError(
        f"{method} is not an attribute of {cls.__name__}; decorated methods must stay where they are defined."
    )


def _construction(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], groups: list[WorkerGroup]) -> Any:
    """(class, args, kwargs) pickled once; modules that the nodes lack travel by value."""
    candidates = user_modules()
    lacking = set().union(*(group.missing_modules(candidates) for group in groups)) if candidates else set()
    for name in lacking:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return ray.put(cloudpickle.dumps((cls, args, kwargs)))
