"""What a LoRA adapter adds to one parallel layer of megatron-core, or to the experts of one.

A layer whose output is cut over workers (queries, keys and values; gate and up) has A whole on each and B cut by rows;
one whose input is cut has A cut by columns and B whole. What is whole is equal on all workers: where each sees its own
tokens only (sequence parallelism), megatron-core sums the gradient over them; else each finds all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch.nn.functional import dropout, linear, pad

from trainers.backends.megatron.grouped_experts import ALIGNED, GroupedExperts, grouped_product
from trainers.backends.megatron.tensors.sources import Source
from trainers.backends.scores.sums import spread


class LowRank(torch.nn.Module):
    """(S, 1, O) to be added to the product of the layer ``base``: scaling x B A x, in the dtype of x; float32 weights.

    ``layer`` says how the rows of the layer are made of tensors of a checkpoint; each of ``targets`` has a pair of
    matrices. The A of one lies above that of the next, and so do the B.
    """

    def __init__(
        self, base: Any, layer: Source, targets: Sequence[str], *, rank: int, scaling: float, dropout: float
    ) -> None:
        super().__init__()
        self.layer, self.targets = layer, targets
        self.rank, self.scaling, self.dropout = rank, scaling, dropout
        self.cuts_output = layer.dim == 0
        self.spreads_sequence, self.group = base.sequence_parallel, base.tp_group
        self.is_on = True
        device = base.weight.device
        self.rows = [layer.part_shape(name)[0] for name in targets]
        self.a = torch.nn.Parameter(torch.zeros(rank * len(targets), layer.shape[1], device=device))
        self.b = torch.nn.Parameter(torch.zeros(sum(self.rows), rank, device=device))
        whole: Any = self.a if self.cuts_output else self.b
        whole.sequence_parallel = self.spreads_sequence
        cut = self.b if self.cuts_output else self.a
        tensor_parallel.set_tensor_model_parallel_attributes(cut, True, layer.dim, 1)

    def forward(self, input_SX: torch.Tensor) -> torch.Tensor:
        if self.dropout and self.training:
            input_SX = self._dropped(input_SX)
        low = self._over_workers(linear(input_SX, self.a.to(input_SX.dtype))) * self.scaling
        pairs = zip(low.split(self.rank, -1), self.b.to(low.dtype).split(self.rows), strict=True)
        added = {name: linear(*pair) for name, pair in zip(self.targets, pairs, strict=True)}
        parts = []
        for name in self.layer.tensors:
            rows = self.layer.part_shape(name)[0]
            part = added[name] if name in added else low.new_zeros(*low.shape[:-1], rows)
            parts.append(part.unflatten(-1, (self.layer.groups, -1)))
        return torch.cat(parts, -1).flatten(-2)

    def delta(self) -> torch.Tensor:
        """float32, in the shape of this worker's weight of the layer: what the adapter makes it another by."""
        delta = self.b.new_zeros(self.layer.shape)
        pairs = zip(self.a.detach().split(self.rank), self.b.detach().split(self.rows), strict=True)
        for name, (a, b) in zip(self.targets, pairs, strict=True):
            self.layer.fill(delta, name, b @ a * self.scaling)
        return delta

    def _over_workers(self, low: torch.Tensor) -> torch.Tensor:
        """A x of the tokens that B is for, summed over workers where the input is cut."""
        moves = {
            (True, True): tensor_parallel.gather_from_sequence_parallel_region,
            (True, False): tensor_parallel.copy_to_tensor_model_parallel_region,
            (False, True): tensor_parallel.reduce_scatter_to_sequence_parallel_region,
            (False, False): tensor_parallel.reduce_from_tensor_model_parallel_region,
        }
        moved: torch.Tensor = moves[self.cuts_output, self.spreads_sequence](low, group=self.group)
        return moved

    def _dropped(self, input_SX: torch.Tensor) -> torch.Tensor:
        """Workers that have the same input drop the same of it."""
        own = not self.cuts_output or self.spreads_sequence
        with tensor_parallel.get_cuda_rng_tracker().fork() if own else contextlib.nullcontext():
            return dropout(input_SX, self.dropout)


