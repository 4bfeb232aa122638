"""``word_checksum`` of ``checksums.py`` as a Triton kernel: the bytes of a bucket are read once instead of twice.

For GPUs. Imported where Triton is there; ``python -m benchmarks.gpu.channel`` compares both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 4  # that a program looks at together
NUM_PROGRAMS = 1024  # at most


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum(words, out, num_rows, rows_each, row, column, width: tl.constexpr, rows: tl.constexpr):  # type: ignore
    """One program so many rows; all add to one number."""
    first = tl.program_id(0) * rows_each
    end = tl.minimum(first + rows_each, num_rows)
    columns = tl.arange(0, width)
    total = tl.zeros((rows, width), tl.int64)
    for start in range(first, end, rows):
        places = (start + tl.arange(0, rows)).to(tl.int64)
        inside = (places < end)[:, None]
        word = tl.load(words + places[:, None] * width + columns[None, :], mask=inside, other=0).to(tl.int64)
        total += word * (((places * row) << 1)[:, None] + ((columns.to(tl.int64) * column) | 1)[None, :])
    tl.atomic_add(out, tl.sum(tl.sum(total, 0), 0), sem="relaxed")


def weighted_sum(words: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """() int64, modulo 2^64: of int32 words (rows, a power of two), each times 2 x its row x ``row`` + (column | 1)."""
    out = torch.zeros((), dtype=torch.int64, device=words.device)
    num_rows, width = words.shape
    rows_each = max(ROWS, triton.cdiv(num_rows, NUM_PROGRAMS))
    with torch.cuda.device(words.device):
        programs = triton.cdiv(num_rows, rows_each)
        _weighted_sum[(programs,)](words, out, num_rows, rows_each, row, column, width=width, rows=ROWS)
    return out
