"""Ray off, with something that looks on: calls are the methods themselves; ``RecordedOff`` notes when each ran."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

from rayhelper.roles.classes import build
from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity
from rayhelper.roles.runtime import OFF, Route, Shard, WorkerInfo, state
from rayhelper.timeline.recording import Recording
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


class RecordedOff(OneProcess):
    """What this process is: the one process, which keeps a record."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        atexit.register(self.teardown)

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        identity = Identity(instance, None if whole is None else whole._rayhelper.identity, None)
        object.__setattr__(instance, "_rayhelper", RecordedPlacement(self.recording, identity))
        build(init, instance, args, kwargs, identity)

    def placement(self, method: RoleMethod[..., Any], target: Any) -> RecordedPlacement:
        return RecordedPlacement(self.recording, Identity(target, None, None))

    def teardown(self) -> None:
        """The file is written."""
        atexit.unregister(self.teardown)
        if state.active is self:
            state.active = None
        self.recording.write()


class RecordedPlacement:
    """Everything runs here."""

    hosts = ()

    def __init__(self, recording: Recording, identity: Identity) -> None:
        self.recording = recording
        self.identity = identity

    def route(self, method: RoleMethod[..., Any]) -> Route:
        return "here"

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started_ns = time.time_ns()
        try:
            return method.call(target, args, kwargs)
        finally:
            self.recording.ran(self.identity.called(method), method.role, 0, started_ns, 0)

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        raise AssertionError("nothing leaves the process")

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise AssertionError("nothing leaves the process")
