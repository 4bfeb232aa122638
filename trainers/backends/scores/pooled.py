"""Models that answer with one row of numbers for each sequence: embeddings, and the classifiers of encoders.

A sequence has one target, its last token, which says where it ends. Models that see tokens to their right, such as
BERT, are called with a mask of the padding; ``sees_ahead`` asks the model itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from trainers.backends.fsdp.documents import Way
from trainers.backends.fsdp.hf_model import ModelHead, evaluating
from trainers.backends.fsdp.packed_attention import single_documents
from trainers.backends.scores.inputs import Dummy, Inputs
from trainers.backends.scores.scorer import Scorer, ValueScorer, arguments_of, joining, of_all

if TYPE_CHECKING:
    from trainers.backends.fsdp.sequence_attention import SequenceRanks

Pooling = Literal["last", "mean", "cls"]


def scorer_of(
    model: Any, head: ModelHead, *, pooling: Pooling, room: int, way: Way | None, ranks: SequenceRanks | None
) -> Scorer | ValueScorer | EmbeddingScorer | ClassifierScorer:
    """What answers for a model with such a head."""
    if head == "lm":
        return Scorer(model, way=way, ranks=ranks, room=room)
    if head == "embedding":
        return EmbeddingScorer(model, pooling, way=way, ranks=ranks)
    return ClassifierScorer(model, ranks=ranks) if is_whole(model) else ValueScorer(model, way=way, ranks=ranks)


class EmbeddingScorer(torch.nn.Module):
    """The hidden states of each sequence, pooled: its last token's, the mean over its tokens, or its first token's."""

    def __init__(
        self, model: Any, pooling: Pooling, *, way: Way | None = None, ranks: SequenceRanks | None = None
    ) -> None:
        super().__init__()
        self.model, self.pooling, self.way, self.ranks = model, pooling, way, ranks
        self.is_bidirectional = sees_ahead(model)
        self.dummy: Dummy | None = None  # as of ``Scorer``
        check_shared(self.ranks, pooling == "last" and not self.is_bidirectional)
        if (pooler := getattr(model, "pooler", None)) is not None:  # of BERT: what it gives is not read
            pooler.requires_grad_(False)

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor]:
        """(N, H) float32, of the N sequences in order."""
        with single_documents(inputs), joining(self.model, inputs, self.dummy):
            given = arguments_of(self.model, inputs, self.way, self.ranks)
            given |= padding_mask(inputs) if self.is_bidirectional else {"use_cache": False}
            hidden_TH = self.model(**given).last_hidden_state.flatten(0, 1)
        return (of_all(pooled(hidden_TH, inputs, self.pooling), inputs, self.ranks),)


class ClassifierScorer(torch.nn.Module):
    """The numbers that the classifier of an encoder gives each sequence."""

    def __init__(self, model: Any, *, ranks: SequenceRanks | None = None) -> None:
        super().__init__()
        self.model = model
        self.dummy: Dummy | None = None  # as of ``Scorer``
        check_shared(ranks, False)

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor]:
        """(N,) float32; (N, K) of a classifier with K labels, if they are several."""
        logits_BK = self.model(input_ids=inputs.input_ids_BT, **padding_mask(inputs)).logits.float()
        rows_N = inputs.places_N // inputs.input_ids_BT.shape[1]
        return (logits_BK.index_select(0, rows_N).squeeze(-1),)


def check_shared(ranks: SequenceRanks | None, can: bool) -> None:
    """Raises ValueError where ranks share rows, and the numbers need other tokens than each rank's own."""
    if ranks is not None and not can:
        raise ValueError("sequence_parallel_size: rows are shared by decoders only with pooling last. Write 1.")


@torch.no_grad()
def sees_ahead(model: Any) -> bool:
    """Whether another last token changes the hidden state of the first one."""
    ids_BT = torch.arange(4, device=next(model.parameters()).device).repeat(2, 1) + 5
    ids_BT[1, -1] += 1
    with evaluating(model):
        first_BH = model(input_ids=ids_BT).last_hidden_state[:, 0].float()
    return not torch.allclose(first_BH[0], first_BH[1], rtol=1e-4, atol=1e-6)


def padding_mask(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The mask of the tokens up to each row's target, by the name that models give it."""
    rows, width = inputs.input_ids_BT.shape
    ends_B = torch.full((rows,), width, device=inputs.input_ids_BT.device)
    ends_B = ends_B.index_copy(0, inputs.places_N // width, inputs.places_N % width + 1)
    return {"attention_mask": (torch.arange(width, device=ends_B.device) < ends_B[:, None]).long()}


def pooled(hidden_TH: torch.Tensor, inputs: Inputs, pooling: Pooling) -> torch.Tensor:
    """(N, H) float32, of the N sequences that end at ``inputs.places_N`` of the flattened hidden states."""
    ends_N = inputs.places_N
    if pooling == "last":
        return hidden_TH.index_select(0, ends_N).float()
    width = inputs.input_ids_BT.shape[1]
    starts_N = ends_N // width * width
    if inputs.document_starts is not None:
        starts = inputs.document_starts.long()
        starts_N = starts[torch.searchsorted(starts, ends_N, right=True) - 1]
    if pooling == "cls":
        return hidden_TH.index_select(0, starts_N).float()
    lengths_N = ends_N - starts_N + 1
    owners_M = torch.repeat_interleave(torch.arange(len(ends_N), device=ends_N.device), lengths_N)
    before_N = lengths_N.cumsum(0) - lengths_N
    places_M = torch.arange(len(owners_M), device=ends_N.device) + (starts_N - before_N)[owners_M]
    sums_NH = hidden_TH.new_zeros(len(ends_N), hidden_TH.shape[1], dtype=torch.float32)
    sums_NH = sums_NH.index_add(0, owners_M, hidden_TH.index_select(0, places_M).float())
    return sums_NH / lengths_N[:, None]


def is_whole(model: Any) -> bool:
    """Whether a sequence classifier reads off its numbers itself: that of an encoder has no plain layer ``score``."""
    return not hasattr(model, "score") and hasattr(model, "classifier")
