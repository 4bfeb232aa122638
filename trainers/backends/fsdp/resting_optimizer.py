"""An optimizer whose states wait in the memory of the host: they come a piece at a time, to change some weights.

While a piece is at work the next one comes and the one before goes, so that a step takes as long as the copies of one
direction, and needs room for two pieces. Reading all states takes room for those of one weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainers.backends.fsdp.optimizer import load_whole_state, whole_state
from trainers.backends.offload import Home, HostMemory

PIECE_BYTES = 512 * 2**20  # of weights, whose states are twice that with AdamW; a larger weight is a piece of its own


class RestingOptimizer:
    """Changes the weights as ``optimizer`` would, bit for bit: any whose states are those of one weight each.

    ``device``: of the weights (tests: the CPU).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.optimizer, self.device, self.piece_bytes = optimizer, device, piece_bytes
        self.memory = HostMemory(device.type)
        self.homes: dict[torch.Tensor, list[Home]] = {}  # of each weight's states, as long as they are the same ones
        on_gpu = device.type == "cuda"
        self.coming, self.going = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._rest()  # some optimizers begin with states

    def step(self) -> None:
        """Each weight that has a gradient is changed, and loses it."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        gradients = {weight: weight.grad for weight in weights if weight.grad is not None}
        for weight in gradients:
            weight.grad = None
        if self.coming is not None:
            torch.cuda.empty_cache()  # what activations have left is cut in other sizes
        try:
            self._step(list(self._pieces(gradients)), gradients)
        except BaseException:
            if self.coming is not None:
                self.coming.synchronize()
            self._rest()
            raise

    def whole_state(self) -> dict[str, Any]:
        """As ``optimizer.whole_state``."""
        return whole_state(self.optimizer, here=self._here)

    def load_whole_state(self, state: Mapping[str, Any]) -> None:
        """As ``optimizer.load_whole_state``; what was there before is dropped first."""
        self.homes, self.memory.used = {}, 0
        self.optimizer.state.clear()
        load_whole_state(self.optimizer, state, loaded=lambda weight: self._free(*self._send([weight])))

    def _step(self, pieces: list[list[torch.Tensor]], gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        leaving: tuple[Sequence[Home], torch.cuda.Event | None] = ((), None)
        coming = self._bring(pieces[0]) if pieces else None
        for k, piece in enumerate(pieces):
            self._free(*leaving)
            here, coming = coming, self._bring(pieces[k + 1]) if k + 1 < len(pieces) else None
            if here is not None:
                torch.cuda.current_stream(self.device).wait_event(here)
            for weight in piece:
                weight.grad = gradients.pop(weight)
            self.optimizer.step()
            for weight in piece:
                weight.grad = None
            leaving = self._send(piece)
        self._free(*leaving)

    def _rest(self) -> None:
        """All states that are here go."""
        self._free(*self._send(self.optimizer.state))

    @contextlib.contextmanager
    def _here(self, weight: torch.Tensor) -> Iterator[None]:
        """Inside, the states of a weight are on the device, to be read."""
        away = [home for home in self.homes.get(weight, []) if not home.storage.nbytes()]
        if (here := self._bring([weight])) is not None:
            here.synchronize()
        try:
            yield
        finally:
            self._free(away, None)

    def _pieces(self, weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        piece: list[torch.Tensor] = []
        room = self.piece_bytes
        for weight in weights:
            num_bytes = (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
            if piece and num_bytes > room:
                yield piece
                piece, room = [], self.piece_bytes
            piece.append(weight)
            room -= num_bytes
        if piece:
            yield piece

    def _bring(self, weights: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
        """What is away of their states begins to come, and is here with the event. All of it, or, failing, nothing."""
        homes = [home for weight in weights for home in self.homes.get(weight, []) if not home.storage.nbytes()]
        try:
            for home in homes:
                home.allocate()  # where the stream of the optimizer may, behind all that it has been given so far
            with self._beside(self.coming):
                for home in homes:
                    home.give()
                return None if self.coming is None else self.coming.record_event()
        except BaseException:
            if self.coming is not None:
                self.coming.synchronize()
            self._free(homes, None)
            raise

    def _send(self, weights: Iterable[torch.Tensor]) -> tuple[list[Home], torch.cuda.Event | None]:
        """Their states begin to go; ``_free`` ends that."""
        homes = [home for weight in weights for home in self._homes(weight) if home.storage.nbytes()]
        with self._beside(self.going):
            for home in homes:
                home.take()
            return homes, None if self.going is None else self.going.record_event()

    def _free(self, homes: Sequence[Home], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        for home in homes:
            home.free()

    def _homes(self, weight: torch.Tensor) -> list[Home]:
        """Where the states of a weight are kept. What the optimizer puts in the place of one later stays here."""
        if weight not in self.homes:
            states = self.optimizer.state.get(weight, {}).values()
            homes = self.memory.homes(state for state in states if torch.is_tensor(state))
            if not homes:
                return []
            self.homes[weight] = homes
        return self.homes[weight]

    @contextlib.contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Inside, work is given to ``stream``, and comes behind all that this one has been given so far."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
