"""What a GPU does in one update: each kernel's time, and how long none ran.

class MeasuredPolicy(Policy):
    @RayHelper.function(group="train", dispatch=..., collect=...)
    def step(self, ...):
        with profiled(folder):               # of the updates of this process, the one that UPDATE says
            return super().step(...)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.steps import ON_GPU

UPDATE = "RAYHELPER_PROFILED_UPDATE"  # of the environment, which workers get: the number of the update, from 0
FILE = "profile.json"
_updates = itertools.count()


@contextlib.contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Writes ``FILE`` into ``folder`` if this is the update to profile, and the process has the first GPU."""
    is_it = next(_updates) == int(os.environ.get(UPDATE, -1))
    if not is_it or not ON_GPU or (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        yield
        return
    torch.cuda.synchronize()
    since = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
        seconds = time.perf_counter() - since
    (folder / FILE).write_text(json.dumps(kernels(profile, seconds)))


def kernels(profile: Any, seconds: float, *, most: int = 40) -> dict[str, Any]:
    """Seconds of the update, seconds in which a kernel ran, and of each kernel its name, milliseconds and count."""
    events = profile.profiler.kineto_results.events()  # by hand: torch's table takes longer than the update
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0, 0
    totals, counts = Counter[str](), Counter[str]()
    for start, stop, name in spans:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
        totals[name] += stop - start
        counts[name] += 1
    return {
        "seconds": seconds,
        "busy_seconds": busy / 1e9,
        "kernels": [[name[:120], total / 1e6, counts[name]] for name, total in totals.most_common(most)],
    }


def show(found: dict[str, Any]) -> None:
    busy = found["busy_seconds"] / found["seconds"]
    print(f"{found['seconds']:.3f} s with the profiler, a kernel runs in {busy:.0%}")
    for name, milliseconds, count in found["kernels"]:
        print(f"{milliseconds:10.1f} ms {count:6}  {name}")
