"""A run that is watched: of every call that leaves the driver, what went in, what came out, and what it left behind.

Watcher            what one run came to, a ``Seen`` a call
WatchedOff         a runtime in which everything runs here, as with Ray off, and is watched
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rayhelper.device_groups import DRIVER
from rayhelper.prove.evidence import Observer
from rayhelper.prove.held import Held, held_of
from rayhelper.prove.on_worker import Notes, OnWorker, named_arguments, random_digests, settings, state_of
from rayhelper.roles.classes import build
from rayhelper.roles.futures import Future, finished
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import Identity
from rayhelper.roles.runtime import Route, state
from rayhelper.runtimes.off import OneProcess
from rayhelper.values.dispatch import bare
from rayhelper.worker.steps import Stepped


@dataclass
class Seen:
    """One call, or the construction of an object."""

    title: str
    name: str = ""  # of the method
    arguments: dict[str, Held] = field(default_factory=dict)
    value: Held | None = None  # None: it raised
    raised: str = ""
    raised_on: int | None = None  # the rank that raised it
    relative: dict[str, Held] = field(default_factory=dict)  # arguments and "value", numbers of workers put as such
    divides: bool = False  # each worker gets a part of the arguments
    collect: str = ""  # how the value is made: "first", "none", "flatten", or "a function"
    workers: list[OnWorker] = field(default_factory=list)  # by rank; none while other calls were in flight
    num_workers: int = 1
    drawn_before: tuple[str, ...] = ()  # generators of the driver that drew since the call before
    random: dict[str, bytes] = field(default_factory=dict)  # where the driver's generators are after the call
    settings: dict[str, str] = field(default_factory=dict)  # of the driver's process as it makes the call

    @property
    def is_collected(self) -> bool:
        """Whether the value is one however many workers there are."""
        return self.collect != "none"


class Watcher:
    """What one run came to. ``num_workers``: that each role has. ``observer``: of one of its calls."""

    def __init__(self, num_workers: Mapping[str, int], observer: Observer | None = None) -> None:
        self.num_workers = num_workers
        self.seen: list[Seen] = []
        self.num_awaited = 0  # calls that are in flight
        self.observer = observer

    def constructed(self, name: str, workers: list[OnWorker]) -> None:
        """An object was constructed."""
        seen = Seen(f"{name}.__init__", name="__init__", workers=workers, num_workers=len(workers))
        seen.random = random_digests()
        self.seen.append(seen)
        self._observed()

    def begins(self, identity: Identity, *, is_awaited: bool = False) -> None:
        """The driver begins a call of an object in this process, or of a part of it."""
        if self.observer is not None:
            self.observer.begins(id(identity), state_of(identity))
            if is_awaited:  # it changes the object while the driver's code goes on
                self.observer.states.pop(id(identity), None)

    def gave(self, title: str, identity: Identity, value: Any) -> None:
        """A call of an object in this process, or of a part of it, has ended with a value."""
        if self.observer is not None:
            self.observer.gave(title, id(identity), state_of(identity), value)

    def _observed(self) -> None:
        if self.observer is not None:
            self.observer.ended(len(self.seen))

    def call(
        self,
        method: RoleMethod[..., Any],
        title: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
        workers: Callable[[], list[OnWorker]],
        *,
        is_off: bool = False,
    ) -> Any:
        """The value of the call, which is made now. With Ray off it is what one worker gives, not in a list of one."""
        seen = self._begun(method, title, args, kwargs)
        try:
            value = run()
        except BaseException as error:
            self._raised(seen, error)
            with contextlib.suppress(Exception):  # a worker that died has noted nothing
                seen.workers = workers()
            raise
        self._ended(seen, value, is_off)
        seen.workers = workers()
        return value

    async def awaited(
        self,
        method: RoleMethod[..., Any],
        title: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Callable[[], Awaitable[Any]],
        workers: Callable[[], list[OnWorker]],
        *,
        is_off: bool = False,
    ) -> Any:
        """As ``call``, of a call that may be in flight beside others, which are seen in the order in which they began.

        What they leave behind is looked at when none is in flight any more, and belongs to the one that began last.
        """
        seen = self._begun(method, title, args, kwargs)
        self.num_awaited += 1
        try:
            value = await run()
        except BaseException as error:
            self._raised(seen, error)
            raise
        finally:
            self.num_awaited -= 1
        self._ended(seen, value, is_off)
        if self.num_awaited == 0:
            self.seen[-1].workers = workers()
        return value

    def _begun(
        self, method: RoleMethod[..., Any], title: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Seen:
        given = {name: _given(value) for name, value in named_arguments(method, args, kwargs).items()}
        seen = Seen(title, method.__name__, {name: held_of(value) for name, value in given.items()})
        seen.num_workers = self.num_workers.get(method.role, 1)
        seen.relative = {name: held_of(_relative(value, seen.num_workers)) for name, value in given.items()}
        collect = method.collect if isinstance(method.collect, str) else "a function"
        seen.collect = "first" if method.execute == "first" else collect
        seen.divides = method.dispatch != "all"
        before = self.seen[-1].random if self.seen else {}
        now = random_digests()
        seen.drawn_before = tuple(name for name in now if name in before and now[name] != before[name])
        seen.random, seen.settings = now, settings()
        self.seen.append(seen)
        return seen

    def _raised(self, seen: Seen, error: BaseException) -> None:
        seen.raised, seen.raised_on = f"{type(error).__name__}: {error}", rank_of_error(error)
        self._observed()

    def _ended(self, seen: Seen, value: Any, is_off: bool) -> None:
        seen.value = held_of([value] if is_off and not seen.is_collected else value)
        seen.relative["value"] = held_of(_relative(value, seen.num_workers))
        seen.random = random_digests()
        self._observed()


def _relative(value: Any, num_workers: int) -> Any:
    """The value, with words in place of whole numbers that are the number of workers."""
    if type(value) is tuple:
        return tuple(_relative(one, num_workers) for one in value)
    return "the number of workers" if type(value) is int and value == num_workers else value


def rank_of_error(error: BaseException) -> int | None:
    """The rank that raised an error, by its notes."""
    told = " ".join([*getattr(error, "__notes__", ()), str(error)])
    found = re.search(r"on rank (\d+) of group", told)
    return int(found[1]) if found else None


def _given(value: Any) -> Any:
    plain = bare(value)
    return plain.result() if isinstance(plain, Future) else plain


class WatchedOff(OneProcess):
    """What this process is: the one process, whose calls of roles are watched."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.notes = Notes()

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        identity = Identity(instance, None if whole is None else whole._rayhelper.identity, None)
        object.__setattr__(instance, "_rayhelper", WatchedPlacement(self, identity))
        with _WithinRole():
            build(init, instance, args, kwargs, identity)
        if whole is None:
            self.watcher.gave(f"{identity.name}.__init__", identity, None)
            self.watcher.constructed(identity.name, [self.notes.of(identity)])

    def placement(self, method: RoleMethod[..., Any], target: Any) -> WatchedPlacement:
        return WatchedPlacement(self, Identity(target, None, None))

    def teardown(self) -> None:
        if state.active is self:
            state.active = None


