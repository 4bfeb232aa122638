"""What megatron-core 0.16 lacks without TransformerEngine and apex: norms and grouped products."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch


class Norm(torch.nn.Module):
    """RMSNorm as megatron-core's layers build it; also where the sequence is spread over tensor-parallel workers."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def grouped_product(
    left_TK: torch.Tensor, weights_EKN: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """(T, N): the first counts[0] rows times the first weight, the next counts[1] times the second, and so on."""
    weights_EKN = weights_EKN.transpose(1, 2) if trans_b else weights_EKN
    ends = list(accumulate(counts.tolist()))
    if left_TK.is_cuda and left_TK.dtype == torch.bfloat16:
        places = torch.tensor(ends, dtype=torch.int32).to(left_TK.device, non_blocking=True)
        product_TN: torch.Tensor = torch.nn.functional.grouped_mm(left_TK, weights_EKN, offs=places)
        return product_TN
    starts = [0, *ends[:-1]]
    products = [left_TK[start:end] @ weight for start, end, weight in zip(starts, ends, weights_EKN, strict=True)]
    return torch.cat(products)
