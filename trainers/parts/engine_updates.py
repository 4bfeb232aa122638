"""The driver's side of ``weights.py``: when engines get the policy's weights, and what if one was lost.

self.engines = EngineUpdates.of(self)  # once all roles are built
self.engines.follow(run)         # at its step, which a checkpoint may have given
self.engines.learned()           # after an optimizer step
self.engines.update()            # before completions are asked for
self.engines.completed(...)      # their value, though a worker may die meanwhile
self.engines.end_generation()    # when all of them are there

Its seconds are those of the run's phases ``generate`` (waiting for completions), ``sync`` and ``offload``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from rayhelper import Channel, ChannelError, DeadlineError, RayHelper
from trainers.parts.weights import EngineLostError, Route
from trainers.run.run import Run

TIMEOUT_S = 600.0  # how long one side waits for the other: engines do nothing else then, or look now and then
NOT_SENT = (EngineLostError, ChannelError, DeadlineError)  # an engine is lost, or busy with what is no decoding


@dataclass(frozen=True)
class Room:
    """Doors by which the policy and engines on the same devices make room for each other.

    make("weights") ► (engines wake and get weights) ► make("kv_cache") ► wake() ► generations ► rest() ► reload()
    """

    make: Callable[[Literal["weights", "kv_cache"]], Any]  # of the policy
    wake: Callable[[], Any]  # of the engines: they get their KV cache
    rest: Callable[[], Any]  # of the engines
    reload: Callable[[], Any]  # of the policy


class EngineUpdates:
    """Weights for the engines of a role, by doors of the trainer.

    ``meet`` returns when every engine has completed what was asked of it before; ``copy``, ``send`` and ``receive`` are
    doors to the functions of those names; ``rebuild`` is one of role rollout that builds the engines which are missing.
    ``open_channel`` makes a channel. ``room``: where policy and engines are on the same devices.

    ``in_flight``: new weights are sent as soon as there are any, to engines that look for them while they generate
    (``weight_sync.arrivals``). Each finds a call of ``receive`` behind its generations as well, which does nothing if
    the weights have come.
    """

    def __init__(
        self,
        route: Route,
        *,
        meet: Callable[[], Any],
        copy: Callable[[int], Any],
        send: Any,
        receive: Any,
        rebuild: Callable[[], Any],
        open_channel: Callable[[Route], Channel],
        room: Room | None = None,
        in_flight: bool = False,
    ) -> None:
        self.route, self.meet, self.copy, self.send, self.receive = route, meet, copy, send, receive
        self.rebuild, self.open_channel, self.room, self.in_flight = rebuild, open_channel, room, in_flight
        self.phase: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.channel: Channel | None = None
        self.receiving: list[Any] = []  # futures of the calls of ``receive`` behind generations
        self.version = 0  # optimizer steps that the policy has made
        self.is_due = True  # engines have older weights than the policy, or rest

    @classmethod
    def of(cls, trainer: Any, *, in_flight: bool = False) -> EngineUpdates:
        """By the doors of a trainer: ``meet_engine``, ``copy_weights``, ``send_weights`` and their like."""
        config, route = trainer.config, trainer.meet_engine()
        room = None
        if route.way == "copied" or route.shares_devices:
            room = Room(trainer.make_room, trainer.wake_engine, trainer.rest_engine, trainer.reload_policy)
        return cls(
            route,
            meet=trainer.meet_engine,
            copy=trainer.copy_weights,
            send=trainer.send_weights,
            receive=trainer.receive_weights,
            rebuild=partial(trainer.build_rollout, trainer.model_path),
            open_channel=partial(channel_to, bucket_mb=config.weight_bucket_mb),
            room=room,
            in_flight=in_flight,
        )

    def follow(self, run: Run) -> None:
        """The policy is that of the run's step, and seconds count in the run's phases."""
        self.version, self.phase = run.step, run.phase

    def learned(self) -> None:
        """The policy has made an optimizer step; in flight, engines get its weights now. Raises as ``update`` does."""
        self.version += 1
        self.is_due = True
        if self.in_flight and self.channel is not None:
            try:
                with self.phase("sync"):  # the policy can do nothing else meanwhile
                    sent = self.send.defer(self.channel, self.version)
                    self.receiving.append(self.receive.defer(self.channel, self.version))
                    sent.result()
            except NOT_SENT as lost:
                self._restore(lost)

    def update(self) -> None:
        """Engines hold the policy's weights, and all that they need to generate.

        Raises EngineLostError as ``completed`` does, ChannelError if weights do not arrive at the second try either.
        """
        if not self.is_due:
            return
        with self.phase("sync"):
            try:
                if self.route.way == "copied":
                    self._fill(lambda: self.copy(self.version))
                elif self.route.way == "sent" and self.in_flight and self.channel is not None:
                    self._look()
                elif self.route.way == "sent":
                    self._send()
            except NOT_SENT as lost:
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

    def end_generation(self) -> None:
        """Training beside the engines has its memory back."""
        if self.room is not None:
            self._rest(self.room)
            self.is_due = True

    def close(self) -> None:
        """Frees the connections; the next update makes others."""
        with contextlib.suppress(*NOT_SENT):  # nobody is left to need the weights
            self._look()
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
                    self._rest(self.room)
                self._send()
            except EngineLostError:  # a further one died
                continue
            self.is_due = False
            return

    def _rest(self, room: Room) -> None:
        """What is away while engines generate is back, if it has room then."""
        with self.phase("offload"):
            room.rest()
            room.reload()

    def _send(self) -> None:
        with self.phase("generate"):  # for as long as it takes: the sender waits TIMEOUT_S at most
            self.meet()
        if self.channel is None:
            self.channel = self.open_channel(self.route)
        self._fill(partial(self._transfer, self.channel))

    def _transfer(self, channel: Channel) -> None:
        sent = self.send.defer(channel, self.version)  # train worker 0 sends while the engines receive
        try:
            self.receive(channel)
        except BaseException:
            self._close()  # or the sender would wait for those that do not come
            with contextlib.suppress(ChannelError, DeadlineError):  # which tell of this one
                sent.result()
            raise
        sent.result()

    def _fill(self, load: Callable[[], None]) -> None:
        """Engines load weights, and then have their KV cache; what is in their way on the same devices goes."""
        if self.room is not None:
            with self.phase("offload"):
                self.room.make("weights")
        with self.phase("sync"):
            load()
        if self.room is not None:
            with self.phase("offload"):
                self.room.make("kv_cache")
                self.room.wake()

    def _look(self) -> None:
        """Raises what went wrong of the calls of ``receive`` that are done."""
        done = [call for call in self.receiving if call.done()]
        self.receiving = [call for call in self.receiving if call not in done]
        for call in done:
            call.result()

    def _close(self) -> None:
        """Ends what is under way as well."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.receiving = []


@RayHelper.function(group="driver", execute="first")
def channel_to(route: Route, bucket_mb: float) -> Channel:
    """A channel to all engines of a route."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its process 0 is both the driver and train worker 0
    network: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() else "gloo"
    transport = network if under_torchrun else "auto"
    return Channel(route.num_engines, bucket_mb=bucket_mb, timeout_s=TIMEOUT_S, transport=transport)
