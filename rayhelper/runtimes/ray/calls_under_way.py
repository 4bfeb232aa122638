"""The calls and constructions that a group's workers have not answered, and what must be known to send them again.

    crew.py <- calls_under_way.py <- recovery.py <- waiting.py <- call.py <- group.py

A call is in ``open`` from when it is sent until its outcome is known, a construction in ``constructing``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import ray

from rayhelper.device_groups import DeviceGroup
from rayhelper.errors import PlacementError, RoleError, WorkerDiedError
from rayhelper.roles.futures import Finished
from rayhelper.roles.left_behind import note_changes
from rayhelper.runtimes.ray.crew import Crew
from rayhelper.timeline.recording import Recording
from rayhelper.values.calls import where_of
from rayhelper.values.reply import Reported
from rayhelper.values.shards import ShardTable

_SOON_S = 0.02  # so long the oldest call is waited for before the others are looked at, which costs more

_FEW = 64  # deferred calls that a group accepts where it does not say, whatever they were given
_MANY = 1024  # and as many while what they were given is less than this:
_MANY_BYTES = 64 << 20


class Sent(Protocol):
    """What was sent to the workers of a group: a call, or the construction of an object."""

    title: str  # in messages
    refs: list[Any]  # Ray's references to the replies, by rank; others after workers were replaced
    outcome: Finished | None  # None: not known yet
    is_construction: bool
    num_bytes: int  # that it was given, if they were packed

    @property
    def sources(self) -> Sequence[Sent]:
        """The calls whose values are arguments of this one."""
        ...

    def send(self, ranks: Iterable[int]) -> None:
        """Sends it to these ranks: for the first time, or again."""
        ...

    def wait(self) -> None:
        """Returns when the outcome is known."""
        ...


class CallsUnderWay:
    """What the workers of one group have been asked and have not answered."""

    def __init__(self, group: DeviceGroup, crew: Crew, recording: Recording | None) -> None:
        self.group = group
        self.crew = crew
        self.recording = recording
        self.shards = ShardTable(len(crew.slots), group.name)
        self.constructions: dict[str, Any] = {}  # payloads by address, for workers that are replaced
        self.constructing: dict[str, Sent] = {}  # by address
        self.abandoned: list[str] = []  # addresses that the driver uses no more, to be freed
        self.open: dict[int, Sent] = {}  # in order
        self.open_bytes = 0  # that those were given
        self.lock = threading.RLock()
        self.stopped = False
        self.dead: WorkerDiedError | PlacementError | None = None  # why the group cannot be used any more
        self.paused_s: Callable[[float], float] = lambda last_s: 0.0  # of the last so many seconds: at breakpoints

    def __iter__(self) -> Any:
        """All that is under way, in an order in which it can be sent again."""
        return iter([*self.constructing.values(), *self.open.values()])

    def begin(self, call: Sent) -> None:
        """Sends a call to its workers."""
        with self.lock:
            call.send(range(len(call.refs)))
            self.note_open(call)

    def begin_construction(self, address: str, payload: Any, construction: Sent) -> None:
        """Has every worker construct an object."""
        with self.lock:
            self.constructions[address] = payload
            self.constructing[address] = construction
            construction.send(range(len(construction.refs)))

    def note_open(self, call: Sent) -> None:
        """The workers have been asked; the outcome is not known."""
        if id(call) not in self.open:
            self.open[id(call)] = call
            self.open_bytes += call.num_bytes

    def close(self, call: Sent) -> None:
        """The outcome of a call is known."""
        if self.open.pop(id(call), None) is not None:
            self.open_bytes -= call.num_bytes

    def make_room(self) -> None:
        """Waits until the group has room for one more call: for the oldest, which mostly ends first."""
        while not self.has_room():
            oldest = next(iter(self.open.values()))
            if oldest.outcome is None and unfinished(oldest.refs, _SOON_S):
                for call in list(self.open.values()):  # others may have ended that were made to fewer ranks
                    if call.outcome is not None or is_answered(call):
                        self.close(call)
            if not self.has_room():
                oldest.wait()
                self.close(oldest)

    def has_room(self) -> bool:
        """Whether one more deferred call is accepted."""
        most, num_calls = self.group.max_in_flight, len(self.open)
        if most is not None:
            return num_calls < most
        return num_calls < _FEW or (num_calls < _MANY and self.open_bytes < _MANY_BYTES)

    def forget(self, address: str) -> None:
        """Frees an object and its parts on every worker."""
        self.constructions.pop(address, None)
        self.constructing.pop(address, None)
        if address in self.abandoned:
            self.abandoned.remove(address)
        self.shards.drop(address)
        self.crew.forget(address)

    def note_shards(self, rank: int, reply: Any) -> Any:
        """The value of a worker's reply; shards and names of changed attributes that came with it are remembered."""
        if not isinstance(reply, Reported):
            return reply
        self.shards.note(rank, reply.shards)
        if reply.changes:
            note_changes(reply.changes)
        return reply.value

    def where(self, title: str) -> str:
        """A call of the method that messages call ``title``, as error messages name it."""
        return where_of(title, self.group.name)

    def check_usable(self, what: str) -> None:
        """Raises RoleError if the group was stopped, WorkerDiedError if a worker is dead for good."""
        if self.stopped:
            raise RoleError(f"{what}: the workers of group {self.group.name!r} were stopped by RayHelper.teardown().")
        if self.dead is not None:
            raise self.dead


def is_answered(call: Sent) -> bool:
    """Whether every rank has answered, and none of them has died: then nothing of it will run again."""
    return not unfinished(call.refs) and all(map(answered, call.refs))


def unfinished(refs: list[Any], timeout_s: float | None = 0.0) -> list[Any]:
    """Those of the references behind which something still runs, or waits to run, after ``timeout_s`` (None: any)."""
    return ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[1] if refs else []


def unfinished_ranks(refs: list[Any]) -> list[tuple[int, Any]]:
    """The ranks that have not answered, each with its reference; ``refs`` in order of rank."""
    waiting = set(unfinished(refs))
    return [(rank, ref) for rank, ref in enumerate(refs) if ref in waiting]


def answered(ref: Any) -> bool:
    """Whether a value is there."""
    if unfinished([ref]):
        return False
    try:
        ray.get(ref)
    except Exception:
        return False
    return True
