"""A GRPO step of a plain YAML beside TRL's GRPOTrainer with vLLM in its process: seconds, memory, reward by step.

    python -m benchmarks.real.grpo --model SMOLLM2_FOLDER [--data GSM8K_FOLDER]     # 135 M on GSM8K, about 6 minutes
    python -m benchmarks.real.grpo --shape 0.6b                                     # random weights, about 8 minutes

The YAML of ours gives the model, the data, the reward and the sizes of a step, and nothing else. GSM8K: 32 problems x
16 completions of at most 256 tokens, one optimizer step per generation. A shape: 64 prompts x 8 completions of 512
tokens, which hardly ever stop. ``--sides``: ours and trl, and with ``--model`` also swift and verl (``peers.py``). Each
takes further keys of its own, such as ``ours:rollout_engine=vllm``, ``trl:gradient_checkpointing=false``,
``swift:vllm_max_num_seqs=512`` or ``verl:actor_rollout_ref.rollout.max_num_seqs=512``. ``--tiny`` tries it on a CPU.

Medians leave the first two steps out. ``first step`` is the time from the start of the process to the end of its first
step; ``peak`` is the most that the process had of the GPU. ``generate`` of TRL holds the transfer of weights. Results
are printed, and written to $OUT/real_grpo.json after each side.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real import peers
from benchmarks.real.gsm8k import prepared_model, problems, write_numbers, write_prompts
from benchmarks.real.sides import by_step, card, chosen, median, model_of, options_of, parsed, report, run_sides, write

REAL = {"prompts": 32, "generations": 16, "length": 256, "steps": 20, "micro": 32}
SHAPE = {"prompts": 64, "generations": 8, "length": 512, "steps": 6, "micro": 16}
TINY = {"prompts": 2, "generations": 4, "length": 12, "steps": 3, "micro": 4}


def ours(asked: dict[str, Any]) -> tuple[list[str], Path]:
    """The command of a plain run, and the file of its steps."""
    folder = Path(asked["folder"])
    keys = {
        "model": asked["model"],
        "dataset": asked["data"],
        "reward_funcs": [asked["rewards"]],
        "num_generations": asked["generations"],
        "max_completion_length": asked["length"],
        "global_batch_size": asked["rows"],
        "max_steps": asked["steps"],
        "output_dir": str(folder / "out"),
        **asked["keys"],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return [sys.executable, "-m", "trainers.grpo", "--config", str(folder / "run.yaml")], folder / "out/metrics.jsonl"


def trl(asked: dict[str, Any]) -> tuple[list[str], Path]:
    told = json.dumps(asked)
    return [sys.executable, "-m", "benchmarks.real.trl_side", "grpo", told], Path(asked["steps_file"])


SIDES = {"ours": ours, "trl": trl, "swift": peers.swift, "verl": peers.verl}


def in_words(found: dict[str, Any], rows: int) -> dict[str, Any]:
    """The steps under one set of names, whoever wrote them."""
    names = {"step_time": "seconds", "time/generate": "generate", "time/update": "update"}
    found["steps"] = [peers.step_of_verl(step["data"]) if "data" in step else step for step in found["steps"]]
    for step in found["steps"]:
        for theirs, name in names.items():
            if theirs in step:
                step[name] = step[theirs]
        length = step.get("completions/mean_length")
        step["tokens"] = None if length is None else length * rows
    return found


COLUMNS = {
    "s a step": lambda one: f"{median(one, 'seconds'):.2f}",
    "generate": lambda one: f"{median(one, 'generate'):.2f}",
    "update": lambda one: f"{median(one, 'update'):.2f}",
    "tokens": lambda one: f"{median(one, 'tokens'):,.0f}",
    "tokens/s": lambda one: f"{median(one, 'tokens') / median(one, 'seconds'):,.0f}",
    "peak GiB": lambda one: f"{one['peak_gib']:.1f}",
    "first step": lambda one: f"{one['ends'][0]:.1f} s",
    "steps": lambda one: str(len(one["steps"])),
}


def main() -> None:
    options = options_of(__doc__, REAL, limit_s=245)
    sizes = chosen(options, TINY if options.tiny else SHAPE if options.model is None else REAL)
    for side in options.sides:
        if options.model is None and parsed(side)[0] in ("swift", "verl"):
            raise SystemExit(f"--sides {side}: ms-swift and verl are measured with a real model; name it with --model")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        model, data = prepared_model(options.model, options.shape, top), top / "data.jsonl"
        if options.model is None:
            write_numbers(sizes["prompts"] * sizes["steps"], data)
        else:
            write_prompts(problems(options.data), data)
        rows = sizes["prompts"] * sizes["generations"]
        asked = {"model": model, "data": str(data), "rows": rows, **sizes}
        asked["rewards"] = "benchmarks.gpu.rewards.even" if options.model is None else "exact_answer"
        for side, found in run_sides(options, top, SIDES, asked):
            results[side] = in_words(found, rows)
            write("real_grpo", vars(options), results)
            told = {key: f"{median(results[side], key):.3f}" for key in ("seconds", "generate", "update")}
            print(
                f"{side}: {told}, {len(results[side]['steps'])} steps, {results[side].get('failed', 'ended')}",
                flush=True,
            )
    sentence = f"{sizes['prompts']} prompts x {sizes['generations']} completions of at most {sizes['length']} tokens"
    report(f"GRPO, {model_of(options)}, {sentence}, {card()}", results, COLUMNS)
    by_step(results, "reward")


if __name__ == "__main__":
    main()