class WholeLowRank(torch.nn.Module):
    """(..., O) to be added to what a layer that each worker has whole makes of (..., X): scaling x B A x; in float32.

    That is a router, or a layer of a vision tower. Where each worker's gradient is of its own tokens (``spreads``),
    megatron-core sums the gradients over them. ``forks``: workers see different inputs, and drop different parts.
    """

    def __init__(
        self, weight: torch.Tensor, rank: int, *, scaling: float, dropout: float, spreads: bool, forks: bool
    ) -> None:
        super().__init__()
        self.scaling, self.dropout, self.forks, self.is_on = scaling, dropout, forks, True
        height, width = weight.shape
        self.a = torch.nn.Parameter(torch.zeros(rank, width, device=weight.device))
        self.b = torch.nn.Parameter(torch.zeros(height, rank, device=weight.device))
        for weight in (self.a, self.b):
            weight.sequence_parallel = spreads  # type: ignore[attr-defined]

    def forward(self, input_X: torch.Tensor) -> torch.Tensor:
        if self.dropout and self.training:
            own = tensor_parallel.get_cuda_rng_tracker().fork() if self.forks else contextlib.nullcontext()
            with own:
                input_X = dropout(input_X, self.dropout)
        low = linear(input_X, self.a.to(input_X.dtype)) * self.scaling
        return linear(low, self.b.to(input_X.dtype))

    def delta(self) -> torch.Tensor:
        """float32, in the shape of the layer's weight: what the adapter makes it another by."""
        delta: torch.Tensor = self.b.detach() @ self.a.detach() * self.scaling
        return delta


