"""The driver's handle on the workers of one device group: construct, call, wait, recover.

submit(method, args, kwargs)
    divide(...)               one (args, kwargs) per shard           values/calls.py
    sendable(...)             packed; put once or sent by value      values/packing.py
    calls.begin(call)         one remote call a worker               calls_under_way.py, crew.py, worker/calls.py
-> Future(GroupCall)          waits, collects                        call.py; of asynchronous methods awaited.py
   what goes wrong meanwhile                                         recovery.py
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayActorError

from rayhelper.device_groups import DeviceGroup
from rayhelper.device_groups.group import CONSTRUCTION_S
from rayhelper.errors import RoleError
from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity, Record, bound_for
from rayhelper.runtimes.ray.awaited import AwaitedCall, AwaitedCalls
from rayhelper.runtimes.ray.call import Construction, GroupCall, late_calls, sources_of
from rayhelper.runtimes.ray.calls_under_way import CallsUnderWay
from rayhelper.runtimes.ray.crew import Crew
from rayhelper.runtimes.ray.late_call import LateCall
from rayhelper.runtimes.ray.modules.reloads import Reloads
from rayhelper.runtimes.ray.placement import Reservation
from rayhelper.runtimes.ray.recovery import Recovery
from rayhelper.timeline.recording import Recording
from rayhelper.values.calls import divide, layout_of, unsendable
from rayhelper.values.packing import LARGE_BYTES, pack, worth_packing
from rayhelper.worker.ambient import DriverMode

C = TypeVar("C", bound=GroupCall)


class ToConstruct(NamedTuple):
    """An object to be constructed: Ray's reference to what workers unpickle, and which modules it relies on."""

    payload: Any
    reloads: Reloads


class WorkerGroup:
    """The workers of one device group. ``wait_s``: for the cluster, if the group must be placed anew."""

    def __init__(
        self,
        group: DeviceGroup,
        reservation: Reservation,
        wait_s: float,
        recording: Recording | None,
        *,
        neighbours: Sequence[DeviceGroup],
        inherits: bool,
    ) -> None:
        self.group = group
        self.recording = recording
        self.crew = Crew(group, reservation, neighbours=neighbours, inherits=inherits, trace=recording is not None)
        self.calls = CallsUnderWay(group, self.crew, recording)
        self.recovery = Recovery(self.calls, wait_s)
        self.mode = DriverMode()
        self.awaited_calls = AwaitedCalls(self.recovery)
        self.reloads: dict[str, Reloads] = {}  # by address of a whole

    def prepare(self) -> None:
        """Gives every process its rank and environment; the group is usable afterwards."""
        self.crew.prepare()

    def unlike_modules(self, sources: Mapping[str, str | None]) -> set[str]:
        """Those of the modules that some worker could not import, or not the same. Raises WorkerDiedError."""
        while True:
            self.calls.check_usable("__init__")
            try:
                return self.crew.unlike_modules(sources)
            except RayActorError as error:
                self.recovery.died(error, "__init__", None, 0)

    def construct(self, address: str, construction: ToConstruct) -> Construction:
        self.recovery.finish()
        self.calls.check_usable("__init__")
        payload, self.reloads[address] = construction
        started = Construction(self.recovery, address, payload)
        self.mode.constructing()
        self.calls.begin_construction(address, payload, started)
        return started

    def constructed(self, address: str, started: Construction) -> dict[str, Sequence[Record]]:
        built = started.built(max(CONSTRUCTION_S, self.group.timeout_s or 0.0))
        del self.calls.constructing[address]
        return built

    def states(self, address: str) -> list[Any]:
        states: list[Any] = ray.get([actor.state.remote(address) for actor in self.crew.actors])
        return states

    def abandon(self, address: str) -> None:
        self.calls.abandoned.append(address)

    def drop(self, address: str) -> None:
        self.calls.forget(address)
        self.reloads.pop(address, None)

    def submit(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Future[Any]:
        self.recovery.finish()
        self.calls.make_room()
        call = self._call(GroupCall, identity, method, location, args, kwargs)
        self.calls.begin(call)
        self.awaited_calls.wake()
        return Future(call)

    async def awaited(
        self,
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.recovery.finish()
        self.calls.check_usable(identity.title(method))
        call = self._call(AwaitedCall, identity, method, location, args, kwargs)
        return await asyncio.wrap_future(self.awaited_calls.begin(call))

    def _call(
        self,
        kind: type[C],
        identity: Identity,
        method: RoleMethod[..., Any],
        location: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> C:
        """A call, ready to be sent."""
        started_ns = time.time_ns() if self.recording else 0
        title, name = identity.title(method), identity.called(method)
        if (reloads := self.reloads.get(str(identity.outermost.address))) is not None:
            reloads.check(title)
        where = self.calls.where(title)
        layout = layout_of(method, self.calls.shards, str(identity.address))
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
        mode = self.mode.of_call(self.recovery.restarts_left)
        return kind(self.recovery, method, title, name, location, layout, order, sent, num_bytes, mode, sources, number)

    def _payloads(self, calls: list[Any], shard_of: tuple[int, ...], where: str) -> tuple[list[tuple[Any, ...]], int]:
        """What each shard is sent (one for all, if it is the same), and its bytes.

        Where workers may be replaced, it may be sent again: then it is packed, as the caller may change it meanwhile.
        """
        stays = self.recovery.restarts_left > 0
        try:
            with bound_for(self.group.name):
                if all(call is calls[0] for call in calls):
                    value, num_bytes = sendable(calls[0], len(shard_of), stays)
                    return [(value,)], num_bytes
                pairs = [sendable(call, shard_of.count(k), stays) for k, call in enumerate(calls)]
        except RoleError:
            raise
        except Exception as error:
            raise unsendable(where, error) from error
        return [(value,) for value, _ in pairs], sum(size for _, size in pairs)

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
        self.calls.stopped = True
        self.crew.end()


def holds_containers(call: Any) -> bool:
    """Whether some argument of a call may be changed in place."""
    args, kwargs = (call.args, call.kwargs) if isinstance(call, LateCall) else call
    return not all(isinstance(value, (bool, int, float, str, bytes, type(None))) for value in (*args, *kwargs.values()))


def sendable(value: Any, num_readers: int, stays: bool = False) -> tuple[Any, int]:
    """The value or what stands for it, an argument of ``num_readers`` remote calls; and its bytes, if it was packed.

    What is large, or holds a tensor, is packed. What several workers read is put into the object store once; what one
    worker reads goes with its call. Small values travel as they are: putting them costs more than sending them eight
    times. ``stays``: what the caller does with the value later does not change what is sent.
    """
    if not worth_packing(value) and not (stays and holds_containers(value)):
        return value, 0
    packed = pack(value)
    if num_readers > 1 and packed.nbytes > LARGE_BYTES:
        return ray.put(packed), packed.nbytes
    return packed, packed.nbytes
