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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU
from rayhelper import Channel, RayHelper
from trainers.parts.engine_updates import EngineUpdates, channel_to
from trainers.parts.weights import Route, built, copy, first_of, receive, send

DTYPE = "bfloat16" if ON_GPU else "float32"


@RayHelper.worker(group=["train", "rollout"])
class Synced:
    """A policy and an engine, and nothing else of a trainer."""

    def __init__(self, model: str, bucket_mb: int) -> None:
        self.model, self.bucket_mb = model, bucket_mb
        self.backend: Any = None
        self.engine: Any = None

    @RayHelper.function(group="driver")
    def measure(self, rounds: int) -> dict[str, Any]:
        self.build_train()
        self.build_rollout()
        found: dict[str, Any] = {}
        for checksum in (True, False):
            config = SimpleNamespace(
                dtype=DTYPE,
                weight_checksum=checksum,
                offload_model=False,
                offload_optimizer=False,
                vllm_enable_lora=False,
            )
            engines = EngineUpdates(
                self.meet_engine(),
                meet=self.meet_engine,
                copy=partial(self.copy_weights, config),
                send=SimpleNamespace(defer=partial(self.send_weights.defer, config)),
                receive=self.receive_weights,
                rebuild=self.build_rollout,
                open_channel=partial(channel_to, bucket_mb=self.bucket_mb),
            )
            seconds = []
            for _ in range(rounds + 1):
                engines.learned()
                since = time.perf_counter()
                engines.update()
                seconds.append(time.perf_counter() - since)
            engines.close()
            found[f"{engines.route.way}{'' if checksum else ' unchecked'}"] = statistics.median(seconds[1:])
        found["bytes"] = self.num_bytes()
        return found

    @RayHelper.function(group="train", execute="first")
    def build_train(self) -> None:
        from trainers.backends.fsdp.backend import FsdpBackend

        self.backend = FsdpBackend(self.model, dtype=DTYPE)

    @RayHelper.function(group="train", execute="first")
    def num_bytes(self) -> int:
        return sum(weight.nbytes for _, weight in self.backend.named_weights())

    @RayHelper.function(group="train")
    def send_weights(self, config: Any, channel: Channel, version: int) -> None:
        send(config, self.backend, channel, version)

    @RayHelper.function(group="rollout")
    def build_rollout(self) -> None:
        from tests.golden.tiny import tiny_tokenizer
        from trainers.rollout.vllm.engine import VllmEngine

        settings = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512, "gpu_memory_utilization": 0.3}
        self.engine = VllmEngine(self.model, tiny_tokenizer(), dtype=DTYPE, engine_kwargs=settings)

    @RayHelper.function(group="rollout", collect=first_of)
    def meet_engine(self) -> Route:
        return Route.between(built(self.engine), trains=self.backend is not None)

    @RayHelper.function(group="rollout")
    def copy_weights(self, config: Any, version: int) -> None:
        copy(config, self.backend, self.engine, version)
        self.wait()

    @RayHelper.function(group="rollout")
    def receive_weights(self, channel: Channel) -> None:
        receive(self.engine, channel)
        self.wait()

    def wait(self) -> None:
        if ON_GPU:
            torch.cuda.synchronize()


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
