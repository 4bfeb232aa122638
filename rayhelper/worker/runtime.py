"""What a process is while it is a worker: which roles it hosts, who it is, and what its objects may call.

A Ray worker is one for its whole life (``host.py``); in process and under torchrun a process is one while it runs the
body of a worker's method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from rayhelper.device_groups import DRIVER
from rayhelper.errors import RoleError
from rayhelper.roles.classes import build
from rayhelper.roles.methods import RoleMethod, find_method, not_constructed
from rayhelper.roles.parts import Identity, Record, address_within, placement_of, refuse_to_travel
from rayhelper.roles.runtime import Route, Shard, WorkerInfo
from rayhelper.values.reply import Changes
from rayhelper.values.shards import is_within
from rayhelper.worker.ambient import Ambient
from rayhelper.worker.changed.arguments import Given, OfConstructor
from rayhelper.worker.changed.classes import changed
from rayhelper.worker.changed.objects import Observed
from rayhelper.worker.process_group import Joined, join_process_group, leave_process_group
from rayhelper.worker.random_streams import RandomStream


class HostedPlacement:
    """The roles of one object, a whole or a part, that this worker hosts."""

    def __init__(self, runtime: WorkerRuntime, identity: Identity) -> None:
        self.runtime = runtime
        self.identity = identity
        self.hosts = (runtime.info.group,)
        self.shards: dict[str, Shard] = {}

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if method.role in self.runtime.info.roles:
            return "here"
        if self.identity.is_building:
            return "skip"
        info, title = self.runtime.info, self.identity.title(method)
        if method.role == DRIVER:
            raise RoleError(f"{title} runs on the driver only, and was called on {self.runtime.describe()}.")
        raise RoleError(
            f"{title} was called on {self.runtime.describe()}, which does not host role {method.role!r} (it hosts "
            f"{', '.join(info.roles)}). Call it from the driver, or let one device group host both roles."
        )

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.runtime.inside(self, method.role):
            return method.call(target, args, kwargs)

    def attending(self, method: RoleMethod[..., Any]) -> None:
        """Nothing: it is part of a call that is looked after."""

    def submit(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("a call on a worker never goes to a group")

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise AssertionError("a call on a worker never goes to a group")

    def report(self, roles: Iterable[str], shard: Shard) -> None:
        """The worker's shard in these roles, to be told with its next reply."""
        for role in roles:
            self.shards[role] = shard
            if self.identity.address is not None:
                self.runtime.unreported[self.identity.address, role] = shard

    __reduce__ = refuse_to_travel


Entry = tuple[HostedPlacement, str | None]  # whose code runs, and for which role

_of_task: ContextVar[tuple[Entry, ...]] = ContextVar("rayhelper_entered", default=())  # by a coroutine, innermost last


class _Inside:
    """No generator: those set the traceback of what is raised, which frozen exceptions refuse."""

    def __init__(self, context: list[Entry], entry: Entry) -> None:
        self.context = context
        self.entry = entry

    def __enter__(self) -> None:
        self.of_task = _of_task.get()
        if self.of_task:
            _of_task.set((*self.of_task, self.entry))
        else:
            self.context.append(self.entry)

    def __exit__(self, *_: object) -> None:
        if self.of_task:
            _of_task.set(self.of_task)
        else:
            self.context.pop()


