"""The two passes of ``linear_scores.py`` over a chunk of logits as Triton kernels: one reading each instead of several.

For GPUs. Imported where Triton is there; ``linear_scores.py`` says the same in plain torch, and is what these kernels
are compared with (``python -m benchmarks.gpu.backend``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # vocabulary entries a program looks at together


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(logits, ids, scale, logps, log_totals, entropy, is_top1, width, block: tl.constexpr):  # type: ignore
    """One program a token: running maximum, sum of exponentials and sum of exponential x logit."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(ids + row)
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    offsets = tl.arange(0, block)
    for start in range(0, width, block):
        inside = start + offsets < width
        z = tl.load(logits + row * width + start + offsets, mask=inside, other=-float("inf")) * scale
        new = tl.maximum(largest, tl.max(z, 0))
        e = tl.exp(z - new)
        rescale = tl.exp(largest - new)
        total = total * rescale + tl.sum(e, 0)
        weighted = weighted * rescale + tl.sum(tl.where(inside, e * z, 0.0), 0)
        largest = new
    log_total = largest + tl.log(total)
    wanted = tl.load(logits + row * width + target) * scale
    tl.store(log_totals + row, log_total)
    tl.store(logps + row, wanted - log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(is_top1 + row, tl.where(wanted >= largest, 1.0, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(logits, ids, scale, log_totals, entropy, g_logp, g_entropy, out, width, block: tl.constexpr):  # type: ignore
    """d loss / d logits of one token and one block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * block + tl.arange(0, block)
    inside = offsets < width
    logp = tl.load(logits + row * width + offsets, mask=inside, other=0.0) * scale - tl.load(log_totals + row)
    wanted = tl.load(g_logp + row)
    inner = tl.load(g_entropy + row) * (logp + tl.load(entropy + row))
    gradient = -tl.exp(logp) * (wanted + inner)
    gradient = gradient + tl.where(offsets == tl.load(ids + row), wanted, 0.0)
    tl.store(out + row * width + offsets, (gradient * scale).to(out.dtype.element_ty), mask=inside)


def statistics(logits_NV: torch.Tensor, ids_N: torch.Tensor, scale: float, *columns: torch.Tensor) -> None:
    """Fills log-probability, log of the total, entropy and top-1 hit (N,) of softmax(scale x logits)."""
    if len(ids_N):
        _statistics[(len(ids_N),)](logits_NV, ids_N, scale, *columns, logits_NV.shape[1], block=BLOCK)


def gradient(
    gradient_NV: torch.Tensor,
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    scale: float,
    log_totals_N: torch.Tensor,
    entropy_N: torch.Tensor,
    logps_gradient_N: torch.Tensor,
    entropy_gradient_N: torch.Tensor,
) -> None:
    """Fills the gradient of the logits, which are not scaled; an id of -1 is in no column."""
    num_rows, width = logits_NV.shape
    grid = (num_rows, triton.cdiv(width, BLOCK))
    given = (log_totals_N, entropy_N, logps_gradient_N.contiguous(), entropy_gradient_N.contiguous())
    if num_rows:
        _gradient[grid](logits_NV, ids_N, scale, *given, gradient_NV, width, block=BLOCK)
