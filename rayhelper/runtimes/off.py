"""Ray off, with something that looks on: calls are the methods themselves.

``AttendedOff`` ends calls that take longer than their group's ``timeout_s``, and notes when each ran.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

from rayhelper.device_groups import DeviceGroups
from rayhelper.roles.classes import build
from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity
from rayhelper.roles.runtime import OFF, Route, Shard, WorkerInfo, state
from rayhelper.timeline.recording import Recording
from rayhelper.watch.attended import deadline_error
from rayhelper.watch.watchdog import Call
from rayhelper.worker.process_group import join_process_group


class OneProcess:
    """What this process is: the one worker of everything."""

    def instance_at(self, address: str) -> Any:
        return None  # nothing travels

    def describe(self) -> str:
        return "this process"

    def current(self) -> WorkerInfo:
        return OFF

    def report_shard(self, shard: Shard) -> None:
        pass  # the one process does everything, whatever its part would be

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        join_process_group(self.current(), backend, timeout_s)


class AttendedOff(OneProcess):
    """What this process is: the one process, whose calls have limits of time; with a recording it keeps a record."""

    def __init__(self, config: DeviceGroups, recording: Recording | None) -> None:
        self.config = config
        self.recording = recording
        atexit.register(self.teardown)

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        identity = Identity(instance, None if whole is None else whole._rayhelper.identity, None)
        object.__setattr__(instance, "_rayhelper", AttendedPlacement(self, identity))
        build(init, instance, args, kwargs, identity)

    def placement(self, method: RoleMethod[..., Any], target: Any) -> AttendedPlacement:
        return AttendedPlacement(self, Identity(target, None, None))

    def teardown(self) -> None:
        """The file of the record is written."""
        atexit.unregister(self.teardown)
        if state.active is self:
            state.active = None
        if self.recording is not None:
            self.recording.write()


class AttendedPlacement:
    """Everything runs here."""

    hosts = ()

    def __init__(self, runtime: AttendedOff, identity: Identity) -> None:
        self.runtime = runtime
        self.identity = identity

    def route(self, method: RoleMethod[..., Any]) -> Route:
        return "here"

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording, started_ns = self.runtime.recording, time.time_ns()
        try:
            return method.call(target, args, kwargs)
        finally:
            if recording is not None:
                recording.ran(self.identity.called(method), method.role, 0, started_ns, 0)

    def attending(self, method: RoleMethod[..., Any]) -> Call:
        return call_here(self.runtime.config, self.identity.title(method), method.role, "rank 0 in this process")

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        raise AssertionError("nothing leaves the process")

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise AssertionError("nothing leaves the process")


def call_here(config: DeviceGroups, title: str, role: str, who: str) -> Call:
    """What looks after a call in this process, which ends it at the ``timeout_s`` of its role."""
    limit_s, remedy = config.limit_of(role)
    return Call(f"{title}, {who}", limit_s, lambda call: deadline_error(call, remedy))
