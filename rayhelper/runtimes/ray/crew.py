"""The processes of one device group: started, given their rank, reached, replaced, ended.

A worker is a Ray actor around a ``Host``. Calls go to numbered slots of the hosts that are bound to a method's address
once; beside the calls, each worker has a ``Door``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayhelper.device_groups import DeviceGroup, all_roles
from rayhelper.device_groups.group import CONSTRUCTION_S
from rayhelper.device_groups.slots import Slot, resources
from rayhelper.errors import PlacementError
from rayhelper.roles.runtime import Shard, WorkerInfo
from rayhelper.runtimes.ray import environment
from rayhelper.runtimes.ray.modules.sources import imported_first
from rayhelper.runtimes.ray.patches import current_task, id_of_actor
from rayhelper.runtimes.ray.placement import NodeLostError, Reservation
from rayhelper.values.shards import is_within
from rayhelper.worker.host import NUM_SLOTS, Host, boot_id
from rayhelper.worker.side_door import Address, ask

_LOOK_S = 2.0  # so often it is looked whether the nodes of processes that start still live


class Crew:
    """The processes of one device group."""

    def __init__(
        self,
        group: DeviceGroup,
        reservation: Reservation,
        *,
        neighbours: Sequence[DeviceGroup],
        inherits: bool,
        trace: bool,
    ) -> None:
        self.group = group
        self.neighbours = neighbours  # the other groups in these bundles
        self.reservation = reservation
        self.num_moves = reservation.num_moves  # when the processes were started
        self.inherits = inherits  # the processes descend from this driver, and so have its whole environment until now
        self.trace = trace
        self.key = secrets.token_bytes(16)
        self.actors = [self._actor(slot) for slot in self.slots]
        self.doors: dict[int, Address] = {}
        self.clock_offsets_ns: dict[int, int] = {}
        self.facts: list[Mapping[str, Any]] = []
        self.port = 0
        self.remotes: dict[str, list[Callable[..., Any]]] = {}  # by location of a method
        self.bound: dict[str, int] = {}  # numbers of the hosts' slots, by location
        self.alike: dict[str, str] = {}  # modules with the sources that all workers would run as the driver does

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The places of the workers, in order of rank."""
        return self.reservation.slots[self.group.name]

    def _actor(self, slot: Slot) -> Any:
        asked = resources(self.group, 1 + len(self.neighbours))
        options = {
            "num_cpus": asked.pop("CPU"),
            "num_gpus": asked.pop("GPU", 0),
            "resources": asked,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.reservation.bundles, slot.rank),
            "max_restarts": 0,
            "name": None,
        }
        name = f"{self.group.name}[{slot.rank}]"
        return _actor_class().options(**options).remote(name, cloudpickle.dumps, current_task)

    def prepare(self, ranks: Iterable[int] | None = None) -> None:
        """Gives the processes of these ranks (None: all) their rank and environment.

        Raises:
            RayActorError: a process died.
            NodeLostError: a node was lost, and what should start there never will.
        """
        chosen = list(range(len(self.slots)) if ranks is None else ranks)
        forgotten = environment.forgotten(os.environ) if self.inherits else []
        forgotten = [*forgotten, "OMP_NUM_THREADS"]  # Ray sets it to 1; _env says what it is
        asked_ns = time.time_ns()
        facts = self._started([self.actors[rank].describe.remote() for rank in chosen])
        middle_ns = (asked_ns + time.time_ns()) // 2
        self.facts = self.facts or [{}] * len(self.slots)
        for rank, fact in zip(chosen, facts, strict=True):
            self.facts[rank] = fact
            same_machine = fact["boot_id"] == boot_id()
            self.clock_offsets_ns[rank] = 0 if same_machine else middle_ns - fact["time_ns"]
        if 0 in chosen:
            self.port = self._started([self.actors[0].hold_port.remote()])[0]
        has_own_folder = bool(
            ray.get_runtime_context().runtime_env.get("working_dir")
        )  # Ray's copy of it, on each node
        folder = None if has_own_folder else os.getcwd()
        doors = self._started(
            [
                self.actors[rank].prepare.remote(
                    self._info(self.slots[rank]),
                    self._env(self.slots[rank]),
                    forgotten,
                    self.slots[rank].address,
                    self.key,
                    self.trace,
                    folder,
                    imported_first(),
                )
                for rank in chosen
            ]
        )
        self.doors |= dict(zip(chosen, doors, strict=True))

    def _started(self, refs: list[Any]) -> list[Any]:
        """The first answers of processes that were started, waited for as long as their nodes live."""
        deadline = time.monotonic() + CONSTRUCTION_S
        while ray.wait(refs, num_returns=len(refs), timeout=_LOOK_S)[1]:
            if lost := self.reservation.lost_nodes():
                raise NodeLostError(f"a node of group {self.group.name!r} was lost as its workers started: {lost}")
            if time.monotonic() >= deadline:
                raise PlacementError(
                    f"the processes of group {self.group.name!r} did not start within {CONSTRUCTION_S:g} s. Read "
                    "Ray's logs on their nodes."
                )
        answers: list[Any] = ray.get(refs)
        return answers

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
            gpus_per_worker=self.group.gpus_per_worker,
            neighbours=all_roles(self.neighbours),
        )

    def _env(self, slot: Slot) -> dict[str, str]:
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
            "MASTER_PORT": str(self.port),
        }
        if self.group.device == "CPU":
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif self.group.gpus_per_worker == 1 and self.facts[slot.rank]["cuda"]:
            # as under torchrun: every worker sees all devices of its node's part of the group, and uses cuda:LOCAL_RANK
            neighbours = [other.rank for other in self.slots if other.node_id == slot.node_id]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(self.facts[rank]["cuda"]) for rank in neighbours)
        return env | dict(self.group.env)

    def calls(self, location: str) -> Sequence[Callable[..., Any]]:
        """What to call, for each worker, to run the method at ``location`` there."""
        known = self.remotes.get(location)
        if known is None:
            slot = next((number for number in range(NUM_SLOTS) if number not in self.bound.values()), None)
            if slot is not None:
                self.bound[location] = slot
            known = self.remotes[location] = [self._bound_call(rank, location) for rank in range(len(self.actors))]
        return known

    def _bound_call(self, rank: int, location: str) -> Callable[..., Any]:
        actor, slot = self.actors[rank], self.bound.get(location)
        if slot is None:
            return functools.partial(actor.call.remote, location)
        actor.bind.remote(slot, location)
        return getattr(actor, f"slot_{slot}").remote  # type: ignore[no-any-return]

    def forget(self, address: str) -> None:
        """Frees an object and its parts on every worker, without waiting."""
        for location in [known for known in self.remotes if is_within(known.partition(" ")[0], address)]:
            del self.remotes[location]
            self.bound.pop(location, None)
        for actor in self.actors:
            actor.drop.remote(address)

    def is_displaced(self) -> bool:
        """Whether all must be replaced: a node of the group is gone, or a group that shares its devices has moved."""
        return self.num_moves != self.reservation.num_moves or bool(self.reservation.lost_nodes())

    def replace(self, ranks: Iterable[int], wait_s: float) -> None:
        """New processes in place of these ranks', which are ended if they still run.

        Where a node was lost, all that the groups on these devices have is placed anew first, within ``wait_s``.

        Raises:
            RayActorError, NodeLostError: as ``prepare``.
            PlacementError: there is no place for the group.
        """
        chosen = list(ranks)
        for rank in chosen:
            with contextlib.suppress(Exception):
                ray.kill(self.actors[rank], no_restart=True)
            self.doors.pop(rank, None)
        self.alike.clear()
        if lost := self.reservation.lost_nodes():
            if len(chosen) < len(self.actors):
                raise NodeLostError(f"a node of group {self.group.name!r} was lost meanwhile: {lost}")
            self.reservation.move(wait_s)
        self.num_moves = self.reservation.num_moves
        for rank in chosen:
            self.actors[rank] = self._actor(self.slots[rank])
        self.prepare(chosen)
        if 0 in chosen:
            for rank in set(range(len(self.actors))) - set(chosen):  # not waited for: they may be busy
                self.actors[rank].set_environment.remote({"MASTER_PORT": str(self.port)})
        for location, known in self.remotes.items():
            for rank in chosen:
                known[rank] = self._bound_call(rank, location)

    def ask(self, question: str, arguments: Any = None, timeout_s: float = 2.0) -> dict[int, Any]:
        """What the workers answer at their doors, by rank; those that do not answer in time are left out."""
        return ask(self.doors, self.key, question, arguments, timeout_s)

    def describe(self, rank: int) -> str:
        """Which worker that is, for messages."""
        slot = self.slots[rank]
        return f"rank {rank} of group {self.group.name!r} (roles {', '.join(self.group.roles)}; node {slot.address})"

    def rank_of(self, actor_id: str | None) -> int | None:
        """The rank whose process is this actor; None if it is none of ours."""
        for rank, actor in enumerate(self.actors):
            if id_of_actor(actor) == actor_id:
                return rank
        return None

    def unlike_modules(self, sources: Mapping[str, str | None]) -> set[str]:
        """Those of the modules that some worker of the group could not import, or not with the same source."""
        asked = {name: source for name, source in sources.items() if source is None or self.alike.get(name) != source}
        if not asked:
            return set()
        first_ranks = {slot.node_id: slot.rank for slot in reversed(self.slots)}.values()
        replies = ray.get([self.actors[rank].unlike_modules.remote(asked) for rank in first_ranks])
        unlike = {name for reply in replies for name in reply}
        self.alike |= {name: source for name, source in asked.items() if source is not None and name not in unlike}
        return unlike

    def end(self) -> None:
        """Ends every process and frees what was reserved."""
        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        if self.group.shares_devices_with is None:
            with contextlib.suppress(Exception):
                self.reservation.free()


@functools.cache
def _actor_class() -> Any:
    """One for all workers: Ray pickles a class, and reads its bytecode, once for each."""
    return ray.remote(Host)
