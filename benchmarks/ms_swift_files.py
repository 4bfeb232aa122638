"""Do the eleven files that ms-swift ships for Ray run here, two steps each, on a machine without a GPU?

    python -m benchmarks.ms_swift_files PATH_TO_MS_SWIFT [--only TEXT] [--out FILE]

The files of examples/ray, examples/sampler and examples/train/multi-node/ray are run from ms-swift's folder by the
command of their scripts, on a Ray cluster of this machine with eight invented GPUs, with real vLLM and Megatron. What
is changed: models are tiny and random and of the same architecture (of one that Megatron builds here, where the file
asks for Megatron), data are rows of the same kind, each role has two devices, a prompt and a completion are short, and
what vLLM or torch have on GPUs alone is off (``ON_CPU``). Files on images get texts: the column says so.

Prints a table: exit code, seconds, steps, and of the last step loss and reward. Exit 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.ms_swift_commands import cases as of_cases
from benchmarks.ms_swift_commands.cases import Case, cases_of
from benchmarks.ms_swift_commands.stand_ins import data_for
from tests import torchvision_on_cpu
from tests.e2e.completion_server import says, serving

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ray/", "sampler/", "train/multi-node/ray/")
DEVICES, GPUS = 2, 8
TOKENS, MOST_TOKENS, ROWS = 16, 512, 128
ON_CPU = {"sleep_level": 0, "bf16": False, "torch_dtype": "float32", "attn_impl": "sdpa", "deepspeed": None}
SMALL = {
    "gpus": DEVICES,
    **dict.fromkeys(("max_completion_length", "max_new_tokens"), TOKENS),
    "max_length": MOST_TOKENS,
    "vllm_max_model_len": 2 * MOST_TOKENS,
    "report_to": ["none"],
}
REMOVED = ("train_iters", "max_steps")


def on_cpu(keys: dict[str, Any], server: str) -> dict[str, Any]:
    """The keys of a file, or of a section of it, as two devices without GPU can run them."""
    made: dict[str, Any] = {}
    for name, value in keys.items():
        if name in REMOVED:
            continue
        if name == "engine_kwargs":
            made[name] = json.dumps({"base_url": server})
        elif name in ON_CPU:
            made[name] = ON_CPU[name]
        elif name in SMALL:
            made[name] = SMALL[name]
        else:
            made[name] = on_cpu(value, server) if isinstance(value, dict) else value
    return made


def ran(case: Case, number: int, folder: Path, ms_swift: Path, server: str, limit_s: float) -> dict[str, Any]:
    """One command, run to its end."""
    words = case.replaced(folder, number)
    for word in words:
        if word.endswith(f"case_{number}.yaml"):
            path = Path(word)
            keys = on_cpu(yaml.safe_load(path.read_text(encoding="utf-8")), server)
            if case.words[0] == "megatron":
                plugins = keys.get("external_plugins", [])
                plugins = plugins if isinstance(plugins, list) else [plugins]
                keys |= {"external_plugins": [*plugins, str(ROOT / "tests" / "megatron_on_cpu.py")], "bf16": False}
            if "Qwen3.5" in str(case.keys.get("model")):  # whose delta layers vLLM runs so on a CPU
                keys |= {"bf16": True, "torch_dtype": "bfloat16"}
            path.write_text(yaml.safe_dump(keys, sort_keys=False))
    if case.words[1] != "sample":
        words += ["--max_steps", "2", "--logging_steps", "1"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    env |= {"OPENAI_API_KEY": "none", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    log = folder / f"{number}.log"
    with log.open("w") as stream:
        try:
            command = [sys.executable, "-m", "trainers", *words]
            code = subprocess.run(
                command, cwd=ms_swift, env=env, stdout=stream, stderr=subprocess.STDOUT, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    output = Path(words[words.index("--output_dir") + 1])
    metrics = sorted(output.rglob("metrics.jsonl"))
    lines = [json.loads(line) for line in metrics[-1].read_text().splitlines()] if metrics else []
    steps = [line for line in lines if "loss" in line]
    last = (steps or lines or [{}])[-1]
    return {
        "name": case.name,
        "file": case.words[2:],
        "code": code,
        "s": round(time.monotonic() - began, 1),
        "steps": len(steps),
        "loss": last.get("loss"),
        "reward": last.get("reward"),
        "replaced": "Qwen3" if case.is_of_no_megatron else "",
        "said": log.read_text(encoding="utf-8", errors="replace")[-6000:],
    }


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of this machine, with invented GPUs."""
    import ray

    from rayhelper.runtimes.ray.patches import ray_on_loopback

    with ray_on_loopback():
        ray.init(address="local", num_cpus=2, num_gpus=GPUS, include_dashboard=False, logging_level="warning")
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def all_ran(chosen: list[Case], folder: Path, options: argparse.Namespace, server: str) -> list[dict[str, Any]]:
    """All commands, one after the other, on one cluster."""
    results = []
    with cluster() as address:
        os.environ["RAY_ADDRESS"] = address
        for number, case in enumerate(chosen):
            one = ran(case, number, folder, options.ms_swift, server, options.limit_s)
            results.append(one)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
            if one["code"]:
                print(one["name"], one["said"][-2500:], sep="\n", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ms_swift", type=Path)
    parser.add_argument("--only", default="", help="files whose command holds this")
    parser.add_argument("--limit_s", type=float, default=900)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [case for case in cases_of(options.ms_swift)[0] if case.name.startswith(FOLDERS)]
    chosen = [case for case in chosen if options.only in f"{case.name} {' '.join(case.words)}"]
    rows = patch.object(of_cases, "data_for", lambda *of: data_for(*of, rows=ROWS))
    answers = serving(lambda _: says("It is \\boxed{2}."))
    with tempfile.TemporaryDirectory() as place, rows, answers as (server, _):
        os.environ.update(torchvision_on_cpu.environment(Path(place) / "operators"))  # of Ray's workers too
        results = all_ran(chosen, Path(place), options, server)
    print("| command | model, replaced by | exit | s | steps | loss | reward |")
    print("|---|---|---|---|---|---|---|")
    for one in results:
        numbers = " | ".join("" if one[name] is None else f"{one[name]:.4g}" for name in ("loss", "reward"))
        print(f"| {one['name']} | {one['replaced']} | {one['code']} | {one['s']} | {one['steps']} | {numbers} |")
    sys.exit(any(one["code"] for one in results) or len(results) < 1)


if __name__ == "__main__":
    main()
