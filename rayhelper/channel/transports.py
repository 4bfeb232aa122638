"""How the bytes of a bucket get from the sender's process to the receivers': four ways, and which one fits.

    cuda_ipc        the buckets lie on the sender's GPU; receivers that see this GPU map them
    nccl            broadcast between different GPUs, of one node or several
    shared_memory   the buckets lie in a memory file that the receivers map; it has no name that could be left behind
    gloo            broadcast between processes anywhere

Each side holds three buckets. What is said about them, and when one may be filled again, is not decided here.
"""

from __future__ import annotations

import base64
import datetime
import functools
import mmap
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rayhelper.channel.buckets import BLOCK
from rayhelper.channel.lines import Message
from rayhelper.channel.patches import gloo_group, nccl_group
from rayhelper.errors import ChannelError

if TYPE_CHECKING:
    import torch

NUM_BUCKETS = 3  # one is filled, one is on its way, one is being read
TRANSPORTS = ("cuda_ipc", "nccl", "shared_memory", "gloo")  # the first that fits is taken
_MEMORY_FILE, _MEMORY_PATH = "rayhelper_channel", re.compile(r"/proc/\d+/fd/\d+")
# The arguments of torch's rebuild_cuda_tensor that are not the same for every tensor of bytes, by position.
_HANDLE, _STORAGE_SIZE, _STORAGE_OFFSET = 7, 8, 9
_COUNTER, _COUNTER_OFFSET, _EVENT, _EVENT_SYNC = 11, 12, 13, 14
_SPIN_S = 0.002  # how long a receiver asks without pause whether a bucket has arrived


@dataclass(frozen=True)
class Endpoint:
    """What a process tells about itself so that a transport can be chosen."""

    machine: str  # equal for processes that can open each other's memory files
    process: str  # for messages
    gpu: str | None  # where its tensors are, or shall be
    visible_gpus: tuple[str, ...]

    @classmethod
    def here(cls, device: torch.device) -> Endpoint:
        """This process, with its tensors on ``device`` (with an index, if it is a GPU)."""
        on_gpu = device.type == "cuda"
        return cls(
            machine=_machine(),
            process=f"process {os.getpid()} on {socket.gethostname()}",
            gpu=_uuid(device.index) if on_gpu else None,
            visible_gpus=_visible_gpus() if on_gpu else (),
        )


def choose(wanted: str, sender: Endpoint, receivers: Sequence[Endpoint]) -> str:
    """The transport: ``wanted``, or for ``auto`` the first that fits. Raises ChannelError if it does not fit."""
    if wanted == "auto":
        return next(name for name in TRANSPORTS if obstacle(name, sender, receivers) is None)
    reason = obstacle(wanted, sender, receivers)
    if reason is not None:
        raise ChannelError(f"transport={wanted!r} cannot be used: {reason}. Use transport='auto'.")
    return wanted


def obstacle(transport: str, sender: Endpoint, receivers: Sequence[Endpoint]) -> str | None:
    """Why a transport does not fit these processes, or None."""
    if transport == "gloo":
        return None
    if transport == "nccl":
        gpus = [end.gpu for end in (sender, *receivers)]
        if None in gpus:
            return "the sender's tensors or a receiver are not on a GPU"
        return None if len(set(gpus)) == len(gpus) else "two of the processes are on the same GPU"
    if transport == "cuda_ipc" and sender.gpu is None:
        return "the sender's tensors are not on a GPU"
    for end in receivers:
        if end.machine != sender.machine or not end.machine:
            return f"{end.process} cannot open memory of {sender.process}"
        if transport == "cuda_ipc" and sender.gpu not in end.visible_gpus:
            return f"{end.process} does not see the sender's GPU"
    return None


