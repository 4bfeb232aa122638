"""Changes to vLLM that have no public switch. One function a patch; delete when vLLM has the switch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def small_blocks_decode() -> None:
    """Decoding steps of vLLM's Triton attention start the kernel in blocks of two warps, with two stages.

    vLLM (0.26) starts it in blocks of four warps with three stages for prompts and decoding alike
    (vllm/v1/attention/ops/triton_unified_attention.py, ``launch_kwargs``). A decoding step has one query a sequence, so
    that the few heads of a group are all that a block multiplies: ``python -m benchmarks.gpu.attention`` compares the
    two. The numbers are the same but for the order of a product's sums. Where a version has no such kernel nothing
    changes.
    """
    from vllm.v1.attention.ops import triton_unified_attention as attention

    kernel = getattr(attention, "kernel_unified_attention", None)
    if kernel is not None and not isinstance(kernel, _Decoding) and _is_hopper():
        attention.kernel_unified_attention = _Decoding(kernel)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class _Decoding:
    """The kernel, started as it says for steps that decode alone; what else is asked of it is the kernel's."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *unnamed: Any, **arguments: Any) -> Any:
        settings = {"num_warps": 2, "num_stages": 2} if _suits(grid, arguments) else {}
        return self.kernel[grid](*unnamed, **settings | arguments)


def _suits(grid: tuple[int, ...], arguments: dict[str, Any]) -> bool:
    """A query a sequence, each read whole by one block, heads of 128 numbers of 16 bits: what was measured."""
    return (
        arguments.keys() >= {"query_ptr", "seq_lens_ptr", "HEAD_SIZE", "TILE_SIZE", "key_cache_ptr"}
        and len(grid) == 2
        and len(arguments["query_ptr"]) <= len(arguments["seq_lens_ptr"])
        and arguments["HEAD_SIZE"] == 128
        and arguments["TILE_SIZE"] == 32
        and arguments["key_cache_ptr"].element_size() == 2
    )
