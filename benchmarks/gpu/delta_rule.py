"""What does the gated delta rule cost by flash-linear-attention, what in plain torch, and how far are they apart?

    python -m benchmarks.gpu.delta_rule [--documents 2048 1024 512 4096 512] [--heads 32] [--key_heads 16]

One layer of Qwen3-Next (heads of 128), bfloat16, one row of documents on one GPU, forward and backward: milliseconds
(medians) and GiB at the most. Errors of outputs and gradients are relative to plain torch of the same inputs in
float32. A row of documents and each document by itself must have the same numbers, but for rounding: ``documents`` is
the largest difference. Where the kernels cannot be had, the reason is printed. Where they are wrong in the backward
pass alone, they are measured forward.
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
from trainers.backends.megatron.delta_rule.kernels import by_kernel, why_none
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


def learned(rule: Rule, given: list[torch.Tensor], lengths: list[int], *, backward: bool = True) -> list[torch.Tensor]:
    """The output, and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_(backward) for x in given]
    starts = torch.tensor([0, *lengths], device=given[0].device).cumsum(0)
    output = rule(*leaves, lengths, starts)
    if not backward:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def plain(*given: Any) -> torch.Tensor:
    return gated_delta_rule(*given[:6])


def kernels(*, backward: bool) -> dict[str, tuple[Rule, bool]]:
    """flash-linear-attention's, where it is installed, forward and, if that is right here, backward."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return {}

    def rule(*given: Any) -> torch.Tensor:
        *rows, _, starts = given
        return by_kernel(chunk_gated_delta_rule, *rows, starts)

    found: dict[str, tuple[Rule, bool]] = {"flash-linear-attention, forward": (rule, False)}
    return found | ({"flash-linear-attention": (rule, True)} if backward else {})


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
    rules: dict[str, tuple[Rule, bool]] = {"plain torch": (plain, True), "plain torch, forward": (plain, False)}
    found: dict[str, Any] = {"reason": "there is no GPU"}
    if ON_GPU:
        found["reason"] = why_none(torch.cuda.get_device_capability())
        rules |= kernels(backward=found["reason"] is None)
    for name, (rule, backward) in rules.items():
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        own = learned(rule, given, lengths, backward=backward)
        errors = {
            kind: float((one.float() - right).norm() / right.norm())
            for kind, one, right in zip(("output", *NAMES), own, exact, strict=False)
        }
        parts = zip(*(x.split(lengths) for x in given), strict=True)
        alone = [learned(rule, list(part), [len(part[0])], backward=backward) for part in parts]
        apart = [torch.cat([one[k] for one in alone]) for k in range(len(own))]
        found[name] = {
            "ms": milliseconds(lambda rule=rule, backward=backward: learned(rule, given, lengths, backward=backward)),
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
    reason = found.pop("reason")
    for name, one in found.items():
        memory = "" if one["gib"] is None else f", {one['gib']:.2f} GiB"
        print(f"{name}: {one['ms']:.2f} ms{memory}; a row and its documents differ by {one['documents']:.1e}")
        print("  errors: " + ", ".join(f"{kind} {error:.1e}" for kind, error in one["errors"].items()))
    if reason is not None:
        print(f"flash-linear-attention: {reason}")
    if "OUT" in os.environ:
        result = {**origin(), "options": vars(options), "reason": reason, **found}
        Path(os.environ["OUT"], "delta_rule.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
