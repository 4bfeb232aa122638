"""Which of a role's workers hold which part of a model: megatron-core's process groups, made once in a process.

Workers are numbered as megatron-core orders them: tensor parallelism innermost, then context, (expert,) data, pipeline.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainers.backends.megatron.settings import MegatronSettings


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Where this worker stands, and how many there are of each kind; one object a model, as long as it lives."""

    tensor: int
    tensor_size: int
    context: int
    context_size: int
    pipeline: int
    pipeline_size: int
    data: int
    data_size: int

    @property
    def workers_per_shard(self) -> int:
        """Workers that share a slice of a batch."""
        return self.tensor_size * self.context_size * self.pipeline_size

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline == self.pipeline_size - 1

    @property
    def is_leader(self) -> bool:
        """Whether this worker answers for all that share its slice of a batch: it is one of those with the loss."""
        return self.is_last_stage and self.tensor == self.context == 0


def start(settings: MegatronSettings, *, seed: int) -> Coordinates:
    """Makes the process groups that ``settings`` ask for, or finds them made; every worker calls it.

    Groups of other sizes, or of a process group that the workers have left, make room if no model uses them any more.

    Raises:
        RuntimeError: a model of this process has groups of other sizes.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=0, world_size=1, store=store)
    sizes = {
        "tensor_model_parallel_size": settings.tensor_model_parallel_size,
        "pipeline_model_parallel_size": settings.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": settings.virtual_stages,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size,
    }
    if parallel_state.model_parallel_is_initialized() and not _made.fits(sizes):
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        gc.collect()  # models that are used no more hold groups, whose threads and buffers would stay
        parallel_state.initialize_model_parallel(**sizes)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        _made.world, _made.sizes = weakref.ref(dist.group.WORLD), sizes
    here = Coordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
    )
    _made.alive.add(here)
    return here


@dataclass
class _Made:
    """What this process's groups, which are megatron-core's module state, were made for."""

    world: Callable[[], Any] = lambda: None  # the default process group, which this does not keep alive
    sizes: dict[str, int | None] = field(default_factory=dict)
    alive: weakref.WeakSet[Coordinates] = field(default_factory=weakref.WeakSet)  # of the models that live

    def fits(self, sizes: dict[str, int | None]) -> bool:
        """Whether a model of these sizes can use the groups. Raises RuntimeError if not, and another one does."""
        if self.world() is not dist.group.WORLD:
            return False
        if self.sizes == sizes:
            return True
        gc.collect()
        if self.alive:
            raise RuntimeError(
                f"all models of one worker need the same parallel sizes: one has {self.sizes}, another has {sizes}. "
                "Delete the trainer that has the first model, or give the roles separate device groups."
            )
        return False


_made = _Made()
