"""What does the gated delta rule cost by flash-linear-attention, what in plain torch, and how far are they apart?

    python -m benchmarks.gpu.delta_rule [--documents 2048 1024 512 4096 512] [--heads 32] [--key_heads 16]

One layer of Qwen3-Next (heads of 128), bfloat16, one row of documents on one GPU, forward and backward: milliseconds
(medians) and GiB at the most. Errors of outputs and gradients are relative to plain torch of the same inputs in
float32. A single row of documents and each document by itself must be the same to the last bit of bfloat16, or nearly:
``documents`` is the largest difference. Without flash-linear-attention its part is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.steps import ON_GPU, synchronize
from benchmarks.origin import origin
from trainers.backends.megatron.delta_rule.kernels import by_documents, installed
from trainers.backends.megatron.delta_rule.rule import gated_delta_rule

DEVICE = "cuda" if ON_GPU else "cpu"
NAMES = ("query", "key", "value", "decay", "beta")
Rule = Callable[..., torch.Tensor]


def inputs(lengths: list[int], heads: int, key_heads: int, width: int) -> list[torch.Tensor]:
    """In bfloat16, but for the decay; keys of one key head for several value heads."""
    torch.manual_seed(0)
    total, times = sum(lengths), heads // key_heads
    query, key = (torch.randn(total, key_heads, width).repeat_interleave(times, 1) for _ in range(2))
    value, rate = torch.randn(total, heads, width), -torch.rand(total, heads).mul(3).exp() / 50
    wide = [x.to(DEVICE, torch.bfloat16) for x in (query, key, value)]
    return [*wide, rate.to(DEVICE), torch.rand(total, heads).to(DEVICE, torch.bfloat16)]


def learned(rule: Rule, given: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
    """The output, and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in given]
    starts = torch.tensor([0, *lengths], device=given[0].device).cumsum(0)
    output = rule(*leaves, lengths, starts)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def plain(*given: Any) -> torch.Tensor:
    return gated_delta_rule(*given[:6])


def milliseconds(call: Callable[[], Any], rounds: int = 10) -> float:
    times = []
    for _ in range(3 + rounds):
        synchronize()
        since = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - since)
    return 1e3 * statistics.median(times[3:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    lengths: list[int] = options.documents
    given = inputs(lengths, options.heads, options.key_heads, options.width)
    exact = learned(plain, [x.float() for x in given], lengths)
    rules: dict[str, Rule] = {"plain torch": plain}
    if ON_GPU and installed() is not None:
        rules["flash-linear-attention"] = by_documents
    found: dict[str, Any] = {}
    for name, rule in rules.items():
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        own = learned(rule, given, lengths)
        errors = {
            kind: float((one.float() - right).norm() / right.norm())
            for kind, one, right in zip(("output", *NAMES), own, exact, strict=True)
        }
        alone = [
            learned(rule, list(parts), [len(parts[0])])
            for parts in zip(*(x.split(lengths) for x in given), strict=True)
        ]
        apart = [torch.cat([one[k] for one in alone]) for k in range(len(own))]
        found[name] = {
            "ms": milliseconds(lambda rule=rule: learned(rule, given, lengths)),
            "gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,
            "errors": errors,
            "documents": max(float((one - other).abs().max()) for one, other in zip(own, apart, strict=True)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[2048, 1024, 512, 4096, 512])
    for name, default in (("heads", 32), ("key_heads", 16), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    found = measure(options)
    for name, one in found.items():
        memory = "" if one["gib"] is None else f", {one['gib']:.2f} GiB"
        print(f"{name}: {one['ms']:.2f} ms{memory}; a row and its documents differ by {one['documents']:.1e}")
        print("  errors: " + ", ".join(f"{kind} {error:.1e}" for kind, error in one["errors"].items()))
    if "flash-linear-attention" not in found:
        print("flash-linear-attention: not measured, as it is not installed or there is no GPU")
    if "OUT" in os.environ:
        result = {**origin(), "options": vars(options), **found}
        Path(os.environ["OUT"], "delta_rule.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
