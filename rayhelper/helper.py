"""``RayHelper``: the two decorators and the few calls around them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from rayhelper.device_groups import DRIVER, OWN, DeviceGroups
from rayhelper.errors import ConfigError, DecorationError, RayHelperError, ShardError
from rayhelper.roles import futures
from rayhelper.roles.classes import decorate_class
from rayhelper.roles.futures import Future
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.parts import begin_apart, end_building
from rayhelper.roles.runtime import OFF, Runtime, Shard, WorkerInfo, state
from rayhelper.values import dispatch as dispatching
from rayhelper.watch.watchdog import warn_s
from rayhelper.worker.process_group import join_process_group
from rayhelper.worker.random_streams import drawing_nothing

RUNTIMES = ("ray", "torchrun", "inprocess", "off")

C = TypeVar("C")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class _Method(Protocol[S_contra, P, R_co]):
    """A function whose first parameter is called self: mypy takes one with ``**kwargs`` for no ``Concatenate``."""

    def __call__(_, self: S_contra, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: N805


class _Function:
    """The decorator that ``RayHelper.function(...)`` returns; kept apart for its types."""

    def __init__(self, role: str, dispatch: Any, execute: Any, collect: Any) -> None:
        self.settings = (role, dispatch, execute, collect)

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: staticmethod[Concatenate[S, P], R]
    ) -> RoleMethod[P, R, S]: ...
    @overload
    def __call__(self, function: classmethod[S, P, R]) -> RoleMethod[P, R, type[S]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, P], R]) -> RoleMethod[P, R, S]: ...
    @overload
    def __call__(self, function: _Method[S, P, R]) -> RoleMethod[P, R, S]: ...
    @overload
    def __call__(self, function: Callable[[], R]) -> RoleMethod[[], R]: ...  # a static method of no parameters
    def __call__(self, function: Any) -> Any:
        if isinstance(function, staticmethod):
            return RoleMethod(function.__func__, *self.settings, kind="static")
        if isinstance(function, classmethod):
            return RoleMethod(function.__func__, *self.settings, kind="class")
        return RoleMethod(function, *self.settings)


class RayHelper:
    """Says which role each method of a plain class belongs to, and where the roles run."""

    @staticmethod
    def worker(group: str | list[str]) -> Callable[[type[C]], type[C]]:
        """Class decorator: the roles that the class's methods belong to.

        Raises:
            DecorationError: no role, a reserved role ('driver', 'own'), or a method whose role is not among them.
        """
        roles = (group,) if isinstance(group, str) else tuple(group) if isinstance(group, (list, tuple)) else ()
        if not roles or not all(isinstance(role, str) and role for role in roles):
            raise DecorationError(f"RayHelper.worker(group=...) takes a role or a list of roles, got {group!r}")
        if DRIVER in roles:
            raise DecorationError("role 'driver' is reserved: methods marked with it run on the driver of any class")
        if OWN in roles:
            raise DecorationError(
                "role 'own' is reserved: a method marked with it has the one role of the class that inherits it. Name "
                "that role."
            )

        def decorate(cls: type[C]) -> type[C]:
            if not isinstance(cls, type):
                raise DecorationError(f"RayHelper.worker decorates classes, got {cls!r}; use RayHelper.function")
            return decorate_class(cls, roles)

        return decorate

    @staticmethod
    def function(
        group: str,
        dispatch: Literal["slice", "all"] | Callable[..., Any] = "all",
        execute: Literal["first", "all"] = "all",
        collect: Literal["none", "flatten"] | Callable[..., Any] = "none",
    ) -> _Function:
        """Method decorator: the role of the method, and how its calls are sent if the role runs on workers.

        Args:
            group: The role. 'driver': only the driver runs the method. 'own', in a base class without roles: the only
                role of the class that inherits the method.
            dispatch: 'all' sends the arguments to every worker. 'slice' cuts them along their first dimension. A
                callable ``f(n, i, data)`` returns the data of shard i of n. ``RayHelper.balanced(...)`` cuts by cost.
            execute: 'all' calls every worker, 'first' only worker 0.
            collect: 'none' gives the list of the shard leaders' values, 'flatten' joins them, a callable gets the list.

        Raises:
            DecorationError: an unknown value, or 'first' with a dispatch that divides.
        """
        return _Function(group, dispatch, execute, collect)

    @staticmethod
    def initialize(
        device_groups: Mapping[str, Any] | str | DeviceGroups,
        *,
        runtime: Literal["ray", "torchrun", "inprocess", "off"] = "ray",
        ray_address: str | None = None,
        trace: str | os.PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        """Starts the workers of ``device_groups``; classes may have been defined before or after.

        Args:
            device_groups: Either form of the configuration, as a mapping or a JSON or YAML string.
            runtime: 'ray'. 'torchrun': every process runs this code. 'inprocess': workers are simulated, one after the
                other. 'off': only ``timeout_s`` of the groups has an effect.
            ray_address: A cluster to join; None joins RAY_ADDRESS if set, else starts a cluster on this machine.
            trace: A .json or .json.gz file: the timeline of every call, written at teardown.
            strict: With 'inprocess': code that would behave differently on Ray raises an error.

        Raises:
            ConfigError: a mistake in the configuration, found before any process starts.
            PlacementError: the cluster lacks the resources.
        """
        _check_initialize(runtime, ray_address, strict)
        warn_s()  # a mistake in it
        groups = DeviceGroups.parse(device_groups)
        if state.active is not None:
            info = RayHelper.current()
            if info.group != DRIVER:
                raise RayHelperError(
                    f"RayHelper.initialize was called on rank {info.rank} of group {info.group!r}, probably by a module"
                    " that calls it when imported. Put the call under `if __name__ == '__main__':`."
                )
            raise RayHelperError("RayHelper.initialize was called twice; call RayHelper.teardown() in between")
        with drawing_nothing():
            state.active = _started(groups, runtime, ray_address, trace, strict)

    @staticmethod
    @contextlib.contextmanager
    def session(
        device_groups: Mapping[str, Any] | str | DeviceGroups,
        *,
        runtime: Literal["ray", "torchrun", "inprocess", "off"] = "ray",
        ray_address: str | None = None,
        trace: str | os.PathLike[str] | None = None,
        strict: bool = False,
    ) -> Iterator[None]:
        """``initialize`` as a context manager. The workers are stopped at its end, also after an exception."""
        RayHelper.initialize(device_groups, runtime=runtime, ray_address=ray_address, trace=trace, strict=strict)
        try:
            yield
        finally:
            RayHelper.teardown()

    @staticmethod
    @contextlib.contextmanager
    def local() -> Iterator[None]:
        """A context in which this process is as with Ray off: objects that it constructs run here, in every role.

        Use it for a short piece of work during a session, such as preparing a model on the driver. Objects from outside
        keep their workers. Objects that are constructed inside cannot be used afterwards, and are no parts of an object
        whose ``__init__`` runs. It applies to all threads.
        """
        outer, state.active = state.active, None
        token = begin_apart()
        try:
            yield
        finally:
            end_building(token)
            RayHelper.teardown()  # of what was initialized inside
            state.active = outer

    @staticmethod
    def teardown() -> None:
        """Stops every worker and frees every placement group. Does nothing while Ray is off."""
        if state.active is not None:
            with drawing_nothing():
                state.active.teardown()

    @staticmethod
    def current() -> WorkerInfo:
        """The role, rank and group of this process. With Ray off: one worker with all roles."""
        if state.active is None:
            return OFF
        return state.active.current()

    @staticmethod
    def shard(index: int, count: int, leader: bool = True) -> None:
        """Called on a worker: its data-parallel coordinate for the role whose method is running (in ``__init__``: all).

        Workers that share an index get the same slice; only the leader's value is collected.

        Raises:
            ShardError: index or count out of range.
        """
        if count < 1 or not 0 <= index < count:
            raise ShardError(f"shard index must lie in 0..count-1, got index {index} of {count}")
        if state.active is not None:
            state.active.report_shard(Shard(index, count, leader))

    @staticmethod
    def init_process_group(backend: str | None = None, timeout_s: float = 1800) -> None:
        """Joins the workers of this worker's group in torch.distributed's default process group.

        Args:
            backend: None: nccl where GPUs are visible, gloo otherwise.
            timeout_s: Seconds after which a collective fails.

        Does nothing if the process has joined already. With Ray off the group has one member.
        """
        if state.active is None:
            join_process_group(RayHelper.current(), backend, timeout_s)
        else:
            state.active.init_process_group(backend, timeout_s)

    @staticmethod
    def whole(value: R) -> R:
        """Wraps an argument so that every worker gets it uncut, whatever the dispatch."""
        return dispatching.whole(value)

    @staticmethod
    def balanced(cost: Callable[[Any], float] | None = None) -> Any:
        """A dispatch that evens out the cost of the shards; 'flatten' restores the caller's order.

        Args:
            cost: The cost of one item of the first sliced argument; None: its length.
        """
        return dispatching.balanced(cost)

    @staticmethod
    def as_completed(waiting: Iterable[Future[R]]) -> Iterator[Future[R]]:
        """An iterator over the futures, each as soon as it is done."""
        return futures.as_completed(waiting)


def _check_initialize(runtime: str, ray_address: str | None, strict: bool) -> None:
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime must be one of {', '.join(map(repr, RUNTIMES))}, got {runtime!r}")
    if strict and runtime != "inprocess":
        raise ConfigError(
            f"strict=True works only with runtime='inprocess', to show differences from Ray. runtime is {runtime!r}"
        )
    if ray_address is not None and runtime != "ray":
        raise ConfigError(f"ray_address={ray_address!r} is for runtime='ray'; runtime is {runtime!r}")


def _started(
    groups: DeviceGroups, runtime: str, ray_address: str | None, trace: str | os.PathLike[str] | None, strict: bool
) -> Runtime | None:
    """The runtime, its workers ready. Each is imported only when it is used: torchrun needs no Ray, nor Ray torch."""
    recording = None
    if trace is not None:
        from rayhelper.timeline.recording import Recording

        recording = Recording(os.fspath(trace), runtime, groups)
    if runtime == "ray":
        from rayhelper.runtimes.driver import DriverRuntime
        from rayhelper.runtimes.ray.cluster import RayCluster

        return DriverRuntime(groups, RayCluster(ray_address, recording))
    if runtime == "inprocess":
        from rayhelper.runtimes.driver import DriverRuntime
        from rayhelper.runtimes.inprocess import InprocessCluster

        return DriverRuntime(groups, InprocessCluster(strict=strict, recording=recording))
    if runtime == "torchrun":
        from rayhelper.runtimes.torchrun.runtime import TorchrunRuntime

        return TorchrunRuntime(groups, recording)
    if recording is not None or groups.have_limits:
        from rayhelper.runtimes.off import AttendedOff

        return AttendedOff(groups, recording)
    return None
