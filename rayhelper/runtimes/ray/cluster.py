"""A driver's Ray cluster: joined or started, its groups of workers, and how classes get there."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from rayhelper.device_groups import DeviceGroups
from rayhelper.errors import ConfigError, DispatchError, RoleError
from rayhelper.roles.parts import bound_for
from rayhelper.runtimes.announced import Announced
from rayhelper.runtimes.debugging import Waiting
from rayhelper.runtimes.ray import placement as placing
from rayhelper.runtimes.ray.group import ToConstruct, WorkerGroup
from rayhelper.runtimes.ray.modules.changes import Changes, Place, changes_in
from rayhelper.runtimes.ray.modules.imports import Imports, not_by_value, refused_late
from rayhelper.runtimes.ray.modules.pins import Pins
from rayhelper.runtimes.ray.modules.reloads import Reloads
from rayhelper.runtimes.ray.modules.sources import sources_of, user_modules
from rayhelper.runtimes.ray.printed import Printed
from rayhelper.timeline.recording import Recording
from rayhelper.values.packing import dumps
from rayhelper.watch.breakpoints import paused_s
from rayhelper.worker.ambient import Ambient
from rayhelper.worker.side_door import Address, stacks, told_stacks

_ANSWER_S = 0.5  # so long a worker may take to say what it has printed
_LOCAL_WAIT_S = 0.0  # a cluster of this machine alone will not grow
_CLUSTER_WAIT_S = 120.0  # unless RAYHELPER_WAIT_S says otherwise


def cluster_wait_s() -> float:
    """Seconds to wait for nodes to join or to be freed. Raises ConfigError if RAYHELPER_WAIT_S is no number."""
    written = os.environ.get("RAYHELPER_WAIT_S", str(_CLUSTER_WAIT_S))
    try:
        return max(0.0, float(written))
    except ValueError:
        raise ConfigError(
            f"RAYHELPER_WAIT_S must be a number of seconds, got {written!r}. Correct or unset it."
        ) from None


class RayCluster:
    """The cluster on which a driver's groups run."""

    def __init__(self, address: str | None, recording: Recording | None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS")
        self.recording = recording
        self.groups: dict[str, WorkerGroup] = {}
        self.told_changes: set[Place] = set()  # what workers were told that was set in modules
        self.is_ours = False
        self.announced: Announced | None = None
        self.printed: Printed | None = None

    def start(self, config: DeviceGroups) -> dict[str, WorkerGroup]:
        self.is_ours = placing.connect(self.address)
        self.printed = Printed()
        wait_s = cluster_wait_s() if self.address else _LOCAL_WAIT_S
        reserved = placing.reserved(config, wait_s=wait_s)
        inherits = self.is_ours and not self.address
        for group in config.groups:
            self.groups[group.name] = WorkerGroup(
                group,
                reserved[group.name],
                wait_s,
                self.recording,
                neighbours=config.neighbours(group),
                inherits=inherits,
            )
        for started in self.groups.values():
            started.prepare()
            started.calls.paused_s = self.paused_s
        self.announced = Announced(self.where_all_are, Waiting(self.doors).answers)
        return self.groups

    def doors(self) -> dict[str, tuple[Address, bytes]]:
        """The doors of all workers and their keys, by name of the worker."""
        crews = [group.crew for group in list(self.groups.values())]
        return {
            f"{crew.group.name}:{rank}": (address, crew.key) for crew in crews for rank, address in crew.doors.items()
        }

    def paused_s(self, last_s: float) -> float:
        """How many of the last so many seconds some worker waited at a breakpoint."""
        answers = [group.crew.ask("halts") for group in list(self.groups.values())]
        return paused_s((halts for answer in answers for halts in answer.values()), last_s)

    def where_all_are(self) -> str:
        """The stacks of the driver and of all workers, as text."""
        told = [f"driver, process {os.getpid()}\n{stacks()}"]
        for name, group in self.groups.items():
            answers = group.crew.ask("stacks")
            told.append(f"group {name!r}\n{told_stacks(answers, range(len(group.crew.actors)))}")
        return "\n".join(told)

    def construction(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Collection[str],
        groups: Sequence[WorkerGroup],
    ) -> Any:
        """What workers unpickle, put once; modules that workers lack, or have otherwise, go by value."""
        known = user_modules()
        sources = sources_of(known)
        unlike = _unlike(groups, sources) if sources else set()
        imports = Imports(cls, known)
        by_value = imports.with_importers(unlike)
        late = imports.late(by_value)
        lacking = _unlike(groups, dict.fromkeys(late)) if late else set()  # the function may never run there
        for name in late.keys() - lacking:
            raise refused_late(cls, name, late[name])
        for name in by_value:
            cloudpickle.register_pickle_by_value(sys.modules[name])
        names_of_modules = imports.modules()
        with bound_for(*names):
            changes = changes_in([name for name in names_of_modules if name not in by_value], self.told_changes)
            changes.check(cls)
            self.told_changes |= changes.values.keys()
            payload = ray.put(_pickled(cls, args, kwargs, Pins(names_of_modules), changes, by_value))
        return ToConstruct(payload, Reloads(names_of_modules))

    def alive(self) -> bool:
        return bool(ray.is_initialized())

    def stop(self) -> None:
        """Ends every worker; a cluster that was started for this run is stopped too."""
        if self.announced is not None:
            self.announced.close()
        if not ray.is_initialized():
            return
        try:
            if self.recording is not None:
                for group in self.groups.values():
                    group.hand_over_spans()
                self.recording.write()
        finally:
            if self.printed is not None:
                asked = [group.crew.ask("printed", timeout_s=_ANSWER_S) for group in self.groups.values()]
                self.printed.wait(last for answers in asked for last in answers.values())
                self.printed.close()
            for group in self.groups.values():
                group.stop()
            if self.is_ours:
                ray.shutdown()


def _unlike(groups: Sequence[WorkerGroup], sources: Mapping[str, str | None]) -> set[str]:
    return {name for group in groups for name in group.unlike_modules(sources)}


def _pickled(
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pins: Pins,
    changes: Changes,
    by_value: Collection[str],
) -> bytes:
    """A class and the arguments of its constructor. Raises DispatchError that says which of them does not pickle."""
    try:
        # the pins first: unpickling the class imports modules
        return dumps((pins, cls, args, kwargs, Ambient.here(), changes))
    except RoleError:
        raise
    except Exception as error:
        named = {f"positional argument {i + 1} of {cls.__name__}(...)": value for i, value in enumerate(args)}
        named |= {f"argument {name!r} of {cls.__name__}(...)": value for name, value in kwargs.items()}
        for name, value in named.items():
            try:
                dumps(value)
            except Exception as reason:
                raise DispatchError(f"{name} cannot be sent to a worker: {reason}") from error
        if by_value:
            raise not_by_value(cls, by_value, error) from error
        raise DispatchError(
            f"class {cls.__name__}, defined in {cls.__module__}, cannot be sent to a worker: {error}. Define it in its "
            "own module, which the workers import."
        ) from error
