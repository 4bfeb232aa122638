"""What does a decoding step of hundreds of sequences cost the process that runs vLLM, and is it what the GPU waits for?

    python -m benchmarks.decoding_host [--shape 4b] [--sequences 512] [--length 96] [--rounds 6] [--engine JSON]

vLLM in this process: on a CPU with a tiny model, where only its scheduler is of interest. Milliseconds a step: of the
parts of vLLM's step (without what they wait for), of waiting for the GPU, of the whole; medians over generations, which
alternate between vLLM's scheduler with our changes (``quick_allocation`` and ``quick_update``) and without. Both must
write the same tokens. A step waits for the GPU hardly at all where the host is the slower of the two.
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
        cache = scheduler.kv_cache_manager
        changed = ((cache, "allocate_slots"), (cache, "cache_blocks"), (scheduler, "update_from_output"))
        ours = [getattr(owner, name) for owner, name in changed]
        ways = {"ours": ours, "vllm": [call.args[-1] for call in ours]}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        written = set()
        for _ in range(1 + options.rounds):
            for way, calls in ways.items():
                for (owner, name), call in zip(changed, calls, strict=True):
                    setattr(owner, name, call)
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
