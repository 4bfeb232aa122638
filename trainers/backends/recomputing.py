"""``gradient_checkpointing: auto``: whether activations of a micro-batch fit, by the numbers of ``rayhelper plan``."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from rayhelper import ConfigError
from rayhelper.planning.memory import Work, training
from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.parallel_sizes import ParallelSizes

SHARE = 0.6  # of a GPU's memory: engines, other models and what the plan does not count have the rest

logger = logging.getLogger(__name__)


def recomputes(model: str, sizes: ParallelSizes, work: Work, *, memory: int | None, trust_remote_code: bool) -> bool:
    """Whether layers are to compute their activations again, the same on all ranks.

    ``work``: without recomputing. ``memory``: bytes of the device; None: it is a CPU, where there is room. A model
    whose shape is not known keeps its activations.
    """
    if memory is None:
        return False
    shape = _shape_of(model, trust_remote_code)
    needed = 0 if shape is None else sum(term.num_bytes for term in training(shape, sizes, work))
    found = needed > SHARE * memory
    if dist.is_initialized() and dist.get_world_size() > 1:
        any_rank = torch.tensor(int(found), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(any_rank, dist.ReduceOp.MAX)
        found = bool(any_rank)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("gradient_checkpointing: %s", str(found).lower())
    return found


def device_memory() -> int | None:
    """Bytes of this process's GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _shape_of(model: str, trust_remote_code: bool) -> ModelShape | None:
    try:
        found = ModelShape.of(model)
        if found is None:
            from transformers import AutoConfig

            config: Any = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            found = ModelShape.of(config.to_dict())
    except (ConfigError, OSError, ValueError):
        return None
    return found
