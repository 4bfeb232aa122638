"""The driver's handle on the workers of one device group: start, construct, call, stop.

submit(method, args, kwargs)
    split_call(dispatch)      one (args, kwargs) per shard           dispatch.py
    shared(...)               put once or sent by value              transport.py
    actor.call.remote(...)    one call a worker                      host.py
-> Future(GroupCall)          join(collect) of the leaders' values   collect.py
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayhelper import environment
from rayhelper import placement as placing
from rayhelper.device_groups import DeviceGroup
from rayhelper.dispatch import split_call, unwrap
from rayhelper.errors import DeadlineError, DispatchError, RoleError, WorkerDiedError, WorkerError
from rayhelper.futures import Future
from rayhelper.group_call import GroupCall, future_refs, late_calls, parameter_names
from rayhelper.host import NUM_SLOTS, Failure, Host, Reported
from rayhelper.plan import Slot
from rayhelper.roles import RoleMethod
from rayhelper.runtime import Shard, WorkerInfo
from rayhelper.shards import check_shards
from rayhelper.transport import shared

_STEP_S = 0.5  # how often a call that takes long looks for failures of single workers


class WorkerGroup:
    """The processes of one device group."""

    def __init__(self, group: DeviceGroup, slots: tuple[Slot, ...], *, wait_s: float) -> None:
        self.group = group
        self.slots = slots
        self.stopped = False
        self.reserved: PlacementGroup = placing.reserve(group, slots, wait_s=wait_s)
        self.actors = [self._actor(slot) for slot in slots]
        self.remotes: dict[str, list[Callable[..., Any]]] = {}  # by address
        self.bound: dict[str, int] = {}  # numbers of the hosts' slots, by address
        self.shards: dict[tuple[int, str], dict[int, Shard]] = {}

    def _actor(self, slot: Slot) -> Any:
        ask = placing.resources(self.group)
        options = {
            "num_cpus": ask.pop("CPU"),
            "num_gpus": ask.pop("GPU", 0),
            "resources": ask,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.reserved, slot.rank),
            "max_restarts": 0,
            "name": None,
        }
        return ray.remote(Host).options(**options).remote(f"{self.group.name}[{slot.rank}]", cloudpickle.dumps)

    def prepare(self, *, inherits: bool) -> None:
        """Gives every process its rank and environment; the group is usable afterwards.

        ``inherits``: the processes descend from this driver, and so have its whole environment until now.
        """
        forgotten = environment.forgotten(os.environ) if inherits else []
        forgotten = [*forgotten, "OMP_NUM_THREADS"]  # Ray sets it to 1; _env says what it is
        facts = self.get([actor.describe.remote() for actor in self.actors], "start")
        port = self.get([self.actors[0].hold_port.remote()], "start")[0]
        self.get(
            [
                actor.prepare.remote(self._info(slot), self._env(slot, port, facts), forgotten, slot.address)
                for actor, slot in zip(self.actors, self.slots, strict=True)
            ],
            "start",
        )

    def _info(self, slot: Slot) -> WorkerInfo:
        return WorkerInfo(
            roles=self.group.roles,
            group=self.group.name,
            rank=slot.rank,
            world_size=len(self.slots),
            local_rank=slot.local_rank,
            local_world_size=slot.local_world_size,
            node_rank=slot.node_rank,
            shard=Shard(slot.rank, len(self.slots)),
        )

    def _env(self, slot: Slot, port: int, facts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        env = environment.passed(os.environ)
        if "OMP_NUM_THREADS" not in env and slot.local_world_size > 1:
            env["OMP_NUM_THREADS"] = "1"  # as torchrun does; one worker alone is left to torch, like one process
        env |= {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(len(self.slots)),
            "LOCAL_RANK": str(slot.local_rank),
            "LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "NODE_RANK": str(slot.node_rank),
            "MASTER_ADDR": self.slots[0].address,
            "MASTER_PORT": str(port),
        }
        if self.group.device == "CPU":
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif self.group.gpus_per_worker == 1 and facts[slot.rank]["cuda"]:
            # as under torchrun: every worker sees all devices of its node's part of the group, and uses cuda:LOCAL_RANK
            neighbours = [other.rank for other in self.slots if other.node_id == slot.node_id]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(facts[rank]["cuda"]) for rank in neighbours)
        return env | dict(self.group.env)

    def missing_modules(self, names: list[str]) -> set[str]:
        """Those of the modules that some node of the group could not import."""
        first_ranks = {slot.node_id: slot.rank for slot in reversed(self.slots)}.values()
        refs = [self.actors[rank].missing_modules.remote(names) for rank in first_ranks]
        return {name for reply in self.get(refs, "missing_modules") for name in reply}

    def construct(self, instance_id: int, payload: Any) -> list[Any]:
        """Starts the construction of an instance on every worker; references to the replies."""
        return [actor.construct.remote(instance_id, payload) for actor in self.actors]

    def constructed(self, instance_id: int, refs: list[Any]) -> None:
        """Waits until every worker has constructed the instance. Raises what a constructor raised."""
        for rank, reply in enumerate(self.get(refs, "__init__")):
            self.note_shards(instance_id, rank, reply)

    def drop(self, instance_id: int) -> None:
        """Frees an instance on every worker, without waiting."""
        for address in [known for known in self.remotes if known.startswith(f"{instance_id} ")]:
            del self.remotes[address]
            self.bound.pop(address, None)
        for actor in self.actors:
            actor.drop.remote(instance_id)

    def submit(
        self, instance_id: int, method: RoleMethod[..., Any], address: str, args: tuple[Any, ...], kwargs: Any
    ) -> Future[Any]:
        """One call on every worker of the group (or worker 0 alone), not waited for."""
        leaders: tuple[int, ...]
        if method.execute == "first":
            shard_of, leaders, num_shards = [0], (0,), 1
        else:
            shard_of, leaders, num_shards = self.layout(instance_id, method.role)
        order: list[int] | None = None
        parts = future_refs(args, kwargs)
        if parts:
            calls: list[Any] = late_calls(method, args, kwargs, num_shards, self.where(method))
        elif method.execute == "first" or method.dispatch == "all":
            calls = [unwrap(args, kwargs)] * num_shards
        else:
            names = parameter_names(method)
            division = split_call(method.dispatch, num_shards, args, kwargs, names=names, where=self.where(method))
            calls, order = list(division.calls), division.order
        sent = self._payloads(calls, shard_of) if args or kwargs else [()] * num_shards
        try:
            refs = [call(*sent[k], *parts) for call, k in zip(self._remotes(address), shard_of, strict=False)]
        except TypeError as error:
            where = self.where(method)
            raise DispatchError(f"an argument of {where} cannot be sent to another process: {error}") from error
        return Future(GroupCall(self, instance_id, method, refs, leaders, order))

    def _remotes(self, address: str) -> list[Callable[..., Any]]:
        """What to call, for each worker, to run the method at ``address`` there."""
        known = self.remotes.get(address)
        if known is not None:
            return known
        slot = next((number for number in range(NUM_SLOTS) if number not in self.bound.values()), None)
        if slot is None:
            known = [functools.partial(actor.call.remote, address) for actor in self.actors]
        else:
            self.bound[address] = slot
            for actor in self.actors:
                actor.bind.remote(slot, address)
            known = [getattr(actor, f"slot_{slot}").remote for actor in self.actors]
        self.remotes[address] = known
        return known

    def _payloads(self, calls: list[Any], shard_of: list[int]) -> list[tuple[Any, ...]]:
        """What each shard is sent; what several workers read goes into the object store once, if it is large."""
        if all(call is calls[0] for call in calls):
            return [(shared(calls[0], len(shard_of)),)] * len(calls)
        return [(shared(call, shard_of.count(k)),) for k, call in enumerate(calls)]

    def where(self, method: RoleMethod[..., Any]) -> str:
        """The call, as error messages name it."""
        return f"{method} on group {self.group.name!r}"

    def layout(self, instance_id: int, role: str) -> tuple[list[int], tuple[int, ...], int]:
        """(slice index of each rank, the leaders' ranks in order of their slices, number of slices)."""
        known = self.shards.get((instance_id, role))
        size = len(self.actors)
        if not known:
            return list(range(size)), tuple(range(size)), size
        return check_shards(known, size, f"role {role!r} on group {self.group.name!r}")

    def note_shards(self, instance_id: int, rank: int, reply: Any) -> Any:
        """The value of a worker's reply; shards that came with it are remembered."""
        if not isinstance(reply, Reported):
            return reply
        for role, shard in reply.shards.items():
            self.shards.setdefault((instance_id, role), {})[rank] = shard
        return reply.value

    def get(self, refs: list[Any], what: str, timeout_s: float | None = None) -> list[Any]:
        """The replies of the workers, in order of rank.

        Raises:
            The workers' own exception of the lowest rank that failed, as soon as one fails.
            WorkerDiedError: a process ended.
            DeadlineError: ``timeout_s``, or else the group's, has passed.
        """
        if self.stopped:
            raise RoleError(f"{what}: the workers of group {self.group.name!r} were stopped by RayHelper.teardown().")
        timeout_s = self.group.timeout_s if timeout_s is None else timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                replies = ray.get(refs, timeout=_STEP_S if left is None else min(_STEP_S, left))
                break
            except GetTimeoutError:
                self._raise_early(refs, what)
                if left is not None and left <= _STEP_S:
                    raise DeadlineError(
                        f"{what} on group {self.group.name!r} did not finish within {timeout_s:g} s; still running on "
                        f"ranks {self._unfinished(refs)}. Raise timeout_s of the group if it needs longer."
                    ) from None
            except (RayActorError, RayTaskError):
                self._raise_early(refs, what)
                raise
        failures = [reply for reply in replies if isinstance(reply, Failure)]
        if failures:
            raise_failure(failures)
        return replies

    def _raise_early(self, refs: list[Any], what: str) -> None:
        failures = []
        for rank, ref in enumerate(refs):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            try:
                reply = ray.get(ref)
            except RayActorError as error:
                slot = self.slots[rank]
                raise WorkerDiedError(
                    f"rank {rank} of group {self.group.name!r} (roles {', '.join(self.group.roles)}; node "
                    f"{slot.address}) died during {what}: {error}"
                ) from None
            except RayTaskError as error:
                raise WorkerError(
                    f"the value of {what} on rank {rank} of group {self.group.name!r} could not be sent back: "
                    f"{error.cause or error}"
                ) from None
            if isinstance(reply, Failure):
                failures.append(reply)
        if failures:
            raise_failure(failures)

    def _unfinished(self, refs: list[Any]) -> str:
        return ", ".join(str(rank) for rank, ref in enumerate(refs) if not ray.wait([ref], timeout=0)[0])

    def stop(self) -> None:
        """Ends every process of the group and frees its resources."""
        self.stopped = True
        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove_placement_group(self.reserved)


def raise_failure(failures: Sequence[Failure]) -> None:
    """Raises the first failure as its own type, with where it happened and the remote traceback as its cause."""
    first = failures[0]
    others = f" ({len(failures) - 1} more ranks failed as well)" if len(failures) > 1 else ""
    remote = WorkerError(f"{first.origin} raised {first.summary}{others}\n\nRemote traceback:\n{first.traceback}")
    if first.error is None:
        raise remote
    original = pickle.loads(first.error)
    if not isinstance(original, Exception):  # SystemExit in a worker must not end the driver silently
        raise remote
    original.add_note(f"[{first.origin}{others}]")
    raise original from remote
