"""What runs on a worker: the construction of objects, and the calls made to them, one at a time or as coroutines.

A class of its own beside ``Host``: Ray puts wrappers around all methods of an actor, those that no driver calls
included, and runs an actor with coroutines in threads.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import Any

from rayhelper import logs
from rayhelper.errors import CallCancelledError, DispatchError, WorkerError
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.runtime import state
from rayhelper.runtimes.ray.late_call import divide_late
from rayhelper.timeline.recording import task_number
from rayhelper.timeline.trace import Tracer
from rayhelper.values.lost import check_value
from rayhelper.values.packing import Ledger, Packed, pack, unpack, worth_packing
from rayhelper.values.reply import Reported
from rayhelper.values.shards import is_within
from rayhelper.watch.breakpoints import Breakpoints
from rayhelper.watch.watchdog import is_importing
from rayhelper.worker.ambient import Mode
from rayhelper.worker.coroutines import Coroutines
from rayhelper.worker.failures import Failure
from rayhelper.worker.process_group import collectives_begun, in_process_group, leave_process_group, let_go
from rayhelper.worker.runtime import WorkerRuntime
from rayhelper.worker.steps import Stepped

_IMPORTING_S = 0.1  # after this time it is looked again whether an import has ended that was not to be interrupted

_AS_AT_FIRST = contextlib.nullcontext()  # the mode of a call whose driver has set none

_NUM_APART = 256  # calls of which it is known whether they had collectives; more than a group has in flight


class Stopped(BaseException):
    """Raised in the main thread of a worker whose call the driver has given up."""


class Calls:
    """The calls of a worker. ``dumps``: a pickler that takes classes of __main__ by value; ``task_id``: of the call."""

    def __init__(self, dumps: Callable[[Any], bytes], task_id: Callable[[], Any]) -> None:
        self.dumps = dumps
        self.task_id = task_id
        self.methods: dict[str, tuple[Any, RoleMethod[..., Any]]] = {}  # the object and its method, by location
        self.ledger = Ledger()
        self.tracer: Tracer | None = None
        self.running: Any = None  # the task of the call in the main thread
        self.cancelled: set[str] = set()  # tasks that the driver has given up
        self.apart: collections.deque[Any] = collections.deque(maxlen=_NUM_APART)  # tasks that ran without a collective
        self.must_rejoin = False
        self.coroutines = Coroutines()
        self.breakpoints: Breakpoints | None = None

    def construct(self, address: str, payload: bytes) -> Any:
        """Constructs (pins, class, args, kwargs, ambient, changes); the reply is its parts, with the shards of each."""
        return self._unstoppable("__init__", self._constructed, address, payload)

    def _constructed(self, address: str, payload: bytes) -> Any:
        runtime = _runtime()
        self.running, started = self.task_id(), time.time_ns()
        where = "__init__"
        try:
            _, cls, args, kwargs, ambient, changes = pickle.loads(payload)
            where = f"{cls.__name__}.__init__"
            changes.apply()
            ambient.apply()
            logs.on_worker(f"{runtime.info.group}-{runtime.info.rank}")
            return self._reply(runtime.build(address, cls, args, kwargs, ambient))
        except BaseException as error:
            return self._failure(error, where)
        finally:
            self._record("construct", runtime.info.roles[0], where, started, self.running)
            self.running = None

    def call(self, location: str, arguments: Any = ((), {}), *parts: Any) -> Any:
        """The reply to one call: see ``Host.call``."""
        return self._unstoppable(location, self._called, location, arguments, parts)

    def _unstoppable(self, what: str, body: Callable[..., Any], *args: Any) -> Any:
        """The body's value. One that is given up in the very moment in which it ends does not reach Ray's own code."""
        try:
            return body(*args)
        except Stopped as error:
            self.running = None
            return self._failure(error, what)
        finally:
            if self.breakpoints is not None:
                self.breakpoints.leave()

    def _called(self, location: str, arguments: Any, parts: tuple[Any, ...]) -> Any:
        method, identity = None, None
        self.running = self.task_id()
        started = time.time_ns() if self.tracer is not None else 0
        begun = collectives_begun()
        try:
            self._check_begin(self.running)
            if self.coroutines.running and in_process_group():
                self.coroutines.finish()  # collectives in the order in which the calls were made
            mode, parts = _mode_of(parts)
            instance, method = self.methods.get(location) or self._resolve(location)
            placement = instance._rayhelper
            identity = placement.identity
            for part in parts:
                if isinstance(part, Failure):
                    return part
            args, kwargs = self._opened(method, arguments, parts)
            del arguments
            with (
                placement.runtime.observing(identity, method, args, kwargs),
                placement.runtime.inside(placement, method.role),
                _AS_AT_FIRST if mode is None else mode.settled(placement.runtime.random).applied(),
            ):
                value = method.finished_call(instance, args, kwargs)
            ended = time.time_ns() if self.tracer is not None else 0
            del args, kwargs  # or what they lend counted as used
            reply = self._answer(value, method, identity, self.running, started, ended)
            if begun is not None and begun == collectives_begun():
                self.apart.append(self.running)
            return reply
        except BaseException as error:
            return self._failed(error, location, method, identity, self.running, started)
        finally:
            self.running = None

    def begin(self, location: str, arguments: Any = ((), {}), *parts: Any) -> None:
        """Begins a call of an asynchronous method; ``collect`` gives what it comes to."""
        task = self.task_id()
        self.coroutines.begin(task.hex(), self._awaited(task, location, arguments, parts))

    async def _awaited(self, task: Any, location: str, arguments: Any, parts: tuple[Any, ...]) -> Any:
        """The reply to one call, as ``_called`` makes it, of a coroutine: other calls run while it is suspended."""
        method, identity = None, None
        started = time.time_ns() if self.tracer is not None else 0
        try:
            self._check_begin(task)
            mode, parts = _mode_of(parts)
            instance, method = self.methods.get(location) or self._resolve(location)
            placement = instance._rayhelper
            identity = placement.identity
            for part in parts:
                if isinstance(part, Failure):
                    return part
            args, kwargs = self._opened(method, arguments, parts)
            del arguments
            with (
                placement.runtime.observing(identity, method, args, kwargs),
                placement.runtime.task_inside(placement, method.role),
            ):
                coroutine: Any = method.coroutine(instance, args, kwargs)
                value = await (
                    coroutine if mode is None else Stepped(coroutine, mode.settled(placement.runtime.random).applied)
                )
            ended = time.time_ns() if self.tracer is not None else 0
            del args, kwargs, coroutine
            return self._answer(value, method, identity, task, started, ended)
        except BaseException as error:
            return self._failed(error, location, method, identity, task, started)
        finally:
            self.cancelled.discard(task.hex())

    def collect(self, calls: Sequence[str], wait_s: float) -> Any:
        """What has come of calls that were begun: ``Coroutines.collect``."""
        return self._unstoppable("an asynchronous call", self._collected, calls, wait_s)

    def _collected(self, calls: Sequence[str], wait_s: float) -> Any:
        self.running = self.task_id()
        try:
            return self.coroutines.collect(calls, wait_s)
        finally:
            self.running = None

    def _check_begin(self, task: Any) -> None:
        """Raises Stopped if the driver has given the task up. The process is in its process group afterwards."""
        if self.cancelled and task.hex() in self.cancelled:
            raise Stopped
        if self.must_rejoin:
            self.rejoin()

    def _opened(self, method: RoleMethod[..., Any], arguments: Any, parts: tuple[Any, ...]) -> Any:
        """(args, kwargs) of this worker."""
        if type(arguments) is Packed:
            arguments = unpack(arguments, ledger=self.ledger)
        return divide_late(method, arguments, parts, self.ledger) if parts else arguments

    def _answer(
        self, value: Any, method: RoleMethod[..., Any], identity: Any, task: Any, started: int, ended: int
    ) -> Any:
        """What the driver is sent of the value of a call."""
        if value is not None or self.ledger.lent:
            where = f"{identity.title(method)} on {_runtime().describe()}"
            check_value(value, where)
            self.ledger.check(where)
        try:
            reply = self._reply(value)
        except DispatchError as error:
            title = f"{identity.title(method)} on {_runtime().describe()}"
            raise WorkerError(f"the value of {title} cannot be sent back: {error}") from error
        if self.tracer is not None:
            self._record("run", method.role, identity.called(method), started, task, reply, ended)
        return reply

    def _failed(
        self,
        error: BaseException,
        location: str,
        method: RoleMethod[..., Any] | None,
        identity: Any,
        task: Any,
        started: int,
    ) -> Failure:
        """What the driver is sent of a call that raised."""
        self.ledger.forget_changed()  # or the next call would be blamed
        if identity is None or method is None:
            return self._failure(error, location)
        if self.tracer is not None:
            self._record("run", method.role, identity.called(method), started, task)
        return self._failure(error, identity.title(method))

    def rejoin(self) -> None:
        """Joins torch.distributed's default group anew, after it was left to stop a call."""
        self.must_rejoin = False
        leave_process_group()
        _runtime().rejoin()

    def leave(self) -> bool:
        """Whether the process was in a process group, which it has left to free those that wait for it."""
        self.must_rejoin = leave_process_group()
        return self.must_rejoin

    def stop_tasks(self, tasks: Sequence[str]) -> str | None:
        """Gives up the tasks: the one that runs, which is named, is interrupted; the others will not begin.

        From any thread.
        """
        running = self.running
        self.cancelled.update(tasks)
        self.coroutines.cancel(tasks)
        os.kill(os.getpid(), signal.SIGUSR1)
        return running.hex() if running is not None and running.hex() in tasks else None

    def ran_apart(self, tasks: Sequence[str]) -> list[str]:
        """Those of the tasks that ran here without a collective: nothing else need run again with them."""
        known = {task.hex() for task in list(self.apart)}
        return [task for task in tasks if task in known]

    def interrupt(self, signum: int, frame: Any) -> None:
        """Raises Stopped in the main thread if the driver has given up what runs there. A handler of SIGUSR1."""
        call = self.coroutines.current() or (None if self.running is None else self.running.hex())
        if call not in self.cancelled:
            return
        if is_importing(frame):  # a module that is interrupted half-way cannot be imported again
            again = threading.Timer(_IMPORTING_S, os.kill, (os.getpid(), signal.SIGUSR1))
            again.daemon = True
            again.start()
            return
        self.cancelled.discard(call)
        raise Stopped

    def drop(self, address: str) -> None:
        """Forgets the methods of an object and its parts."""
        kept = {
            place: found for place, found in self.methods.items() if not is_within(place.partition(" ")[0], address)
        }
        self.methods = kept

    def _resolve(self, location: str) -> tuple[Any, RoleMethod[..., Any]]:
        found = self.methods[location] = _runtime().located(location)
        return found

    def _reply(self, value: Any) -> Any:
        if isinstance(value, GeneratorType):  # Ray would take one for several values
            raise WorkerError(f"cannot pickle {value!r}: return a list, or write the method itself as a generator")
        if value is not None and worth_packing(value, arrays=True):
            value = pack(value)
        runtime = _runtime()
        changes = runtime.take_changes()
        return Reported(value, runtime.take_reports(), changes) if changes or runtime.unreported else value

    def _failure(self, error: BaseException, method: str) -> Failure:
        runtime = _runtime()
        let_go(error)
        cancelled = isinstance(error, asyncio.CancelledError) and self.coroutines.is_cancelled()
        if cancelled or isinstance(error, Stopped):
            error = CallCancelledError(f"{method} was stopped on {runtime.describe()}: the driver abandoned the call")
        return Failure.of(error, method, runtime.describe(), runtime.info.rank, self.dumps)

    def _record(
        self, phase: str, role: str, name: str, started_ns: int, task: Any, reply: Any = None, ended_ns: int = 0
    ) -> None:
        if self.tracer is not None:
            value = reply.value if isinstance(reply, Reported) else reply
            num_bytes = value.nbytes if type(value) is Packed else 0
            rank, call = _runtime().info.rank, task_number(task)
            self.tracer.record(role, rank, phase, name, started_ns, ended_ns or time.time_ns(), call, num_bytes)


def _mode_of(parts: tuple[Any, ...]) -> tuple[Mode | None, tuple[Any, ...]]:
    """The driver's mode, if it was sent, and the rest."""
    return (parts[0], parts[1:]) if parts and type(parts[0]) is Mode else (None, parts)


def _runtime() -> WorkerRuntime:
    assert isinstance(state.active, WorkerRuntime), "the host was used before prepare()"
    return state.active
