"""Decoding steps as CUDA graphs: one per shape, captured when the shape occurs for the second time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from trainers.backends.capture import captured

logger = logging.getLogger(__name__)


class Graphs:
    """Runs steps that read and write fixed buffers only. What cannot be captured runs eagerly and says so once."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.graphs: dict[Hashable, Any] = {}
        self.seen: set[Hashable] = set()
        self.stream: Any = None  # of all captures
        self.last: Any = None  # it keeps the memory of graphs for those to come, even if it is not to run any more

    def clear(self) -> None:
        """Forgets all graphs: buffers or weights lie elsewhere now. Kernels stay loaded."""
        self.graphs.clear()

    def run(self, shape: Hashable, step: Callable[[], object]) -> None:
        """One step: a real one in any case, as kernels that are loaded first may not be captured.

        ``shape``: what decides which kernels run.
        """
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
        """On the stream of captures, where kernels and workspaces are made before a graph needs them."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _captured(self, step: Callable[[], object]) -> Any:
        try:
            graph = captured(step, pool=None if self.last is None else self.last.pool(), stream=self.stream)
        except RuntimeError as error:
            self.is_on = False
            self.clear()
            self.last = None
            torch.cuda.synchronize()
            reason = str(error).splitlines()[0]
            logger.warning("rollout_engine: hf decodes without CUDA graphs: its steps cannot be captured (%s)", reason)
            return None
        self.last = graph
        return graph
