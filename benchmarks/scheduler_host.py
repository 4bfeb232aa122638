"""What does vLLM's scheduler take of a decoding step of hundreds of sequences: vLLM's own, and ours?

    python -m benchmarks.scheduler_host [--sequences 512] [--steps 256] [--page 16] [--ends] [--rounds 3]

No model: what a scheduler plans is answered with tokens of a seed. Milliseconds of a core per step of ``schedule``, of
``update_from_output`` and of both, medians over rounds, which alternate between vLLM's scheduler, ours, and ours one
request at a time (as it is where prompts are among a step's requests). ``--ends``: completions end at lengths spread
over the steps; otherwise all are as long. All must be told the same tokens of the same requests.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.origin import origin
from tests.rollout.prompts import save_decided
from tests.rollout.schedulers import VOCABULARY, answered, hasher, request_of, scheduler_of
from trainers.rollout.vllm.scheduling.steps import take_decoded

PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sequences", 512), ("steps", 256), ("page", 16), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ends", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    told = defaultdict(set)
    with tempfile.TemporaryDirectory() as model:
        save_decided(Path(model), head_dim=32)
        for _ in range(options.rounds):
            for is_ahead in (False, True):
                for way in ("vLLM's", "one by one", "arrays"):
                    spent, tokens = run(way, model, options, is_ahead=is_ahead)
                    found[f"{'ahead' if is_ahead else 'known'}, {way}"].append(spent)
                    told[is_ahead].add(tokens)
    print(origin())
    medians = {
        way: {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
        for way, rounds in found.items()
    }
    for way, parts in medians.items():
        print(f"{way}: " + ", ".join(f"{part} {milliseconds:.3f} ms" for part, milliseconds in parts.items()))
    if out := os.environ.get("OUT"):
        (Path(out) / "scheduler_host.json").write_text(json.dumps(medians))
    assert all(len(one) == 1 for one in told.values()), "the ways were told of other tokens"


def run(way: str, model: str, options: argparse.Namespace, *, is_ahead: bool) -> tuple[dict[str, float], str]:
    """Milliseconds per step, and a digest of all that was given out."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from trainers.rollout.vllm.scheduling.scheduler import AsyncDecodingScheduler, DecodingScheduler

    theirs = (Scheduler, AsyncScheduler)[is_ahead]
    ours = (DecodingScheduler, AsyncDecodingScheduler)[is_ahead]
    num_pages = options.sequences * (2 + (PROMPT + options.steps) // options.page)
    scheduler = scheduler_of(
        theirs if way == "vLLM's" else ours,
        model,
        num_pages=num_pages,
        page=options.page,
        max_num_seqs=options.sequences,
        max_model_len=4096,
        max_num_batched_tokens=options.sequences * PROMPT,
    )
    if way == "one by one":
        scheduler.steps.has_arrays = False
    random, hashes = np.random.default_rng(0), hasher(options.page)
    for number in range(options.sequences):
        length = options.steps * (number + 1) // options.sequences + 1 if options.ends else options.steps + 1
        params = SamplingParams(max_tokens=length, stop_token_ids=[VOCABULARY], logprobs=0)
        prompt = random.integers(0, VOCABULARY, PROMPT).tolist()
        scheduler.add_request(request_of(f"request {number}", prompt, params, hashes))
    spent = {"schedule": 0.0, "update_from_output": 0.0}
    flights: list[tuple[Any, Any]] = []
    digest, num_steps = hashlib.sha256(), 0
    gc.collect()
    gc.disable()  # as an engine of ours has it
    while scheduler.has_requests() or flights:
        since = time.thread_time()
        planned = scheduler.schedule()
        is_counted = not planned.scheduled_new_reqs
        spent["schedule"] += is_counted * (time.thread_time() - since)
        num_steps += is_counted
        if planned.num_scheduled_tokens:
            flights.append((planned, answered(planned, defaultdict(lambda: True), random)))
        while len(flights) > (is_ahead and bool(planned.num_scheduled_tokens)):
            given = flights.pop(0)
            since = time.thread_time()
            outputs = scheduler.update_from_output(*given)
            spent["update_from_output"] += bool(not given[0].scheduled_new_reqs) * (time.thread_time() - since)
            rows = [
                (output.request_id, output.new_token_ids[0], float(output.new_logprobs.logprobs[0, 0]))
                for one in outputs.values()
                for output in one.outputs
            ]
            for step in take_decoded(scheduler):
                rows += [
                    (name, token, logp)
                    for name, token, logp in zip(
                        step.request_ids, step.tokens.tolist(), step.logps.tolist(), strict=True
                    )
                ]
            digest.update(repr(sorted(rows)).encode())
    gc.enable()
    parts = {part: 1e3 * seconds / num_steps for part, seconds in spent.items()}
    return parts | {"both": sum(parts.values())}, digest.hexdigest()


if __name__ == "__main__":
    main()
