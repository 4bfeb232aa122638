"""Ray off, with a timeline: calls are the methods themselves, and when each ran is recorded."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.runtime import OFF, Route, Shard, WorkerInfo, state
from rayhelper.timeline.recording import Recording
from rayhelper.worker.process_group import join_process_group


class RecordedOff:
    """What this process is: the one process, which keeps a record."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        atexit.register(self.teardown)

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        object.__setattr__(instance, "_rayhelper", RecordedPlacement(self.recording))
        init(instance, *args, **kwargs)

    def placement(self, method: RoleMethod[..., Any], target: Any) -> RecordedPlacement:
        return RecordedPlacement(self.recording)

    def current(self) -> WorkerInfo:
        return OFF

    def report_shard(self, shard: Shard) -> None:
        pass  # the one process does everything, whatever its part would be

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        join_process_group(self.current(), backend, timeout_s)

    def teardown(self) -> None:
        """The file is written."""
        atexit.unregister(self.teardown)
        if state.active is self:
            state.active = None
        self.recording.write()


class RecordedPlacement:
    """Everything runs here."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def route(self, method: RoleMethod[..., Any]) -> Route:
        return "here"

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started_ns = time.time_ns()
        try:
            return method.call(target, args, kwargs)
        finally:
            self.recording.ran(method, 0, started_ns, 0)

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        raise AssertionError("nothing leaves the process")
