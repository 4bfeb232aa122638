"""Does vLLM write what the policy would, wherever the two are and however weights get from one to the other?

    python -m benchmarks.gpu.engine [--ways WAY ...]

A few GRPO steps of two layers of a Qwen3 shape with a large learning rate, in bfloat16, in every placement that the
visible GPUs allow. Fingerprints of the engine's weights are compared at each sync (a run that has others fails); beside
them stands how far the engine's log-probabilities of the sampled tokens are from the policy's: bfloat16 rounding,
about 0.01, is right; weights of a step before give ten times as much. Speed is not measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import SHAPES, save_shape
from benchmarks.gpu.steps import ON_GPU
from benchmarks.origin import origin

GPU = "GPU" if ON_GPU else "CPU"
LORA = {"tuner_type": "lora", "lora_rank": 8, "learning_rate": 3e-2}
ADAPTER = LORA | {"vllm_enable_lora": True}


def on(num_gpus: int, *groups: tuple[list[int], list[str]], **extra: Any) -> dict[str, Any]:
    """The keys of a placement on Ray; ``extra`` belongs to the last group."""
    found: dict[str, Any] = {"nproc_per_node": num_gpus}
    for k, (ranks, roles) in enumerate(groups):
        found[f"group{k}"] = {"device": GPU, "ranks": ranks if ON_GPU else len(ranks), "workers": roles}
    found[f"group{len(groups) - 1}"] |= extra
    return {"use_ray": True, "device_groups": found}


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "level2": (
        1,
        {"sleep_level": 2, "offload_model": True, "offload_optimizer": True},
    ),
    "level1": (1, {"sleep_level": 1}),
    "lora_merged": (1, {"sleep_level": int(ON_GPU), **LORA}),
    "lora_apart": (1, {"sleep_level": 1, **ADAPTER}),
    "varlen": (
        1,
        {"padding_free": True, "model_init_kwargs": {"attn_implementation": "varlen"}},
    ),
    "two_processes": (
        1,
        {
            "sleep_level": 1,
            "offload_optimizer": True,
            **on(1, ([0], ["train"]), ([0], ["rollout"]), shares_devices_with="group0"),
        },
    ),
    "ray": (1, {"sleep_level": 2, **on(1, ([0], ["train", "rollout"]))}),
    "apart": (2, on(2, ([0], ["train"]), ([1], ["rollout"]))),
    "apart_lora": (2, ADAPTER | on(2, ([0], ["train"]), ([1], ["rollout"]))),
    "ahead": (2, {"max_staleness": 1} | on(2, ([0], ["train"]), ([1], ["rollout"]))),
    "in_flight": (
        2,
        {"max_staleness": 1, "weight_sync_interval": 8} | on(2, ([0], ["train"]), ([1], ["rollout"])),
    ),
    "torchrun": (2, {"sleep_level": 2, "offload_optimizer": True}),
    "colocated": (2, {"sleep_level": 2, **on(2, ([0, 1], ["train", "rollout"]))}),
    "tensor_colocated": (
        2,
        {"sleep_level": 2, "vllm_tensor_parallel_size": 2, **on(2, ([0, 1], ["train", "rollout"]))},
    ),
    "tensor_workers": (
        3,
        {"vllm_tensor_parallel_size": 2, **on(3, ([0], ["train"]), ([1, 2], ["rollout"]))},
    ),
    "tensor_inside": (
        3,
        {
            "vllm_tensor_parallel_size": 2,
            **on(3, ([0], ["train"]), ([1, 2], ["rollout"]), gpus_per_worker=2),
        },
    ),
    "tensor_inside_lora": (
        3,
        ADAPTER
        | {
            "vllm_tensor_parallel_size": 2,
            **on(3, ([0], ["train"]), ([1, 2], ["rollout"]), gpus_per_worker=2),
        },
    ),
    "two_two": (4, on(4, ([0, 1], ["train"]), ([2, 3], ["rollout"]))),
}


def run(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    own = folder / name
    own.mkdir()
    settings = {
        "model": str(folder / "model"),
        "dataset": [{"prompt": f"{k:04d} is the number "[:16]} for k in range(16)],
        "output_dir": str(own / "out"),
        "reward_funcs": ["benchmarks.gpu.rewards.even"],
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "global_batch_size": 32,
        "max_completion_length": 64,
        "learning_rate": 1e-3,
        "max_steps": options.steps,
        "save_steps": 0,
        "logging_steps": 1,
        "report_to": ["none"],
        "rollout_importance_sampling_mode": "token_truncate",
        "rollout_engine": "vllm",
        "vllm_enforce_eager": True,
        "vllm_max_model_len": 128,
        **({"vllm_gpu_memory_utilization": 0.2} if ON_GPU else {"dtype": "float32"}),
    } | WAYS[name][1]
    (own / "config.json").write_text(json.dumps(settings))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name == "torchrun" else []
    command = [sys.executable, *torchrun, "-m", "trainers.grpo", "--config", str(own / "config.json")]
    with subprocess.Popen(command) as process:
        try:
            failed: Any = process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            failed = f"took more than {options.limit_s:.0f} s"
    if failed:
        return {"failed": failed}
    steps = [json.loads(line) for line in (own / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "sampling/sampling_logp_difference/mean" in step]
    kept = ("loss", "time/sync", "staleness", "staleness/tokens_mean", "staleness/mixed_completions")
    return {
        "differences": [step["sampling/sampling_logp_difference/mean"] for step in steps],
        **{key: [step[key] for step in steps] for key in kept if key in steps[-1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all for which there are GPUs enough")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit_s", type=float, default=200, help="seconds that one way may take")
    options = parser.parse_args()
    ways = options.ways or [name for name, (gpus, _) in WAYS.items() if gpus <= max(torch.cuda.device_count(), 1)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_shape(options.shape, Path(folder) / "model", num_hidden_layers=2)
        for name in ways:
            found[name] = run(name, options, Path(folder))
            print(f"{name:<20}" + "  ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
            if out := os.environ.get("OUT"):
                (Path(out) / "engine.json").write_text(json.dumps({**origin(), **found}, indent=1))
    if failed := [name for name, one in found.items() if "failed" in one]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
