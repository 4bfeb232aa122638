"""What a parameter of megatron-core is made of: tensors of a checkpoint, and how each is cut over workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint that one parameter is made of: the rows of one above those of the next.

    A rank has an equal part of each tensor along ``dim``, or all of it (None). With ``groups`` above one the rows of a
    part are cut into so many groups, and groups lie above each other: q, k, v of one key-value head, then of the next.

    A tensor may consist of ``sections``, so many rows each: of every section a rank has an equal part.
    """

    parameters: tuple[str, ...]  # what megatron-core and TransformerEngine call the parameter; {}: a rank's expert
    tensors: Mapping[str, tuple[int, ...]]  # name and shape in the checkpoint
    dim: int | None = None
    num_ranks: int = 1  # that ``dim`` is cut over
    groups: int = 1
    num_padded: int = 0  # rows of zeros behind the last one
    sections: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of tensors that are cut by rows

    @property
    def key(self) -> str:
        return next(iter(self.tensors))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter on a rank."""
        parts = [self.part_shape(name) for name in self.tensors]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def part_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor, with its padding."""
        shape = list(self.tensors[name])
        if self.dim is not None:
            shape[self.dim] = (shape[self.dim] + self.num_padded) // self.num_ranks
        return tuple(shape)

    def part(self, name: str, tensor: Any, rank: int) -> Tensor:
        """A rank's part, without padding, of a tensor or of a slice of a file."""
        if self.dim is None:
            own: Tensor = tensor[(slice(None),)]
            return own
        if name not in self.sections:
            own = tensor[self._place(name, rank)]
            return own
        start, parts = 0, []
        for rows in self.sections[name]:
            each = rows // self.num_ranks
            parts.append(tensor[start + rank * each : start + (rank + 1) * each])
            start += rows
        return torch.cat(parts)

    def _place(self, name: str, rank: int) -> tuple[slice, ...]:
        """Where a rank's part of a tensor, without padding, begins and ends."""
        assert self.dim is not None, "it is cut"
        end, length = self.tensors[name][self.dim], self.part_shape(name)[self.dim]
        own = slice(min(rank * length, end), min((rank + 1) * length, end))
        return (*[slice(None)] * self.dim, own)

    def views(self, shard: Tensor) -> dict[str, Tensor]:
        """Where the parts of the tensors lie in a rank's parameter: (groups, rows of a group, ...)."""
        rows = [self.part_shape(name)[0] // self.groups for name in self.tensors]
        return dict(zip(self.tensors, shard.unflatten(0, (self.groups, -1)).split(rows, dim=1), strict=True))

    def fill(self, shard: Tensor, name: str, part: Tensor, share: float | None = None) -> None:
        """Puts a rank's part of a tensor where it belongs; ``share``: as in ``MegatronWeights.load_named``."""
        view = self.views(shard)[name]
        given = part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:])
        own, padding = view[:, : given.shape[1]], view[:, given.shape[1] :]
        if share is None:
            own.copy_(given)
        else:
            own.lerp_(given.to(own), share)
        padding.zero_()

    def join(self, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors, in memory of their own, from the parameters of all ranks."""
        views = [self.views(shard) for shard in (shards if self.dim is not None else shards[:1])]
        for name in self.tensors:
            parts = [view[name].flatten(0, 1) for view in views]
            if self.num_padded:
                ends = (self._place(name, rank)[0] for rank in range(self.num_ranks))
                parts = [part[: end.stop - end.start] for part, end in zip(parts, ends, strict=True)]
            if self.num_ranks > 1 and name in self.sections:
                sizes = [rows // self.num_ranks for rows in self.sections[name]]
                parts = [one for section in zip(*(part.split(sizes) for part in parts), strict=True) for one in section]
            yield name, torch.cat(parts, dim=self.dim or 0)


@dataclass(frozen=True)
class Block:
    """A layer, or what comes before the first or behind the last one: its sources, and those of each expert."""

    plain: Sequence[Source]
    experts: Sequence[Sequence[Source]] = ()
