"""How many tokens a second does one update take in, and what does the GPU do meanwhile?

    python -m benchmarks.gpu.update_speed [--shape 0.6b] [--sequences 128] [--length 528]

``FsdpBackend.step`` with GRPO's loss on sequences of equal length, bfloat16, AdamW. MFU counts 6 x parameters x tokens
against the device's peak (trainers/run/throughput.py). ``waits``: how often an update waited for the GPU, as far as
torch tells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.gpu.profiled import kernels, show
from benchmarks.gpu.shapes import SHAPES, save_shape
from benchmarks.origin import origin

EAGER = {"cuda_graphs": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "captured": {},
    "captured_compiled": {"torch_compile": True},
    "eager": EAGER,
    "compiled": EAGER | {"torch_compile": True},
    "compiled_resting": {"torch_compile": True, "optimizer_offload": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled_checkpointing": {"torch_compile": True, "gradient_checkpointing": True},
    "autocast": {"sharding": "no_shard"},
    "compiled_autocast": {"torch_compile": True, "sharding": "no_shard"},
    "joined": EAGER | {"padding_free": True},
    "compiled_joined": EAGER | {"torch_compile": True, "padding_free": True},
    "checkpointing_joined": {"gradient_checkpointing": True, "padding_free": True},
    "compiled_checkpointing_joined": {"torch_compile": True, "gradient_checkpointing": True, "padding_free": True},
}


def measure(
    model: str, options: argparse.Namespace, settings: dict[str, Any], micro: int, tokens: int | None
) -> dict[str, Any]:
    import numpy as np
    import torch

    from rayhelper import RayHelper
    from trainers.backends.fsdp.backend import FsdpBackend
    from trainers.batch import Ragged, Samples, on_device
    from trainers.losses.policy import policy_gradient_loss

    RayHelper.init_process_group()
    backend = FsdpBackend(
        model,
        **{"sharding": "full_shard"} | settings,
        dtype="bfloat16",
        learning_rate=1e-6,
        num_training_steps=100,
        peak_tflops=989,
        token_budget=tokens,
    )
    random = np.random.default_rng(0)
    low, high = options.lengths or (options.length, options.length)
    lengths = random.integers(low, high + 1, options.sequences)
    ids = [random.integers(4, backend.module.config.vocab_size, length) for length in lengths]
    masks = [np.arange(length) >= 16 for length in lengths]
    advantages = np.linspace(-1, 1, len(ids), dtype=np.float32)
    samples = Samples(input_ids=Ragged.of(ids, np.int64), target_mask=Ragged.of(masks, bool), advantages=advantages)
    num_targets = float(sum(mask.sum() for mask in masks))

    def loss(logps: Any, entropy: Any, mask_BT: Any, micro: Any, metrics: Any) -> torch.Tensor:
        advantages = on_device(torch.tensor(micro.advantages), logps.device)
        return policy_gradient_loss(
            logps, None, advantages, mask_BT, loss_type="dapo", normaliser=num_targets
        )[0]  # fmt: skip

    norms: list[float] = []  # of gradients: the same whatever the variant, but for rounding

    def update() -> float:
        torch.cuda.synchronize()
        since = time.perf_counter()
        metrics = backend.step(samples, loss, micro_batch_size=micro)
        torch.cuda.synchronize()
        norms.append(round(float(metrics.values()["grad_norm"]), 5))
        return time.perf_counter() - since

    first = update()  # with what it compiles
    second = update()
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(update() for _ in range(3))
    num_tokens = int(lengths.sum())
    num_parameters = sum(weight.numel() for weight in backend.module.parameters())
    found = {
        "norms": norms[:3],
        "seconds": seconds,
        "first": first,
        "second": second,
        "tokens_per_second": num_tokens / seconds,
        "mfu": 6 * num_parameters * num_tokens / seconds / 989e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        update()
    torch.cuda.set_sync_debug_mode("default")
    found["waits"] = sum("synchroniz" in str(one.message) for one in waited)
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            profiled_seconds = update()
        seen = kernels(profiler, profiled_seconds, most=options.profile)
        found["gpu_busy_share"] = seen["busy_seconds"] / seen["seconds"]
        show(seen)
    return found


def in_words(row: dict[str, Any]) -> str:
    return " ".join(
        f"{key} {value:<10.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=528)
    parser.add_argument("--lengths", type=int, nargs=2, help="of sequences, drawn between these, in place of --length")
    parser.add_argument("--micros", type=int, nargs="+", default=[16])
    parser.add_argument("--tokens", type=int, nargs="+", help="token budgets of micro-batches, in place of --micros")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0], help="activation_memory_budget, if compiled")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--profile", type=int, default=0, help="rows of a table of kernels")
    parser.add_argument("--json")
    options = parser.parse_args()
    import gc

    import torch

    rows: dict[str, Any] = {}
    target = options.json or (Path(os.environ["OUT"]) / "update_speed.json" if "OUT" in os.environ else None)
    with tempfile.TemporaryDirectory() as folder:
        save_shape(options.shape, Path(folder))
        sizes = [(16, tokens) for tokens in options.tokens] if options.tokens else [(n, None) for n in options.micros]
        for variant, (micro, tokens), budget in itertools.product(options.variants, sizes, options.budgets):
            if budget < 1 and "torch_compile" not in VARIANTS[variant]:
                continue
            name = f"{variant} {tokens or micro}" + (f" budget {budget}" if budget < 1 else "")
            try:
                settings = VARIANTS[variant] | {"activation_memory_budget": budget}
                rows[name] = measure(folder, options, settings, micro, tokens)
            except torch.OutOfMemoryError:
                rows[name] = {}
            print(f"{name:<28}" + in_words(rows[name]), flush=True)
            if target:
                Path(target).write_text(json.dumps({**origin(), "options": vars(options), "rows": rows}, indent=1))
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
