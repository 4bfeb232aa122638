"""A function's work on a GPU as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[[], object], *, stream: Any, pool: Any = None) -> torch.cuda.CUDAGraph:
    """The graph of what ``function`` starts on the device; nothing of it has run yet.

    ``pool``: of an earlier graph, whose memory it may use where that graph's is free. ``stream``: to capture on, one
    for many graphs: cuBLAS keeps 32 MiB of an H100 for each stream that it has seen. Not by ``torch.cuda.graph``, which
    gives all of torch's free memory back: training would ask for it again.

    Raises:
        RuntimeError: it does what a graph cannot hold, such as to wait for the device.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # what it frees meanwhile would be a part of the capture
    try:
        torch.cuda.synchronize()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(*([] if pool is None else [pool]))
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says that the capture has failed, and not why
                    graph.capture_end()
                _draw_again()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
    finally:
        if collects:
            gc.enable()
    return graph


def _draw_again() -> None:
    """The device's random numbers are as they were: its generator would go on waiting for the end of the capture."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
