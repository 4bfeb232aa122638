"""What a call of a decorated method does in this process. (Decorated classes: ``classes.py``.)

    trainer.update(batch)
        -> BoundRoleMethod (a functools.partial of the wrapper and the instance)
        -> invoke(method, target, args, kwargs)
             Ray off                      the method itself
             on the driver                placement.submit(...).result()        runtimes/ray/group.py
             on a worker                  the method itself, or RoleError       worker/calls.py

The decorators only store what they were told. Where a call runs is decided when it is made.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, overload

from typing_extensions import TypeVar

from rayhelper.device_groups import OWN
from rayhelper.errors import DecorationError, RoleError
from rayhelper.roles.futures import Future, finished
from rayhelper.roles.runtime import Placement, state
from rayhelper.values.collect import validate_collect
from rayhelper.values.dispatch import Whole, validate_dispatch
from rayhelper.watch.attended import Attended, attended
from rayhelper.watch.interrupts import run
from rayhelper.watch.watchdog import Call, Off, Watched, watchdog

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
P_plain = ParamSpec("P_plain")
R_co = TypeVar("R_co", covariant=True)
S_co = TypeVar("S_co", covariant=True, default=Any)  # what the first parameter takes: the instance, unless static
Kind = Literal["method", "static", "class"]
Flavour = Literal["plain", "async", "generator", "async generator"]


class RoleMethod(Generic[P, R_co, S_co]):
    """A method together with the role it belongs to and the way its calls travel."""

    def __init__(
        self, function: Callable[..., Any], role: str, dispatch: Any, execute: str, collect: Any, kind: Kind = "method"
    ) -> None:
        if not isinstance(role, str) or not role:
            raise DecorationError(f"RayHelper.function(group=...) takes the name of one role, got {role!r}")
        if not callable(function):
            raise DecorationError(f"RayHelper.function decorates methods, got {type(function).__name__}")
        validate_dispatch(dispatch, execute)
        validate_collect(collect)
        self.__setstate__((function, role, dispatch, execute, collect, kind))

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.function, self.role, self.dispatch, self.execute, self.collect, self.kind)

    def __setstate__(self, fields: tuple[Any, ...]) -> None:
        self.function, self.role, self.dispatch, self.execute, self.collect, self.kind = fields
        functools.update_wrapper(self, self.function)
        self.flavour = _flavour(self.function)
        self.is_async = self.flavour in ("async", "async generator")
        self.wrapper = _WRAPPERS[self.flavour](self)
        self.is_own = self.role == OWN
        self.origin = self  # as it stands in its class
        self.played: dict[str, RoleMethod[..., Any]] = {}  # of an own method: the same in the roles that play it

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    def __str__(self) -> str:
        return f"{self.function.__qualname__} (role {self.role!r})"

    # A type checker shows a decorator a static method as a function like any other. Whether the first parameter takes
    # the instance tells them apart; that parameter's name is lost.
    @overload
    def __get__(self, instance: None, owner: Any = None) -> RoleMethod[P, R_co, S_co]: ...
    @overload
    def __get__(
        self: RoleMethod[P_plain, R, type[S]], instance: S, owner: Any = None
    ) -> BoundRoleMethod[P_plain, R]: ...
    @overload
    def __get__(self: RoleMethod[P_plain, R, S], instance: S, owner: Any = None) -> BoundRoleMethod[P_plain, R]: ...
    @overload
    def __get__(
        self: RoleMethod[P_plain, R, S], instance: object, owner: Any = None
    ) -> BoundRoleMethod[Concatenate[S, P_plain], R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if self.is_own:
            method = self.played_by(owner if instance is None else type(instance))
            if method is not self:
                return method.__get__(instance, owner)
        if instance is not None:
            return BoundRoleMethod(self.wrapper, instance)
        return self if self.kind == "method" else BoundRoleMethod(self.wrapper, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        """``Class.method(instance, ...)``, and what ``property`` and other decorators call."""
        method = self.played_by(type(args[0])) if self.is_own and args else self
        return method.wrapper(*args, **kwargs)  # type: ignore[no-any-return]

    def played_by(self, cls: type | None) -> RoleMethod[..., Any]:
        """The method in the one role of a class, if it is an own one; in a class without roles it stays as it is."""
        roles = getattr(cls, "__rayhelper_roles__", ())
        if not self.is_own or not roles:
            return self
        known = self.played.get(roles[0])
        if known is None:
            known = RoleMethod(self.function, roles[0], self.dispatch, self.execute, self.collect, self.kind)
            known.__name__ = self.__name__
            known.origin = self
            self.played[roles[0]] = known
        return known

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The undecorated method's own value."""
        if self.kind == "static":
            return self.function(*args, **kwargs)
        if self.kind == "class":
            target = target if isinstance(target, type) else type(target)
        return self.function(target, *args, **kwargs)

    def finished_call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attending: Call | None = None
    ) -> Any:
        """The value of a whole call: coroutines are awaited and generators drained into a list.

        ``attending``: looks after the call.
        """
        if attending is not None and not self.is_async:
            with Watched(attending):
                return self.finished_call(target, args, kwargs)
        if self.is_async:
            coroutine = self.coroutine(target, args, kwargs)
            return _run(coroutine if attending is None else attended(attending, coroutine))
        value = self.call(target, args, kwargs)
        return list(value) if self.flavour == "generator" else value

    def coroutine(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """A coroutine of the whole call, of a method that ``is_async``: it gives what ``finished_call`` returns."""
        value = self.call(target, args, kwargs)
        return _drain(value) if self.flavour == "async generator" else value


class BoundRoleMethod(functools.partial, Generic[P, R_co]):  # type: ignore[type-arg]
    """A decorated method of an instance: callable as the method itself, with ``defer`` and ``stream``.

    A subclass of ``functools.partial`` so that ``inspect`` sees the method's signature and whether it is a coroutine
    function or a generator.
    """

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.func.__doc__

    @property
    def __name__(self) -> str:
        return self.func.__name__

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __func__(self) -> Any:
        return self.func

    # A deferred call is made to its end: it gives what a coroutine returns and the items of a generator.
    @overload
    def defer(
        self: BoundRoleMethod[P_plain, Coroutine[Any, Any, R]], *args: P_plain.args, **kwargs: P_plain.kwargs
    ) -> Future[R]: ...
    @overload
    def defer(
        self: BoundRoleMethod[P_plain, Iterator[R] | AsyncIterator[R]], *args: P_plain.args, **kwargs: P_plain.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def defer(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def defer(self, *args: Any, **kwargs: Any) -> Any:
        """A ``Future`` of the call, at once. With Ray off the call is made now and the future is already done."""
        return defer(self.func.method, self.__self__, args, kwargs)  # type: ignore[attr-defined]

    @overload
    def stream(
        self: BoundRoleMethod[P_plain, Coroutine[Any, Any, R]], *args: P_plain.args, **kwargs: P_plain.kwargs
    ) -> Iterator[R]: ...
    @overload
    def stream(
        self: BoundRoleMethod[P_plain, Iterator[R] | AsyncIterator[R]], *args: P_plain.args, **kwargs: P_plain.kwargs
    ) -> Iterator[list[R]]: ...
    @overload
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[R_co]: ...
    def stream(self, *args: Any, **kwargs: Any) -> Any:
        """The leaders' values, each as soon as its worker has finished, in no fixed order; ``collect`` is not applied.

        With Ray off: the one value.
        """
        return defer(self.func.method, self.__self__, args, kwargs).as_parts()  # type: ignore[attr-defined]


def invoke(method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a decorated call: the method's own if it stays in this process, else what ``collect`` makes."""
    placement = getattr(target, "_rayhelper", None)
    if placement is None:
        if (
            state.process is None
        ):  # cheaper than ``active``, of which tasks may have another only where there are workers
            watchdog.made += 1  # which finds this call on the stack if it does not end: see ``_title_off``
            if not watchdog.is_awake:
                watchdog.wake()
            return method.call(target, *_plain(args, kwargs))
        assert state.active is not None, "a runtime was begun"
        placement = state.active.placement(method, target)
    route = placement.route(method)
    if route == "here":
        return _made_here(placement, placement.attending(method), method, target, *_plain(args, kwargs))
    if route == "skip":
        return None
    return placement.submit(method, target, args, kwargs).result()


async def invoke_async(method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``invoke`` for ``async def`` methods; several that are awaited together are in flight together."""
    route, placement = _route(method, target)
    if route == "here":
        coroutine = method.call(target, *_plain(args, kwargs))
        call = _call_here(method, target, placement)
        return await (coroutine if call is None else attended(call, coroutine))
    if route == "skip" or placement is None:
        return None
    return await placement.awaited(method, target, args, kwargs)


def invoke_generator(
    method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Any]:
    """As ``invoke`` for generator methods; a group's workers run theirs to the end before the first item is here."""
    route, placement = _route(method, target)
    if route == "here":
        items = method.call(target, *_plain(args, kwargs))
        call = _call_here(method, target, placement)
        yield from (items if call is None else Attended(call, items))
    elif route == "group" and placement is not None:
        yield from placement.submit(method, target, args, kwargs).result()


async def invoke_async_generator(
    method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncIterator[Any]:
    """As ``invoke_generator`` for asynchronous generator methods."""
    route, placement = _route(method, target)
    if route == "here":
        items = method.call(target, *_plain(args, kwargs))
        call = _call_here(method, target, placement)
        async for item in items if call is None else Attended(call, items):
            yield item
    elif route == "group" and placement is not None:
        for item in await placement.awaited(method, target, args, kwargs):
            yield item


def defer(method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    """The future of a decorated call; one that stays in this process is made now."""
    route, placement = _route(method, target)
    if route == "group" and placement is not None:
        future: Future[Any] = placement.submit(method, target, args, kwargs)
        return future
    if route == "skip":
        return finished(lambda: None)
    plain_args, plain_kwargs = _plain(args, kwargs)
    call = _call_here(method, target, placement)
    if placement is None or method.flavour != "plain":
        return finished(lambda: method.finished_call(target, plain_args, plain_kwargs, call))
    return finished(lambda: _made_here(placement, call, method, target, plain_args, plain_kwargs))


def _made_here(
    placement: Placement,
    call: Call | None,
    method: RoleMethod[..., Any],
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The value of a call that stays in this process. ``call`` looks after it, if it is not part of another call."""
    if call is None:
        return placement.run(method, target, args, kwargs)
    with Watched(call):
        return placement.run(method, target, args, kwargs)


def _call_here(method: RoleMethod[..., Any], target: Any, placement: Placement | None) -> Call | None:
    """What looks after a call that stays here; None: the call of which it is a part is looked after."""
    if placement is None:
        return Call(_titled(method, target))
    call: Call | None = placement.attending(method)
    return call


def _titled(method: RoleMethod[..., Any], target: Any) -> str:
    cls = target if isinstance(target, type) else type(target)
    return f"{cls.__name__}.{method.__name__} (role {method.role!r}), rank 0 in this process"


def _title_off(frame: dict[str, Any]) -> str | None:
    """Which call runs in a frame of ``invoke``; None: one that is looked after otherwise."""
    if frame.get("placement") is not None or "method" not in frame:
        return None
    return _titled(frame["method"], frame.get("target"))


watchdog.off.append(Off(invoke.__code__, _title_off))


def find_method(entry: Any) -> RoleMethod[..., Any]:
    """The decorated method inside a class attribute, which may wrap it (a property, a retry decorator)."""
    while not isinstance(entry, RoleMethod):
        inner = getattr(entry, "fget", None) or getattr(entry, "__func__", None) or getattr(entry, "__wrapped__", None)
        if inner is None:
            raise RoleError(f"{entry!r} holds no method decorated with RayHelper.function")
        entry = inner
    return entry


def _flavour(function: Callable[..., Any]) -> Flavour:
    if inspect.iscoroutinefunction(function):
        return "async"
    if inspect.isasyncgenfunction(function):
        return "async generator"
    return "generator" if inspect.isgeneratorfunction(function) else "plain"


def _route(method: RoleMethod[..., Any], target: Any) -> tuple[str, Placement | None]:
    placement = getattr(target, "_rayhelper", None)
    if placement is None:
        if state.active is None:
            return "here", None
        placement = state.active.placement(method, target)
    return placement.route(method), placement


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that stays here: ``whole`` is taken off, futures give their values."""
    for value in args:
        if isinstance(value, (Whole, Future)):
            args = tuple(_open(value) for value in args)
            break
    if kwargs:
        kwargs = {name: _open(value) for name, value in kwargs.items()}
    return args, kwargs


def _open(value: Any) -> Any:
    if isinstance(value, Whole):
        return value.value
    return value.result() if isinstance(value, Future) else value


def _run(coroutine: Any) -> Any:
    """The coroutine's value, also where an event loop runs already: a worker that lives in its caller's process."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop: asyncio.AbstractEventLoop | None = getattr(state.active, "loop", None)
        return run(coroutine) if loop is None else loop.run_until_complete(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


# The wrappers. Each body is one call of a module-level function, because pickle copies what a wrapper closes over.


def _plain_wrapper(method: RoleMethod[..., Any]) -> Callable[..., Any]:
    def wrapper(target: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        return invoke(method, target, args, kwargs)

    return _named(wrapper, method)


def _async_wrapper(method: RoleMethod[..., Any]) -> Callable[..., Any]:
    async def wrapper(target: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        return await invoke_async(method, target, args, kwargs)

    return _named(wrapper, method)


def _generator_wrapper(method: RoleMethod[..., Any]) -> Callable[..., Any]:
    def wrapper(target: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        yield from invoke_generator(method, target, args, kwargs)

    return _named(wrapper, method)


def _async_generator_wrapper(method: RoleMethod[..., Any]) -> Callable[..., Any]:
    async def wrapper(target: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        async for item in invoke_async_generator(method, target, args, kwargs):
            yield item

    return _named(wrapper, method)


_WRAPPERS: dict[Flavour, Callable[[RoleMethod[..., Any]], Callable[..., Any]]] = {
    "plain": _plain_wrapper,
    "async": _async_wrapper,
    "generator": _generator_wrapper,
    "async generator": _async_generator_wrapper,
}


def _named(wrapper: Callable[..., Any], method: RoleMethod[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(wrapper, method.function)
    wrapper.method = method  # type: ignore[attr-defined]
    if method.kind == "static":  # the wrapper takes a target that the function itself does not
        signature = inspect.signature(method.function)
        first = inspect.Parameter("target", inspect.Parameter.POSITIONAL_ONLY)
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()]
        )
    return wrapper


def not_constructed(method: RoleMethod[..., Any], target: Any) -> RoleError:
    """The error for a call whose target has no workers of its own."""
    if isinstance(target, type) or method.kind != "method":
        return RoleError(
            f"{method} was called on the class; only an instance has workers. Call it on an instance of "
            f"{target.__name__ if isinstance(target, type) else 'the class'}."
        )
    name = type(target).__name__
    if not hasattr(target, "__rayhelper_roles__"):
        return RoleError(f"{method} was called on a {name}, a class without @RayHelper.worker(group=...). Add it.")
    return RoleError(
        f"{method} was called on a {name} that has no workers. It was constructed before RayHelper.initialize: "
        "construct it after. Or a decorator above @RayHelper.worker replaced its __init__: make @RayHelper.worker the "
        "topmost decorator."
    )
