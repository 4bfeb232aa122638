"""How many milliseconds does a decoding step of 512 sequences take: hf engine, generate, vLLM, and without a host?

    python -m benchmarks.gpu.decoding [--shapes smollm2-135m 0.6b] [--systems ...] [--limit_s 60] [--floor FILE]

512 sequences (32 prompts of 16 tokens, 16 completions each) decode 256 tokens, no stop tokens, random weights,
bfloat16. ``slots``: the hf engine with CUDA graphs; ``slots, eager``: without; ``generate``: transformers' own.
Milliseconds are those of a call by its tokens, prompts included; the faster of the second and third call.
``floor`` runs FILE, a program that prints JSON with ``ms_a_step`` for a shape. Prints a table and writes
decoding.json under $OUT. All ends within 6 minutes; what failed stands on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.continuous_batching import PROMPTS, SAMPLES, of_vllm, prompts
from benchmarks.gpu.shapes import saved_apart, tokenizer
from benchmarks.origin import origin

SYSTEMS = ("slots", "slots, eager", "generate", "vllm", "floor")
ALL_S = 350.0  # of the whole benchmark


def of_engine(folder: str, system: str, tokens: int) -> dict[str, Any]:
    """Measures the hf engine in this process."""
    import numpy as np

    from trainers.batch import Prompts, Ragged
    from trainers.rollout.base import Sampling
    from trainers.rollout.hf.engine import HfEngine

    dtype: Any = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = HfEngine(folder, tokenizer(), dtype=dtype, cuda_graphs=system == "slots")
    engine.stop_token_ids = {-1}
    engine._is_probed = system == "generate"  # without slots
    vocabulary = int(engine.module.config.vocab_size)
    rows = [ids for ids in prompts(vocabulary) for _ in range(SAMPLES)]
    given = Prompts(Ragged.of(rows, np.int64))
    seconds = []
    for call in range(3):
        start = time.perf_counter()
        rollouts = engine.generate(given, Sampling(max_completion_length=tokens), seed=call)
        seconds.append(time.perf_counter() - start)
        print("CALL", seconds[-1], flush=True)
    assert set(rollouts.completion_ids.lengths.tolist()) == {tokens}
    decoder = engine._decoder
    graphs = 0 if decoder is None else len(decoder.graphs.graphs)
    return {"seconds": min(seconds[1:]), "first_s": seconds[0], "graphs": graphs, "in_slots": decoder is not None}


def measured(folder: Path, shape: str, system: str, tokens: int, limit_s: float, floor: Path | None) -> dict[str, Any]:
    """One system in a process of its own; an error is a row too, with the seconds of the calls that ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.decoding", "--one", system, str(folder), "--tokens", str(tokens)]
    if system == "floor":
        if floor is None:
            return {"error": "--floor names no program"}
        command = [sys.executable, str(floor), shape]
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired as error:
        calls = [line.split()[1] for line in (error.stdout or b"").decode().splitlines() if line.startswith("CALL ")]
        if not calls:
            return {"error": f"more than {limit_s:.0f} s"}
        return {"ms_a_step": 1e3 * min(map(float, calls)) / tokens, "note": f"{len(calls)} calls in {limit_s:.0f} s"}
    if system == "floor":
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {"ms_a_step": found[-1]["ms_a_step"]["272"], "all": found[-1]} if found else failure(done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return failure(done.stderr)
    result = json.loads(lines[-1].removeprefix("RESULT "))
    warnings = [line for line in done.stderr.splitlines() if "rollout_engine: hf" in line]
    return {**result, "ms_a_step": 1e3 * result["seconds"] / tokens, "note": " ".join(warnings)}


def failure(stderr: str) -> dict[str, Any]:
    """The end of what a process said."""
    return {"error": " ".join(stderr.split())[-600:]}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "0.6b"])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit_s", type=float, default=60)
    parser.add_argument("--floor", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        system, folder = args.one
        found = of_vllm(folder, args.tokens) if system == "vllm" else of_engine(folder, system, args.tokens)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        print("RESULT", json.dumps({**found, "peak_gib": peak}))
        return
    start, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            saved_apart(shape, Path(folder), shape)
            for system in args.systems:
                left = ALL_S - (time.monotonic() - start)
                row: dict[str, Any] = {"shape": shape, "system": system}
                if left < 5:
                    row["error"] = "no time was left"
                else:
                    limit_s = min(args.limit_s, left)
                    row |= measured(Path(folder) / shape, shape, system, args.tokens, limit_s, args.floor)
                rows.append(row)
                if "error" in row:
                    print(f"{shape} {system}: {row['error']}", file=sys.stderr, flush=True)
    print(f"{PROMPTS * SAMPLES} sequences\n{'shape':14} {'system':14} ms a step   first s   GiB")
    for row in rows:
        ms = f"{row['ms_a_step']:9.2f}" if "ms_a_step" in row else "   failed"
        print(
            f"{row['shape']:14} {row['system']:14} {ms} {row.get('first_s', 0):9.1f} {row.get('peak_gib', 0):5.1f}   "
            f"{row.get('note', '')}"
        )
    out = os.environ.get("OUT")
    if out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        Path(out, "decoding.json").write_text(json.dumps({**origin(), "gpu": device, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
