"""Sums over the ranks of a group where each has the gradient of the one loss, and what such a sum is made of.

A plain all-reduce in the graph has neither of their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def total(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, of which every rank has the whole gradient already."""
    return _Total.apply(values, group)  # type: ignore[no-any-return, no-untyped-call]


def spread(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The values as they are, alike on every rank; each rank's gradient is a part of theirs."""
    return _Spread.apply(values, group)  # type: ignore[no-any-return, no-untyped-call]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _summed(gradient, ctx.group), None


def _summed(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    values = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, group=group)
    return values