class _TaskInside:
    """As ``_Inside``, of a coroutine: other code runs while it is suspended."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __enter__(self) -> None:
        self.outer = _of_task.get()
        _of_task.set((*self.outer, self.entry))

    def __exit__(self, *_: object) -> None:
        _of_task.set(self.outer)


class _Observing:
    """No generator: see ``_Inside``."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        identity: Identity,
        method: RoleMethod[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.runtime, self.identity, self.method, self.args, self.kwargs = runtime, identity, method, args, kwargs

    def __enter__(self) -> None:
        self.marks = self.runtime.given.marks(self.method, self.args, self.kwargs)
        self.observed = self.runtime.observed.get(str(self.identity.outermost.address))
        self.title = self.identity.title(self.method)
        if self.observed is not None:
            self.in_full = self.observed.next_in_full(self.title)
            self.shared = self.observed.shared(self.identity.cls, in_full=self.in_full)

    def __exit__(self, *_: object) -> None:
        changes, title = self.runtime.changes, self.title
        labels: list[str] = []
        if self.marks:
            labels += self.runtime.given.changed(self.marks, self.method, self.args, self.kwargs)
        if self.observed is not None:
            labels += changed(self.shared, self.observed.shared(self.identity.cls, in_full=self.in_full))
            attributes, others = self.observed.changes(title)
            labels += others
            for address, names in attributes.items():
                changes.attributes.setdefault(address, {}).update(names)
        changes.others.extend((title, label) for label in labels if (title, label) not in self.runtime.told)
        self.runtime.told.update((title, label) for label in labels)


class WorkerRuntime:
    """What this process is: one worker of a device group."""

    def __init__(self, info: WorkerInfo, node: str) -> None:
        self.info = info
        self.node = node
        self.context: list[Entry] = []
        self.loop: asyncio.AbstractEventLoop | None = None  # in which its coroutines run; None: one for each call
        self.joined: Joined | None = None
        self.random = RandomStream()
        self.instances: dict[str, Any] = {}  # by address
        self.awaited: str | None = None  # the address of the whole that is about to be constructed
        self.unreported: dict[tuple[str, str], Shard] = {}  # by address and role
        self.observed: dict[str, Observed] = {}  # by the address of the whole
        self.given = Given()
        self.told: set[tuple[str, str]] = set()  # methods, and what they change of arguments and classes
        self.changes = Changes({}, [])  # that calls have made, and the driver is not told of yet
        self.notes: Any = None  # of calls, while ``prove`` compares runtimes

    def build(
        self, address: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient
    ) -> tuple[Record, ...]:
        """Constructs the object that the driver knows by ``address``; its parts. Random numbers are the driver's."""
        self.awaited = address
        try:
            with self.random.constructing(ambient.random):
                instance = cls(*args, **kwargs)
        except BaseException:
            self.drop(address)
            raise
        finally:
            self.awaited = None
        self.instances[address] = instance
        identity = placement_of(instance).identity
        self.observed[address] = Observed(identity.instances(), OfConstructor(cls, args, kwargs))
        return identity.records()  # type: ignore[no-any-return]

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        if whole is None:
            address, self.awaited = self.awaited, None  # None: this process alone has it
            identity = Identity(instance, None, address)
        else:
            enclosing = whole._rayhelper.identity
            identity = Identity(instance, enclosing, address_within(enclosing))
        placement = HostedPlacement(self, identity)
        object.__setattr__(instance, "_rayhelper", placement)
        if identity.address is not None:
            self.instances[identity.address] = instance  # others may be given it while it is built
        with self.inside(placement, None):
            build(init, instance, args, kwargs, identity)

    def drop(self, address: str) -> None:
        """Forgets an object and its parts; their memory is freed."""
        self.observed.pop(address, None)
        for known in [known for known in self.instances if is_within(known, address)]:
            del self.instances[known]

    def state(self, address: str) -> Any:
        """What an object and its parts hold here, and what the calls since the last question came to: for ``prove``."""
        return self.noted(placement_of(self.instances[address]).identity)

    def noted(self, identity: Identity) -> Any:
        """As ``state``, of an object of this process."""
        if self.notes is None:
            from rayhelper.prove.on_worker import Notes

            self.notes = Notes()
        return self.notes.of(identity)

    def take_reports(self) -> dict[tuple[str, str], Shard]:
        """The shards that were reported since the last time, by address and role."""
        reported, self.unreported = self.unreported, {}
        return reported

    def observing(
        self, identity: Identity, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Observing:
        """Inside, a call is made; what it changes is to be told, also if it raises."""
        return _Observing(self, identity, method, args, kwargs)

    def take_changes(self) -> Changes | None:
        """What calls have changed since the last time, and the driver has another copy of."""
        if not self.changes.attributes and not self.changes.others:
            return None
        changes, self.changes = self.changes, Changes({}, [])
        return changes

    def located(self, location: str) -> tuple[Any, RoleMethod[..., Any]]:
        """The object and the method at a location, as ``driver.location_of`` writes it."""
        address, mro_index, name = location.split(" ", 2)
        instance = self.instances[address]
        method = find_method(type(instance).__mro__[int(mro_index)].__dict__[name]).played_by(type(instance))
        return instance, self.watched(method)

    def watched(self, method: RoleMethod[..., Any]) -> RoleMethod[..., Any]:
        """The method; while ``prove`` compares runtimes, one whose calls are noted."""
        return method if self.notes is None else self.notes.noting(method)

    def instance_at(self, address: str) -> Any:
        return self.instances.get(address)

    def placement(self, method: RoleMethod[..., Any], target: Any) -> HostedPlacement:
        if isinstance(target, type) or method.kind != "method":
            identity = Identity(target, None, None)
            identity.is_built = True
            return HostedPlacement(self, identity)
        innermost = self._innermost()
        if method.role == DRIVER and innermost is not None:
            return innermost[0]  # skipped if its instance is being constructed, else refused
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        innermost = self._innermost()
        if innermost is None:
            return self.info
        placement, role = innermost
        shards = placement.shards
        known = shards.get(role) if role else next(iter(shards.values()), None)
        return replace(self.info, shard=known) if known else self.info

    def report_shard(self, shard: Shard) -> None:
        innermost = self._innermost()
        if innermost is None:
            raise RoleError("RayHelper.shard(...) was called outside any method of a trainer")
        placement, role = innermost
        placement.report([role] if role else self.info.roles, shard)

    def inside(self, placement: HostedPlacement, role: str | None) -> _Inside:
        """Inside, code of the placement's instance runs, for a role or (None) its constructor."""
        return _Inside(self.context, (placement, role))

    def task_inside(self, placement: HostedPlacement, role: str) -> _TaskInside:
        """Inside, a coroutine of the placement's instance runs for a role, in a task of asyncio."""
        return _TaskInside((placement, role))

    def _innermost(self) -> Entry | None:
        """Whose code runs here."""
        of_task = _of_task.get()
        if of_task:
            return of_task[-1]
        return self.context[-1] if self.context else None

    def describe(self) -> str:
        """Who this is, for messages."""
        return f"rank {self.info.rank} of group {self.info.group!r} on node {self.node}"

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        """Joins the workers of the group in torch.distributed's default group, if the process is in none."""
        self.joined = join_process_group(self.info, backend, timeout_s)

    def rejoin(self) -> None:
        """Joins anew after a member left to free the others; a group that the user's own code made is the user's."""
        if self.joined is not None:
            leave_process_group()
            self.init_process_group(self.joined.backend, self.joined.timeout_s)

    def teardown(self) -> None:
        raise RoleError(f"RayHelper.teardown() belongs on the driver, and was called on {self.describe()}.")
