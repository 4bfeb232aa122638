"""The most memory of a GPU that is in use while something runs, whoever allocated it: torch, vLLM, CUDA graphs."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from benchmarks.gpu.so_far import note

NOTED = 400  # looks: some twenty seconds


class PeakMemory:
    """Inside, a thread asks the driver many times a second; ``gib(since)`` is the most since then (perf_counter)."""

    def __init__(self, interval_s: float = 0.05) -> None:
        self.interval_s = interval_s
        self.seen: list[tuple[float, float]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def gib(self, since: float) -> float:
        return max((gib for moment, gib in self.seen if moment >= since), default=0.0)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        while not self.ended.wait(self.interval_s):
            free, total = torch.cuda.mem_get_info()
            self.seen.append((time.perf_counter(), (total - free) / 2**30))
            if len(self.seen) % NOTED == 0:
                note("peak_gib of late", max(gib for _, gib in self.seen[-NOTED:]))
