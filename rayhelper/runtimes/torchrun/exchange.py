"""What the processes of a torchrun run tell one another: every process's object, on every process.

    gather(value)     every process's value, once all have come
    Situation         what a process answers at its door, when the others have waited too long for it or have lost it

Gloo groups of its own, over the store that torchrun's environment names, so that the default group stays the user's.
Strangers can write to this store and so come to stand in a process's place: what is gathered carries a code made with
the run's key (``key.py``), which is compared before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from rayhelper.authenticated.sealing import NONCE_BYTES, TAG_BYTES
from rayhelper.channel.patches import gloo_group
from rayhelper.device_groups.group import CALL_S
from rayhelper.ranks import runs
from rayhelper.runtimes.torchrun.key import VARIABLE, Codes, RunKey, is_one_node
from rayhelper.values.packing import pack, unpack
from rayhelper.watch.attended import told_coroutines
from rayhelper.watch.breakpoints import Breakpoints, paused_s
from rayhelper.watch.watchdog import Call, watchdog
from rayhelper.worker.process_group import leave_process_group
from rayhelper.worker.side_door import Address, Door, ask, stacks, told_stacks

logger = logging.getLogger(__name__)

_NUM_LANES = 2  # of calls, and of calls that are awaited
_WAITS = -1  # in place of the length of a value: the process waits at a breakpoint
_TOGETHER_BYTES = 64 * 1024  # up to here all are gathered at once, above one is sent after the other
_START_S = 300.0  # for the slowest process to start
_ANSWER_S = 2.0  # for the slowest answer at a door
_SKEW_S = 0.5  # between the deadlines of one call: all ask where all are before any is freed
_AFTER_S = 1.0  # so much longer gloo waits than we do: who gives up says so before the others lose it


@dataclass(frozen=True)
class Situation:
    """What a process is doing."""

    arrivals: int  # the gatherings it has come to
    late: str  # what it saw when it gave a call up; empty if it did not
    stacks: str


class Lane:
    """Gatherings that follow one another. Those of two lanes may be made at once, in two threads."""

    def __init__(self, number: int, group: Any) -> None:
        self.number, self.group = number, group
        self.arrivals = 0
        self.meeting = threading.Lock()  # held while values are gathered
        self.waits: tuple[Any, list[Any]] | None = None  # what this process told the others at a breakpoint

    def arrive(self) -> int:
        """A number for the gathering to which this process comes, which no other one has."""
        self.arrivals += 1
        return _NUM_LANES * self.arrivals + self.number


class Exchange:
    """The processes of this run, ``size`` of them, of which this is ``rank``."""

    def __init__(self, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        self.rank = rank
        self.size = size
        self.closed = False
        self.received_bytes = 0  # by the last gathering
        self.late = ""
        self.broken = False  # a gathering was given up: the others may still wait in it
        self.doors: dict[int, Address] = {}
        self.coroutines: dict[int, Any] = {}  # of calls that are in flight
        self.note_end: Callable[[], None] | None = None  # another process was asked to end
        rendezvous: Any = vars(dist)["rendezvous"]
        self.store, _, _ = next(iter(rendezvous("env://", rank, size)))
        self.number = dist.PrefixStore("rayhelper", self.store).add(f"exchanges/{rank}", 1)  # type: ignore[attr-defined]
        self.run_key = RunKey(self.store_of("key"))
        self.key = self.run_key.secret
        if not self.run_key.is_shared and rank == 0:
            logger.warning(
                "this run has several nodes and no %s. So a late call shows only the stacks of its own node. Values "
                "from other nodes are not authenticated. Set %s to the same secret on every node.",
                VARIABLE,
                VARIABLE,
            )
        own_address = _own_address()
        start = timedelta(seconds=_START_S)
        try:
            self.lanes = [
                Lane(number, gloo_group(self.store_of(f"exchange/{number}"), rank, size, start, own_address))
                for number in range(_NUM_LANES)
            ]
            nonce = torch.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), dtype=torch.uint8)
            nonces = [bytes(one.numpy()) for one in self._all(self.lanes[0], nonce, _START_S)]
        finally:
            self.run_key.forget_file()  # all have read it by now, or the run ends here
        self.codes = Codes(self.key if self.run_key.is_shared else None, nonces)
        has_terminal = rank == 0 and sys.stdin is not None and sys.stdin.isatty()
        who = f"rank {rank} of torchrun on node {own_address}"
        self.breakpoints = Breakpoints(
            f"torchrun:{rank}", lambda: who, self.wait_at_breakpoint, has_terminal=has_terminal
        )
        answers: dict[str, Callable[[Any], Any]] = {
            "situation": lambda _: asdict(self.situation()),
            "stacks": lambda _: self.own_stacks(),
            "end": lambda _: self._asked_to_end(),
        }
        answers |= self.breakpoints.answers
        place = own_address if self.run_key.is_shared else "127.0.0.1"
        self.door = Door(place, self.key, answers)
        told = self.gather((self.door.address, self.run_key.node, os.getpid()), lambda: False, _START_S)
        self.run_key.first_process = told[0][0][2]
        self.doors = {
            rank: address
            for rank, ((address, node, _), _) in enumerate(told)
            if self.run_key.is_shared or node == self.run_key.node
        }

    def store_of(self, name: str) -> Any:
        """A part of the store with names of its own; a run may have one exchange after the other."""
        import torch.distributed as dist

        return dist.PrefixStore(f"rayhelper/{self.number}/{name}", self.store)  # type: ignore[attr-defined]

    def store_of_group(self, name: str, size: int) -> Any:
        """Where so many processes meet for a process group: on one node a file of this user's, else torchrun's store.

        Strangers cannot write to the file, and so come into no group, whose members unpickle what they send each other.
        """
        import torch.distributed as dist

        path = self.run_key.file_for(f"{self.number}/{name}")
        if path is None:
            return self.store_of(name)
        return dist.FileStore(str(path), size)  # type: ignore[attr-defined]

    @property
    def arrivals(self) -> int:
        """The gatherings to which this process has come."""
        return sum(lane.arrivals for lane in self.lanes)

    def gather(
        self, value: Any, flag: Callable[[], bool], timeout_s: float, *, of_coroutine: bool = False
    ) -> list[tuple[Any, bool]]:
        """Every process's value, in order of rank, each with its flag, which is read as late as possible.

        Calls meet in the order in which they are made. So do the calls that are awaited (``of_coroutine``), among
        themselves: an ordinary call that is made while they are in flight does not wait for them.

        A value is packed here, or was before by ``ready``, so that one that cannot be sent keeps nobody waiting.

        Raises:
            TimeoutError: not every process came within ``timeout_s``, or another gave this up: who, and where all are.
            ConnectionError: a process is gone, or what came is not from it: which.
        """
        if self.broken:
            raise ConnectionError("an earlier call was abandoned")
        lane = self.lanes[of_coroutine]
        number = lane.arrive()
        try:
            with lane.meeting:
                return self._gathered(lane, number, value, flag, max(timeout_s, 0.01))
        except _LateError:
            self.broken, self.late = True, "not every process had come"  # gloo may give up while the doors are asked
            self.late = self.where_all_are(self.arrivals)
            raise TimeoutError(self.late) from None
        except _LostError as lost:
            raise self._explained(str(lost)) from None
        except _ForgedError as forged:
            self.broken = True
            raise ConnectionError(str(forged)) from None

    def _gathered(
        self, lane: Lane, number: int, value: Any, flag: Callable[[], bool], timeout_s: float
    ) -> list[tuple[Any, bool]]:
        import torch

        packed = value if type(value) is Ready else ready(value)
        length = TAG_BYTES + 1 + len(packed)
        sizes, timeout_s = self._sizes(lane, length, timeout_s)
        body = bytes([flag()]) + packed  # all have come by now
        text = torch.frombuffer(bytearray(self.codes.made(self.rank, number, body) + body), dtype=torch.uint8)
        if max(sizes) <= _TOGETHER_BYTES:
            texts = self._all(lane, torch.nn.functional.pad(text, (0, max(sizes) - len(text))), timeout_s)
        else:
            texts = [self._from(lane, source, text, size, timeout_s) for source, size in enumerate(sizes)]
        received = [memoryview(text[:size].numpy()) for text, size in zip(texts, sizes, strict=True)]
        self.received_bytes = sum(sizes)
        for source, whole in enumerate(received):
            if not self.codes.fits(bytes(whole[:TAG_BYTES]), source, number, whole[TAG_BYTES:]):
                raise _ForgedError(
                    f"the message in the place of rank {source} was not made with this run's key. RayHelper did not "
                    f"read it. Either {VARIABLE} is not the same on all nodes, or another program writes to the run's "
                    "store"
                )
        values = [whole[TAG_BYTES:] for whole in received]
        return [(unpack(pickle.loads(value[1:]), writable=True), bool(value[0])) for value in values]

    def _sizes(self, lane: Lane, length: int, timeout_s: float) -> tuple[list[int], float]:
        """How long the values of all processes are, and the seconds that are left.

        A process that waits at a breakpoint takes part meanwhile: all start over then, and that time does not count.
        """
        import torch

        end = time.monotonic() + timeout_s
        while True:
            begun = time.monotonic()
            left_s = max(0.01, end - begun)
            if lane.waits is not None:  # of this process's own breakpoint
                (own, _), lane.waits = lane.waits, None
                _wait(own, left_s)
                continue
            sizes = [int(size) for size in self._all(lane, torch.tensor([length], device="cpu"), left_s)]
            if min(sizes) != _WAITS:
                return sizes, max(0.01, end - time.monotonic())
            end += time.monotonic() - begun

    def wait_at_breakpoint(self) -> None:
        """Tells the processes that wait for this one that it is at a breakpoint. From any thread."""
        import torch

        for lane in self.lanes:
            if self.closed or self.broken or not lane.meeting.acquire(blocking=False):
                continue
            try:
                if lane.waits is None or lane.waits[0].is_completed():
                    lane.waits = self._begun(lane, torch.tensor([_WAITS], device="cpu"), CALL_S)
            except _LostError:  # they have gone, which the next call will tell
                pass
            finally:
                lane.meeting.release()

    def paused_s(self, last_s: float) -> float:
        """How many of the last so many seconds some process waited at a breakpoint."""
        return paused_s(ask(self.doors, self.key, "halts", None, _ANSWER_S).values(), last_s)

    def _all(self, lane: Lane, tensor: Any, timeout_s: float) -> list[Any]:
        """The tensors of all processes, which have one shape."""
        work, received = self._begun(lane, tensor, timeout_s)
        _wait(work, timeout_s)
        return received

    def _begun(self, lane: Lane, tensor: Any, timeout_s: float) -> tuple[Any, list[Any]]:
        """A collective in which all get the tensors of all, and where these will be."""
        import torch
        import torch.distributed as dist

        received = [torch.empty_like(tensor) for _ in range(self.size)]
        options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=timeout_s + _AFTER_S)
        try:
            return lane.group.allgather([received], [tensor], options), received
        except RuntimeError as error:
            raise _LostError(str(error)) from None

    def _from(self, lane: Lane, source: int, own: Any, size: int, timeout_s: float) -> Any:
        """The tensor of one process."""
        import torch
        import torch.distributed as dist

        text = own if source == self.rank else torch.empty(size, dtype=torch.uint8, device="cpu")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, timedelta(seconds=timeout_s + _AFTER_S)
        try:
            work = lane.group.broadcast([text], options)
        except RuntimeError as error:
            raise _LostError(str(error)) from None
        _wait(work, timeout_s)
        return text

    def doors_by_name(self) -> dict[str, tuple[Address, bytes]]:
        """The doors of the processes, and the key to each, by the name under which a debugger finds it."""
        return {f"torchrun:{rank}": (address, self.key) for rank, address in self.doors.items()}

    def attending(self, title: str) -> Call:
        """What reports, on rank 0, that a call of all processes does not end."""

        def where() -> str:
            return "" if self.rank else f". Where each rank is:\n{self.where_each_is()}"

        return Call(title, where=where, paused_s=self.paused_s)

    def where_each_is(self) -> str:
        """The stacks of all processes, as text."""
        return told_stacks(ask(self.doors, self.key, "stacks", None, _ANSWER_S), range(self.size))

    @contextlib.contextmanager
    def hearing_of_the_end(self, note: Callable[[], None]) -> Iterator[None]:
        """Inside, ``note`` is called when another process passes on that the run shall end."""
        before, self.note_end = self.note_end, note
        try:
            yield
        finally:
            self.note_end = before

    def pass_end_on(self) -> bool:
        """Tells process 0 that the run shall end, or on process 0 all others. Whether process 0 knows it now."""
        doors = {rank: address for rank, address in self.doors.items() if (rank == 0) is (self.rank > 0)}
        told = ask(doors, self.key, "end", None, _ANSWER_S)
        return self.rank == 0 or told.get(0) is True

    def _asked_to_end(self) -> bool:
        """Whether this process does something about it."""
        if note := self.note_end:
            note()
        return note is not None

    def situation(self) -> Situation:
        """What this process is doing."""
        return Situation(self.arrivals, self.late, self.own_stacks())

    def own_stacks(self) -> str:
        """Where the threads of this process are, and the coroutines of roles that are suspended."""
        return stacks() + told_coroutines(list(self.coroutines.values()))

    def _situations(self) -> Mapping[int, Situation]:
        answers = ask(self.doors, self.key, "situation", None, _ANSWER_S)
        return {rank: Situation(**answer) for rank, answer in answers.items()}

    def where_all_are(self, arrivals: int) -> str:
        """Which ranks have not come to so many gatherings, and the stacks of all, for a message."""
        situations = self._situations()
        running = [rank for rank in range(self.size) if rank not in situations or situations[rank].arrivals < arrivals]
        told = told_stacks({rank: seen.stacks for rank, seen in situations.items()}, range(self.size))
        return (
            f"still running on ranks {', '.join(runs(running)) or '(none by now)'}. The call was given up. Raise "
            f"timeout_s of the group if it needs longer. Where each rank is:\n{told}"
        )

    def given_up_elsewhere(self) -> str:
        """What the first rank that gave a call up saw then; empty if none did."""
        return _first_late(self._situations())

    def _explained(self, lost: str) -> Exception:
        """The error for a connection that was lost, from what the doors and the store know."""
        situations = self._situations()
        if late := _first_late(situations):
            self.broken, self.late = True, late
            return TimeoutError(late)
        silent = [rank for rank in self.doors if rank not in situations]
        left = [rank for rank in silent if self._has_left(rank)]
        gone = [rank for rank in silent if rank not in left]
        told = []
        if gone:
            told.append(f"{_ranks(gone)} no longer answers: the process ended, or cannot be reached")
        if left:
            told.append(
                f"{_ranks(left)} left the run through RayHelper.teardown() or the end of the program. Every process "
                "must make the same calls, and they did not make this one"
            )
        answering = f"every process {'' if self.run_key.is_shared else 'of this node '}still answers"
        return ConnectionError(f"{'; '.join(told) or answering} ({first_line(lost)})")

    def _has_left(self, rank: int) -> bool:
        with contextlib.suppress(Exception):  # the store may have gone with the process that kept it
            return bool(self.store_of("doors").check([f"left/{rank}"]))
        return False

    def close(self) -> None:
        """Leaves the group."""
        with contextlib.suppress(Exception):
            self.store_of("doors").set(f"left/{self.rank}", "")
        self.closed = True
        self.run_key.close()
        self.door.close()
        self.lanes.clear()
        self.store = None


class Watch:
    """A deadline for what this process does inside: when it passes, the others are asked where they are, and freed.

    ``late`` is what they said then. What runs here is not interrupted; a collective in which another process waits for
    it fails there, as this process leaves the process group. Time at breakpoints, of any process, does not count.
    """

    def __init__(self, exchange: Exchange, timeout_s: float | None) -> None:
        self.exchange = exchange
        self.limit_s = timeout_s or CALL_S
        self.began = time.monotonic()
        self.has_end = timeout_s is not None
        self.late = ""
        self.left = False  # the process group
        self.ended = threading.Event()
        self.passing = threading.Lock()
        self.call = Call("", timeout_s, warns=False, paused_s=exchange.paused_s, on_late=self._pass)

    def __enter__(self) -> Watch:
        self.exchange.late = ""
        if self.has_end:
            watchdog.begin(self.call)
        return self

    def __exit__(self, *raised: object) -> None:
        self.expired()

    def expired(self) -> str:
        """``late``, and nothing more will be watched."""
        self.ended.set()
        watchdog.end(self.call)
        with self.passing:  # it may be asking
            return self.late

    def left_s(self) -> float:
        """How long to wait for the others: until the deadline, below 0 after it."""
        if not self.has_end:
            return self.limit_s
        passed_s = time.monotonic() - self.began
        return self.limit_s + paused_s([self.exchange.breakpoints.halted()], passed_s) - passed_s

    def _pass(self) -> None:
        with self.passing:
            if self.ended.is_set():
                return
            self.late = self.exchange.late = self.exchange.where_all_are(self.exchange.arrivals + 1)
            self.ended.wait(_SKEW_S)
            self.left = leave_process_group()


class Ready(bytes):
    """A value, packed to be sent to the other processes."""


def ready(value: Any) -> Ready:
    """The value, packed. Raises what packing it raises."""
    return Ready(pickle.dumps(pack(value), protocol=5))


class _LateError(Exception):
    """Not every process came in time."""


class _LostError(Exception):
    """A connection to another process broke."""


class _ForgedError(Exception):
    """What came is not from a process of this run."""


def _wait(work: Any, timeout_s: float) -> None:
    """Nothing, when the operation has ended. Raises _LateError, _LostError."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise _LateError from None
        raise _LostError(str(error)) from None


def _own_address() -> str:
    """Loopback if all processes are on this node, else its address from which MASTER_ADDR is reached (IPv4)."""
    if is_one_node():
        return "127.0.0.1"
    master = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards_master:
        towards_master.connect(master)  # sends nothing
        return str(towards_master.getsockname()[0])
    return "127.0.0.1"


def _first_late(situations: Mapping[int, Situation]) -> str:
    return next((f"rank {rank} gave it up: {seen.late}" for rank, seen in sorted(situations.items()) if seen.late), "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs(ranks))}"


def first_line(text: str) -> str:
    """The first line of a message, at most 200 characters."""
    return (text.strip().splitlines() or [""])[0][:200]