class Transport(Protocol):
    """Buckets that both sides have, and the way from the one to the other."""

    buckets: list[torch.Tensor]  # uint8, of equal length

    def connect(self, store: Any, address: str, timeout_s: float) -> None:
        """Both sides: meets the others through ``store``; ``address`` is this machine's that they can reach."""
        ...

    def publish(self, index: int, used: int) -> None:
        """Sender: lets the receivers have the first ``used`` bytes, which are written (``finish_copies``)."""
        ...

    def expect(self, index: int, used: int) -> None:
        """Receiver: as soon as it knows that a bucket is on its way."""
        ...

    def arrived(self, index: int, meanwhile: Callable[[float], Any]) -> None:
        """Receiver: returns when the bucket can be read; ``meanwhile(seconds)`` waits a little and may raise."""
        ...

    def reclaim(self, index: int) -> None:
        """Sender: before a bucket that every receiver has read is filled again."""
        ...

    def close(self) -> None:
        """Both sides: frees what is held; also after a failure."""
        ...


def offer(name: str, device: torch.device, nbytes: int, num_receivers: int) -> tuple[Transport, list[Message]]:
    """The sender's side of a transport, and for each receiver what ``accept`` needs to build the other."""
    if name == "shared_memory":
        file, memory = _memory_file(nbytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return Mapped(memory, device, nbytes, file), [{"path": path} for _ in range(num_receivers)]
    if name == "cuda_ipc":
        import torch

        on_gpu = torch.empty(NUM_BUCKETS * nbytes, dtype=torch.uint8, device=device)
        return Mapped(on_gpu, device, nbytes), [_handle(on_gpu) for _ in range(num_receivers)]
    size = num_receivers + 1
    return Broadcast(name, device, nbytes, 0, size), [{"rank": rank, "size": size} for rank in range(1, size)]


def accept(name: str, device: torch.device, nbytes: int, setup: Message) -> Transport:
    """A receiver's side of a transport; ``device``: where its tensors shall be."""
    if name == "shared_memory":
        return Mapped(_open_memory_file(str(setup["path"]), NUM_BUCKETS * nbytes), device, nbytes)
    if name == "cuda_ipc":
        return Mapped(_open_handle(setup, NUM_BUCKETS * nbytes), device, nbytes)
    return Broadcast(name, device, nbytes, setup["rank"], setup["size"])


class Mapped:
    """shared_memory and cuda_ipc: the buckets are the same memory on both sides, so nothing has to be moved."""

    def __init__(self, memory: torch.Tensor, device: torch.device, nbytes: int, file: int | None = None) -> None:
        self.buckets = _cut(memory, nbytes)
        self._file = file  # kept open so that receivers can open it
        self._pinned = memory if device.type == "cuda" and memory.device.type == "cpu" else None
        if self._pinned is not None:
            import torch

            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            torch.cuda.check_error(int(code))

    def connect(self, store: Any, address: str, timeout_s: float) -> None:
        pass

    def publish(self, index: int, used: int) -> None:
        pass

    def expect(self, index: int, used: int) -> None:
        pass

    def arrived(self, index: int, meanwhile: Callable[[float], Any]) -> None:
        pass

    def reclaim(self, index: int) -> None:
        pass

    def close(self) -> None:
        if self._pinned is not None:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
        if self._file is not None:
            os.close(self._file)
        self._pinned, self._file = None, None
        self.buckets = []  # the memory goes with the last tensor that lies in it


class Broadcast:
    """gloo and nccl: every process has buckets of its own; a process group that nobody else uses fills them."""

    def __init__(self, name: str, device: torch.device, nbytes: int, rank: int, size: int) -> None:
        import torch

        self._name, self._rank, self._size = name, rank, size
        pin = name == "gloo" and device.type == "cuda"
        place = "cpu" if name == "gloo" else device
        memory = torch.empty(NUM_BUCKETS * nbytes, dtype=torch.uint8, device=place, pin_memory=pin)
        self.buckets = _cut(memory, nbytes)
        self._group: Any = None
        self._store: Any = None  # torch keeps only its own half of it alive
        self._work: dict[int, Any] = {}

    def connect(self, store: Any, address: str, timeout_s: float) -> None:
        timeout = datetime.timedelta(seconds=2 * timeout_s)  # the channel's own deadlines come first
        self._store = store
        try:
            if self._name == "nccl":
                self._group = nccl_group(store, self._rank, self._size, timeout)
            else:
                self._group = gloo_group(store, self._rank, self._size, timeout, address)
        except (RuntimeError, OSError) as error:  # the store's own errors, too
            raise _failed(self._name, error) from error

    def publish(self, index: int, used: int) -> None:
        self.expect(index, used)

    def expect(self, index: int, used: int) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._work[index] = self._group.broadcast([self.buckets[index][:used]], options)
        except RuntimeError as error:
            raise _failed(self._name, error) from error

    def arrived(self, index: int, meanwhile: Callable[[float], Any]) -> None:
        spin_until = time.monotonic() + _SPIN_S
        while not self._work[index].is_completed():
            meanwhile(0.0 if time.monotonic() < spin_until else 0.001)
        try:
            self.reclaim(index)
        except ChannelError:
            meanwhile(0.5)  # if a process has died, its line says it better
            raise

    def reclaim(self, index: int) -> None:
        try:
            self._work.pop(index).wait()
        except RuntimeError as error:
            raise _failed(self._name, error) from error

    def close(self) -> None:
        if self._name == "nccl" and self._group is not None:
            self._group.abort()  # a kernel may still wait for a process that has died
        self._group, self._work, self.buckets = None, {}, []
        self._store = None


def finish_copies(*devices: torch.device) -> None:
    """Returns when the copies on the current streams of those devices that are GPUs are done."""
    import torch

    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _cut(memory: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    assert nbytes % BLOCK == 0, "the end of a bucket is sent in whole blocks"
    return [memory[k * nbytes : (k + 1) * nbytes] for k in range(NUM_BUCKETS)]


def _memory_file(nbytes: int) -> tuple[int, torch.Tensor]:
    """A file without a name, and its memory. A process of this machine opens it as /proc/PID/fd/N while it is open."""
    import torch

    file = os.memfd_create(_MEMORY_FILE)
    os.ftruncate(file, NUM_BUCKETS * nbytes)
    return file, torch.frombuffer(mmap.mmap(file, NUM_BUCKETS * nbytes), dtype=torch.uint8)


def _open_memory_file(path: str, nbytes: int) -> torch.Tensor:
    import torch

    try:
        if not _MEMORY_PATH.fullmatch(path) or not os.readlink(path).startswith(f"/memfd:{_MEMORY_FILE}"):
            raise ChannelError(f"{path!r} is not the memory of a sender. Nothing of it was opened.")
        with open(path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise ChannelError(f"cannot open the sender's memory: {error}. Use transport='gloo'.") from error


def _handle(memory: torch.Tensor) -> Message:
    """What one receiver needs to open memory of this GPU; torch counts receivers, so each needs its own."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(memory)
    return {
        "gpu": _uuid(memory.device.index),
        "handles": [base64.b64encode(arguments[place]).decode() for place in (_HANDLE, _COUNTER, _EVENT)],
        "numbers": [arguments[place] for place in (_STORAGE_SIZE, _STORAGE_OFFSET, _COUNTER_OFFSET)],
        "event_sync": bool(arguments[_EVENT_SYNC]),
    }


def _open_handle(setup: Message, nbytes: int) -> torch.Tensor:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle, counter, event = (base64.b64decode(text) for text in setup["handles"])
    storage_size, storage_offset, counter_offset = map(int, setup["numbers"])
    device = _visible_gpus().index(setup["gpu"])  # the sender may number the GPUs differently
    place = (torch.Tensor, (nbytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, device)
    counted = (handle, storage_size, storage_offset, False, counter, counter_offset, event, bool(setup["event_sync"]))
    try:
        memory: torch.Tensor = rebuild_cuda_tensor(*place, *counted)
    except RuntimeError as error:
        raise ChannelError(f"cannot open the sender's GPU memory: {error}. Use transport='shared_memory'.") from error
    return memory


@functools.cache
def _visible_gpus() -> tuple[str, ...]:
    import torch

    return tuple(_uuid(index) for index in range(torch.cuda.device_count()))


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def this_process() -> str:
    """Different for any two processes that live at the same time."""
    return f"{os.getpid()} {_machine() or socket.gethostname()}"


@functools.cache
def _machine() -> str:
    """Equal for processes that can open each other's memory files: one boot, one space of process ids, one user."""
    if not sys.platform.startswith("linux"):
        return ""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _failed(name: str, error: Exception) -> ChannelError:
    return ChannelError(f"{name} failed: {str(error).splitlines()[0]}")
