"""A worker process as its driver reaches it: the doors behind which objects are built and called.

    driver: host.construct(address, (pins, class, args, kwargs, ambient, changes)) -> the same __init__ runs here
    driver: host.call(location, arguments, *parts)                  -> value, Packed, Reported(value, shards) or Failure
    driver: host.begin(...), host.collect(...)                      the same of asynchronous methods   coroutines.py

What is called runs in ``calls.py``. A host knows nothing of Ray: ``runtimes/ray/group.py`` makes an actor of it. While
a call runs in the main thread, the driver reaches the process through its ``Door``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayhelper.folder import begin_in
from rayhelper.roles.runtime import WorkerInfo, state
from rayhelper.runtimes.ray.modules.sources import unlike_modules
from rayhelper.timeline.trace import Span, Tracer
from rayhelper.watch.breakpoints import Breakpoints
from rayhelper.watch.patches import stop_at_breakpoints
from rayhelper.worker.calls import Calls
from rayhelper.worker.runtime import WorkerRuntime
from rayhelper.worker.side_door import Door, printed, stacks

# Methods that stand for bound addresses. Every argument of a remote call is serialised on its own, which for a small
# call is a fifth of its cost: a call through a slot sends nothing but its own arguments.
NUM_SLOTS = 64

_HELD_PORTS: list[socket.socket] = []  # until this process ends, or the port is used


class Host:
    """A worker process as its group's handle sees it.

    ``dumps``: a pickler that takes classes of __main__ by value; ``task_id``: of the call that the process is in.
    """

    def __init__(self, name: str, dumps: Callable[[Any], bytes], task_id: Callable[[], Any]) -> None:
        self.name = name  # as it stands before what the process prints
        self.calls = Calls(dumps, task_id)
        self.slots: dict[int, str] = {}  # locations that are called by number

    def __repr__(self) -> str:
        return self.name

    def describe(self) -> dict[str, Any]:
        """Facts the driver needs before it can set the environment of the group."""
        return {
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "time_ns": time.time_ns(),
            "boot_id": boot_id(),
        }

    def hold_port(self) -> int:
        """A free port of this node, held by a bound socket that does not listen.

        Nobody else is given the port, yet a listener with SO_REUSEADDR (as torch's TCPStore sets) may take it.
        """
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        _HELD_PORTS.append(held)
        return int(held.getsockname()[1])

    def prepare(
        self,
        info: WorkerInfo,
        env: dict[str, str],
        forgotten: list[str],
        node: str,
        key: bytes,
        trace: bool,
        folder: str | None,
        first: list[str],
    ) -> tuple[str, int]:
        """Makes this process worker ``info`` of its group, its environment cleared of ``forgotten``, ``env`` added.

        The modules ``first`` are imported now: other packages of these have their names from then on.

        It works in ``folder`` as its driver does, if this node has it; None: it stays where it is. The reply is the
        address of the process's door, which opens to ``key``.
        """
        if folder is not None:
            begin_in(folder)
        for name in forgotten:
            os.environ.pop(name, None)
        os.environ.update(env)
        for module in first:
            importlib.import_module(module)
        state.active = runtime = WorkerRuntime(info, node)
        calls = self.calls
        runtime.loop = calls.coroutines.loop
        calls.tracer = Tracer() if trace else None
        signal.signal(signal.SIGUSR1, calls.interrupt)
        calls.breakpoints = Breakpoints(f"{info.group}:{info.rank}", runtime.describe)
        stop_at_breakpoints(calls.breakpoints.stop)
        answers: dict[str, Callable[[Any], Any]] = {
            **calls.breakpoints.answers,
            "stop": calls.stop_tasks,
            "leave": lambda _: calls.leave(),
            "wake": lambda _: calls.coroutines.wake(),
            "apart": calls.ran_apart,
            "printed": lambda _: printed(),
            "stacks": lambda _: stacks() + calls.coroutines.stacks(),
        }
        return Door(node, key, answers).address

    def set_environment(self, env: dict[str, str]) -> None:
        """Changes the environment, after another worker of the group was replaced."""
        os.environ.update(env)

    def unlike_modules(self, sources: Mapping[str, str | None]) -> list[str]:
        """Those of the driver's modules that this process could not import, or not with the same source."""
        return unlike_modules(sources)

    def construct(self, address: str, payload: bytes) -> Any:
        """Constructs (pins, class, args, kwargs, ambient, changes) here; the reply is its parts and their shards."""
        return self.calls.construct(address, payload)

    def state(self, address: str) -> Any:
        """What an object and its parts hold here."""
        return _runtime().state(address)

    def drop(self, address: str) -> None:
        """Forgets an object and its parts; their memory is freed."""
        _runtime().drop(address)
        self.calls.drop(address)

    def call(self, location: str, arguments: Any = ((), {}), *parts: Any) -> Any:
        """The value of one call, wrapped only if there is more to say than the value.

        ``parts``: the driver's ``Mode``, if it has set one, and the replies of the calls whose futures are arguments.
        """
        return self.calls.call(location, arguments, *parts)

    def begin(self, location: str, arguments: Any = ((), {}), *parts: Any) -> None:
        """Begins a call of an asynchronous method, as ``call`` makes it; ``collect`` gives what it comes to."""
        self.calls.begin(location, arguments, *parts)

    def collect(self, calls: Sequence[str], wait_s: float) -> Any:
        """What has come of calls that were begun: ``Coroutines.collect``."""
        return self.calls.collect(calls, wait_s)

    def rejoin(self) -> None:
        """Joins torch.distributed's default group anew, after it was left to stop a call."""
        self.calls.rejoin()

    def bind(self, slot: int, location: str) -> None:
        """From now on ``slot_N(...)`` is ``call(location, ...)``."""
        self.slots[slot] = location

    def spans(self) -> tuple[list[Span], int]:
        """What was recorded since the last time, and how much did not fit."""
        assert self.calls.tracer is not None, "only a traced worker is asked for its spans"
        return self.calls.tracer.drain()


def _slot(number: int) -> Callable[..., Any]:
    def slot(self: Host, *sent: Any) -> Any:
        return self.calls.call(self.slots[number], *sent)

    return slot


for _number in range(NUM_SLOTS):
    setattr(Host, f"slot_{_number}", _slot(_number))


def boot_id() -> str:
    """What tells machines apart: one clock, one memory."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _runtime() -> WorkerRuntime:
    assert isinstance(state.active, WorkerRuntime), "the host was used before prepare()"
    return state.active
