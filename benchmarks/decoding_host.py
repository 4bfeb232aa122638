"""What does a decoding step of hundreds of sequences cost the process that runs vLLM, and is it what the GPU waits for?

    python -m benchmarks.decoding_host [--shape 4b] [--sequences 512] [--length 96] [--rounds 6] [--engine JSON]

vLLM in this process: on a CPU with a tiny model, where only its scheduler is of interest. Milliseconds a step: of the
parts of vLLM's step (without what they wait for), of waiting for the GPU, of the whole; medians over generations, which
alternate between our scheduler and vLLM's own steps. Both must write the same tokens. A step waits for the GPU hardly
at all where the host is the slower of the two. ``benchmarks.scheduler_host`` measures the scheduler only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.gpu.host_time import shown, watched
from benchmarks.gpu.shapes import SHAPES, save_shape
from benchmarks.gpu.steps import ON_GPU
from benchmarks.origin import origin
from trainers.batch import Prompts, Ragged
from trainers.rollout.base import Sampling
from trainers.rollout.vllm.engine import VllmEngine

PAGE = 64
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    for name, default in (("sequences", 512), ("length", 96), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv_gib", type=float, default=2)
    parser.add_argument("--engine", type=json.loads, default={}, help="further fields of vLLM's EngineArgs, as JSON")
    options = parser.parse_args()
    prompts = Prompts(Ragged.of(np.random.default_rng(0).integers(4, 100, (options.sequences, 16)), np.int64))
    limits = {"min_tokens": options.length} if options.shape == "tiny" else {}  # others hardly ever draw the stop token
    sampling = Sampling(max_completion_length=options.length, generation_kwargs=limits)
    with watched() as generations:
        with tempfile.TemporaryDirectory() as folder:
            from transformers import AutoTokenizer

            save_shape(options.shape, Path(folder))
            engine = VllmEngine(
                folder,
                AutoTokenizer.from_pretrained(folder),
                dtype="bfloat16" if ON_GPU else "float32",
                engine_kwargs={
                    "max_num_seqs": options.sequences,
                    "max_model_len": 2 * PAGE + options.length,
                    "block_size": PAGE,
                    "kv_cache_memory_bytes": int(options.kv_gib * GIB),
                    **options.engine,
                },
            )
        scheduler = engine.engine.engine_core.engine_core.scheduler
        pages = scheduler.kv_cache_manager
        found: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
        written = set()
        for _ in range(1 + options.rounds):
            for way in found:
                scheduler.steps.settle()
                scheduler.steps.is_usual = scheduler.steps.has_arrays = way == "ours"
                scheduler.kv_cache_manager = pages if way == "ours" else pages.cache
                rollouts = engine.generate(prompts, sampling, seed=0)
                found[way].append(generations[-1])
                written.add(rollouts.completion_ids.values.tobytes())
    medians = {
        way: {part: statistics.median(one[part] for one in rounds[1:]) for part in rounds[0]}
        for way, rounds in found.items()
    }
    print(origin())
    for way, generation in medians.items():
        print(way, shown(generation))
    if out := os.environ.get("OUT"):
        (Path(out) / "decoding_host.json").write_text(json.dumps(medians))
    assert len(written) == 1, "the two ways wrote other tokens"


if __name__ == "__main__":
    main()
