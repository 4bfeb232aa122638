"""The driver's side of ``weight_sync.py``: when engines get the policy's weights, and what if one was lost.

self.engines = EngineUpdates.of(self)  # once all roles are built
self.engines.version = run.step  # of a policy from a checkpoint
self.engines.learned()           # after an optimizer step
self.engines.update()            # before completions are asked for
self.engines.completed(...)      # their value, though a worker may die meanwhile
self.engines.end_generation()    # when all of them are there
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from rayhelper import Channel, ChannelError, RayHelper
from trainers.run import Run
from trainers.weight_sync import EngineLostError, Route

TIMEOUT_S = 600.0  # how long one side waits for the other: an engine may be in the middle of its completions


@dataclass(frozen=True)
class Room:
    """Doors by which the policy and engines of other processes, on the same devices, make room for each other.

    make("weights") ► (engines wake, weights are sent) ► make("kv_cache") ► wake() ► generations ► (rest) ► reload()
    """

    make: Callable[[Literal["weights", "kv_cache"]], Any]  # of the policy
    wake: Callable[[], Any]  # of the engines: they get their KV cache
    reload: Callable[[], Any]  # of the policy


class EngineUpdates:
    """Weights for the engines of a role, by doors of the trainer.

    ``copy``, ``send`` and ``receive`` are doors to the functions of those names; ``rest`` one to ``end_generation``;
    ``rebuild`` one of role rollout that builds the engines which are missing. ``open_channel`` makes a channel.
    ``room``: where weights are sent to other processes on the devices of the policy.

    ``in_flight``: new weights are offered as soon as there are any, to engines that look for them while they generate
    (``weight_sync.arrivals``). Each finds a call of ``receive`` behind its generations as well, which does nothing if
    the weights have come.
    """

    def __init__(
        self,
        route: Route,
        *,
        copy: Callable[[int], Any],
        send: Any,
        receive: Any,
        rest: Callable[[], Any],
        rebuild: Callable[[], Any],
        open_channel: Callable[[Route], Channel],
        room: Room | None = None,
        in_flight: bool = False,
    ) -> None:
        self.route, self.copy, self.send, self.receive = route, copy, send, receive
        self.rest, self.rebuild, self.open_channel, self.room = rest, rebuild, open_channel, room
        self.in_flight = in_flight
        self.channel: Channel | None = None
        self.sending: Any = None  # a future: the round that is under way
        self.receiving: list[Any] = []  # futures of the calls of ``receive`` behind generations
        self.version = 0  # optimizer steps that the policy has made
        self.is_due = True  # engines have older weights than the policy, or rest

    @classmethod
    def of(cls, trainer: Any, *, in_flight: bool = False) -> EngineUpdates:
        """By the doors of a trainer: ``meet_engine``, ``copy_weights``, ``send_weights`` and their like."""
        config, route = trainer.config, trainer.meet_engine()
        room = Room(trainer.make_room, trainer.wake_engine, trainer.reload_policy) if route.shares_devices else None
        return cls(
            route,
            copy=trainer.copy_weights,
            send=trainer.send_weights,
            receive=trainer.receive_weights,
            rest=trainer.rest_engine,
            rebuild=partial(trainer.build_rollout, trainer.model_path),
            open_channel=partial(channel_to, bucket_mb=config.weight_bucket_mb),
            room=room,
            in_flight=in_flight,
        )

    def learned(self) -> None:
        """The policy has made an optimizer step. Raises as ``update`` does, of weights that were in flight before."""
        self.version += 1
        self.is_due = True
        if self.in_flight and self.channel is not None:
            try:
                self._settle()
                self.sending = self.send.defer(self.channel, self.version)
                self.receiving.append(self.receive.defer(self.channel, self.version))
            except (EngineLostError, ChannelError) as lost:
                self._restore(lost)

    def update(self) -> None:
        """Engines hold the policy's weights, and all that they need to generate.

        Raises EngineLostError as ``completed`` does, ChannelError if weights do not arrive at the second try either.
        """
        if not self.is_due:
            return
        if self.route.way == "copied":
            self.copy(self.version)
        elif self.route.way == "sent":
            try:
                if self.sending is None:
                    self._send()
                else:
                    self._settle()
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
        if self.route.way == "copied" or self.room is not None:
            with contextlib.nullcontext() if run is None else run.phase("offload"):
                self._rest()
            self.is_due = True

    def close(self) -> None:
        """Frees the connections, once what is under way has arrived; the next update makes others."""
        with contextlib.suppress(EngineLostError, ChannelError):  # nobody is left to need the weights
            self._settle()
        self._close()

    def _restore(self, lost: Exception) -> None:
        """Workers that took the place of others have engines, and all engines the policy's weights."""
        if self.route.way != "sent":
            raise EngineLostError(
                "a worker died that trains and generates; another took its place, but what it had learned is gone. "
                "Go on from a checkpoint (resume_from_checkpoint: auto), or give role rollout a group of its own, "
                "whose restarts replace workers in a running run."
            ) from lost
        while True:
            self._close()
            self.rebuild()
            try:
                if self.room is not None:  # the policy may be away
                    self._rest()
                self._send()
            except EngineLostError:  # a further one died
                continue
            self.is_due = False
            return

    def _rest(self) -> None:
        """What is away while engines generate is back, if it has room then."""
        self.rest()
        if self.room is not None:
            self.room.reload()

    def _send(self) -> None:
        if self.channel is None:
            self.channel = self.open_channel(self.route)
        if self.room is not None:
            self.room.make("weights")
        sent = self.send.defer(self.channel, self.version)  # train worker 0 sends while the engines receive
        try:
            self.receive(self.channel)
        except BaseException:
            self._close()  # or the sender would wait for those that do not come
            with contextlib.suppress(ChannelError):  # which tells of this one
                sent.result()
            raise
        sent.result()
        if self.room is not None:
            self.room.make("kv_cache")
            self.room.wake()

    def _settle(self) -> None:
        """What was sent in flight has arrived everywhere. Raises what went wrong of it."""
        sending, self.sending = self.sending, None
        if sending is not None:
            sending.result()
        done = [call for call in self.receiving if call.done()]
        self.receiving = [call for call in self.receiving if call not in done]
        for call in done:
            call.result()

    def _close(self) -> None:
        """Ends what is under way as well."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.sending is not None:
            with contextlib.suppress(ChannelError):  # that the channel is closed
                self.sending.result()
        self.sending, self.receiving = None, []


@RayHelper.function(group="driver", execute="first")
def channel_to(route: Route, bucket_mb: float) -> Channel:
    """A channel to all engines of a route."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its process 0 is both the driver and train worker 0
    network: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() else "gloo"
    transport = network if under_torchrun else "auto"
    return Channel(route.num_engines, bucket_mb=bucket_mb, timeout_s=TIMEOUT_S, transport=transport)
