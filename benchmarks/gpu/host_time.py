"""What a decoding step of vLLM takes of the process that runs it, part by part, and how long it waits for the GPU.

with watched() as generations:      # in the process of the engine
    ...
generations[-1]                     # {"schedule": milliseconds a step, ..., "waiting": ..., "all": ..., "steps": 512}
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.steps import ON_GPU


@contextlib.contextmanager
def watched() -> Iterator[list[dict[str, float]]]:
    """Each generation's milliseconds a step; those of a part are without the parts inside it, and without waiting."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from trainers.rollout.vllm.engine import VllmEngine
    from trainers.rollout.vllm.scheduling.scheduler import AsyncDecodingScheduler, DecodingScheduler

    seconds, counts, generations = defaultdict[str, float](float), defaultdict[str, int](int), list[dict[str, float]]()
    inside: list[float] = []  # seconds of the calls within each of those under way

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timing(*given: Any, **named: Any) -> Any:
            inside.append(0.0)
            since = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                taken = time.perf_counter() - since
                seconds[name] += taken - inside.pop()
                counts[name] += 1
                if inside:
                    inside[-1] += taken

        return timing

    def generation(generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def timing(*given: Any, **named: Any) -> Any:
            seconds.clear()
            counts.clear()
            since = time.perf_counter()
            rollouts = generate(*given, **named)
            steps = counts["advance"]
            spent = seconds | {"all": time.perf_counter() - since}
            generations.append({part: 1e3 * taken / steps for part, taken in spent.items()} | {"steps": steps})
            return rollouts

        return timing

    parts: list[tuple[Any, str, str]] = [
        *[
            (kind, name, name)
            for kind in (Scheduler, DecodingScheduler, AsyncDecodingScheduler)
            for name in ("schedule", "update_from_output")
        ],
        (UniProcExecutor, "execute_model", "execute_model"),
        (UniProcExecutor, "sample_tokens", "sample_tokens"),
        (VllmEngine, "advance", "advance"),
        *([(torch.cuda.Event, "synchronize", "waiting")] if ON_GPU else []),
    ]
    with contextlib.ExitStack() as patches:
        for owner, name, part in parts:
            patches.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        patches.enter_context(patch.object(VllmEngine, "generate", generation(VllmEngine.generate)))
        yield generations


def shown(generation: dict[str, float]) -> str:
    steps = f"{generation['steps']:.0f} steps of "
    return steps + ", ".join(
        f"{part} {milliseconds:.2f} ms" for part, milliseconds in generation.items() if part != "steps"
    )
