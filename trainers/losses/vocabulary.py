"""What losses ask about the columns of logits (..., V): sums, picks and maxima over the vocabulary.

``WHOLE``: all columns are here, and the answers are plain torch. Where they lie in shards on several processes,
``backends/scores/vocabulary.py`` answers the same questions with the same gradients, so that a loss is written once.
"""

from __future__ import annotations

import torch


class Vocabulary:
    """A vocabulary whose columns are all in this process. Answers without V hold one value for each row of logits."""

    def size_of(self, values_NV: torch.Tensor) -> int:
        """The columns of all processes together."""
        return values_NV.shape[-1]

    def widest(self, own_columns: int) -> int:
        """The most columns that a process holds, where this one holds ``own_columns``."""
        return own_columns

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Where ``ids`` stand among the columns here; -1 for those that others hold."""
        return ids

    def cut(self, values_NV: torch.Tensor, size: int) -> tuple[torch.Tensor, Vocabulary]:
        """What is here of the columns below ``size``, and their vocabulary."""
        return values_NV[..., :size], self

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """What every process has alike, on its way to columns: its gradient is summed over all of them."""
        return values

    def total(self, values_NV: torch.Tensor) -> torch.Tensor:
        """The sum over the vocabulary."""
        return values_NV.sum(-1)

    def mean(self, values_NV: torch.Tensor) -> torch.Tensor:
        """The mean over the vocabulary."""
        return values_NV.mean(-1)

    def logsumexp(self, values_NV: torch.Tensor) -> torch.Tensor:
        """log(total(exp(values)))."""
        return values_NV.logsumexp(-1)

    def softmax(self, values_NV: torch.Tensor) -> torch.Tensor:
        """(..., V) the columns of the softmax that are here."""
        return values_NV.softmax(-1)

    def log_softmax(self, values_NV: torch.Tensor) -> torch.Tensor:
        """(..., V) the columns of the log-softmax that are here."""
        return values_NV.log_softmax(-1)

    def pick(self, values_NV: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The values at ``ids``, one for each row (...) or K (..., K)."""
        if ids.dim() == values_NV.dim():
            return values_NV.gather(-1, ids)
        return values_NV.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def marked(self, values_NV: torch.Tensor, ids_NK: torch.Tensor, counts_NK: torch.Tensor) -> torch.Tensor:
        """(..., V) bool: the columns that ``ids`` name, in an entry of which ``counts`` is True."""
        return torch.zeros_like(values_NV).scatter_add(-1, ids_NK, counts_NK.float()) > 0

    def argmax(self, values_NV: torch.Tensor) -> torch.Tensor:
        """The id of the largest value, the lowest one of several."""
        return values_NV.argmax(-1)

    def topk(self, values_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest values (..., k), in order, and their ids."""
        values, ids = values_NV.topk(k, dim=-1)
        return values, ids

    def take(self, values_NV: torch.Tensor, held_by: Vocabulary) -> torch.Tensor:
        """The columns that this vocabulary has here, of values whose columns lie as ``held_by`` says; no gradient."""
        return values_NV if held_by == self else self.own(held_by.gathered(values_NV))

    def gathered(self, values_NV: torch.Tensor) -> torch.Tensor:
        """(..., V) all columns; no gradient."""
        return values_NV

    def own(self, values_NV: torch.Tensor) -> torch.Tensor:
        """Those of all columns that are here."""
        return values_NV


WHOLE = Vocabulary()
