"""The driver's handle on the workers of one device group: construct, call, wait, recover.

submit(method, args, kwargs)
    divide(...)               one (args, kwargs) per shard           values/calls.py
    sendable(...)             packed; put once or sent by value      transport.py
    crew.calls(address)       one remote call a worker               crew.py, worker/host.py
-> Future(GroupCall)          waits, collects                        call.py
   what goes wrong meanwhile                                         recovery.py
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

from rayhelper.device_groups import DeviceGroup
from rayhelper.device_groups.slots import Slot
from rayhelper.errors import RoleError
from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity, Record, bound_for
from rayhelper.runtimes.ray.call import Construction, GroupCall, late_calls, sources_of
from rayhelper.runtimes.ray.crew import Crew
from rayhelper.runtimes.ray.recovery import Recovery
from rayhelper.runtimes.ray.transport import sendable
from rayhelper.runtimes.ray.waiting import CONSTRUCTION_S, replies_of
from rayhelper.timeline.recording import Recording
from rayhelper.values.calls import divide, layout_of, unsendable, where_of
from rayhelper.values.reply import Reported
from rayhelper.values.shards import ShardTable


class WorkerGroup:
    """The workers of one device group, and the calls that are on their way to them."""

    def __init__(
        self,
        group: DeviceGroup,
        slots: tuple[Slot, ...],
        reserved: PlacementGroup,
        recording: Recording | None,
        *,
        neighbours: Sequence[DeviceGroup],
        inherits: bool,
    ) -> None:
        self.group = group
        self.recording = recording
        self.crew = Crew(group, slots, reserved, neighbours=neighbours, inherits=inherits, trace=recording is not None)
        self.shards = ShardTable(len(slots), group.name)
        self.constructions: dict[str, Any] = {}  # by address, for workers that are replaced
        self.constructing: dict[str, Construction] = {}  # by address
        self.open: dict[int, GroupCall] = {}  # calls whose outcome is not known yet, in order
        self.recovery = Recovery(self)
        self.lock = threading.RLock()
        self.stopped = False

    def prepare(self) -> None:
        """Gives every process its rank and environment; the group is usable afterwards."""
        self.crew.prepare()

    def missing_modules(self, names: list[str]) -> set[str]:
        """Those of the modules that some node of the group could not import. Raises WorkerDiedError."""
        while True:
            self.check_usable("__init__")
            try:
                return self.crew.missing_modules(names)
            except RayActorError as error:
                self.recovery.died(error, "__init__", None, 0)

    def construct(self, address: str, payload: Any) -> Construction:
        self.recovery.finish()
        self.check_usable("__init__")
        call = Construction(self, address, payload)
        with self.lock:
            self.constructions[address] = payload
            self.constructing[address] = call
            call.send(range(len(self.crew.actors)))
        return call

    def constructed(self, address: str, started: Construction) -> dict[str, Sequence[Record]]:
        limit_s = max(CONSTRUCTION_S, self.group.timeout_s or 0.0)
        replies = replies_of(self, "__init__", started, limit_s)
        built = {self.crew.describe(rank): self.note_shards(rank, reply) for rank, reply in enumerate(replies)}
        del self.constructing[address]
        return built

    def drop(self, address: str) -> None:
        self.constructions.pop(address, None)
        self.constructing.pop(address, None)
        self.shards.drop(address)
        self.crew.forget(address)

    def submit(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Future[Any]:
        self.recovery.finish()
        self._make_room()
        started_ns = time.time_ns() if self.recording else 0
        title, name = identity.title(method), identity.called(method)
        where = self.where(title)
        layout = layout_of(method, self.shards, str(identity.address))
        sources = sources_of(args, kwargs)
        order: list[int] | None = None
        if sources:
            calls: list[Any] = late_calls(method, args, kwargs, layout.num_shards, where)
        else:
            division = divide(method, layout.num_shards, args, kwargs, where)
            calls, order = division.calls, division.order
        number = self.recording.dispatched(name, started_ns) if self.recording else 0
        sent, num_bytes = self._payloads(calls, layout.shard_of, where) if args or kwargs else ([()], 0)
        if self.recording:
            self.recording.span("serialise", name, started_ns, number, num_bytes)
        call = GroupCall(self, method, title, name, location, layout, order, sent, sources, number)
        with self.lock:
            call.send(range(len(layout.shard_of)))
            self.open[id(call)] = call
        return Future(call)

    def _payloads(self, calls: list[Any], shard_of: tuple[int, ...], where: str) -> tuple[list[tuple[Any, ...]], int]:
        """What each shard is sent (one for all, if it is the same), and its bytes."""
        try:
            with bound_for(self.group.name):
                if all(call is calls[0] for call in calls):
                    value, num_bytes = sendable(calls[0], len(shard_of))
                    return [(value,)], num_bytes
                pairs = [sendable(call, shard_of.count(k)) for k, call in enumerate(calls)]
        except RoleError:
            raise
        except Exception as error:
            raise unsendable(where, error) from error
        return [(value,) for value, _ in pairs], sum(size for _, size in pairs)

    def _make_room(self) -> None:
        """Waits until fewer calls than ``max_in_flight`` are on their way."""
        while len(self.open) >= self.group.max_in_flight:
            for call in list(self.open.values()):
                if call.outcome is not None or call.is_answered():
                    self.close(call)
            if len(self.open) >= self.group.max_in_flight:
                oldest = next(iter(self.open.values()))
                oldest.wait()
                self.close(oldest)

    def close(self, call: GroupCall) -> None:
        """The outcome of a call is known."""
        self.open.pop(id(call), None)

    def where(self, title: str) -> str:
        """A call of the method that messages call ``title``, as error messages name it."""
        return where_of(title, self.group.name)

    def note_shards(self, rank: int, reply: Any) -> Any:
        """The value of a worker's reply; shards that came with it are remembered."""
        if not isinstance(reply, Reported):
            return reply
        self.shards.note(rank, reply.shards)
        return reply.value

    def check_usable(self, what: str) -> None:
        """Raises RoleError if the group was stopped, WorkerDiedError if a worker is dead for good."""
        if self.stopped:
            raise RoleError(f"{what}: the workers of group {self.group.name!r} were stopped by RayHelper.teardown().")
        if self.recovery.dead is not None:
            raise self.recovery.dead

    def hand_over_spans(self) -> None:
        """Gives the recording what the workers recorded; those that do not answer are left out."""
        assert self.recording is not None, "only a recorded group has spans"
        asked = {actor.spans.remote(): rank for rank, actor in enumerate(self.crew.actors)}
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=10.0)
        for ref in ready:
            rank = asked[ref]
            with contextlib.suppress(Exception):  # a worker that died took its spans along
                spans, dropped = ray.get(ref)
                self.recording.add(spans, dropped, self.crew.clock_offsets_ns[rank])
        if late:
            self.recording.missing(f"{self.group.name}[{rank}]" for rank in (asked[ref] for ref in late))

    def stop(self) -> None:
        """Ends every process of the group and frees its resources."""
        self.stopped = True
        self.crew.end()
