"""SFT on GSM8K, packed, by a plain YAML beside TRL's SFTTrainer with packing: tokens a second, memory, loss.

    python -m benchmarks.real.sft --model SMOLLM2_FOLDER [--data GSM8K_FOLDER]     # 135 M, about 4 minutes
    python -m benchmarks.real.sft --shape 0.6b                                     # random weights, about 6 minutes

The YAML of ours gives the model, the data, ``packing``, ``max_length`` and the rows of a step: 16 of 1,024 tokens. TRL
has its defaults, and micro-batches of ``--micro`` rows, which its documentation leaves to the user. ``--sides``:
``ours:torch_compile=true`` or ``trl:gradient_checkpointing=false`` are sides with further keys. ``--tiny`` tries it on
a CPU. Medians leave the first two steps out; tokens are those that passed through the model. Results are printed, and
written to $OUT/real_sft.json after each side.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real.gsm8k import prepared_model, problems, write_solutions
from benchmarks.real.sides import WARM, by_step, card, chosen, median, model_of, options_of, report, run_sides, write

SIZES = {"rows": 16, "length": 1024, "steps": 30, "micro": 4}
TINY = {"rows": 4, "length": 256, "steps": 4, "micro": 2}


def ours(asked: dict[str, Any]) -> tuple[list[str], Path]:
    """The command of a plain run, and the file of its steps."""
    folder = Path(asked["folder"])
    keys = {
        "model": asked["model"],
        "dataset": asked["data"],
        "packing": True,
        "max_length": asked["length"],
        "global_batch_size": asked["rows"],
        "max_steps": asked["steps"],
        "output_dir": str(folder / "out"),
        **asked["keys"],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return [sys.executable, "-m", "trainers.sft", "--config", str(folder / "run.yaml")], folder / "out/metrics.jsonl"


def trl(asked: dict[str, Any]) -> tuple[list[str], Path]:
    told = json.dumps(asked)
    return [sys.executable, "-m", "benchmarks.real.trl_side", "sft", told], Path(asked["steps_file"])


def in_words(found: dict[str, Any]) -> dict[str, Any]:
    """The steps under one set of names, whoever wrote them; ``tokens`` of each step."""
    before = 0.0
    for step in found["steps"]:
        step["seconds"] = step.get("seconds", step.get("step_time"))
        if step.get("num_tokens") is not None:
            step["tokens"], before = step["num_tokens"] - before, step["num_tokens"]
    return found


def rate(found: dict[str, Any]) -> float:
    """Tokens a second over all steps but the first two."""
    steps = found["steps"][WARM:] or found["steps"]
    seconds = sum(step["seconds"] for step in steps)
    return sum(step.get("tokens") or 0.0 for step in steps) / seconds if seconds else float("nan")


COLUMNS = {
    "s a step": lambda one: f"{median(one, 'seconds'):.3f}",
    "tokens": lambda one: f"{median(one, 'tokens'):,.0f}",
    "tokens/s": lambda one: f"{rate(one):,.0f}",
    "peak GiB": lambda one: f"{one['peak_gib']:.1f}",
    "first step": lambda one: f"{one['ends'][0]:.1f} s",
    "last loss": lambda one: f"{statistics.mean([step['loss'] for step in one['steps'] if step.get('loss')][-3:]):.4f}",
    "steps": lambda one: str(len(one["steps"])),
}


def main() -> None:
    options = options_of(__doc__, SIZES, limit_s=200)
    sizes = chosen(options, TINY if options.tiny else SIZES)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        model, data = prepared_model(options.model, options.shape, top), top / "data.jsonl"
        write_solutions(problems(options.data), data)
        asked = {"model": model, "data": str(data), **sizes}
        for side, found in run_sides(options, top, {"ours": ours, "trl": trl}, asked):
            one = results[side] = in_words(found)
            write("real_sft", vars(options), results)
            print(
                f"{side}: {rate(one):,.0f} tokens/s, {len(one['steps'])} steps, {one.get('failed', 'ended')}",
                flush=True,
            )
    title = f"SFT packed, {model_of(options)}, {sizes['rows']} rows of {sizes['length']} tokens a step, {card()}"
    report(title, results, COLUMNS)
    by_step(results, "loss")


if __name__ == "__main__":
    main()
