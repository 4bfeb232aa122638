"""The questions a training backend answers. ``fsdp.py`` answers them with transformers; ``megatron.py`` will.

Unless said otherwise **every rank** of the role calls a method, with its own slice of the batch; a slice may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from trainers.batch import Ragged, Sequences
from trainers.metrics import Metrics

BatchT = TypeVar("BatchT", bound=Sequences, contravariant=True)


class LossFunction(Protocol[BatchT]):
    """The loss of one micro-batch.

    ``logps_BT`` and ``entropy_BT`` (float32, entropy without gradient unless asked for) and ``mask_BT`` (bool) hold one
    entry a target token, left-aligned: T is the largest number of targets of a row, and mask_BT says which exist.
    ``micro`` is the micro-batch itself; its ragged per-target columns pad to the same (B, T).
    The value must already be divided by the normaliser of the whole optimizer step over all workers, so that the
    backend only ever *sums* over micro-batches and workers.
    """

    def __call__(
        self, logps_BT: torch.Tensor, entropy_BT: torch.Tensor, mask_BT: torch.Tensor, micro: BatchT, metrics: Metrics
    ) -> torch.Tensor: ...


class Backend(Protocol):
    """A model in training (or only scoring), spread over the workers of a role."""

    module: Any  # the model, for engines that share it

    def token_logps(self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0) -> Ragged:
        """float32 log-probabilities of each row's targets under softmax(logits / temperature); no gradient."""
        ...

    def step(
        self,
        sequences: Sequences,
        loss_function: LossFunction[Any],
        *,
        micro_batch_size: int,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> Metrics:
        """One optimizer step; gradients are summed over micro-batches and ranks.

        Returns what the loss function added, and ``loss`` (sum), ``grad_norm`` before clipping and ``learning_rate``
        that the step used (same).
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, one at a time."""
        ...

    def save(self, folder: Path) -> None:
        """Writes model (a Hugging Face folder), optimizer, scheduler and every rank's RNG state into ``folder``."""
        ...

    def export(self, folder: Path) -> None:
        """Writes the model alone, as a Hugging Face folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit."""
        ...
