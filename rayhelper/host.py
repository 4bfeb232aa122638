"""One worker process: the trainers placed on it, and the calls made to them.

    driver: host.construct(id, (class, args, kwargs))     -> the same __init__ runs here
    driver: host.call(id, method, arguments, *parts)      -> value, Reported(value, shards) or Failure

A host knows nothing of Ray: ``worker_group.py`` makes an actor of it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayhelper.collect import join, join_first
from rayhelper.device_groups import DRIVER
from rayhelper.dispatch import split_call
from rayhelper.errors import RoleError
from rayhelper.modules import missing_modules
from rayhelper.roles import RoleMethod, not_constructed
from rayhelper.runtime import Route, Shard, WorkerInfo, state

# Methods that stand for bound addresses. Every argument of a remote call is serialised on its own, which for a small
# call is a fifth of its cost: a call through a slot sends nothing but its own arguments.
NUM_SLOTS = 64

_HELD_PORTS: list[socket.socket] = []  # until this process ends, or the port is used


@dataclass(frozen=True)
class FuturePart:
    """Stands for a future among the arguments: its value is what ``collect`` makes of parts[start:stop]."""

    start: int
    stop: int
    collect: Any
    first: bool
    leaders: tuple[int, ...]
    order: list[int] | None
    where: str


@dataclass(frozen=True)
class LateCall:
    """Arguments that hold futures: divided here, where their values arrive, instead of on the driver."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dispatch: Any
    num_shards: int
    index: int
    names: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Reported:
    """A value together with the shards that the worker reported since the last call, by role."""

    value: Any
    shards: dict[str, Shard]


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the driver."""

    error: bytes | None  # the pickled exception; None if it cannot be pickled
    summary: str
    traceback: str
    origin: str  # role, group, rank, node, method


class HostedPlacement:
    """The roles of one instance that this worker hosts."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self.constructing = True
        self.shards: dict[str, Shard] = {}
        self.unreported: set[str] = set()

    def route(self, method: RoleMethod[..., Any]) -> Route:
        if method.role in self.runtime.info.roles:
            return "here"
        if self.constructing:
            return "skip"
        info = self.runtime.info
        if method.role == DRIVER:
            raise RoleError(f"{method} runs on the driver only, and was called on {self.runtime.describe()}.")
        raise RoleError(
            f"{method} was called on {self.runtime.describe()}, which does not host role {method.role!r} (it hosts "
            f"{', '.join(info.roles)}). Call it from the driver, or let one device group host both roles."
        )

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.runtime.inside(self, method.role):
            return method.call(target, args, kwargs)

    def submit(self, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("a call on a worker never goes to a group")

    def __reduce__(self) -> Any:
        raise RoleError("a trainer cannot be sent to another process; send what it computed instead")


class WorkerRuntime:
    """What this process is: one worker of a device group."""

    def __init__(self, info: WorkerInfo, node: str) -> None:
        self.info = info
        self.node = node
        self.context: list[tuple[HostedPlacement, str | None]] = []

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        placement = HostedPlacement(self)
        object.__setattr__(instance, "_rayhelper", placement)
        with self.inside(placement, None):
            init(instance, *args, **kwargs)
        placement.constructing = False

    def placement(self, method: RoleMethod[..., Any], target: Any) -> HostedPlacement:
        if isinstance(target, type) or method.kind != "method":
            placement = HostedPlacement(self)
            placement.constructing = False
            return placement
        raise not_constructed(method, target)

    def current(self) -> WorkerInfo:
        if not self.context:
            return self.info
        placement, role = self.context[-1]
        shards = placement.shards
        known = shards.get(role) if role else next(iter(shards.values()), None)
        return replace(self.info, shard=known) if known else self.info

    def report_shard(self, shard: Shard) -> None:
        if not self.context:
            raise RoleError("RayHelper.shard(...) was called outside any method of a trainer")
        placement, role = self.context[-1]
        for name in [role] if role else self.info.roles:
            placement.shards[name] = shard
            placement.unreported.add(name)

    @contextlib.contextmanager
    def inside(self, placement: HostedPlacement, role: str | None) -> Iterator[None]:
        self.context.append((placement, role))
        try:
            yield
        finally:
            self.context.pop()

    def describe(self) -> str:
        return f"rank {self.info.rank} of group {self.info.group!r} on node {self.node}"

    def teardown(self) -> None:
        raise RoleError(f"RayHelper.teardown() belongs on the driver, and was called on {self.describe()}.")


@dataclass(repr=False)
class Host:
    """A worker process as its group's handle sees it."""

    name: str  # as it stands before what the process prints
    dumps: Callable[[Any], bytes]  # a pickler that takes classes of __main__ by value
    trainers: dict[int, Any] = field(default_factory=dict)
    methods: dict[str, tuple[Any, RoleMethod[..., Any]]] = field(default_factory=dict)  # by address
    slots: dict[int, str] = field(default_factory=dict)  # addresses that are called by number

    def __repr__(self) -> str:
        return self.name

    def describe(self) -> dict[str, Any]:
        """Facts the driver needs before it can set the environment of the group."""
        return {"pid": os.getpid(), "hostname": socket.gethostname(), "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def hold_port(self) -> int:
        """A free port of this node, held by a bound socket that does not listen.

        Nobody else is given the port, yet a listener with SO_REUSEADDR (as torch's TCPStore sets) may take it.
        """
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        _HELD_PORTS.append(held)
        return int(held.getsockname()[1])

    def prepare(self, info: WorkerInfo, env: dict[str, str], forgotten: list[str], node: str) -> None:
        """Makes this process worker ``info`` of its group, its environment cleared of ``forgotten``, ``env`` added."""
        for name in forgotten:
            os.environ.pop(name, None)
        os.environ.update(env)
        state.active = WorkerRuntime(info, node)

    def missing_modules(self, names: Sequence[str]) -> list[str]:
        """Those of the modules that this process could not import."""
        return missing_modules(names)

    def construct(self, instance_id: int, payload: bytes) -> Any:
        """Constructs (class, args, kwargs) here; the reply carries the shards it reported."""
        runtime = _runtime()
        try:
            cls, args, kwargs = pickle.loads(payload)
            instance = cls(*args, **kwargs)
            self.trainers[instance_id] = instance
            return _reply(instance._rayhelper, None)
        except BaseException as error:
            return failure(error, self.dumps, f"__init__ on {runtime.describe()}")

    def drop(self, instance_id: int) -> None:
        """Forgets an instance; its memory is freed."""
        self.trainers.pop(instance_id, None)
        prefix = f"{instance_id} "
        self.methods = {known: found for known, found in self.methods.items() if not known.startswith(prefix)}

    def call(self, address: str, arguments: Any = ((), {}), *parts: Any) -> Any:
        """The value of one call, wrapped only if there is more to say than the value."""
        method: Any = address
        try:
            instance, method = self.methods.get(address) or self._resolve(address)
            placement = instance._rayhelper
            if parts:
                for part in parts:
                    if isinstance(part, Failure):
                        return part
                arguments = _divide_late(arguments, parts)
            args, kwargs = arguments
            with placement.runtime.inside(placement, method.role):
                value = method.finished_call(instance, args, kwargs)
            return _reply(placement, value)
        except BaseException as error:
            return failure(error, self.dumps, f"{method} on {_runtime().describe()}")

    def bind(self, slot: int, address: str) -> None:
        """From now on ``slot_N(...)`` is ``call(address, ...)``."""
        self.slots[slot] = address

    def _resolve(self, address: str) -> tuple[Any, RoleMethod[..., Any]]:
        instance_id, mro_index, name = address.split(" ", 2)
        instance = self.trainers[int(instance_id)]
        found = instance, find_method(type(instance).__mro__[int(mro_index)].__dict__[name])
        self.methods[address] = found
        return found


def _slot(number: int) -> Callable[..., Any]:
    def slot(self: Host, *sent: Any) -> Any:
        return self.call(self.slots[number], *sent)

    return slot


for _number in range(NUM_SLOTS):
    setattr(Host, f"slot_{_number}", _slot(_number))


def method_address(instance_id: int, mro_index: int, name: str) -> str:
    """Which method of which instance: the same name may stand in several classes of a class's ``__mro__``."""
    return f"{instance_id} {mro_index} {name}"


def find_method(entry: Any) -> RoleMethod[..., Any]:
    """The decorated method inside a class attribute, which may wrap it (a property, a retry decorator)."""
    while not isinstance(entry, RoleMethod):
        inner = getattr(entry, "fget", None) or getattr(entry, "__func__", None) or getattr(entry, "__wrapped__", None)
        if inner is None:
            raise RoleError(f"{entry!r} holds no method decorated with RayHelper.function")
        entry = inner
    return entry


def failure(error: BaseException, dumps: Callable[[Any], bytes], origin: str) -> Failure:
    """The exception in a form that always travels."""
    text = "".join(traceback.format_exception(error))
    pickled: bytes | None = None
    with contextlib.suppress(Exception):  # one with a constructor of its own may pickle and not come back
        attempt = dumps(error)
        pickled = attempt if type(pickle.loads(attempt)) is type(error) else None
    return Failure(pickled, "".join(traceback.format_exception_only(error)).strip(), text, origin)


def _runtime() -> WorkerRuntime:
    assert isinstance(state.active, WorkerRuntime), "the host was used before prepare()"
    return state.active


def _reply(placement: HostedPlacement, value: Any) -> Any:
    if not placement.unreported:
        return value
    shards = {role: placement.shards[role] for role in placement.unreported}
    placement.unreported.clear()
    return Reported(value, shards)


def _divide_late(late: LateCall, parts: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(_future_value(value, parts) for value in late.args)
    kwargs = {name: _future_value(value, parts) for name, value in late.kwargs.items()}
    division = split_call(late.dispatch, late.num_shards, args, kwargs, names=late.names, where=late.where)
    return division.calls[late.index]


def _future_value(value: Any, parts: Sequence[Any]) -> Any:
    if not isinstance(value, FuturePart):
        return value
    replies = parts[value.start : value.stop]
    values = [reply.value if isinstance(reply, Reported) else reply for reply in replies]
    if value.first:
        return join_first(value.collect, values[0], where=value.where)
    return join(value.collect, [values[k] for k in value.leaders], order=value.order, where=value.where)
