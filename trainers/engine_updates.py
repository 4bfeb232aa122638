"""The driver's side of ``weight_sync.py``: when engines get the policy's weights, and what if one was lost.

self.engines = EngineUpdates(self.meet_engine(), copy=self.copy_weights, ...)  # once all roles are built
self.engines.learned()           # after an optimizer step
self.engines.update()            # before completions are asked for
self.engines.completed(...)      # their value, though a worker may die meanwhile
self.engines.end_generation()    # when all of them are there
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Literal

import torch

from rayhelper import Channel, ChannelError
from trainers.run import Run
from trainers.weight_sync import EngineLostError, Route

TIMEOUT_S = 600.0  # how long one side waits for the other: an engine may be in the middle of its completions


class EngineUpdates:
    """Weights for the engines of a role, by doors of the trainer.

    ``copy``, ``send`` and ``receive`` are doors to the functions of those names; ``rest`` one to ``end_generation``;
    ``rebuild`` one of role rollout that builds the engines which are missing; ``open_channel`` one of the driver.
    """

    def __init__(
        self,
        route: Route,
        *,
        copy: Callable[[], Any],
        send: Any,
        receive: Callable[[Channel], Any],
        rest: Callable[[], Any],
        rebuild: Callable[[], Any],
        open_channel: Callable[[Route], Channel],
    ) -> None:
        self.route, self.copy, self.send, self.receive = route, copy, send, receive
        self.rest, self.rebuild, self.open_channel = rest, rebuild, open_channel
        self.channel: Channel | None = None
        self.is_due = True

    def learned(self) -> None:
        """The policy has changed."""
        self.is_due = True

    def update(self) -> None:
        """Engines hold the policy's weights, and all that they need to generate.

        Raises EngineLostError as ``completed`` does, ChannelError if weights do not arrive at the second try either.
        """
        if self.route.way == "copied":
            self.copy()
        elif self.route.way == "sent" and self.is_due:
            try:
                self._send()
            except (EngineLostError, ChannelError) as lost:
                self._restore(lost)
        self.is_due = False

    def completed(self, completions: Any, again: Callable[[], Any]) -> Any:
        """The value of a future of completions; that of ``again()`` if a worker died and was replaced meanwhile.

        ``again`` completes by the policy as it is now. Whoever dies too often uses up the ``restarts`` of its group.

        Raises:
            EngineLostError: the worker that died trains as well.
        """
        while True:
            try:
                return completions.result()
            except EngineLostError as lost:
                self._restore(lost)
                completions = again()

    def end_generation(self, run: Run | None = None) -> None:
        """Training beside the engines has its memory back; that takes time of ``run``'s step, if there is one."""
        if self.route.way == "copied":
            with contextlib.nullcontext() if run is None else run.phase("offload"):
                self.rest()

    def close(self) -> None:
        """Frees the connections; the next update makes others."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _restore(self, lost: Exception) -> None:
        """Workers that took the place of others have engines, and all engines the policy's weights."""
        if self.route.way != "sent":
            raise EngineLostError(
                "a worker died that trains and generates; another took its place, but what it had learned is gone. "
                "Go on from a checkpoint (resume_from_checkpoint: auto), or give role rollout a group of its own, "
                "whose restarts replace workers in a running run."
            ) from lost
        while True:
            self.rebuild()
            self.close()
            try:
                return self._send()
            except EngineLostError:  # a further one died
                continue

    def _send(self) -> None:
        if self.channel is None:
            self.channel = self.open_channel(self.route)
        sent = self.send.defer(self.channel)  # train worker 0 sends while the engines receive
        try:
            self.receive(self.channel)
        except BaseException:
            self.close()  # or the sender would wait for those that do not come
            with contextlib.suppress(ChannelError):  # which tells of this one
                sent.result()
            raise
        sent.result()


def channel_to(route: Route, bucket_mb: float) -> Channel:
    """A channel to all engines of a route."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its process 0 is both the driver and train worker 0
    network: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() else "gloo"
    transport = network if under_torchrun else "auto"
    return Channel(route.num_engines, bucket_mb=bucket_mb, timeout_s=TIMEOUT_S, transport=transport)
