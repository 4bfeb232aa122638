"""What megatron-core 0.16 lacks without TransformerEngine and apex: norms, and products of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trainers.backends.scores.linear_scores import add_product

compiled = functools.cache(torch.compile)


def in_one_pass(function: Callable[..., torch.Tensor], rows: tuple[torch.Tensor, ...], *given: Any) -> torch.Tensor:
    """``function`` of tensors with a row a token, and of what is given beside.

    On a GPU it is compiled, once for any number of rows, and reads and writes the memory once. No row and a single one
    would be cases of their own to torch.compile, which makes only so many of a function: these are not compiled.
    """
    if not rows[0].is_cuda or len(rows[0]) < 2:
        return function(*rows, *given)
    for one in rows:
        torch._dynamo.maybe_mark_dynamic(one, 0)
    result: torch.Tensor = compiled(function)(*rows, *given)
    return result


def normed(rows_SH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) of each row, computed in float32."""
    wide_SH = rows_SH.float()
    scale_S1 = torch.rsqrt(wide_SH.square().mean(-1, keepdim=True) + eps)
    return (wide_SH * scale_S1 * weight_H.float()).to(rows_SH.dtype)


def centred_norm(rows_SH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """``normed`` by the weight plus one, computed in float32 as the rest."""
    return normed(rows_SH, weight_H.float() + 1, eps)


class Norm(torch.nn.Module):
    """RMSNorm as megatron-core's layers build it; also where the sequence is spread over tensor-parallel workers.

    With ``layernorm_zero_centered_gamma`` its weight is what is added to one.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed
        self.eps = eps
        self.scaled = centred_norm if config.layernorm_zero_centered_gamma else normed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return in_one_pass(self.scaled, (hidden.flatten(0, -2),), self.weight, self.eps).view(hidden.shape)


def add_weight_gradient(input_TK: torch.Tensor, gradient_TN: torch.Tensor, total_NK: torch.Tensor) -> None:
    """Adds a linear layer's gradient to its buffer, in the buffer's dtype: the product is not rounded before."""
    if len(input_TK):
        add_product(total_NK, gradient_TN.T, input_TK)
