"""How long do the policy's weights take to get into vLLM, and to the host and back?

    python -m benchmarks.gpu.weight_sync [--shape 7b] [--offloaded_shape 0.6b] [--rounds 5] [--json FILE]

copied: one process of one GPU trains and generates. sent: two Ray workers on two GPUs (left out where there is one).
Each with and without the checksum, the engine's own copy into its fused weights included, medians of the rounds after
the first. The policy holds bfloat16, as FSDP2 sends it. Then offload and reload of a model in training (float32 weights
in FSDP2's shards, AdamW's states; ``--offloaded_shape``) beside a plain pinned copy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU
from rayhelper import Channel, RayHelper
from trainers.configuration.completion import CompletionConfig
from trainers.parts.generator import Generator
from trainers.parts.policy import Policy

DTYPE: Literal["bfloat16", "float32"] = "bfloat16" if ON_GPU else "float32"


class ScoringPolicy(Policy):
    """Which is read and never trained."""

    def new_backend(self, model: str, num_steps: int | None, **settings: Any) -> Any:
        from trainers.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(model, dtype=DTYPE)

    @RayHelper.function(group="train", execute="first")
    def num_bytes(self) -> int:
        return sum(weight.nbytes for _, weight in self.built.named_weights())


class DummyGenerator(Generator):
    """Whose engine has weights of its own until it gets the policy's; it waits until they are there."""

    @RayHelper.function(group="rollout")
    def start(self, path: str) -> None:
        from benchmarks.tiny.text import tiny_tokenizer
        from trainers.rollout.vllm.engine import VllmEngine

        settings = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512, "gpu_memory_utilization": 0.3}
        self.engine = VllmEngine(path, tiny_tokenizer(), dtype=DTYPE, engine_kwargs=settings)

    @RayHelper.function(group="rollout")
    def copy(self, version: int) -> None:
        super().copy(version)
        wait()

    @RayHelper.function(group="rollout")
    def receive(self, channel: Channel, unless: int | None = None) -> None:
        super().receive(channel, unless)
        wait()


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


@RayHelper.worker(group=["train", "rollout"])
class Synced:
    """A policy and an engine, and nothing else of a trainer."""

    def __init__(self, model: str, bucket_mb: int) -> None:
        self.config = CompletionConfig(model=model, dataset="unused", dtype=DTYPE, weight_bucket_mb=bucket_mb)
        self.policy = ScoringPolicy(self.config, loss=wait)  # it has none
        self.generator = DummyGenerator(self.config, self.policy)

    @RayHelper.function(group="driver")
    def measure(self, rounds: int) -> dict[str, Any]:
        self.policy.build(self.config.model)
        self.generator.build(self.config.model)
        found: dict[str, Any] = {}
        for checksum in (True, False):
            self.sender_has(checksum)
            self.engine_has(checksum)
            seconds = []
            for _ in range(rounds + 1):
                self.generator.learned()
                since = time.perf_counter()
                self.generator.update()
                seconds.append(time.perf_counter() - since)
            self.generator.close()
            found[f"{self.generator.way}{'' if checksum else ' unchecked'}"] = statistics.median(seconds[1:])
        found["bytes"] = self.policy.num_bytes()
        return found

    @RayHelper.function(group="train")
    def sender_has(self, checksum: bool) -> None:
        self.policy.config = replace(self.config, weight_checksum=checksum)

    @RayHelper.function(group="rollout")
    def engine_has(self, checksum: bool) -> None:
        self.generator.config = replace(self.config, weight_checksum=checksum)


def copied(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return Synced(str(folder / "model"), options.bucket_mb).measure(options.rounds)


def sent(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    where = [{"device": "GPU", "ranks": [k]} if ON_GPU else {"device": "CPU", "ranks": 1} for k in range(2)]
    groups = {"trainer": {**where[0], "workers": ["train"]}, "engine": {**where[1], "workers": ["rollout"]}}
    with RayHelper.session(groups):
        return Synced(str(folder / "model"), options.bucket_mb).measure(options.rounds)


def offloaded(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """GB/s of a model in training, and of a pinned copy."""
    import numpy as np

    from trainers.backends.fsdp.backend import FsdpBackend
    from trainers.batch import Ragged, Sequences
    from trainers.losses.tokens import sft_loss

    RayHelper.init_process_group()
    backend = FsdpBackend(
        folder / "in_training", sharding="full_shard", dtype="bfloat16", learning_rate=1e-6, num_training_steps=9
    )
    sequences = Sequences(Ragged.of([np.arange(4, 68)], np.int64), Ragged.of([np.arange(64) > 0], bool))

    def loss(logps: Any, entropy: Any, mask: Any, micro: Any, metrics: Any) -> Any:
        return sft_loss(logps, mask, normaliser=63.0)

    backend.step(sequences, loss, micro_batch_size=1)
    torch.cuda.synchronize()
    rates: dict[str, list[float]] = {"offload": [], "reload": []}
    for _ in range(options.rounds + 1):
        for name, values in rates.items():
            since = time.perf_counter()
            getattr(backend, name)()
            torch.cuda.synchronize()
            values.append(time.perf_counter() - since)
    away = [weight.nbytes for weight in backend.module.parameters()]
    num_bytes = 3 * sum(away)  # weights and two moments, in float32
    device = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    host = torch.empty(2**32, dtype=torch.uint8, pin_memory=True)
    found = {name: num_bytes / statistics.median(values[1:]) / 1e9 for name, values in rates.items()}
    for name, (target, source) in {"pinned to host": (host, device), "pinned to device": (device, host)}.items():
        target.copy_(source)
        torch.cuda.synchronize()
        since = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found[name] = 2**32 / (time.perf_counter() - since) / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--offloaded_shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket_mb", type=int, default=256)
    options = arguments(parser, list(PARTS), limit_s=300)
    found = run_parts("benchmarks.gpu.weight_sync", options, PARTS, partial(save, options))
    for part in options.parts:
        for name, value in found[part].items():
            rate = f"{found[part]['bytes'] / value / 1e9:10.1f} GB/s" if name.startswith(("copied", "sent")) else ""
            print(f"{part:<12}{name:<24}{value!s:>24}{rate}")


def save(options: argparse.Namespace, folder: Path) -> dict[str, int]:
    """The model whose weights travel, and the one to offload, as far as a part needs them."""
    if "offloaded" in options.parts:
        saved_apart(options.offloaded_shape, folder, "in_training")
    return saved_apart(options.shape, folder) if {"copied", "sent"} & set(options.parts) else {}


PARTS = {"copied": copied, "sent": sent, "offloaded": offloaded}

if __name__ == "__main__":
    main()
