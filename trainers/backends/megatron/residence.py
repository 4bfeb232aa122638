"""Where a model lies: what of it is on the device, and what waits in the memory of the host.

Two reasons send something away. The settings ``param_offload``, ``grad_offload`` and ``optimizer_offload`` do so
whenever it is not in use, and it comes back by itself; ``offload`` does so for an engine on the same device, and until
``reload`` whoever needs it is told so. They go together: what is away already stays where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainers.backends.megatron.settings import MegatronSettings
from trainers.backends.offload import MEMORY, WEIGHTS, Offload


class Residence:
    """Of this worker's ``stages``, which ``chunks`` are with their gradients, and of their ``optimizer`` if any."""

    def __init__(
        self, stages: Sequence[Any], chunks: Sequence[Any], optimizer: Any, settings: MegatronSettings
    ) -> None:
        self.stages, self.chunks, self.optimizer, self.settings = stages, chunks, optimizer, settings
        self.offloaded = Offload()  # for an engine
        self.resting = {WEIGHTS: Offload(), MEMORY: Offload()}  # by the settings
        self.num_users = 0  # of the weights, one within the other: a student that teaches itself is asked in its step

    @contextlib.contextmanager
    def weights_here(self) -> Iterator[None]:
        """Inside, weights are on the device, as the last step left them."""
        self.bring_weights()
        if self.optimizer is not None and self.settings.overlap_param_gather:  # which may wait for a pass
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
        if self.settings.param_offload and not self.num_users:
            self.resting[WEIGHTS].offload(self._weights())

    def bring_weights(self) -> None:
        """They stay until the next ``weights_here`` ends."""
        self.offloaded.check_here(WEIGHTS)
        self.resting[WEIGHTS].reload()

    def check_memory(self) -> None:
        """Raises RuntimeError if what the optimizer remembers is away for an engine."""
        self.offloaded.check_here(MEMORY)

    def bring_memory(self) -> None:
        """What the optimizer remembers stays until ``rest``."""
        self.check_memory()
        if self.settings.optimizer_offload and torch.cuda.is_available():
            torch.cuda.empty_cache()  # it does not fit what activations have left
        self.resting[MEMORY].reload()

    def bring_gradients(self) -> None:
        """Room for them, with anything in it."""
        for memory in self._gradients():
            memory.untyped_storage().resize_(memory.nbytes)

    def rest(self) -> None:
        """Behind a step: what the settings want away."""
        if self.settings.optimizer_offload:
            self.resting[MEMORY].offload(self._memory())
        if self.settings.grad_offload:
            self._drop_gradients()

    def offload(self, *, model: bool, optimizer: bool) -> None:
        """Weights, what the optimizer remembers, or both; with the latter gradients go, nowhere: they are of a step."""
        if model:
            self.offloaded.offload(self._weights(), WEIGHTS)
        if optimizer and self.optimizer is not None:
            self.offloaded.offload(self._memory(), MEMORY)
            self._drop_gradients()

    def reload(self) -> None:
        """What ``offload`` moved."""
        self.offloaded.reload()

    def _weights(self) -> list[torch.Tensor]:
        return [tensor for stage in self.stages for tensor in (*stage.parameters(), *stage.buffers())]

    def _memory(self) -> list[torch.Tensor]:
        """The optimizer's states and its own copies of weights; in float32 it may have parts of the model's instead."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self._weights()}
        found = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            found += [value for entries in one.optimizer.state.values() for value in entries.values()]
        return [value for value in found if torch.is_tensor(value) and value.untyped_storage().data_ptr() not in own]

    def _gradients(self) -> list[torch.Tensor]:
        chunks = self.chunks if self.optimizer is not None else []
        return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _drop_gradients(self) -> None:
        for memory in self._gradients():
            memory.untyped_storage().resize_(0)
