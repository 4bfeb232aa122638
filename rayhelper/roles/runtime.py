"""The one module-level object: what this process is.

``state.active`` is None while Ray is off, a driver's runtime after ``RayHelper.initialize``, and a worker's runtime in
a worker process. A coroutine of a simulated worker is a worker for its own task alone: other code runs in the process
while it is suspended. Everything else that the library knows belongs to an instance of a user's class, through the
``Placement`` that its construction left on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Route = Literal["here", "skip", "group"]


@dataclass(frozen=True)
class Shard:
    """A worker's data-parallel coordinate: slice ``index`` of ``count`` is its own; leaders' values are collected."""

    index: int
    count: int
    leader: bool = True


@dataclass(frozen=True)
class WorkerInfo:
    """Who the calling process is, as ``RayHelper.current()`` tells it. With Ray off it describes one worker."""

    roles: tuple[str, ...]
    group: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    shard: Shard
    gpus_per_worker: int = 1  # as its device group says; 0 on CPU
    neighbours: tuple[str, ...] = ()  # roles that other processes have on the same devices


OFF = WorkerInfo((), "off", 0, 1, 0, 1, 0, Shard(0, 1))  # the one worker of everything


class Placement(Protocol):
    """Where the roles of one instance of a user's class run, seen from this process. ``method``: a ``RoleMethod``."""

    @property
    def identity(self) -> Any:
        """Who the instance is: an ``Identity`` (``parts.py``)."""
        ...

    @property
    def hosts(self) -> Collection[str]:
        """The groups whose workers have the instance."""
        ...

    def route(self, method: Any) -> Route:
        """Whether a call runs here, is skipped (a constructor still runs), or goes to a group. Raises RoleError."""
        ...

    def run(self, method: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call that stays here."""
        ...

    def attending(self, method: Any) -> Any:
        """A ``Call`` (``watch/watchdog.py``) that looks after a call that stays here; None: nothing need do so."""
        ...

    def submit(self, method: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The ``Future`` of a call that goes to a group."""
        ...

    async def awaited(self, method: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The collected value of an asynchronous method's call that goes to a group, beside others that are awaited."""
        ...


class Runtime(Protocol):
    """What a process is while Ray is on."""

    def construct(
        self, init: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> None:
        """Runs a user's ``__init__`` and leaves a ``Placement`` on the instance.

        ``whole``: the object of whose ``__init__`` this one is built, as a part; None: it is no part.
        """
        ...

    def instance_at(self, address: str) -> Any:
        """This process's own object at an address (``parts.py``); None if it does not have it."""
        ...

    def describe(self) -> str:
        """Who this process is, for messages."""
        ...

    def placement(self, method: Any, target: Any) -> Placement:
        """The placement for a call on a target that has none of its own. Raises RoleError."""
        ...

    def current(self) -> WorkerInfo: ...

    def report_shard(self, shard: Shard) -> None: ...

    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        """Joins the workers of this worker's group in torch.distributed's default group, if it is in none."""
        ...

    def teardown(self) -> None: ...


_of_task: ContextVar[Runtime | None] = ContextVar("rayhelper_of_task", default=None)


class _State:
    process: Runtime | None = None

    @property
    def active(self) -> Runtime | None:
        return _of_task.get() or self.process

    @active.setter
    def active(self, runtime: Runtime | None) -> None:
        self.process = runtime


state = _State()


class acting_as:  # noqa: N801
    """Inside, this process is what ``runtime`` says; None: as with Ray off.

    No generator: those set the traceback of what is raised, which frozen exceptions refuse.
    """

    def __init__(self, runtime: Runtime | None) -> None:
        self.runtime = runtime

    def __enter__(self) -> None:
        self.outer, state.process = state.process, self.runtime
        self.outer_of_task = _of_task.get()
        if self.outer_of_task is not None:
            _of_task.set(self.runtime)

    def __exit__(self, *_: object) -> None:
        state.process = self.outer
        if self.outer_of_task is not None:
            _of_task.set(self.outer_of_task)


class task_acting_as:  # noqa: N801
    """Inside, this is so for the asyncio task that runs here, and for those that it begins; not for the process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __enter__(self) -> None:
        self.outer = _of_task.get()
        _of_task.set(self.runtime)

    def __exit__(self, *_: object) -> None:
        _of_task.set(self.outer)
