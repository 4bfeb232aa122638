"""How long does the dry run of a large cluster take, from starting Python to the last line?

    python -m benchmarks.plan [--rounds 5]

Three configurations at 1,024 and at 100,000 GPUs: two groups written as counts, two that halve every node by explicit
ranks, and the first on a cluster with half the nodes that it needs. Reported is the median of wall times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


def counts(num_gpus: int) -> dict[str, Any]:
    """Half of the GPUs train, half generate."""
    train = {"gpus": num_gpus // 2, "tensor_model_parallel_size": 4}
    rollout = {"gpus": num_gpus // 2, "vllm_tensor_parallel_size": 8}
    return {"model": SHAPE, "nproc_per_node": 8, "train": train, "rollout": rollout}


def ranks(num_gpus: int) -> dict[str, Any]:
    """The same, with half of every node for each."""
    halves = {
        "trainers": [rank for rank in range(num_gpus) if rank % 8 < 4],
        "engines": [rank for rank in range(num_gpus) if rank % 8 >= 4],
    }
    roles = {"trainers": ["train"], "engines": ["rollout"]}
    groups = {name: {"device": "GPU", "ranks": half, "workers": roles[name]} for name, half in halves.items()}
    return {"model": SHAPE, "tensor_model_parallel_size": 4, "device_groups": {"nproc_per_node": 8, **groups}}


def seconds(file: Path, nodes: int, code: int) -> float:
    """Wall time of one dry run that must end with the exit code."""
    command = [sys.executable, "-m", "rayhelper", "plan", "--config", str(file), "--nodes", str(nodes)]
    start = time.perf_counter()
    ran = subprocess.run(command, capture_output=True, text=True)
    taken = time.perf_counter() - start
    assert ran.returncode == code, ran.stderr or ran.stdout
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    cases: list[tuple[str, Callable[[int], dict[str, Any]], int, int]] = [
        ("counts", counts, 8, 0),
        ("explicit ranks", ranks, 8, 0),
        ("half the nodes", counts, 16, 1),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.json"
        for name, configuration, gpus_per_node, code in cases:
            for num_gpus in (1_024, 100_000):
                file.write_text(json.dumps(configuration(num_gpus)))
                taken = [seconds(file, num_gpus // gpus_per_node, code) for _ in range(rounds)]
                print(f"{name:16} {num_gpus:>9,} GPUs  {statistics.median(taken):6.2f} s  (worst {max(taken):.2f} s)")


if __name__ == "__main__":
    main()
