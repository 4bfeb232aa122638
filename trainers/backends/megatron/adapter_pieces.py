"""What each parameter of an adapter has of the matrices that peft writes.

transformers stacks the experts of a layer, gate above up, and peft adapts the stack: a pair of matrices an expert and
stack, written as

    experts.base_layer.lora_A  (E R, H)   the R rows of an expert above those of the next      gate_up_proj
    experts.base_layer.lora_B  (2 I, R E)  of the R columns each, those of all experts side by side
    experts.lora_A (E R, I), experts.lora_B (H, R E)                                            down_proj

Where gate_proj and up_proj are named, as before transformers stacked them, peft gives the pair of both twice the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from trainers.backends.megatron.tensors.sources import Source


@dataclass(frozen=True)
class Stack:
    """One matrix for all experts of a layer: how it lies in a file, and over workers by EP and ETP."""

    name: str
    file: tuple[int, int]
    factors: tuple[int, ...]  # of its rows, then of its columns
    order: tuple[int, ...]  # of these factors: over EP, over ETP if it is cut so too, then those of ``shape``
    shape: tuple[int, ...]  # on a worker
    copies: int = 1  # workers of ETP that have the same

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.file}

    def put(self, own: torch.Tensor, weights: Mapping[str, torch.Tensor], rank: int) -> None:
        parts = weights[self.name].reshape(self.factors).permute(self.order).reshape(-1, *self.shape)
        own.copy_(parts[rank // self.copies])

    def join(self, shards: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        parts = torch.stack(list(shards[:: self.copies])).reshape([self.factors[k] for k in self.order])
        yield self.name, parts.permute([self.order.index(k) for k in range(len(self.order))]).reshape(self.file)


@dataclass(frozen=True)
class Piece:
    """What one parameter has of matrices of a file: those of ``source`` lie above each other."""

    source: Source | Stack
    parameter: Parameter | None  # None: on another stage of the pipeline
    group: dist.ProcessGroup  # over which the source is cut

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.parameter is not None:
            self.put(self.parameter.detach(), weights)

    def put(self, own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """Fills ``own``, of the shape of the parameter, with this worker's part."""
        if isinstance(self.source, Stack):
            self.source.put(own, weights, self.group.rank())
            return
        for name in self.source.tensors:
            self.source.fill(own, name, self.source.part(name, weights[name], self.group.rank()))


def expert_stacks(config: Any, linear: str, name: str, rank: int, over: tuple[int, int]) -> tuple[Stack, Stack]:
    """A and B, which begin with ``name``, of one product of the experts of a layer; ``over`` EP and ETP."""
    hidden, size, num_experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    wide, cuts = over
    each, part = num_experts // wide, size // cuts
    a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    high = num_experts * rank
    if linear == "linear_fc1":
        return (
            Stack(a, (high, hidden), (wide, each, rank, hidden), (0, 1, 2, 3), (each, rank, hidden), copies=cuts),
            Stack(b, (2 * size, high), (2, cuts, part, rank, wide, each), (4, 1, 0, 2, 3, 5), (2 * part, rank, each)),
        )
    return (
        Stack(a, (high, size), (wide, each, rank, cuts, part), (0, 3, 1, 2, 4), (each, rank, part)),
        Stack(b, (hidden, high), (hidden, rank, wide, each), (2, 0, 1, 3), (hidden, rank, each), copies=cuts),
    )
