"""The questions a training backend answers: ``fsdp/backend.py`` with transformers, ``megatron/`` with megatron-core.

Unless said otherwise **every rank** of the role calls a method, with its own slice of the batch; a slice may be empty.
A backend has one of two heads. ``lm``: scores of target tokens, for policies, references and teachers. ``value``: one
number a target token, for critics and reward models, or several, for classifiers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from trainers.batch import Ragged, Sequences
from trainers.losses.vocabulary import WHOLE, Vocabulary
from trainers.metrics import Metrics

BatchT = TypeVar("BatchT", contravariant=True)


@dataclass
class SentWeights:
    """What ``parts/weights.py`` remembers of a backend's weights."""

    to: Any = None  # the engine, or the identity of the channel, that has got all of them
    prints: dict[str, torch.Tensor] = field(default_factory=dict)  # fingerprints by name, as they were when last sent


class Steppable(Protocol):
    """What a backend learns from: a batch whose rows become sequences.

    A row of ``Sequences`` is one sequence; a row of ``Preferences`` is a pair.
    Micro-batches never tear a row apart.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...
    def as_sequences(self) -> Sequences: ...
    def row_lengths(self) -> Any: ...  # (rows,) int64: tokens of each row, of all its sequences, padded to the longest


def token_lengths(batch: Steppable, *, padded: bool) -> Any:
    """(rows,) int64: the tokens of each row; without padding by ``unpadded_lengths``, if the batch has that."""
    unpadded = None if padded else getattr(batch, "unpadded_lengths", None)
    return batch.row_lengths() if unpadded is None else unpadded()


class LossFunction(Protocol[BatchT]):
    """The loss of one micro-batch.

    ``logps_BT`` and ``entropy_BT`` (float32, entropy without gradient unless asked for) and ``mask_BT`` (bool) hold one
    entry a target token, left-aligned: T is the largest number of targets of a row, and mask_BT says which exist.
    ``micro`` is the micro-batch itself, whose ragged per-target columns pad to the same (B, T); B are the rows of
    ``micro.as_sequences()``. ``extra`` holds, as (B, T) under the names ``<name>_BT``, what a ``TokenFunction`` found.
    The value must already be divided by the normaliser of the whole optimizer step over all workers, so that the
    backend only ever *sums* over micro-batches and workers.

    With a value head it is called as ``(values_BT, mask_BT, micro, metrics)``; with several
    labels values_BT is (B, T, K).
    """

    def __call__(
        self,
        logps_BT: torch.Tensor,
        entropy_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        micro: BatchT,
        metrics: Metrics,
        **extra: torch.Tensor,
    ) -> torch.Tensor: ...


class TokenFunction(Protocol):
    """Further numbers of each target token that need all of its logits; they are made a chunk of tokens at a time.

    ``inputs`` is called once a micro-batch, before the model, and gives tensors whose first dimension is the N targets
    of ``micro.as_sequences()``, in order, without gradient. ``__call__`` gets the float32 logits of some of these
    targets, not divided by any temperature, and the same rows of the inputs; it gives one float32 number a target and
    name. What needs a gradient stands before what has none. It is called again in the backward pass. The logits are
    those columns of ``vocabulary`` that this process holds, so whatever looks along V asks the vocabulary.
    """

    names: tuple[str, ...]

    def inputs(self, micro: Any) -> tuple[torch.Tensor, ...]: ...

    def __call__(
        self, logits_NV: torch.Tensor, *inputs: torch.Tensor, vocabulary: Vocabulary = WHOLE
    ) -> tuple[torch.Tensor, ...]: ...


class Backend(Protocol):
    """A model in training (or only scoring), spread over the workers of a role."""

    module: Any  # the model, for engines that share it
    sent: SentWeights
    vocabulary: Vocabulary  # the columns of logits that this process holds

    @property
    def trains_part(self) -> bool:
        """Whether training leaves some of the weights as they are: those that a LoRA adapter does not change."""
        ...

    def token_logps(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> Ragged:
        """float32 log-probabilities of each row's targets under softmax(logits / temperature); no gradient.

        ``adapter=False``: of the model without its LoRA adapter.
        """
        ...

    def token_scores(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """What ``token_logps`` gives, and float32 entropies, in nats, of the distributions the targets come from."""
        ...

    def token_values(self, sequences: Sequences, *, micro_batch_size: int) -> Ragged:
        """float32 values at each row's targets, of a value head; no gradient."""
        ...

    def top_logps(
        self, sequences: Sequences, k: int, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """The k likeliest ids at each row's targets (values (N, k) int64) and their log-probabilities (float32)."""
        ...

    def target_features(self, sequences: Sequences, *, adapter: bool = True) -> torch.Tensor:
        """(N, H) what ``logits`` takes, of the N targets of all rows, in one pass on the device; no gradient."""
        ...

    def logits(self, features_NX: torch.Tensor) -> torch.Tensor:
        """(N, V) float32 logits that predict the targets: the columns of ``vocabulary``."""
        ...

    def step(
        self,
        batch: Any,
        loss_function: Any,
        *,
        micro_batch_size: int,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        token_function: TokenFunction | None = None,
    ) -> Metrics:
        """One optimizer step; gradients are summed over micro-batches and ranks.

        A step whose loss or gradient norm is not finite on some rank changes nothing on any (``finite.py``).

        Returns what the loss function added, and ``loss`` (sum), ``grad_norm`` before clipping and ``learning_rate``
        that the step used (same), and what ``throughput.add_work`` adds.
        """
        ...

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, every rank holds all weights, so that an engine that shares the module may run at its own pace."""
        ...

    def named_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, one at a time; a LoRA adapter is merged into them.

        ``trained_only``: those alone that training under an adapter can change.
        """
        ...

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices of the LoRA adapter, under peft's names, one at a time; its scaling is in those called B."""
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights in place."""
        ...

    def mix_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]], share: float) -> None:
        """weights = share x given + (1 - share) x own, in place: a reference that follows a policy."""
        ...

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Moves weights, what the optimizer remembers, or both to the memory of the host."""
        ...

    def reload(self) -> None:
        """Brings back what ``offload`` moved."""
        ...

    def save(self, folder: Path) -> None:
        """Writes model (a Hugging Face folder), optimizer, scheduler and every rank's RNG state into ``folder``.

        With a LoRA adapter the model is the adapter alone. A backend may go on writing when this has returned: until
        all is there ``checkpoint.Writing`` marks the folder, and the next ``save``, ``load`` or ``export`` waits.
        """
        ...

    def export(self, folder: Path) -> None:
        """Writes the model alone, as a Hugging Face folder; a LoRA adapter is merged, and written into ``adapter``."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit, on any number of ranks."""
        ...