def in_role() -> bool:
    """Whether code of a role, or of a constructor, runs in a run with Ray off."""
    return _within_role.get()


_within_role: ContextVar[bool] = ContextVar("rayhelper_within_role", default=False)


class WatchedPlacement:
    """Everything runs here. Calls that a role makes of another are part of the call that the driver made."""

    hosts = ()

    def __init__(self, runtime: WatchedOff, identity: Identity) -> None:
        self.watcher, self.notes = runtime.watcher, runtime.notes
        self.identity = identity

    def route(self, method: RoleMethod[..., Any]) -> Route:
        crosses = method.role != DRIVER and not self.identity.is_building and not _within_role.get()
        return "group" if crosses else "here"

    def run(self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method.call(target, args, kwargs)

    def attending(self, method: RoleMethod[..., Any]) -> None:
        """Nothing: no deadline counts while runs are compared."""

    def submit(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        plain = tuple(map(_given, args)), {name: _given(value) for name, value in kwargs.items()}

        def run() -> Any:
            token = _within_role.set(True)
            try:
                value = self.notes.noting(method).finished_call(target, *plain)
                self.watcher.gave(title, whole, value)
                return value
            finally:
                _within_role.reset(token)

        title, whole = self.identity.title(method), self.identity.outermost
        self.watcher.begins(whole)

        def workers() -> list[OnWorker]:
            return [self.notes.of(whole)]

        return finished(lambda: self.watcher.call(method, title, *plain, run, workers, is_off=True))

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plain = tuple(map(_given, args)), {name: _given(value) for name, value in kwargs.items()}

        title, whole = self.identity.title(method), self.identity.outermost
        self.watcher.begins(whole, is_awaited=True)

        def run() -> Awaitable[Any]:
            return Stepped(self.notes.noting(method).coroutine(target, *plain), _WithinRole)

        def workers() -> list[OnWorker]:
            self.watcher.gave(title, whole, None)
            return [self.notes.of(whole)]

        return await self.watcher.awaited(method, title, *plain, run, workers, is_off=True)


class _WithinRole:
    """Inside, code of a role runs. No generator: see ``acting_as``."""

    def __enter__(self) -> None:
        self.token = _within_role.set(True)

    def __exit__(self, *_: object) -> None:
        _within_role.reset(self.token)
