"""What does a decoding step of hundreds of sequences cost vLLM's scheduler, with and without ``quick_allocation``?

    python -m benchmarks.decoding_host [--sequences 512] [--length 96] [--rounds 6]

A tiny model on the CPU, vLLM in this process. Milliseconds of a step that ``schedule`` and ``update_from_output`` take:
medians over generations, which alternate between vLLM's own allocation and ours. Both must write the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import save_shape
from benchmarks.origin import origin
from trainers.batch import Prompts, Ragged
from trainers.rollout.base import Sampling
from trainers.rollout.vllm import VllmEngine

PAGE = 64


def timed(call: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    def timing(*given: Any, **named: Any) -> Any:
        since = time.perf_counter()
        try:
            return call(*given, **named)
        finally:
            seconds[name] += time.perf_counter() - since

    return timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sequences", 512), ("length", 96), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    prompts = Prompts(Ragged.of(np.random.default_rng(0).integers(4, 100, (options.sequences, 16)), np.int64))
    sampling = Sampling(max_completion_length=options.length, generation_kwargs={"min_tokens": options.length})
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoTokenizer

        save_shape("tiny", Path(folder))
        engine = VllmEngine(
            folder,
            AutoTokenizer.from_pretrained(folder),
            engine_kwargs={
                "max_num_seqs": options.sequences,
                "max_model_len": 2 * PAGE + options.length,
                "block_size": PAGE,
                "kv_cache_memory_bytes": 2**31,
            },
        )
    scheduler = engine.engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_manager
    ours = cache.allocate_slots, cache.cache_blocks
    ways = {"ours": ours, "vllm": tuple(call.args[-1] for call in ours)}
    seconds: dict[str, float] = defaultdict(float)
    for part in ("schedule", "update_from_output"):
        setattr(scheduler, part, timed(getattr(scheduler, part), seconds, part))
    found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ways}
    written = set()
    for _ in range(1 + options.rounds):
        for way, calls in ways.items():
            cache.allocate_slots, cache.cache_blocks = calls
            seconds.clear()
            rollouts = engine.generate(prompts, sampling, seed=0)
            written.add(rollouts.completion_ids.values.tobytes())
            for part, spent in seconds.items():
                found[way][part].append(1e3 * spent / options.length)
    assert len(written) == 1, "the two ways wrote other tokens"
    print(origin())
    for way in ways:
        print(way, *(f"{part} {statistics.median(times[1:]):.2f} ms" for part, times in found[way].items()))


if __name__ == "__main__":
    main()
