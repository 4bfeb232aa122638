"""Adding up gradients as a Triton kernel: PyTorch's for two dtypes takes half again as long on large tensors.

For GPUs; ``python -m benchmarks.gpu.backend`` compares it with plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048  # numbers of a program


@triton.jit  # type: ignore[untyped-decorator]
def _add(total, part, size, block: tl.constexpr):  # type: ignore
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    value = tl.load(total + places, mask=inside) + tl.load(part + places, mask=inside).to(tl.float32)
    tl.store(total + places, value, mask=inside)


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """total += part, of a float32 total; where the two lie alike in memory by the kernel."""
    if total.is_contiguous() and part.is_contiguous() and total.shape == part.shape:
        _add[(triton.cdiv(total.numel(), BLOCK),)](total, part, total.numel(), block=BLOCK)
    else:
        total += part
