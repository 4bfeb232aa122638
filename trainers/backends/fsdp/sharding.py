"""FSDP2: a model whose weights lie in shards over the ranks, each layer gathered while it runs.

Everything here is the identity for tensors that are not sharded, so that callers need not ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainers.backends.fsdp.patches import forget_gradients, holds_gradients, sharded_weights


def shard(
    scorer: torch.nn.Module, model: Any, *, dtype: torch.dtype, reshard_after_forward: bool, offload_params: bool
) -> None:
    """Shards ``model`` over the ranks of the default process group: every layer alone, the rest with ``scorer``.

    Forward and backward run in ``dtype``, gradients are reduced and weights kept in float32. ``reshard_after_forward``
    frees a layer's weights between forward and backward (ZeRO-3; without, ZeRO-2). ``offload_params`` keeps shards,
    gradients and optimizer on the CPU.
    """
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = dtype if dtype != torch.float32 else None
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload_params else OffloadPolicy(),
    }
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **settings)
    fully_shard(scorer, reshard_after_forward=False, **settings)


def layers_of(model: Any) -> list[torch.nn.Module]:
    """What transformers says must not be torn apart, or else the members of the longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    layers = [part for part in model.modules() if type(part).__name__ in names]
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    return layers or list(max(lists, key=len, default=[]))


@contextlib.contextmanager
def whole_weights(scorer: Any, *, reshard_after_forward: bool) -> Iterator[None]:
    """Inside, every rank holds all weights, and running the model needs no other rank. Every rank enters.

    ``reshard_after_forward``: as ``shard`` was told.
    """
    parts = _sharded_parts(scorer)
    for part in parts:
        part.set_reshard_after_forward(False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(reshard_after_forward and part is not scorer, recurse=False)
            part.reshard()


def forget_step(scorer: torch.nn.Module) -> bool:
    """After a step that failed: nothing of its gradients stays, nor of where FSDP was in it. No rank is asked.

    False: this torch cannot (2.13 can), and another step would be wrong.
    """
    weights = _sharded_weights(scorer)
    for weight in weights:
        forget_gradients(weight)
    assert isinstance(scorer, FSDPModule)
    if not hasattr(scorer, "reset_iter_state") or not (weights and all(map(holds_gradients, weights))):
        return False
    scorer.reset_iter_state()
    return True


def reshard(scorer: torch.nn.Module) -> None:
    """Frees gathered weights: without a backward pass those of the root stay, and what is written to them is lost."""
    for part in _sharded_parts(scorer):
        part.reshard()


def _sharded_parts(scorer: torch.nn.Module) -> list[FSDPModule]:
    return [part for part in scorer.modules() if isinstance(part, FSDPModule)]


def _sharded_weights(scorer: torch.nn.Module) -> list[Any]:
    return [weight for part in _sharded_parts(scorer) for weight in sharded_weights(part)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if it lies in shards; then every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor``, which every rank holds whole, laid out as ``like`` is; no rank is asked for anything."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device_mesh.device_type)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to(like.device)


def most_of_ranks(count: int, device: torch.device) -> int:
    """The largest count of any rank. Every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return count
    counts = torch.tensor(count, device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)
