"""A process of vLLM's own that holds a part of a model on a CPU, set up as ``start.py`` sets up its own process.

vLLM imports it by its name, in that process alone.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from trainers.rollout.vllm.patches import flat_rotations, pack_weights, plain_experts, plain_products


class CpuWorker(CPUWorker):  # type: ignore[misc]
    """Keeps its weights where others can be loaded into their place, and compiles nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pack_weights(False)
        plain_experts()
        plain_products()
        flat_rotations()
        torch.compiler.set_stance("force_eager")
        super().__init__(*args, **kwargs)
