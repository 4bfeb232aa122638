"""What a model of the ``fsdp`` backend says of tokens, and how it is run: half of ``FsdpBackend``, which builds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from trainers.backends.base import token_lengths
from trainers.backends.fsdp.hf_model import evaluating
from trainers.backends.fsdp.one_worker.low_weights import LowWeights
from trainers.backends.fsdp.sequence_attention import SequenceRanks
from trainers.backends.fsdp.sharding import most_of_ranks, reshard
from trainers.backends.fsdp.token_room import ScoringRoom
from trainers.backends.fsdp.tuners.adapters import without_adapter
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.offload import WEIGHTS, Offload
from trainers.backends.random_state import unmoved
from trainers.backends.scores.inputs import ReadAt, in_order, micro_batches, model_inputs, targets_of_rows
from trainers.backends.scores.scorer import Scorer
from trainers.backends.scores.shared_prompts import shared_inputs
from trainers.backends.scores.top_logps import TopLogps
from trainers.batch import Ragged, Sequences


class Scoring:
    """Scores without gradients. The fields are those of the backend."""

    module: Any
    scorer: Any
    adapted: Any
    device: torch.device
    dtype: torch.dtype
    read_at: ReadAt
    padding_free: bool
    token_budget: int | None
    scoring_room: ScoringRoom | None
    vision: Vision | None
    sharing: SequenceRanks | None
    offloaded: Offload
    low: LowWeights | None  # of a single worker
    casts: bool  # by autocast
    is_sharded: bool
    shares_prompts: bool  # completions of one prompt may stand in one row
    compiles_learning: bool  # layers are compiled for passes that learn alone

    def token_logps(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> Ragged:
        """float32 log-probabilities of each row's targets under softmax(logits / temperature).

        Any rank, alone too, unless weights lie in shards. Without dropout they are, bit for bit, those that ``step``
        finds for the same micro-batches; within rounding, where its passes are captured or compiled.
        """
        return self._each(sequences, micro_batch_size, lambda scores: scores[:1], 1, temperature, adapter)[0]

    def token_scores(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """The log-probabilities of ``token_logps``, and the entropies at the same targets. As ``token_logps``."""
        logps, entropies = self._each(sequences, micro_batch_size, lambda scores: scores[:2], 2, temperature, adapter)
        return logps, entropies

    def token_values(self, batch: Any, *, micro_batch_size: int, as_in_step: bool = False) -> Ragged:
        """float32 values at each row's targets, of a value head: (N,), or (N, num_labels) if there are several.

        As ``token_logps``. ``as_in_step``: with the dropout that the next ``step`` of the same batch will have.
        """
        with unmoved(self.device) if as_in_step else contextlib.nullcontext():
            return self._each(batch, micro_batch_size, lambda values: values, 1, as_in_step=as_in_step)[0]

    def top_logps(
        self, sequences: Sequences, k: int, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """The k likeliest ids at each row's targets (values (N, k)) and their log-probabilities. As ``token_logps``."""
        function = TopLogps(k, temperature)
        logps, ids = self._each(
            sequences, micro_batch_size, lambda scores: scores.further, 2, temperature, adapter, token_function=function
        )
        return Ragged(ids.values.astype(np.int64), ids.offsets), logps

    @contextlib.contextmanager
    def _without_adapter(self, without: bool) -> Iterator[None]:
        """Inside, the adapter takes no part. Weights are sharded as it goes and comes back: what is gathered meanwhile
        would stay without gradient, as layers do that are not sharded again after a forward pass."""
        if not without or self.adapted is None:
            yield
            return
        self._settle()
        with without_adapter(self.adapted):
            yield
            self._settle()

    @torch.no_grad()
    def target_features(self, sequences: Sequences, *, adapter: bool = True) -> torch.Tensor:
        """(N, H) what ``logits`` takes, of the targets of all rows in one pass. Every rank if weights lie in shards."""
        self.offloaded.check_here(WEIGHTS)
        self._agree_on_towers(sequences)
        with evaluating(self.module), self._without_adapter(not adapter), self._uncompiled():
            features_NX: torch.Tensor = self._run(self.scorer, sequences, temperature=1.0, features_only=True)[0]
        return features_NX

    def logits(self, features_NX: torch.Tensor) -> torch.Tensor:
        """(N, V) float32 logits of what ``target_features`` gave."""
        with self._computing():
            logits_NV: torch.Tensor = self.scorer.head.logits(features_NX)
        return logits_NV

    @torch.no_grad()
    def _each(
        self,
        batch: Any,
        micro_batch_size: int,
        pick: Callable[[Any], tuple[torch.Tensor, ...]],
        num_columns: int,
        temperature: float = 1.0,
        adapter: bool = True,
        as_in_step: bool = False,
        **settings: Any,
    ) -> list[Ragged]:
        """The columns that ``pick`` takes of each micro-batch's scores, in the order of the rows."""
        self.offloaded.check_here(WEIGHTS)
        room = None if as_in_step else self.scoring_room
        rows = self._cut(batch, micro_batch_size, self.token_budget if room is None else room.budget())
        mode = contextlib.nullcontext() if as_in_step else evaluating(self.module)
        columns: list[list[torch.Tensor]] = [[] for _ in range(num_columns)]
        self._agree_on_towers(batch)
        with mode, self._without_adapter(not adapter), self._holding(), self._uncompiled():
            for k in range(most_of_ranks(len(rows), self.device) if self.is_sharded else len(rows)):
                micro = batch[rows[k]].as_sequences() if k < len(rows) else None
                scores = pick(self._run(self.scorer, micro, temperature=temperature, **settings))
                if micro is not None:
                    for column, values in zip(columns, scores, strict=True):  # wide ones would fill the device
                        column.append(values if values.dim() == 1 else values.cpu())
        if not rows:
            return [Ragged.of([], np.float32) for _ in columns]
        counts = np.concatenate([targets_of_rows(batch[part]) for part in rows])
        return [in_order([Ragged.split(torch.cat(parts).cpu().numpy(), counts)], rows) for parts in columns]

    def _agree_on_towers(self, batch: Any) -> None:
        """All ranks run a tower in shards as often in each pass: every rank calls it before its passes."""
        if self.is_sharded and self.vision is not None and self.scorer.dummy is not None:
            most = self.vision.num_towers(batch.as_sequences().images)
            self.scorer.dummy.num_towers = most_of_ranks(most, self.device)

    def _run(self, forward: torch.nn.Module, micro: Sequences | None, **settings: Any) -> Any:
        micro = Sequences(Ragged.of([], np.int64), Ragged.of([], bool)) if micro is None else micro
        sharing = None if self.sharing is None else (self.sharing.index, self.sharing.size)
        told: dict[str, Any] = {"padding_free": self.padding_free, "read_at": self.read_at, "sharing": sharing}
        inputs = shared_inputs(micro, self.device) if self.shares_prompts else None
        if inputs is None:
            inputs = model_inputs(micro, self.device, **told, vision=self.vision)
        if not isinstance(self.scorer, Scorer):
            settings = {}
        with self._computing():
            return forward(inputs, **settings)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, the model runs in ``dtype``."""
        with self._holding(), torch.autocast(self.device.type, self.dtype, enabled=self.casts):
            yield

    def _holding(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the weights that it runs with."""
        return contextlib.nullcontext() if self.low is None else self.low.held()

    def _cut(self, batch: Any, micro_batch_size: int, budget: int | None) -> list[np.ndarray]:
        lengths = token_lengths(batch, padded=not self.padding_free)
        return micro_batches(lengths, micro_batch_size, token_budget=budget, padding_free=self.padding_free)

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, layers run as written, if they are compiled for passes that learn alone."""
        return torch.compiler.set_stance("force_eager") if self.compiles_learning else contextlib.nullcontext()

    def _settle(self) -> None:
        """Weights as they are kept, before they are read or written."""
        self.offloaded.check_here(WEIGHTS)
        if self.is_sharded:
            reshard(self.scorer)
