"""Does a configuration of examples/ run as it stands, and how long do its steps take?

    python -m benchmarks.gpu.examples gkd examples/megatron/opsd.yaml [--gpus 2] [--steps 4] [--limit_s 300]

The command line of the example, by a process of its own, in a folder where the models' hub names are folders: Qwen3
shapes with random weights, which hardly ever end a completion, and a tokenizer with a token a byte. All keys are the
file's but for how many steps it takes, and that none is saved. ``--gpus``: workers of each role, where there are fewer
than the file asks for.

Prints medians of the steps after the first ``--warm``, and the losses of all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.parts import run_limited
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU, our_steps, phases
from benchmarks.origin import origin

ROOT = Path(__file__).resolve().parents[2]
MODEL_KEYS = ("model", "ref_model", "teacher_model", "value_model", "reward_model")


def shape_of(model: str) -> str:
    """Of a hub name such as Qwen/Qwen3-4B or Qwen/Qwen3-4B-Base.

    Raises:
        SystemExit: no such shape is known.
    """
    found = re.search(r"(\d[\w.]*b(?:-a\w+)?)", model.lower())
    if found is None or found[1] not in SHAPES:
        sys.exit(f"{model} is of no shape that is known here: {', '.join(SHAPES)}")
    return found[1]


def write(options: argparse.Namespace, folder: Path) -> None:
    """The example as it runs in ``folder``, its models and data beside it."""
    keys: dict[str, Any] = yaml.safe_load(Path(options.file).read_text(encoding="utf-8"))
    keys |= {"max_steps": options.warm + options.steps, "save_steps": 0, "report_to": ["none"], "output_dir": "out"}
    keys |= options.keys
    for model in sorted({keys[name] for name in MODEL_KEYS if keys.get(name)}, reverse=True):
        saved_apart(options.shape or shape_of(model), folder, model)
    (folder / "examples").symlink_to(ROOT / "examples")
    for section in keys.values():
        if options.gpus and isinstance(section, dict) and "gpus" in section:
            section["gpus"] = options.gpus
    (folder / "example.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer")
    parser.add_argument("file")
    parser.add_argument("--gpus", type=int, help="workers of each role")
    parser.add_argument("--shape", choices=SHAPES, help="of all models, in the place of their own")
    parser.add_argument("--keys", type=json.loads, default={}, help="further keys of the trainer, as JSON")
    parser.add_argument("--use_ray", default="true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1, help="steps that are not counted: compilation, pinning memory")
    parser.add_argument("--limit_s", type=float, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(options, folder)
        command = [sys.executable, "-m", f"trainers.{options.trainer}", "--config", "example.yaml"]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {"cwd": folder, "env": os.environ | {"PYTHONPATH": path}}
        ended = run_limited([*command, "--use_ray", options.use_ray], options.limit_s, **settings)
        steps = our_steps(folder / "out", options.warm)
        found = {
            "ended": ended,
            "phases": phases(steps),
            "losses": [step["loss"] for step in our_steps(folder / "out", 0)],
            "mean_length": [step.get("completions/mean_length") for step in steps],
            "on_gpu": ON_GPU,
        }
    print(f"{options.file}: {len(steps)} steps, {'to its end' if ended == 0 else f'ended by {ended}'}")
    for phase, value in found["phases"].items():
        print(f"  {phase:<44}{value:12.3f}")
    print(f"  losses {found['losses']}, mean lengths {found['mean_length']}")
    if "OUT" in os.environ:
        everything = {**origin(), "options": vars(options), **found}
        (Path(os.environ["OUT"]) / "examples.json").write_text(json.dumps(everything, indent=1))
    sys.exit(ended != 0)


if __name__ == "__main__":
    main()
