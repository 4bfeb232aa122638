"""Does GRPO with vLLM run by its defaults where q, k and v have biases, as in Qwen2.5, and do both draw alike?

    python -m benchmarks.gpu.biased [--steps 4] [--temperatures 1.0 0.7] [--json FILE]

A random model in Qwen2.5-0.5B's shape with biases, and a byte tokenizer. ``trainers.grpo`` is run by the command line,
with nothing but model, data, reward and lengths said. For each temperature: the exit code, and how far vLLM's
log-probabilities of what it drew are from the trainer's (the mean and the largest of the last step).
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

from benchmarks.gpu.steps import ON_GPU
from benchmarks.tiny.text import save_tiny

SHAPE = {
    **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    **{"num_key_value_heads": 2, "initializer_range": 0.02},
}
TINY = {"hidden_size": 128, "num_hidden_layers": 2}
BIAS = 0.5  # the deviation from which biases are drawn; those of Qwen2.5 reach far beyond


def model_in(folder: Path) -> str:
    """The model, saved."""
    import torch
    from transformers import AutoModelForCausalLM

    path = save_tiny(folder, family="qwen2", **(SHAPE if ON_GPU else TINY))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.copy_(BIAS * torch.randn(parameter.shape, generator=generator))
    model.to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(path)
    return path


def run(model: str, folder: Path, temperature: float, steps: int) -> dict[str, Any]:
    """A run by the command line, and what it says of both log-probabilities."""
    rows = [{"prompt": f"Say {number}: "} for number in range(64)]
    keys = {
        **{"model": model, "dataset": rows, "reward_funcs": ["tests.e2e.runs.evenness"], "rollout_engine": "vllm"},
        **{"num_generations": 8, "global_batch_size": 64, "max_completion_length": 64, "max_steps": steps},
        **{"temperature": temperature, "output_dir": str(folder), "report_to": ["none"], "learning_rate": 1e-4},
        **{"vllm_importance_sampling_correction": True, "vllm_max_model_length": 256},
    }
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(keys))
    done = subprocess.run(
        [sys.executable, "-m", "trainers.grpo", "--config", str(config)], capture_output=True, text=True, timeout=280
    )
    numbers = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in numbers.read_text().splitlines()] if numbers.exists() else []
    trained = [line for line in lines if "loss" in line]
    sampling = {name: value for name, value in (trained[-1] if trained else {}).items() if "sampling" in name}
    ended = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:300]
    return {"temperature": temperature, "exit": done.returncode, "steps": len(trained), **sampling, "ended": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "biased.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = model_in(Path(folder) / "model")
        found = [run(model, Path(folder) / str(one), one, options.steps) for one in options.temperatures]
    for one in found:
        print(json.dumps(one))
    Path(options.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
