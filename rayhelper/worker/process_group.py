"""torch.distributed's default group, as this process sees it: joined, left so that others are freed, joined anew."""

from __future__ import annotations

import atexit
import collections
import contextlib
import errno
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rayhelper.roles.runtime import WorkerInfo
from rayhelper.worker.patches import abort_process_group, num_collectives

PLACE = "rayhelper/place"  # in a store: the number of the place where its members meet next
_requests: collections.Counter[str] = collections.Counter()  # to join, of this process


@dataclass(frozen=True)
class Joined:
    """How the process joined."""

    backend: str
    timeout_s: float


def join_process_group(info: WorkerInfo, backend: str | None, timeout_s: float, store: Any = None) -> Joined:
    """How this process now is in the default group, as ``info.rank``; it may have been in one before.

    ``store``: where the members meet; None: at the address and port that the environment names, or nowhere for a group
    of one.
    """
    import torch
    import torch.distributed as dist

    _requests["join"] += 1  # also by a process that is in it: one that took its place would wait for the others here
    if not dist.is_initialized():
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if info.world_size == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
        elif backend == "nccl":
            torch.cuda.set_device(info.local_rank if info.gpus_per_worker == 1 else 0)  # with several it sees its own
        if store is None:
            store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), info, timeout_s)
        place = store.add(PLACE, 0)  # where a group met that was left, the addresses of its members still stand
        meeting = dist.PrefixStore(str(place), store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=meeting, rank=info.rank, world_size=info.world_size, timeout=timeout)
        store.set(PLACE, str(place + 1))  # by every member, before it can leave: all of them have met
        if info.world_size == 1:
            atexit.register(_leave_alone)  # NCCL warns of a group that is still there at the end
    return Joined(str(dist.get_backend()), timeout_s)


def _store(host: str, port: int, info: WorkerInfo, timeout_s: float) -> Any:
    """The store of a group, which listens at this one address of the first member's node.

    torch's own would listen at all addresses. It has no password: whoever reaches the address can write to it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    kept: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False, "multi_tenant": True}
    if info.rank > 0:
        return TCPStore(host, port, info.world_size, is_master=False, **kept)
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        listener = socket.create_server(place[:2], family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:  # above all: this node does not have the address
            raise
        # the store of the group that this process has left still listens there, and is what torch returns
        return TCPStore(host, port, info.world_size, is_master=True, **kept)
    descriptor = listener.detach()
    return TCPStore(host, port, info.world_size, is_master=True, master_listen_fd=descriptor, use_libuv=True, **kept)


def _leave_alone() -> None:
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() == 1:  # the members of a larger one may be gone
        dist.destroy_process_group()


def in_process_group() -> bool:
    """Whether this process shares the default group with others."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    return bool(dist and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def collectives_begun() -> int | None:
    """How many collectives this process has begun, counting requests to join; None: it cannot be known."""
    begun = num_collectives() if in_process_group() else 0
    return None if begun is None else begun + _requests["join"]


def leave_process_group() -> bool:
    """Whether the process was in the default group with others, and has left it now.

    That frees them: a gloo collective that waits for this process fails at once, an NCCL one is aborted.
    """
    if not in_process_group():
        return False
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        if dist.get_backend() == "nccl":
            abort_process_group()
        else:
            dist.destroy_process_group()
    return True


def let_go(error: BaseException | None) -> None:
    """What the frames of an exception hold is freed: the process group of a collective that failed, above all.

    As long as a frame holds it, its connections stay open, and other processes wait at their other ends.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
