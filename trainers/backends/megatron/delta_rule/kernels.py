"""The gated delta rule: on a GPU by flash-linear-attention where that is installed, else in plain torch (rule.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainers.backends.megatron.delta_rule.rule import gated_delta_rule


def by_documents(
    query_SHK: torch.Tensor,
    key_SHK: torch.Tensor,
    value_SHV: torch.Tensor,
    decay_SH: torch.Tensor,
    beta_SH: torch.Tensor,
    lengths: Sequence[int],
    starts: torch.Tensor,
) -> torch.Tensor:
    """(S, H, V). ``lengths`` and ``starts`` (documents + 1, int64, on the device) say the same of the documents.

    The kernels are for bfloat16 and float16; they keep what they find out about ``starts`` as long as it is one tensor.
    """
    is_half = query_SHK.dtype in (torch.bfloat16, torch.float16)
    kernel = installed() if query_SHK.is_cuda and is_half else None
    if kernel is None:
        return gated_delta_rule(query_SHK, key_SHK, value_SHV, decay_SH, beta_SH, lengths)
    given = (x[None].contiguous() for x in (query_SHK, key_SHK, value_SHV, decay_SH, beta_SH))
    output_1SHV, _ = kernel(*given, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    return output_1SHV[0].to(query_SHK.dtype)  # type: ignore[no-any-return]


@functools.cache
def installed() -> Callable[..., Any] | None:
    """flash-linear-attention's function; None where it cannot be imported."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule  # type: ignore[no-any-return]
