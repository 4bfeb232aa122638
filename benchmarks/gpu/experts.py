"""What does it take to bring tokens to their experts and back, and how exact is the sum of what experts answer?

    python -m benchmarks.gpu.experts [--tokens 8192] [--experts 128] [--chosen 8] [--width 2048] [--ffn 768]

One layer's permutation, activation and sum, forward and backward, in bfloat16 on one GPU: ours
(expert_rows.py and grouped_experts.py in trainers/backends/megatron) beside megatron-core's own without
TransformerEngine. Milliseconds on the device's clock and on the host's, medians; errors are those of the sum, relative
to one in float64. Beside them the two grouped products, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from benchmarks.gpu.steps import ON_GPU, synchronize
from benchmarks.origin import origin
from trainers.backends.megatron import expert_rows
from trainers.backends.megatron.grouped_experts import grouped_product, weighted_swiglu

DEVICE = "cuda" if ON_GPU else "cpu"


def their_swiglu(rows_R2N: torch.Tensor, weight_R1: torch.Tensor) -> torch.Tensor:
    """What megatron-core's GroupedMLP does once torch.compile has seen too many layers and sizes."""
    gate_RN, up_RN = rows_R2N.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_RN) * up_RN * weight_R1).to(rows_R2N.dtype)


SIDES = {
    "ours": SimpleNamespace(permute=expert_rows.permute, unpermute=expert_rows.unpermute, swiglu=weighted_swiglu),
    "megatron-core": SimpleNamespace(permute=moe_utils.permute, unpermute=moe_utils.unpermute, swiglu=their_swiglu),
}


def milliseconds(call: Callable[[], Any], rounds: int = 10) -> dict[str, float]:
    """Of the device and of the host, the median of some rounds after three."""
    device, host = [], []
    for _ in range(3 + rounds):
        synchronize()
        since = time.perf_counter()
        call()
        host.append(time.perf_counter() - since)
        synchronize()
        device.append(time.perf_counter() - since)
    return {"until_done": 1e3 * statistics.median(device[3:]), "host": 1e3 * statistics.median(host[3:])}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens_SH = torch.randn(options.tokens, options.width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    scores_SE = torch.rand(options.tokens, options.experts, device=DEVICE)
    map_SE = torch.zeros_like(scores_SE, dtype=torch.bool).scatter_(
        1, scores_SE.topk(options.chosen).indices, value=True
    )
    probs_SE = (scores_SE * map_SE).requires_grad_()
    rows = options.tokens * options.chosen
    between_R2N = torch.randn(rows, 2 * options.ffn, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    counts_E = map_SE.sum(0).cpu()
    up_EHN, down_ENH = (
        torch.randn(options.experts, *shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((options.width, 2 * options.ffn), (options.ffn, options.width))
    )
    found: dict[str, Any] = {}
    for name, side in SIDES.items():

        def there_and_back(side: Any = side) -> torch.Tensor:
            rows_RH, probs_R, token_R = side.permute(tokens_SH, map_SE, probs_SE, rows)
            back_SH = side.unpermute(rows_RH * probs_R[:, None].to(rows_RH.dtype), token_R, tokens_SH.shape)
            back_SH.backward(tokens_SH.detach())
            return back_SH.detach()

        def activation(side: Any = side) -> None:
            probs_R1 = torch.ones(rows, 1, device=DEVICE, requires_grad=True)
            hidden_RN = side.swiglu(between_R2N, probs_R1)
            hidden_RN.backward(hidden_RN.detach())

        answers_RH = torch.randn(rows, options.width, device=DEVICE, dtype=torch.bfloat16)
        _, _, token_R = side.permute(tokens_SH, map_SE, probs_SE, rows)
        exact_SH = torch.zeros(tokens_SH.shape, device=DEVICE, dtype=torch.float64)
        exact_SH.index_add_(0, token_R, answers_RH.double())
        again = [side.unpermute(answers_RH, token_R, tokens_SH.shape) for _ in range(2)]
        found[name] = {
            "there_and_back": milliseconds(there_and_back),
            "activation": milliseconds(activation),
            "error": float((again[0].double() - exact_SH).norm() / exact_SH.norm()),
            "same_twice": torch.equal(*again),
        }

    def products() -> None:
        rows_RH = torch.empty(rows, options.width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        hidden_RN = grouped_product(rows_RH, up_EHN, counts_E)[:, : options.ffn].contiguous()
        out_RH = grouped_product(hidden_RN, down_ENH, counts_E)
        out_RH.backward(rows_RH.detach())

    found["products"] = milliseconds(products)
    found["products"]["tflops"] = 18e-9 * rows * options.width * options.ffn / found["products"]["until_done"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("experts", 128), ("chosen", 8), ("width", 2048), ("ffn", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    found = measure(options)
    for name in SIDES:
        one = found[name]
        print(f"{name}: error {one['error']:.2e}, the same twice: {one['same_twice']}")
        for part in ("there_and_back", "activation"):
            print(f"  {part:<16}{one[part]['until_done']:8.2f} ms, of the host {one[part]['host']:.2f}")
    print(f"products: {found['products']['until_done']:.2f} ms, {found['products']['tflops']:.0f} TFLOP/s")
    if "OUT" in os.environ:
        result = {**origin(), "options": vars(options), **found}
        Path(os.environ["OUT"], "experts.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
