"""How fast do SFT and GRPO train on megatron-core, over the GPUs of one host?

    python -m benchmarks.gpu.megatron --shape 4b --keys '{"tensor_model_parallel_size": 2}' [--parts sft grpo]
    python -m benchmarks.gpu.megatron --parts sft sft:backend=fsdp     # beside it, FSDP2 on the same GPUs

Random weights in Qwen3 shapes, bfloat16, one Ray worker a GPU. ``sft``: rows of ``length`` tokens, each of about five
documents packed best fit, ``rows`` a step. ``grpo``: ``prompts`` x ``generations`` completions of so many tokens,
vLLM in the processes that train (one engine a GPU, asleep while they train), one optimizer step a generation.
``--keys`` are further keys of the trainer, such as how the model is cut. Medians of the steps after the first ``warm``.

MFU: 6 x parameters that a token goes through x tokens of 989 TFLOP/s a GPU, by the seconds of the update on the driver.
``peak``: the memory in use on the first GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.grpo import GIB, PROMPT, rows_of
from benchmarks.gpu.measured import MeasuredGRPO
from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.profiled import FILE, UPDATE, profiled, show
from benchmarks.gpu.sft import PEAK_FLOPS, documents
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU, our_steps, phases
from rayhelper import RayHelper
from trainers.batch import Sequences
from trainers.grpo.config import GRPOConfig
from trainers.metrics import Metrics
from trainers.parts.policy import Policy
from trainers.sft.config import SFTConfig
from trainers.sft.loss import supervised_loss
from trainers.sft.trainer import SFTTrainer


class MeasuredPolicy(Policy):
    """Nobody wants the model."""

    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None: ...

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def step(self, samples: Sequences, numbers: int, entropy_gradient: bool = False) -> Metrics:
        with profiled(Path(self.config.output_dir)):
            return super().step(samples, numbers, entropy_gradient)


class MeasuredSFT(SFTTrainer):
    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.policy = MeasuredPolicy(config, loss=supervised_loss)


def sft(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = SFTConfig(
        **shared(options, folder),
        dataset=documents(options),
        packing=True,
        max_length=options.length,
        global_batch_size=options.rows,
        per_device_train_batch_size=options.micro,
    )
    if options.profile:
        os.environ[UPDATE] = str(options.warm)
    found = measured(options, folder, lambda: MeasuredSFT(config).train(), ["train"])
    file = folder / "ours" / FILE
    return found | ({"profile": json.loads(file.read_text())} if file.exists() else {})


def grpo(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = options.prompts * options.generations
    engine = {
        "vllm_max_num_seqs": -(-size // options.gpus),
        "vllm_engine_kwargs": {"kv_cache_memory_bytes": int(options.kv_gib * GIB)},
    }
    config = GRPOConfig(
        **shared(options, folder),
        dataset=rows_of(options.prompts),
        reward_funcs=["benchmarks.gpu.rewards.even"],
        num_generations=options.generations,
        per_device_train_batch_size=options.micro,
        global_batch_size=size,
        generation_batch_size=size,
        max_prompt_length=PROMPT,
        max_completion_length=options.completion,
        rollout_engine="vllm" if ON_GPU else "hf",
        sleep_level=2 if ON_GPU else 0,
        **(engine if ON_GPU else {}),
    )
    roles = ["train", "rollout", "reference", "teacher", "reward"]
    found = measured(options, folder, lambda: MeasuredGRPO(config).train(), roles)
    steps = our_steps(folder / "ours", options.warm)
    length = statistics.median(step["completions/mean_length"] for step in steps)
    return found | {"completion_tokens_per_second": size * length / found["seconds"]}


def shared(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    on_cpu = {} if ON_GPU else {"external_plugins": ["tests.megatron_on_cpu"]}
    return {
        "model": str(folder / "model"),
        "output_dir": str(folder / "ours"),
        "backend": options.backend,
        "learning_rate": 1e-6,
        "max_steps": options.warm + options.steps,
        "save_steps": 0,
        "logging_steps": 1,
        "report_to": ["none"],
        "peak_tflops": PEAK_FLOPS / 1e12,
        **on_cpu,
        **(options.keys if options.backend == "megatron" else {"torch_compile": ON_GPU}),
    }


def measured(options: argparse.Namespace, folder: Path, train: Any, roles: list[str]) -> dict[str, Any]:
    ranks = list(range(options.gpus)) if ON_GPU else options.gpus
    group = {"device": "GPU" if ON_GPU else "CPU", "ranks": ranks, "workers": roles}
    with PeakMemory() as peak, RayHelper.session({"all": group}):
        train()
    steps = our_steps(folder / "ours", options.warm)
    found = phases(steps)
    tokens = found["throughput/tokens_per_second"]
    return {
        "seconds": found["time/step"],
        "tokens_per_second_per_gpu": tokens / options.gpus,
        "mfu": found["throughput/mfu"],
        "peak_gib": peak.gib(since=0.0),
        "losses": [step["loss"] for step in our_steps(folder / "ours", 0)],
        "phases": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--layers", type=int, help="of the shape, if not all")
    parser.add_argument("--backend", choices=["megatron", "fsdp"], default="megatron")
    parser.add_argument("--keys", type=json.loads, default={}, help="of the trainer, as JSON")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not counted: compilation, pinning memory")
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="of a step of SFT")
    parser.add_argument("--length", type=int, default=4096, help="tokens of such a row at most")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--kv_gib", type=float, default=20)
    parser.add_argument("--profile", action="store_true", help="SFT's first counted step, on the first GPU")
    options = arguments(parser, ["sft", "grpo"], limit_s=200)
    changes = {"num_hidden_layers": options.layers} if options.layers else {}
    found = run_parts("benchmarks.gpu.megatron", options, PARTS, partial(saved_apart, options.shape, **changes))
    print(f"{options.shape} ({found['parameters'] / 1e6:.0f} M) on {options.gpus} GPUs, {options.keys}")
    for name in options.parts:
        if "mfu" in (one := found[name]):
            print(f"{name:<24}{one['seconds']:8.2f} s{one['tokens_per_second_per_gpu']:10.0f} tokens/s a GPU"
                  f"{one['mfu']:8.1%} MFU{one['peak_gib']:8.1f} GiB peak")  # fmt: skip
            for phase, value in one["phases"].items():
                print(f"  {phase:<44}{value:12.3f}")
        if "profile" in one:
            show(one["profile"])


PARTS = {"sft": sft, "grpo": grpo}

if __name__ == "__main__":
    main()
