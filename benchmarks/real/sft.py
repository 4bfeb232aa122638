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

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real.gsm8k import prepared_model, problems, write_solutions
from benchmarks.real.sides import WARM, by_step, card, median, parsed, report, run_side, write

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a real model")
    parser.add_argument("--data", help="folder of GSM8K")
    parser.add_argument("--shape", default="0.6b", help="random weights, where no model is named")
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"], metavar="SIDE[:key=value,...]")
    parser.add_argument("--limit_s", type=float, default=200, help="seconds that one side may take")
    parser.add_argument("--tiny", action="store_true")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    if options.tiny and options.model is None:
        options.shape = "tiny"
    sizes = TINY if options.tiny else SIZES
    sizes = {name: value if getattr(options, name) is None else getattr(options, name) for name, value in sizes.items()}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as top:
        model, data = prepared_model(options.model, options.shape, Path(top)), Path(top) / "data.jsonl"
        write_solutions(problems(options.data), data)
        for k, side in enumerate(options.sides):
            name, keys = parsed(side)
            folder = Path(top) / f"side{k}"
            folder.mkdir()
            asked = {
                **{"model": model, "data": str(data), "folder": str(folder), "keys": keys, **sizes},
                "steps_file": str(folder / "steps.jsonl"),
            }
            command, steps_file = {"ours": ours, "trl": trl}[name](asked)
            results[side] = in_words(run_side(command, steps_file, folder / "log", options.limit_s))
            write("real_sft", vars(options), results)
            one = results[side]
            print(
                f"{side}: {rate(one):,.0f} tokens/s, {len(one['steps'])} steps, {one.get('failed', 'ended')}",
                flush=True,
            )
    what = Path(options.model).name if options.model else f"{options.shape}, random weights"
    title = f"SFT packed, {what}, {sizes['rows']} rows of {sizes['length']} tokens a step, {card()}"
    report(title, results, COLUMNS)
    by_step(results, "loss")


if __name__ == "__main__":
    main()
