"""Learning curves on GSM8K with the accuracy of all 1,319 test problems: SFT of a real model, and four runs from it.

    python -m benchmarks.real.learning --model SMOLLM2_FOLDER [--data GSM8K_FOLDER]
    python -m benchmarks.real.learning --model SMOLLM2_FOLDER --runs sft dpo --seeds 0 --keys dpo:learning_rate=1e-6
    python -m benchmarks.real.learning --tiny                     # random weights, on a CPU, about five minutes

``--runs``: sft, grpo, dpo (from samples of the SFT model), gkd (of the SFT model into one with a third of its layers)
and ppo, and trl_grpo where it is named: GRPO by TRL's trainer; ``stages.py`` has their keys. All but ``sft`` begin with
the SFT model of their seed, which is trained first where it is missing. The runs are plain YAML files. Accuracy is that
of greedy completions of the model at the start and at ``--points`` checkpoints. It is measured after the run, and its
seconds do not count.

``--out`` (outputs/real) gets ``results.json``, a plot of each run, and the last model of each seed. A run that is in
``results.json`` is not repeated: an interrupted command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.real.gsm8k import problems, write_prompts
from benchmarks.real.learning.plot import svg
from benchmarks.real.learning.stages import PEERS, RUNS, TINY, Begin, Sizes, command
from benchmarks.real.sides import card, parsed, run_side
from benchmarks.tiny.text import tiny_model, tiny_tokenizer


class Curves:
    """The runs of one command. ``done`` has what came of each, by its name and seed."""

    def __init__(self, options: argparse.Namespace, sizes: Sizes) -> None:
        self.options, self.sizes = options, sizes
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = self.out / "results.json"
        self.done: dict[str, Any] = json.loads(self.results.read_text())["runs"] if self.results.exists() else {}
        self.keys = dict(map(parsed, options.keys))
        self.train_rows = problems(options.data)
        self.test_file = self.out / "test.jsonl"
        write_prompts(problems(options.data, "test")[: sizes.test_rows], self.test_file)
        self.model = random_model(self.out / "tiny") if options.model is None else str(Path(options.model).resolve())

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """What came of a run; of one that was done before, what came of it then."""
        told, folder = f"{name} seed {seed}", self.out / f"seed{seed}" / name
        if told in self.done:
            return self.done[told]
        start = self.model if name == "sft" else self._sft(seed)
        shutil.rmtree(folder, ignore_errors=True)
        begin = Begin(folder, start, seed, self.train_rows, self.sizes)
        line, model = command(name, begin, self.keys.get(name, {}))
        found = run_side(line, folder / "out" / "metrics.jsonl", folder / "log", self.options.limit_s)
        if "failed" in found:
            raise SystemExit(f"{told} {found['failed']}; its log ends:\n{found['log']}")
        steps = found.pop("steps")
        found["tokens"] = steps[-1].get("num_tokens")
        found["curve"] = self._accuracies(folder, model, len(steps))
        self.done[told] = found
        self.results.write_text(json.dumps({**origin(), "device": card(), "runs": self.done}, indent=1))
        return found

    def _sft(self, seed: int) -> str:
        self.run("sft", seed)
        return str(self.out / f"seed{seed}" / "sft" / "out" / "final")

    def _accuracies(self, folder: Path, model: str, num_steps: int) -> list[dict[str, Any]]:
        """Of the model at the start, of each checkpoint, and of the last one. Only the last is kept."""
        saved = {int(path.name.rpartition("-")[2]): path for path in (folder / "out").glob("checkpoint-*")}
        models = {0: model, **{step: str(saved[step]) for step in sorted(saved)}, num_steps: str(folder / "out/final")}
        asked = {"models": list(models.values()), "data": str(self.test_file), "length": self.sizes.length}
        (folder / "asked.json").write_text(json.dumps({**asked, "out": str(folder / "accuracy.json")}))
        subprocess.run(
            [sys.executable, "-m", "benchmarks.real.learning.accuracy", str(folder / "asked.json")], check=True
        )
        found = json.loads((folder / "accuracy.json").read_text())
        for path in saved.values():
            shutil.rmtree(path)
        return [{"step": step, **one} for step, one in zip(models, found, strict=True)]

    def show(self, name: str) -> None:
        """Prints the curves of a run, a column per seed, and writes their plot."""
        runs = {seed: self.run(name, seed) for seed in self.options.seeds}
        count = next(iter(runs.values()))["curve"][0]["problems"]
        print(f"\n{name}, {Path(self.model).name}, {card()}: accuracy of {count:,} test problems of GSM8K in percent")
        print("  step" + "".join(f"{f'seed {seed}':>16}" for seed in runs))
        for points in zip(*(run["curve"] for run in runs.values()), strict=True):
            print(f"{points[0]['step']:6d}" + "".join(f"{in_percent(point):>16}" for point in points))
        for title, shown in COLUMNS.items():
            print(f"{title:>6}" + "".join(f"{shown(run):>16}" for run in runs.values()))
        curves = {
            f"seed {seed}": [(point["step"], 100 * point["accuracy"]) for point in run["curve"]]
            for seed, run in runs.items()
        }
        (self.out / f"{name}.svg").write_text(svg(f"{name}: test accuracy on GSM8K by step", curves))
        print(f"the plot is {self.out / f'{name}.svg'}", flush=True)


COLUMNS = {
    "s": lambda run: f"{run['whole_s']:,.0f}",
    "tokens": lambda run: f"{run['tokens']:,.0f}",
    "GiB": lambda run: f"{run['peak_gib']:.1f}",
}


def in_percent(point: dict[str, Any]) -> str:
    """Accuracy and its standard error."""
    share, count = point["accuracy"], point["problems"]
    return f"{100 * share:.1f} +- {100 * math.sqrt(share * (1 - share) / count):.1f}"


def random_model(folder: Path) -> str:
    """A tiny one with a chat template."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a real model with a chat template")
    parser.add_argument("--data", help="folder of GSM8K: train.jsonl and test.jsonl")
    parser.add_argument("--runs", nargs="+", choices=RUNS + PEERS, default=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--keys", nargs="+", default=[], metavar="RUN:key=value,...", help="keys of a run's YAML")
    parser.add_argument("--out", default="outputs/real")
    parser.add_argument("--limit_s", type=float, default=3600, help="seconds that one run may take")
    parser.add_argument("--tiny", action="store_true")
    for field in dataclasses.fields(Sizes):
        if field.name != "reward":
            parser.add_argument(f"--{field.name}", type=int)
    options = parser.parse_args()
    if options.model is None and not options.tiny:
        parser.error("name a model with --model, or take --tiny")
    sizes = TINY if options.tiny else Sizes()
    told = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(Sizes)}
    curves = Curves(options, dataclasses.replace(sizes, **{name: n for name, n in told.items() if n is not None}))
    for name in options.runs:
        curves.show(name)


if __name__ == "__main__":
    main()
