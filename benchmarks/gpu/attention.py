"""How long does attention take in a decoding step of vLLM's Triton backend, by how its kernel is started?

    python -m benchmarks.gpu.attention [--sequences 32 128 512] [--contexts 64 272 528 2048] [--heads 32] [--kv_heads 8]

One layer, bfloat16, heads of 128, pages of 64 tokens anywhere in the cache. Each row: microseconds (medians of CUDA
graphs' replays) as vLLM starts the kernel, as ``small_blocks_decode`` does, and by other numbers of warps
and stages; GB/s of keys and values for the second; and how far apart the two results are, relative to the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.origin import origin

HEAD, PAGE = 128, 64
OTHERS = ((1, 2), (1, 3), (2, 3), (4, 2))  # warps, stages


class Started:
    """A kernel with a fixed number of warps and stages."""

    def __init__(self, kernel: Any, num_warps: int, num_stages: int) -> None:
        self.kernel, self.settings = kernel, {"num_warps": num_warps, "num_stages": num_stages}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda **arguments: self.kernel[grid](**arguments, **self.settings)


def microseconds(call: Callable[[], Any], calls: int = 20) -> float:
    """Of one call, among ``calls`` in a CUDA graph: as decoding runs it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(times)


def measure(attention: Any, num_sequences: int, context: int, heads: int, kv_heads: int) -> dict[str, float]:
    from trainers.rollout.vllm.patches import small_blocks_decode

    torch.manual_seed(0)
    pages = -(-context // PAGE)
    num_pages = num_sequences * pages
    query, out = (torch.randn(num_sequences, heads, HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    keys, values = (torch.randn(num_pages, PAGE, kv_heads, HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(num_pages, device="cuda", dtype=torch.int32).view(num_sequences, pages)
    starts = torch.arange(num_sequences + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((num_sequences,), context, device="cuda", dtype=torch.int32)

    def step() -> None:
        attention.unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=context,
            softmax_scale=HEAD**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )

    kernel = attention.kernel_unified_attention
    found: dict[str, float] = {}
    try:
        found["vllm"] = microseconds(step)
        before = out.clone()
        small_blocks_decode()
        assert attention.kernel_unified_attention is not kernel, "the patch is for other GPUs"
        found["ours"] = microseconds(step)
        found["ours_gb_s"] = 4e-3 * num_sequences * context * kv_heads * HEAD / found["ours"]
        found["difference"] = float((out - before).abs().max() / before.abs().max())
        for num_warps, num_stages in OTHERS:
            attention.kernel_unified_attention = Started(kernel, num_warps, num_stages)
            found[f"{num_warps}x{num_stages}"] = microseconds(step)
    finally:
        attention.kernel_unified_attention = kernel
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 272, 528, 2048])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    options = parser.parse_args()
    from vllm.v1.attention.ops import triton_unified_attention

    rows: dict[str, Any] = {}
    for num_sequences in options.sequences:
        for context in options.contexts:
            name = f"{num_sequences} x {context}"
            rows[name] = measure(triton_unified_attention, num_sequences, context, options.heads, options.kv_heads)
            print(f"{name:<12}" + "".join(f"{key} {value:<10.4g}" for key, value in rows[name].items()), flush=True)
    if "OUT" in os.environ:
        result = {**origin(), "options": vars(options), "rows": rows}
        Path(os.environ["OUT"], "attention.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
