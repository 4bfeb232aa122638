"""Decoding steps as CUDA graphs: one per shape, captured when the shape occurs for the second time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Graphs:
    """Runs steps that read and write fixed buffers only. What cannot be captured runs eagerly and says so once."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.clear()

    def clear(self) -> None:
        """Forgets all graphs: buffers or weights lie elsewhere now."""
        self.graphs: dict[Hashable, Any] = {}
        self.seen: set[Hashable] = set()
        self.pool: Any = None

    def run(self, shape: Hashable, step: Callable[[], object]) -> None:
        """One step: a real one in any case, as kernels that are loaded first may not be captured."""
        if not self.is_on:
            step()
        elif shape in self.graphs:
            self.graphs[shape].replay()
        elif shape not in self.seen:
            self.seen.add(shape)
            self._aside(step)
        else:
            graph = self._captured(step)
            if graph is None:
                step()
            else:
                self.graphs[shape] = graph
                graph.replay()

    def _aside(self, step: Callable[[], object]) -> None:
        """On a stream of its own, as capture needs it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)

    def _captured(self, step: Callable[[], object]) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                step()
        except RuntimeError as error:
            self.is_on = False
            self.clear()
            torch.cuda.synchronize()
            reason = str(error).splitlines()[0]
            logger.warning("rollout_engine: hf decodes without CUDA graphs: its steps cannot be captured (%s)", reason)
            return None
        self.pool = graph.pool() if self.pool is None else self.pool
        return graph
