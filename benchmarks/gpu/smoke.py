"""Do the trainers do on GPUs, and on device groups of GPUs, what they do on one CPU?

    python -m benchmarks.gpu.smoke [--json FILE]

Builds a tiny model, runs every trainer for a few steps, SFT and GRPO in every placement that the visible GPUs allow,
in float32, and prints the losses beside those of one CPU process; the float32 columns must agree to about 1e-4, GPU
kernels being other kernels. bfloat16 runs are shown for what they are. Speed is not measured here: runs without Ray
share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.tiny.text import save_tiny

ROWS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a in range(2, 10) for b in range(10)
]
SFT = {"per_device_train_batch_size": 4, "global_batch_size": 16, "max_steps": 5, "learning_rate": 1e-3}
GRPO = {
    "per_device_train_batch_size": 8,
    "global_batch_size": 32,
    "max_steps": 3,
    "num_iterations": 2,
    "beta": 0.1,
    "max_completion_length": 8,
    "reward_funcs": ["exact_answer", "benchmarks.gpu.smoke.digits"],
}
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "0"} for row in ROWS]
SETTINGS = {
    "sft": SFT,
    "grpo": GRPO,
    "dpo": SFT | {"dataset": PAIRS},
    "reward": SFT | {"dataset": PAIRS},
    "gkd": SFT | {"lmbda": 0.0, "offload_teacher_model": True},
    "ppo": {name: value for name, value in GRPO.items() if name not in ("num_iterations", "beta")},
}


def digits(completions: list[str], **_: object) -> list[float]:
    """A reward that a random model earns in parts."""
    return [sum(character.isdigit() for character in text) / 8 for text in completions]


def groups(**sizes: tuple[int, list[str]]) -> str:
    """Device groups of GPUs as JSON: name=(number of GPUs, roles)."""
    first, found = 0, {}
    for name, (count, roles) in sizes.items():
        found[name] = {"device": "GPU", "ranks": list(range(first, first + count)), "workers": roles}
        first += count
    return json.dumps(found)


def placements(num_gpus: int) -> dict[str, tuple[str, list[str]]]:
    """name -> (trainer, arguments)."""
    found = {
        "sft one GPU": ("sft", []),
        "sft one GPU, Ray": ("sft", ["--use_ray", "true"]),
        "sft one GPU, bfloat16": ("sft", ["--dtype", "bfloat16"]),
        "grpo one GPU": ("grpo", []),
        "grpo one GPU, Ray": ("grpo", ["--use_ray", "true"]),
        "grpo one GPU, bfloat16": ("grpo", ["--dtype", "bfloat16"]),
        "sft one GPU, LoRA, bfloat16": ("sft", ["--dtype", "bfloat16", "--tuner_type", "lora"]),
    }
    for trainer in ("dpo", "reward", "gkd", "ppo"):
        found[f"{trainer} one GPU"] = (trainer, [])
        found[f"{trainer} one GPU, bfloat16"] = (trainer, ["--dtype", "bfloat16"])
    if num_gpus > 1:
        two = groups(train=(2, ["train"]))
        both = groups(policy=(2, ["train", "rollout"]))
        apart = groups(policy=(1, ["train"]), samplers=(1, ["rollout"]))
        found["sft two GPUs, torchrun"] = ("sft", ["torchrun"])
        found["grpo two GPUs, torchrun"] = ("grpo", ["torchrun"])
        found["sft two GPUs, torchrun, bfloat16"] = ("sft", ["torchrun", "--dtype", "bfloat16"])
        found["sft two GPUs, Ray"] = ("sft", ["--use_ray", "true", "--device_groups", two])
        found["grpo two GPUs, colocated, Ray"] = ("grpo", ["--use_ray", "true", "--device_groups", both])
        found["grpo two GPUs, separate, Ray"] = ("grpo", ["--use_ray", "true", "--device_groups", apart])
    return found


def losses(name: str, trainer: str, arguments: list[str], folder: Path) -> list[float]:
    """The losses that a run logs."""
    folder, models = folder / name, folder
    settings = SETTINGS[trainer] | ({"teacher_model": str(models / "teacher")} if trainer == "gkd" else {})
    config = {"model": str(models / "model"), "dataset": ROWS, "output_dir": str(folder / "out"), "dtype": "float32"}
    (folder / "config.json").parent.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | settings | {"report_to": ["none"], "save_steps": 0}))
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if name.endswith("CPU") else {})
    launcher = [sys.executable]
    if arguments[:1] == ["torchrun"]:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        arguments = arguments[1:]
    command = [*launcher, "-m", f"trainers.{trainer}", "--config", str(folder / "config.json"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny(folder / "model")
        save_tiny(folder / "teacher", seed=1)
        runs = {f"{trainer} CPU": (trainer, list[str]()) for trainer in SETTINGS} | placements(
            torch.cuda.device_count()
        )

        def run(placement: str) -> None:
            try:
                found[placement] = losses(placement, *runs[placement], folder)
            except RuntimeError as error:
                found[placement] = []
                print(f"--- {placement} failed\n{error}", flush=True)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(run, [placement for placement in runs if "Ray" not in placement]))
        for placement in runs:
            if "Ray" in placement:
                run(placement)
        found = {placement: found[placement] for placement in runs}
    for placement, values in found.items():
        print(f"{placement:34s}" + "  ".join(f"{value: .6f}" for value in values))
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "losses": found}, indent=2))


if __name__ == "__main__":
    main()
