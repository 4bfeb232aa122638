"""What happened in this run, call by call: the spans of the driver and of its workers, on their way into a trace file.

``trace.py`` knows the file; this file knows what a call consists of. A span costs a clock reading and an append; the
workers keep theirs until the run ends.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayhelper.device_groups import DRIVER, DeviceGroups
from rayhelper.errors import ConfigError
from rayhelper.timeline import trace

if TYPE_CHECKING:
    from rayhelper.runtimes.torchrun.exchange import Exchange


class Recording:
    """The timeline of a run, as this process sees it."""

    def __init__(self, path: str, runtime: str, groups: DeviceGroups) -> None:
        self.path = Path(path)
        trace.check_path(self.path)
        if not self.path.parent.is_dir():
            raise ConfigError(f"trace={str(path)!r}: the folder {self.path.parent} does not exist. Make it first.")
        try:
            tempfile.TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise ConfigError(f"trace={str(path)!r} cannot be written: {error}. Choose another folder.") from None
        self.rank = 0  # of this process, among those that run the driver's code
        num_ranks = {role: group.num_workers for group in groups.groups for role in group.roles}
        self.metadata: dict[str, Any] = {"runtime": runtime, "num_ranks": num_ranks if runtime != "off" else {}}
        self.tracer = trace.Tracer()
        self.numbers = itertools.count(1)
        self.tasks: dict[int, tuple[int, int]] = {}  # by task_number: the call of a worker's task, and when it was sent
        self.just_sent: list[tuple[Any, int, int]] = []  # what will stand in ``tasks``; made when it is needed
        self.dropped = 0

    def dispatched(self, name: str, started_ns: int) -> int:
        """The number of a call of the method ``name`` whose arguments were divided since ``started_ns``."""
        call = next(self.numbers)
        self.span("dispatch", name, started_ns, call)
        return call

    def span(self, phase: str, name: str, started_ns: int, call: int, num_bytes: int = 0) -> None:
        """Something that the driver did from ``started_ns`` until now."""
        self.tracer.record(DRIVER, self.rank, phase, name, started_ns, time.time_ns(), call, num_bytes)

    def ran(self, name: str, role: str, rank: int, started_ns: int, call: int) -> None:
        """A worker that lives in this process ran a method since ``started_ns``: the driver's code waited for it."""
        ended_ns = time.time_ns()
        self.tracer.record(role, rank, "run", name, started_ns, ended_ns, call, 0)
        if role != DRIVER:
            self.tracer.record(DRIVER, self.rank, "wait", name, started_ns, ended_ns, call, 0)

    def sent(self, task_id: Any, call: int, sent_ns: int) -> None:
        """A worker was asked to run a task for a call."""
        self.just_sent.append((task_id, call, sent_ns))

    def add(self, spans: list[trace.Span], dropped: int, offset_ns: int) -> None:
        """Takes over the spans of a worker whose clock is ``offset_ns`` behind.

        The time from sending a task until it ran becomes a span of its own.
        """
        self.dropped += dropped
        self.tasks |= {task_number(task_id): (call, sent_ns) for task_id, call, sent_ns in self.just_sent}
        self.just_sent.clear()
        for span in trace.shifted(spans, offset_ns):
            call, sent_ns = self.tasks.get(span.call, (0, span.start_ns))
            if sent_ns < span.start_ns:
                self.tracer.record(span.role, span.rank, "queue", span.name, sent_ns, span.start_ns, call)
            self.tracer.record(*span._replace(call=call))

    def missing(self, workers: Iterable[str]) -> None:
        """These workers did not tell what they recorded."""
        self.metadata["missing"] = [*self.metadata.get("missing", []), *workers]

    def write_gathered(self, exchange: Exchange) -> None:
        """Rank 0 writes what all processes recorded, if they all come within a moment."""
        spans, dropped = self.tracer.drain()
        try:
            found = [value for value, _ in exchange.gather((spans, dropped), lambda: False, 10.0)]
            gathered = [value for value in found if isinstance(value, tuple)]  # a process may make a call instead
            self.missing(f"process {rank}" for rank, value in enumerate(found) if not isinstance(value, tuple))
        except (TimeoutError, ConnectionError) as error:
            self.metadata["missing"] = [f"other processes: {error}"]
            gathered = [(spans, dropped)]
        if self.rank == 0:
            self.dropped += sum(lost for _, lost in gathered)
            self._write([span for some, _ in gathered for span in some])

    def write(self) -> None:
        """The file is written."""
        spans, dropped = self.tracer.drain()
        self.dropped += dropped
        self._write(spans)

    def _write(self, spans: list[trace.Span]) -> None:
        trace.write(self.path, spans, metadata={**self.metadata, "dropped": self.dropped})


def task_number(task_id: Any) -> int:
    """The number under which a worker records a task: the part of its name that differs, short enough for JSON."""
    return int(task_id.hex()[:13], 16)
