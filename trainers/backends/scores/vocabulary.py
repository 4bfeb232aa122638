"""A vocabulary whose columns lie in shards over the ranks of a tensor-parallel group.

All that has one value a token is alike on every rank, the loss too; each rank holds some columns of the logits. Every
rank computes the one loss and takes its backward pass, and each gets the gradients of that one loss. So a sum over the
ranks passes its gradient on as it is (``total`` of sums.py: each rank already has all of it), and what goes from a
token to its columns gets the sum of the ranks' gradients (``spread``). A plain all-reduce has neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from trainers.backends.scores import sums
from trainers.losses.vocabulary import Vocabulary

MAX_ID = 2**32 - 1


@dataclass(frozen=True)
class ShardedVocabulary(Vocabulary):
    """The columns [r x shard, (r + 1) x shard) that are below ``size`` are those of rank r; it may have none.

    Values come without the columns that pad a shard behind ``size``. Every rank of the group calls every method.
    """

    size: int
    shard: int
    group: dist.ProcessGroup

    def __post_init__(self) -> None:
        places = self.shard * dist.get_world_size(self.group)
        assert self.size <= places, f"{self.size} columns do not fit into {places}"

    @property
    def start(self) -> int:
        """The id of the first column here."""
        return dist.get_rank(self.group) * self.shard

    @property
    def width(self) -> int:
        """How many columns are here."""
        return min(max(self.size - self.start, 0), self.shard)

    def check(self, values_NV: torch.Tensor) -> None:
        """Raises AssertionError unless they have the columns that are here, and no padding."""
        assert values_NV.shape[-1] == self.width, f"{values_NV.shape[-1]} columns are given, {self.width} are here"

    def size_of(self, values_NV: torch.Tensor) -> int:
        return self.size

    def widest(self, own_columns: int) -> int:
        return self.shard

    def cut(self, values_NV: torch.Tensor, size: int) -> tuple[torch.Tensor, Vocabulary]:
        vocabulary = replace(self, size=min(size, self.size))
        return values_NV[..., : vocabulary.width], vocabulary

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        return sums.spread(values, self.group)

    def total(self, values_NV: torch.Tensor) -> torch.Tensor:
        return sums.total(values_NV.sum(-1), self.group)

    def mean(self, values_NV: torch.Tensor) -> torch.Tensor:
        return self.total(values_NV) / self.size

    def logsumexp(self, values_NV: torch.Tensor) -> torch.Tensor:
        self.check(values_NV)
        return _LogTotal.apply(values_NV.logsumexp(-1), self)  # type: ignore[no-any-return, no-untyped-call]

    def softmax(self, values_NV: torch.Tensor) -> torch.Tensor:
        return self.log_softmax(values_NV).exp()

    def log_softmax(self, values_NV: torch.Tensor) -> torch.Tensor:
        return values_NV - self.spread(self.logsumexp(values_NV)).unsqueeze(-1)

    def pick(self, values_NV: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if ids.dim() < values_NV.dim():
            return self.pick(values_NV, ids.unsqueeze(-1)).squeeze(-1)
        places = self.places(ids)
        found = _not_empty(values_NV).gather(-1, places.clamp(min=0)).masked_fill(places < 0, 0.0)
        return sums.total(found, self.group)

    def marked(self, values_NV: torch.Tensor, ids_NK: torch.Tensor, counts_NK: torch.Tensor) -> torch.Tensor:
        places = self.places(ids_NK)
        places = places.where(places >= 0, self.width)  # one more column, for what is not here
        counts_NV = values_NV.new_zeros(*values_NV.shape[:-1], self.width + 1)
        return counts_NV.scatter_add_(-1, places, counts_NK.to(counts_NV.dtype))[..., :-1] > 0

    def argmax(self, values_NV: torch.Tensor) -> torch.Tensor:
        values, places = _not_empty(values_NV.detach()).max(-1)
        keys = _keys(values, places + self.start)
        dist.all_reduce(keys, dist.ReduceOp.MAX, group=self.group)
        return _ids_of(keys)

    def topk(self, values_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest values (..., k), in order, and their ids, the lowest of equal ones first; no gradient.

        Each rank's own k are the candidates.
        """
        assert k <= self.size, f"the {k} largest of {self.size}"
        keys = _keys(values_NV.detach(), torch.arange(self.start, self.start + self.width, device=values_NV.device))
        keys = keys.topk(min(k, self.width), dim=-1).values
        none = torch.iinfo(torch.int64).min
        candidates = self.gather(torch.nn.functional.pad(keys, (0, k - keys.shape[-1]), value=none))
        best = candidates.movedim(0, -2).flatten(-2).topk(k, dim=-1).values
        return _values_of(best), _ids_of(best)

    def gathered(self, values_NV: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(values_NV.detach(), (0, self.shard - self.width))
        return self.gather(padded).movedim(0, -2).flatten(-2)[..., : self.size]

    def own(self, values_NV: torch.Tensor) -> torch.Tensor:
        return values_NV[..., self.start : self.start + self.width]

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        places = ids - self.start
        return places.where((places >= 0) & (places < self.width), -1)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(ranks, ...) the values of every rank, which have one shape; no gradient."""
        found = values.new_empty(dist.get_world_size(self.group), *values.shape)
        dist.all_gather(list(found.unbind()), values.contiguous(), group=self.group)
        return found


class _LogTotal(torch.autograd.Function):
    """log(sum(exp)) over the ranks, of one number each."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, vocabulary: ShardedVocabulary) -> torch.Tensor:
        total = vocabulary.gather(own).logsumexp(0)
        ctx.save_for_backward(own, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own, total = ctx.saved_tensors
        return gradient * (own - total).exp(), None


def _not_empty(values_NV: torch.Tensor) -> torch.Tensor:
    """With a column of -inf where there is none, so that each rank takes the same operations."""
    return values_NV if values_NV.shape[-1] else torch.nn.functional.pad(values_NV, (0, 1), value=-torch.inf)


def _keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the float32 values, and of equal ones the lowest id last: a value and its id in one."""
    bits = (values.float() + 0.0).view(torch.int32)  # -0.0 is 0.0
    return (_ordered(bits).long() << 32) + (MAX_ID - ids)


def _values_of(keys: torch.Tensor) -> torch.Tensor:
    return _ordered((keys >> 32).int()).view(torch.float32)


def _ids_of(keys: torch.Tensor) -> torch.Tensor:
    return MAX_ID - (keys & MAX_ID)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """int32 that order as the floats of these bits do; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
