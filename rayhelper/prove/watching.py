"""A run that is watched: of every call that leaves the driver, what went in, what came out, and what it left behind.

Watcher            what one run came to, a ``Seen`` a call
WatchedOff         a runtime in which everything runs here, as with Ray off, and is watched
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rayhelper.device_groups import DRIVER
from rayhelper.roles.classes import build
from rayhelper.roles.futures import Future, finished
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import names_of_roles
from rayhelper.roles.parts import Identity, placement_of
from rayhelper.roles.runtime import Route, state
from rayhelper.runtimes.off import OneProcess
from rayhelper.values.calls import parameter_names
from rayhelper.values.contents import Contents, contents_of
from rayhelper.values.dispatch import bare
from rayhelper.worker.steps import Stepped

State = dict[str, dict[str, Contents]]  # of an object and its parts, by name: what each attribute holds


@dataclass
class Seen:
    """One call, or the construction of an object."""

    title: str
    arguments: dict[str, Contents] = field(default_factory=dict)
    value: Contents | None = None  # None: it raised
    raised: str = ""
    relative: dict[str, Contents] = field(default_factory=dict)  # arguments and "value", numbers of workers put as such
    is_collected: bool = True  # the value is one however many workers there are
    states: list[State] = field(default_factory=list)  # by worker; none while other calls were in flight
    num_workers: int = 1


class Watcher:
    """What one run of so many workers came to."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.seen: list[Seen] = []
        self.num_awaited = 0  # calls that are in flight

    def constructed(self, name: str, states: list[State]) -> None:
        self.seen.append(Seen(f"{name}.__init__", states=states, num_workers=len(states)))

    def call(
        self,
        method: RoleMethod[..., Any],
        title: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
        states: Callable[[], list[State]],
        *,
        is_off: bool = False,
    ) -> Any:
        """The value of the call, which is made now. With Ray off it is what one worker gives, not in a list of one."""
        seen = self._begun(method, title, args, kwargs)
        try:
            value = run()
        except BaseException as error:
            seen.raised = f"{type(error).__name__}: {error}"
            raise
        self._ended(seen, value, is_off)
        seen.states = states()
        return value

    async def awaited(
        self,
        method: RoleMethod[..., Any],
        title: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Callable[[], Awaitable[Any]],
        states: Callable[[], list[State]],
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
            seen.raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.num_awaited -= 1
        self._ended(seen, value, is_off)
        if self.num_awaited == 0:
            self.seen[-1].states = states()
        return value

    def _begun(
        self, method: RoleMethod[..., Any], title: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Seen:
        names = parameter_names(method)
        labels = [names[k] if k < len(names) else str(k + 1) for k in range(len(args))]
        given = {name: _given(value) for name, value in (*zip(labels, args, strict=True), *kwargs.items())}
        seen = Seen(title, {name: contents_of([value], with_leaves=True) for name, value in given.items()})
        seen.relative = {name: contents_of([self._relative(value)]) for name, value in given.items()}
        seen.is_collected = method.execute == "first" or method.collect != "none"
        self.seen.append(seen)
        return seen

    def _ended(self, seen: Seen, value: Any, is_off: bool) -> None:
        seen.value = contents_of([[value] if is_off and not seen.is_collected else value], with_leaves=True)
        seen.relative["value"] = contents_of([self._relative(value)])
        seen.num_workers = 1 if is_off else self.num_workers

    def _relative(self, value: Any) -> Any:
        """The value, with words in place of whole numbers that are the number of workers."""
        if type(value) is tuple:
            return tuple(map(self._relative, value))
        return "the number of workers" if type(value) is int and value == self.num_workers else value


def _given(value: Any) -> Any:
    plain = bare(value)
    return plain.result() if isinstance(plain, Future) else plain


def state_of(identity: Identity) -> State:
    """What an object of this process and its parts hold, in the attributes that methods of roles read or set."""
    found: State = {}
    for instance in identity.instances():
        known = names_of_roles(type(instance))
        name = instance._rayhelper.identity.name
        found[name] = {
            attribute: contents_of([value], of_arrays_alone=not _is_plain(value), with_leaves=True)
            for attribute, value in vars(instance).items()
            if attribute in known and placement_of(value) is None
        }
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, type(None)))


class WatchedOff(OneProcess):
    """What this process is: the one process, whose calls of roles are watched."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        identity = Identity(instance, None if whole is None else whole._rayhelper.identity, None)
        object.__setattr__(instance, "_rayhelper", WatchedPlacement(self.watcher, identity))
        build(init, instance, args, kwargs, identity)
        if whole is None:
            self.watcher.constructed(identity.name, [state_of(identity)])

    def placement(self, method: RoleMethod[..., Any], target: Any) -> WatchedPlacement:
        return WatchedPlacement(self.watcher, Identity(target, None, None))

    def teardown(self) -> None:
        if state.active is self:
            state.active = None


_within_role: ContextVar[bool] = ContextVar("rayhelper_within_role", default=False)


class WatchedPlacement:
    """Everything runs here. Calls that a role makes of another are part of the call that the driver made."""

    hosts = ()

    def __init__(self, watcher: Watcher, identity: Identity) -> None:
        self.watcher = watcher
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
                return method.finished_call(target, *plain)
            finally:
                _within_role.reset(token)

        title = self.identity.title(method)

        def states() -> list[State]:
            return [state_of(self.identity.outermost)]

        return finished(lambda: self.watcher.call(method, title, *plain, run, states, is_off=True))

    async def awaited(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plain = tuple(map(_given, args)), {name: _given(value) for name, value in kwargs.items()}

        def run() -> Awaitable[Any]:
            return Stepped(method.coroutine(target, *plain), _WithinRole)

        def states() -> list[State]:
            return [state_of(self.identity.outermost)]

        return await self.watcher.awaited(method, self.identity.title(method), *plain, run, states, is_off=True)


class _WithinRole:
    """Inside, code of a role runs. No generator: see ``acting_as``."""

    def __enter__(self) -> None:
        self.token = _within_role.set(True)

    def __exit__(self, *_: object) -> None:
        _within_role.reset(self.token)
