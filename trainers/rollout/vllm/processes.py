"""vLLM's own processes under one engine, which hold its model together: how weights get to them.

    engine's process ──► channel: memory of a GPU, or of the host ──► each process loads its part

Also what keeps an engine whole when a signal stops the thread that steps it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from rayhelper import Channel, ChannelError
from trainers.rollout.vllm.model import load

BUCKET_MB = 64
TIMEOUT_S = 1800.0  # the weights may be on their way from another node meanwhile


class ModelProcesses:
    """The processes of vLLM's ``executor``; ``device``: where weights stand when they are handed on.

    If one of them dies, this process ends as well: what replaces workers that die then replaces it.
    """

    def __init__(self, executor: Any, device: torch.device) -> None:
        self.executor, self.device = executor, device
        self.channel: Channel | None = None
        executor.register_failure_callback(_end_worker)

    def load(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Every process has loaded its part of the weights.

        Raises:
            ChannelError: a process is gone, or could not load them.
            Exception: what ``named_weights`` raised, as it is.
        """
        if self.channel is None:
            self.channel = Channel(
                self.executor.world_size,
                bucket_mb=BUCKET_MB,
                timeout_s=TIMEOUT_S,
                transport="cuda_ipc" if self.device.type == "cuda" else "shared_memory",
                host="127.0.0.1",
            )
        asked = self.executor.collective_rpc("apply_model", args=(partial(_load, self.channel),), non_block=True)
        try:
            self.channel.send((name, weight.to(self.device)) for name, weight in named_weights)
        except BaseException:
            self.close()
            with contextlib.suppress(Exception), uninterrupted():
                asked.result()  # answers that are not taken would be those to the next question
            raise
        with uninterrupted():
            mistakes = [mistake for mistake in asked.result() if mistake]
        if mistakes:
            self.close()
            raise ChannelError(f"a process of the engine could not load the weights: {mistakes[0]}")

    def close(self) -> None:
        """Frees what the channel holds."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _end_worker() -> None:
    print("a process of vLLM that holds a part of the model has died; its worker ends", file=sys.stderr, flush=True)
    os._exit(1)


def _load(channel: Channel, model: Any) -> str:
    """What went wrong as a process loads its part. It is no exception: of those vLLM would lose the others' answers."""
    try:
        load(channel.receive(copy=False), model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What stops this thread from outside (Ctrl-C, a call that the driver gives up) does so at the end.

    After half a step vLLM's parts, and its processes' answers, would be at odds.
    """
    late: list[int] = []
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():  # no other is stopped
            for stop in (signal.SIGINT, signal.SIGUSR1):
                if (handler := signal.getsignal(stop)) is not None:
                    before[stop] = handler
                    signal.signal(stop, lambda number, _: late.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in late:
            signal.raise_signal(number)
