"""Does the fsdp backend say on a GPU what it says elsewhere, and how fast do weights move to the host and back?

    python -m benchmarks.gpu.backend [--json FILE]    (OUT=FOLDER: FOLDER/backend.json)

Checks, each with the largest difference found and what is allowed: the Triton kernels of the head and of sums of
gradients against the same formulas in plain torch, values and gradients; a step in shards of one worker and by autocast
against float32, on the weights' gradients; a step after ``offload`` and ``reload`` against one without; three steps
with the optimizer's states in the host's memory against three without. Then offload and reload of weights and AdamW's
states of the 596 M Qwen3 shape in GB/s, beside one pinned copy of as many bytes. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.shapes import save_shape
from benchmarks.origin import origin
from rayhelper import RayHelper
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.scores import linear_scores
from trainers.batch import Ragged, Sequences
from trainers.losses.tokens import sft_loss
from trainers.losses.vocabulary import WHOLE


def head_differences(dtype: torch.dtype, *, num_kept: int = 0) -> dict[str, float]:
    """Kernels against plain torch on 300 tokens of a vocabulary that is no multiple of a block.

    ``num_kept`` tokens of which something is kept for the backward pass, and then without a gradient of the entropy.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    features = torch.randn(300, 256, device="cuda", generator=generator, dtype=dtype)
    weight = torch.randn(50_021, 256, device="cuda", generator=generator, dtype=dtype) / 8
    ids = torch.randint(0, 50_021, (300,), device="cuda", generator=generator)
    coefficients = torch.randn(2, 300, device="cuda", generator=generator)

    def answer() -> dict[str, torch.Tensor]:
        one, other = features.clone().requires_grad_(), weight.clone().requires_grad_()
        settings = (1 / 0.7, 128, not num_kept, WHOLE, num_kept * len(weight) * weight.element_size())
        logps, entropy, top1 = linear_scores.LinearScores.apply(one, other, ids, *settings)  # type: ignore
        loss = (coefficients[0] * logps).sum()
        loss = loss if num_kept else loss + (coefficients[1] * entropy).sum()
        gradients = torch.autograd.grad(loss, [one, other])
        return {"logps": logps, "entropy": entropy, "top1": top1, "features": gradients[0], "weight": gradients[1]}

    by_kernels = answer()
    kernels, linear_scores._kernels = linear_scores._kernels, _plain  # type: ignore
    try:
        plain = answer()
    finally:
        linear_scores._kernels = kernels
    return {
        name: float((by_kernels[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in plain.items()
    }


def sum_difference() -> float:
    """Adding a bfloat16 gradient to a float32 one: exact, so nothing may differ."""
    from trainers.backends.fsdp.one_worker import gradient_kernels

    total, part = (torch.randn(1031, 2053, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    found = 0.0
    for one, other in ((total, part), (total.T, part.T)):  # the second by torch
        expected, sums = one + other, one.clone()
        gradient_kernels.add(sums, other)
        found = max(found, float((sums - expected).abs().max()))
    return found


class _Plain:
    @staticmethod
    def statistics(logits: torch.Tensor, *given: Any) -> None:
        linear_scores._statistics(logits.clone(), *given)

    gradient = staticmethod(linear_scores._gradient)


def _plain() -> Any:
    return _Plain


def batch(vocabulary: int) -> Sequences:
    random = np.random.default_rng(0)
    lengths = [700, 300, 900, 120]
    ids = [random.integers(4, vocabulary, length) for length in lengths]
    return Sequences(Ragged.of(ids, np.int64), Ragged.of([np.arange(len(row)) > 0 for row in ids], bool))


def gradient_of_step(model: str, moved: bool = False, **settings: Any) -> tuple[torch.Tensor, FsdpBackend]:
    """All gradients of one step, as one vector."""
    backend = FsdpBackend(model, learning_rate=1e-5, num_training_steps=10, max_grad_norm=0.0, **settings)
    sequences = batch(backend.module.config.vocab_size)
    found: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        grads = [weight.grad for weight in backend.module.parameters()]
        full = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        found.append(torch.cat([grad.flatten().float() for grad in full]))

    if moved:
        before = torch.cuda.memory_allocated()
        backend.offload()
        freed = before - torch.cuda.memory_allocated()
        assert freed > 0.9 * sum(w.numel() * 4 for w in backend.module.parameters()), "the weights are still there"
        backend.reload()
    assert backend.optimizer is not None
    backend.optimizer.register_step_pre_hook(keep)

    num_tokens = float(sequences.target_mask.values.sum())
    backend.step(sequences, partial(loss_of, num_tokens=num_tokens), micro_batch_size=2)
    return found[0], backend


def loss_of(logps: Any, entropy: Any, mask: Any, micro: Any, metrics: Any, num_tokens: float) -> torch.Tensor:
    return sft_loss(logps, mask, normaliser=num_tokens)


def resting_difference(model: str) -> float:
    """Of the weights after three steps, with AdamW's states in the host's memory and on the device."""
    found = []
    for rests in (False, True):
        settings: dict[str, Any] = {"dtype": "bfloat16", "sharding": "full_shard", "optimizer_offload": rests}
        backend = FsdpBackend(model, learning_rate=1e-5, num_training_steps=10, **settings)
        sequences = batch(backend.module.config.vocab_size)
        for _ in range(3):
            backend.step(sequences, partial(loss_of, num_tokens=100.0), micro_batch_size=2)
        found.append(torch.cat([weight.flatten().cpu() for _, weight in backend.named_weights()]))
    return float((found[0] - found[1]).abs().max())


def moves(model: str, sharding: str) -> dict[str, float]:
    """GB/s of offload and reload after a step, in the second round, and of pinned copies of as many bytes."""
    _, backend = gradient_of_step(model, dtype="bfloat16", sharding=sharding)
    num_bytes = sum(weight.numel() * 12 for weight in backend.module.parameters())
    seconds = {}
    for _ in range(2):
        for name in ("offload", "reload"):
            torch.cuda.synchronize()
            since = time.perf_counter()
            getattr(backend, name)()
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - since
    on_gpu = torch.empty(num_bytes // 4, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(num_bytes // 4, dtype=torch.uint8, pin_memory=True)
    for name, target, source in (("pinned offload", pinned, on_gpu), ("pinned reload", on_gpu, pinned)):
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - since
    return {name: num_bytes / taken / 1e9 for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", action="store_true", help="these alone")
    parser.add_argument("--json")
    options = parser.parse_args()
    RayHelper.init_process_group()
    checks: dict[str, tuple[float, float]] = {}
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        for num_kept in (0, 200):
            for name, difference in head_differences(dtype, num_kept=num_kept).items():
                checks[f"head {dtype} {f'{num_kept} kept ' if num_kept else ''}{name}"] = (difference, allowed)
    checks["sum of gradients"] = (sum_difference(), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        save_shape("0.6b", Path(folder), num_hidden_layers=4)
        exact = gradient_of_step(folder)[0]
        for name, settings in (
            ("autocast", {"dtype": "bfloat16"}),
            ("shards", {"dtype": "bfloat16", "sharding": "full_shard"}),
            ("moved", {"moved": True}),
            ("moved shards", {"dtype": "bfloat16", "sharding": "full_shard", "moved": True}),
            ("padding free", {"padding_free": True}),
            ("token budget", {"token_budget": 1000}),
        ):
            found = gradient_of_step(folder, **settings)[0]
            low = "dtype" in settings
            checks[f"step {name}"] = (float((found - exact).norm() / exact.norm()), 5e-2 if low else 1e-3)
        checks["states at rest"] = (resting_difference(folder), 1e-6)  # a step changes a weight by up to 1e-5
    rates = {}
    if not options.checks:
        with tempfile.TemporaryDirectory() as folder:
            save_shape("0.6b", Path(folder))
            rates = {sharding: moves(folder, sharding) for sharding in ("no_shard", "full_shard")}
    print(f"{'check':<36}{'difference':>12}{'allowed':>10}")
    for name, (difference, allowed) in checks.items():
        print(f"{name:<36}{difference:>12.2e}{allowed:>10.0e}{'' if difference <= allowed else '   FAILED'}")
    for sharding, row in rates.items():
        print(f"{sharding}: " + ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in row.items()))
    file = options.json or (Path(os.environ["OUT"]) / "backend.json" if "OUT" in os.environ else None)
    if file:
        Path(file).write_text(json.dumps({**origin(), "checks": checks, "gb_per_s": rates}, indent=2))
    sys.exit(any(difference > allowed for difference, allowed in checks.values()))


if __name__ == "__main__":
    main()
