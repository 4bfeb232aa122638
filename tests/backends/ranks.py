"""Several ranks of one process group, for as long as one function runs.

Ranks are forked from a server that has imported everything and computed nothing (``tests.warm.ranks``): they start in
milliseconds, however many threads this process has, and this process never joins a process group itself.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import warm

forkserver = multiprocessing.get_context("forkserver")


def _use_the_warm_server() -> None:
    """Ranks are forked from the server of ``tests.warm``, which all processes of a run of the suite share."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]

    def ensure_running() -> None:
        resource_tracker.ensure_running()
        if server._forkserver_alive_fd is None:
            server._forkserver_address = warm.ranks()
            server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)

    server.ensure_running = ensure_running


_use_the_warm_server()


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    timeout_s: float = 800.0,
    joined: bool = True,
) -> list[Any]:
    """What ``function(rank, *args)`` returned on each of ``num_ranks`` gloo ranks; ``folder`` is where they meet.

    ``joined`` False: ranks are in no process group, and may make their own.

    Raises:
        AssertionError: a rank failed, with its traceback, or did not finish in time; the others are stopped.
    """
    meeting = folder / f"ranks_{time.monotonic_ns()}"
    processes, pipes = [], {}
    for rank in range(num_ranks):
        ours, theirs = forkserver.Pipe(duplex=False)
        process = forkserver.Process(
            target=_rank,
            args=(theirs, rank, num_ranks, meeting if joined else None, timeout_s, function, args),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = rank
    try:
        values = _collect(pipes, processes, time.monotonic() + timeout_s)
        for process in processes:
            process.join(timeout_s)
        return values
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in list(pipes):
            pipe.close()
        meeting.unlink(missing_ok=True)


def _collect(pipes: dict[Connection, int], processes: list[Any], deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    num_ranks = len(processes)
    while len(values) < num_ranks:
        waiting = [pipe for pipe, rank in pipes.items() if rank not in values]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(pipes[pipe] for pipe in waiting)} of {num_ranks} did not finish in time"
        for pipe in ready:
            rank = pipes[pipe]  # type: ignore[index]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                raise AssertionError(f"rank {rank} of {num_ranks} died without a word, exit code {code}") from None
            assert succeeded, f"rank {rank} of {num_ranks} failed:\n{value}"
            values[rank] = value
    return [values[rank] for rank in range(num_ranks)]


def _rank(
    pipe: Connection,
    rank: int,
    num_ranks: int,
    meeting: Path | None,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        if meeting is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=num_ranks,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        answer = pickle.dumps((True, function(rank, *args)))
        if meeting is not None:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
