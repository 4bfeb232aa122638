"""The gated delta rule: on a GPU by flash-linear-attention where that can be had, else in plain torch (rule.py)."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainers.backends.megatron.delta_rule.rule import gated_delta_rule

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
# Triton's versions that multiply wrongly on Hopper in the backward pass, from and before:
# https://github.com/fla-org/flash-linear-attention/issues/640
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))


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
    kernel = None
    if query_SHK.is_cuda and query_SHK.dtype in HALF:
        kernel = installed(query_SHK.device.index)
    if kernel is None:
        return gated_delta_rule(query_SHK, key_SHK, value_SHV, decay_SH, beta_SH, lengths)
    return by_kernel(kernel, query_SHK, key_SHK, value_SHV, decay_SH, beta_SH, starts)


def by_kernel(kernel: Callable[..., Any], *given: torch.Tensor) -> torch.Tensor:
    """(S, H, V) by flash-linear-attention's function; the last of ``given`` are the starts of documents."""
    *rows, starts = given
    output_1SHV, _ = kernel(*(x[None].contiguous() for x in rows), cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    output_SHV: torch.Tensor = output_1SHV[0]
    return output_SHV.to(rows[0].dtype)


@functools.cache
def installed(device: int) -> Callable[..., Any] | None:
    """flash-linear-attention's function; None, with the reason in the log, where it cannot be had on that GPU."""
    reason = why_none(torch.cuda.get_device_capability(device))
    if reason is None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule  # type: ignore[no-any-return]
    logger.warning("gated delta-rule layers are computed in plain torch, which is slower: %s", reason)
    return None


def why_none(capability: tuple[int, int]) -> str | None:
    """Why the kernels cannot be had on a GPU of that compute capability, with the remedy; None: they can."""
    try:
        import triton
        from fla.ops import gated_delta_rule as _  # noqa: F401
    except ImportError as error:
        return f"flash-linear-attention cannot be imported ({error}). Run pip install 'rayhelper[delta]'."
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    first, last = WRONG_ON_HOPPER
    if capability[0] == 9 and first <= version < last and importlib.util.find_spec("tilelang") is None:
        return (
            f"Triton {triton.__version__} computes wrong numbers on this GPU in the backward pass of "
            "flash-linear-attention. Install Triton 3.7.1 or later, or tilelang."
        )
    return None
