"""How long does a step of a plain GRPO run take, by rollout engine: a YAML of model, data and reward, nothing tuned?

    python -m benchmarks.gpu.plain_grpo [--shapes smollm2-135m 0.6b] [--engines hf vllm trl] [--steps 6]
        [--limit_s 240] [--keys '{"token_budget": "auto"}']

Random weights of a shape, 32 prompts of some 16 tokens, 16 completions each of at most 256 tokens, which hardly ever
stop, one optimizer step per generation. The command is the one of the README, in one process. Of ``metrics.jsonl`` the
median of all steps but the first two, and where a step's time went. ``--keys``: further ones of the YAML. ``trl``:
TRL's own trainer with vLLM in the same process, and its own settings otherwise. ``peak_gib``: the most memory of the
device that is in use, whoever took it; ``to_first_s``: from the start of the process to the end of the first step.
Writes plain_grpo.json under $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.shapes import saved_apart
from benchmarks.gpu.steps import clock, trl_settings
from benchmarks.origin import origin

PROMPTS, SAMPLES, TOKENS = 32, 16, 256


def measured(model: Path, engine: str, steps: int, limit_s: float, further: dict[str, Any]) -> dict[str, Any]:
    """Of one run; ``further``: keys of its YAML."""
    folder = Path(tempfile.mkdtemp(dir=model.parent))
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{k:04d} is the number "}) + "\n" for k in range(PROMPTS * steps)))
    start = time.monotonic()
    if engine == "trl":
        row = {"model": str(model), "data": str(data), "folder": str(folder), "steps": steps, "start": time.time()}
        command = [sys.executable, "-m", "benchmarks.gpu.plain_grpo", "--trl", json.dumps(row)]
        with PeakMemory() as peak:
            done = _ended(command, limit_s)
        if isinstance(done, dict):
            return done
        return {**json.loads(done.splitlines()[-1]), "whole_s": time.monotonic() - start, "peak_gib": peak.gib(0)}
    keys = {
        **{"model": str(model), "dataset": str(data), "output_dir": str(folder / "out"), "rollout_engine": engine},
        **{"reward_funcs": ["benchmarks.gpu.rewards.even"], "num_generations": SAMPLES, "max_steps": steps},
        **{"max_completion_length": TOKENS, "global_batch_size": PROMPTS * SAMPLES, "dtype": "bfloat16"},
        **{"per_device_train_batch_size": 32, "logging_steps": 1},
        **further,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(keys))
    command = [sys.executable, "-m", "trainers.grpo", "--config", str(folder / "run.yaml"), "--use_ray", "false"]
    with PeakMemory() as peak:
        done = _ended(command, limit_s)
    if isinstance(done, dict):
        return done
    whole_s = time.monotonic() - start
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    names = sorted(
        name for name in lines[-1] if name == "step_time" or name.startswith(("time/", "memory/", "sampling/"))
    )
    medians = {
        name: statistics.median(line[name] for line in lines[2:] if line.get(name) is not None) for name in names
    }
    later = sum(line.get("step_time") or 0.0 for line in lines[1:])
    times = {"whole_s": round(whole_s, 1), "first_step_s": lines[0].get("step_time"), "to_first_s": whole_s - later}
    return {**times, **medians, "peak_gib": peak.gib(0)}


def _ended(command: list[str], limit_s: float) -> str | dict[str, Any]:
    """What the command wrote, or what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {limit_s:.0f} s"}
    return done.stdout if not done.returncode else {"error": done.stderr[-1500:]}


def by_trl(model: str, data: str, folder: str, steps: int, start: float) -> dict[str, Any]:
    """Medians of TRL's steps, in this process, with vLLM in it and what its documentation leaves to it otherwise."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.gpu.rewards import even

    watch = clock()
    arguments = GRPOConfig(
        **trl_settings(Path(folder) / "trl", steps),
        num_generations=SAMPLES,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=PROMPTS * SAMPLES // 32,
        max_completion_length=TOKENS,
        use_vllm=torch.cuda.is_available(),
        vllm_mode="colocate",
    )
    rows = load_dataset("json", data_files=data, split="train")
    trainer = GRPOTrainer(model=model, reward_funcs=even, args=arguments, train_dataset=rows, callbacks=[watch])
    began = time.time()
    trainer.train()
    return {
        "step_time": statistics.median(watch.seconds[2:]),
        "first_step_s": watch.seconds[0],
        "to_first_s": began - start + watch.seconds[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "0.6b"])
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit_s", type=float, default=240)
    parser.add_argument("--keys", type=json.loads, default={})
    parser.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        found = by_trl(**args.trl)
        print("\n" + json.dumps(found), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            saved_apart(shape, Path(folder), shape)
            for engine in args.engines:
                row = {
                    "shape": shape,
                    "engine": engine,
                    **measured(Path(folder) / shape, engine, args.steps, args.limit_s, args.keys),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if out := os.environ.get("OUT"):
        Path(out, "plain_grpo.json").write_text(json.dumps({**origin(), "gpu": device, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
