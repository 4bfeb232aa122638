"""How things are measured: in alternating blocks, and the driver's memory while a call runs."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

Call = Callable[[], object]

_STEADY_S = 20.0
_libc = ctypes.CDLL(None)


@dataclass
class Timing:
    """Seconds a call, one figure a block."""

    blocks: list[float] = field(default_factory=list)
    failure: str = ""  # instead: why there are none

    @property
    def seconds(self) -> float:
        return statistics.median(self.blocks)

    def ratio_to(self, other: Timing) -> float:
        """Median of the ratios block by block: a slow moment of the machine meets both sides."""
        return statistics.median(one / base for one, base in zip(self.blocks, other.blocks, strict=True))


@dataclass
class Growth:
    """MB by which the driver's memory grew: at most while the call ran, and after its value was dropped.

    Private memory alone (RssAnon): the object store's pages are shared, and stay mapped for whoever touched them first.
    """

    peak_mb: float = 0.0
    kept_mb: float = 0.0
    failure: str = ""


def alternating(calls: Mapping[str, Call], *, num_blocks: int, block_s: float, warm_s: float) -> dict[str, Timing]:
    """Seconds a call for each, in blocks of about ``block_s`` that alternate between them, the order turning.

    A call that raises is left out from then on, with what it raised.
    """
    timings = {name: Timing() for name in calls}
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        try:
            repeats[name] = max(1, int(block_s / _warm(call, warm_s)))
        except Exception as error:
            timings[name].failure = said(error)
    for block in range(num_blocks):
        names = list(repeats)
        turn = block % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            try:
                timings[name].blocks.append(seconds_a_call(calls[name], repeats[name]))
            except Exception as error:
                timings[name] = Timing(failure=said(error))
                del repeats[name]
    return timings


def seconds_a_call(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _warm(call: Call, warm_s: float) -> float:
    """Seconds that a call takes once it has been made for ``warm_s``."""
    end = time.perf_counter() + warm_s
    while True:
        seconds = seconds_a_call(call, 1)
        if time.perf_counter() >= end:
            return seconds


def steady() -> None:
    """Waits until the machine has come to rest after processes were started, or for 20 s."""
    end = time.monotonic() + _STEADY_S
    while psutil.cpu_percent(interval=0.25) > 25 and time.monotonic() < end:
        pass


def growth(call: Call) -> Growth:
    """What the driver's private memory does during a call that was made before.

    Memory that the allocator keeps for later is returned first and last: else a call would seem to need none, or to
    keep what it found in the pool that the contestant before it filled.
    """
    _clean()
    try:
        with _Watch() as watch:
            value = call()
            watch.peak = private_bytes()
        del value
    except Exception as error:
        return Growth(failure=said(error))
    _clean()
    kept = private_bytes() - watch.before
    return Growth(peak_mb=max(watch.peak - watch.before, 0) / 1e6, kept_mb=kept / 1e6)


def _clean() -> None:
    gc.collect()
    _libc.malloc_trim(0)


def private_bytes(process: int | None = None) -> int:
    """Resident memory that the process shares with nobody."""
    with open(f"/proc/{process or os.getpid()}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


class _Watch:
    """Another process that looks at this one's memory every millisecond: a thread would wait for the same lock."""

    def __enter__(self) -> _Watch:
        command = [sys.executable, "-S", "-c", _WATCHER, str(os.getpid())]
        self.watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.watcher.stdout is not None, "stdout is a pipe"
        self.watcher.stdout.readline()
        self.before = self.peak = private_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        written, _err = self.watcher.communicate("end\n")
        self.peak = max(self.peak, int(written))


_WATCHER = """
import select, sys, time
peak = 0
status = open(f"/proc/{sys.argv[1]}/status")
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    status.seek(0)
    peak = max(peak, next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")))
    time.sleep(0.001)
print(peak * 1024)
"""


def said(error: BaseException) -> str:
    """An exception in one line. Ray's own wrap what the worker raised."""
    cause = getattr(error, "cause", None) or error
    line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    text = f"{type(cause).__name__}: {line}"
    return text if len(text) <= 120 else text[:117] + "..."
