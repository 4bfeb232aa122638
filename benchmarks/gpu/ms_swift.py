"""Do ms-swift's own example commands run on a GPU, with vLLM, from the first step to the last?

    python -m benchmarks.gpu.ms_swift PATH_TO_MS_SWIFT --model FOLDER --rows gsm8k/train.jsonl [--out FILE] NAME...

``NAME`` is a script or file below ms-swift's ``examples``. A command keeps its keys, plugins and prompts. What the
machine and the hub do not allow is changed: every model is ``--model``, the rows are GSM8K's in ms-swift's form, each
role has ``--gpus`` GPUs (which accumulate what others would learn), sizes of layouts are at most that, completions have
at most ``--tokens`` tokens, and the run takes ``--steps`` steps.

Prints a table: exit code, seconds, steps, and of the last step loss, gradient norm and reward. Exit 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.ms_swift_commands import cases as of_cases
from benchmarks.ms_swift_commands.cases import Case, cases_of

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = re.compile(r"(tensor|pipeline|context|expert)\w*_parallel_size$")
SHOWN = ("loss", "grad_norm", "reward", "kl")
NO_TRACKERS = ("wandb", "swanlab")  # which need a network


def rows_of(gsm8k: Path, folder: Path, count: int = 512) -> str:
    """GSM8K's problems as conversations, with the whole answer, whose last line the reward reads."""
    target = folder / "gsm8k.jsonl"
    rows = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()[:count]]
    made = [
        {
            "messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}],
            "solution": row["answer"].rpartition("#### ")[2],
        }
        for row in rows
    ]
    target.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return str(target)


def fitted(name: str, value: Any, options: argparse.Namespace) -> Any:
    """A key's value, as far as ``--gpus`` and a small model allow it."""
    if name in ("gpus", "nnodes", "nproc_per_node") or LAYOUT.search(name):
        return min(int(value), options.gpus)
    if name == "vllm_max_model_len":
        return min(int(value), options.most_tokens)
    if name in ("max_length", "max_completion_length"):
        return min(int(value), options.tokens)
    if name == "report_to":
        kept = [one for one in (value if isinstance(value, list) else [value]) if one not in NO_TRACKERS]
        return kept or ["none"]
    return value


def fitted_file(path: Path, options: argparse.Namespace) -> None:
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))

    def changed(keys: dict[str, Any]) -> dict[str, Any]:
        made = {k: changed(v) if isinstance(v, dict) else fitted(k, v, options) for k, v in keys.items()}
        return {name: value for name, value in made.items() if name not in ("train_iters", "max_steps")}

    path.write_text(yaml.safe_dump(changed(keys), sort_keys=False))


def fitted_words(words: list[str], options: argparse.Namespace) -> list[str]:
    made: list[str] = []
    for word in words:
        if word.startswith("--") or not made or not made[-1].startswith("--"):
            made.append(word)
            continue
        value = fitted(made[-1][2:], word, options)
        made += value if isinstance(value, list) else [str(value)]
    for name in ("--train_iters", "--max_steps"):
        if name in made:
            del made[made.index(name) : made.index(name) + 2]
    return [word for word in made if word not in NO_TRACKERS]


def ran(case: Case, number: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One command, run to its end."""
    words = case.replaced(folder, number)
    for word in words:
        if word.endswith(f"case_{number}.yaml"):
            fitted_file(Path(word), options)
    words = fitted_words(words, options)
    processes = max(1, int(case.environment.get("NPROC_PER_NODE") or 1) // options.gpus)
    if "--gradient_accumulation_steps" in words:  # a step has as many sequences as over all processes
        place = words.index("--gradient_accumulation_steps") + 1
        words[place] = str(int(words[place]) * processes)
    words += ["--max_steps", str(options.steps)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path}
    if options.gpus > 1 and "NPROC_PER_NODE" in case.environment:
        env["NPROC_PER_NODE"] = str(options.gpus)
    began = time.monotonic()
    with (folder / f"{number}.log").open("w") as log:
        try:
            command = [sys.executable, "-m", "trainers", *words]
            code = subprocess.run(
                command, cwd=options.ms_swift, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=options.limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    told = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace")
    output = next((Path(words[k + 1]) for k, word in enumerate(words) if word == "--output_dir"), folder)
    metrics = sorted(output.rglob("metrics.jsonl"))
    lines = [json.loads(line) for line in metrics[-1].read_text().splitlines()] if metrics else []
    steps = [line for line in lines if "loss" in line]
    last = steps[-1] if steps else {}
    return {
        "name": case.name,
        "code": code,
        "s": round(time.monotonic() - began, 1),
        "steps": len(steps),
        **{name: last.get(name) for name in SHOWN},
        "command": " ".join(words),
        "said": told[-6000:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ms_swift", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="at most, of a prompt and of a completion")
    parser.add_argument("--most_tokens", type=int, default=8192, help="that the model may see")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit_s", type=float, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.rows = options.rows.resolve()
    options.model = str(Path(options.model).resolve())
    results = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = rows_of(options.rows, folder)
        with (
            patch.object(of_cases, "model_for", lambda *_: options.model),
            patch.object(of_cases, "data_for", lambda *_: rows),
        ):
            cases = [case for case in cases_of(options.ms_swift)[0] if case.name in options.names]
            for number, case in enumerate(cases):
                results.append(ran(case, number, folder, options))
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1))
                if results[-1]["code"]:
                    print(results[-1]["command"], "\n", results[-1]["said"][-2500:], flush=True)
    print("| command | exit | s | steps | loss | grad_norm | reward | kl |\n|---|---|---|---|---|---|---|---|")
    for one in results:
        numbers = " | ".join("" if one[name] is None else f"{one[name]:.4g}" for name in SHOWN)
        print(f"| {one['name']} | {one['code']} | {one['s']} | {one['steps']} | {numbers} |")
    sys.exit(any(one["code"] for one in results) or len(results) < len(options.names))


if __name__ == "__main__":
    main()