class ExpertsLowRank(torch.nn.Module):
    """What is to be added to one of the two products of each expert of this worker, as peft stacks it; float32 weights.

    ``a`` and ``b``: shapes (E, R, width) and (height, R, E) of the matrices. ``group``: workers that each expert is cut
    over. They have the same tokens, and megatron-core sums what they answer, and the gradients of the tokens. B is cut
    by rows in the first product (``linear_fc1``: gate and up are halves of them), A by columns in the second. The other
    matrix is whole on each worker, and its gradient is summed here.
    """

    def __init__(
        self, experts: Any, linear: str, a: tuple[int, ...], b: tuple[int, ...], *, scaling: float, group: Any
    ) -> None:
        super().__init__()
        self.scaling, self.group, self.is_on = scaling, group, True
        self.cuts_output = linear == "linear_fc1"
        base = next(experts.parameters())
        self.a = torch.nn.Parameter(torch.zeros(a, device=base.device))
        self.b = torch.nn.Parameter(torch.zeros(b, device=base.device))
        for weight in (self.a, self.b):
            tensor_parallel.set_tensor_model_parallel_attributes(weight, True, 0, 1)  # no other worker has the same
            weight.allreduce = base.allreduce  # type: ignore[attr-defined]  # whose gradient is summed as is
        whole: Any = self.a if self.cuts_output else self.b
        whole.shared = group.rank() > 0  # but for this one, which norms of gradients count once
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each expert, while they are at work

    def begin(self) -> None:
        """Before experts that come one by one: what is summed over workers is summed once for all of them."""
        a_ERX, b_ORE = self._matrices()
        self.pairs = list(zip(a_ERX.unbind(0), b_ORE.unbind(2), strict=True))

    def of(self, expert: int, input_SX: torch.Tensor) -> torch.Tensor:
        """(S, O): scaling x B A x, of one expert, for tokens that went to it."""
        a_RX, b_OR = self.pairs[expert]
        low_SR = linear(input_SX, a_RX.to(input_SX.dtype)) * self.scaling
        return linear(low_SR, b_OR.to(input_SX.dtype))

    def of_all(self, input_SX: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """(S, O) of all experts: the first counts_E[0] tokens are of the first one."""
        a_ERX, b_ORE = self._matrices()
        a_EXR, b_ERO = a_ERX.transpose(1, 2).to(input_SX.dtype), b_ORE.permute(2, 1, 0).to(input_SX.dtype)
        if unaligned := -a_EXR.shape[2] % ALIGNED:  # zeros add nothing
            a_EXR, b_ERO = pad(a_EXR, (0, unaligned)), pad(b_ERO, (0, 0, 0, unaligned))
        low_SR = grouped_product(input_SX, a_EXR.contiguous(), counts_E) * self.scaling
        return grouped_product(low_SR, b_ERO.contiguous(), counts_E)

    def delta(self, expert: int) -> torch.Tensor:
        """float32, in the shape of the expert's weight: what the adapter makes it another by."""
        delta: torch.Tensor = self.b.detach()[:, :, expert] @ self.a.detach()[expert] * self.scaling
        return delta

    def delta_of_all(self, shape: torch.Size) -> torch.Tensor:
        """The same of the weight, of ``shape``, that holds those of all experts transposed."""
        a_EXR, b_ERO = self.a.detach().transpose(1, 2), self.b.detach().permute(2, 1, 0)
        return (a_EXR @ b_ERO * self.scaling).reshape(shape)

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B, where the gradient of the one that is whole will be summed over the workers.

        copy_to_tensor_model_parallel_region leaves a gradient that is not contiguous as it is.
        """
        if self.group.size() == 1:
            return self.a, self.b
        if self.cuts_output:
            return spread(self.a, self.group), self.b
        return self.a, spread(self.b, self.group)


def attach(base: Any, low_rank: LowRank) -> None:
    """From now on ``base`` adds what ``low_rank`` gives, unless that is off."""
    base.add_module("low_rank", low_rank)
    _add_to(base, low_rank, low_rank)


def attach_to_router(router: Any, rank: int, *, scaling: float, dropout: float) -> WholeLowRank:
    """What a router adds to its logits from now on, unless it is off."""
    own = bool(router.config.sequence_parallel)
    low_rank = WholeLowRank(router.weight, rank, scaling=scaling, dropout=dropout, spreads=own, forks=own)
    router.add_module("low_rank", low_rank)
    plain = router.gating

    def gating(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = plain(hidden)
        return logits + low_rank(hidden).to(logits.dtype) if low_rank.is_on else logits

    router.gating = gating
    return low_rank


def attach_to_linear(base: torch.nn.Linear, rank: int, *, scaling: float, dropout: float) -> WholeLowRank:
    """What a linear layer of a vision tower adds from now on, unless it is off; it learns at the layer's own rate."""
    spreads = bool(getattr(base.weight, "sequence_parallel", False))
    low_rank = WholeLowRank(base.weight, rank, scaling=scaling, dropout=dropout, spreads=spreads, forks=False)
    for weight in (low_rank.a, low_rank.b):
        weight.rate = getattr(base.weight, "rate", None)  # type: ignore[attr-defined]
    base.add_module("low_rank", low_rank)
    base.register_forward_hook(lambda _, given, found: found + low_rank(given[0]) if low_rank.is_on else found)
    return low_rank


def attach_to_experts(experts: Any, linear: str, low_rank: ExpertsLowRank) -> None:
    """From now on experts add what ``low_rank`` gives to their product ``linear``."""
    experts.add_module(f"{linear}_low_rank", low_rank)
    if isinstance(experts, GroupedExperts):  # which look for it
        return
    experts.register_forward_pre_hook(lambda *_: low_rank.begin())
    experts.register_forward_hook(lambda *_: low_rank.pairs.clear())
    for k, expert in enumerate(experts.local_experts):
        _add_to(getattr(expert, linear), low_rank, partial(low_rank.of, k))


def _add_to(base: Any, low_rank: Any, added: Callable[[torch.Tensor], torch.Tensor]) -> None:

    def add(layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
        if not low_rank.is_on:
            return output
        product, bias = output
        return product + added(inputs[0]), bias

    base.register_forward_hook(add)


def begin_gradients(embedding: torch.nn.Module) -> None:
    """Layers behind a frozen embedding are recomputed with gradients: the recomputation asks its input for them."""

    def require(_: Any, __: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.requires_grad_() if torch.is_grad_enabled() else hidden

    embedding.register_forward_hook(require)
