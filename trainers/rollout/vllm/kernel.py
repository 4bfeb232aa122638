"""What stands in the place of the kernel of vLLM's Triton attention; ``patches.py`` puts it there."""

from __future__ import annotations

from functools import partial
from typing import Any


class DecodingKernel:
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
