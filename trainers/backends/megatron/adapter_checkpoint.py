"""Checkpoints of a model under a LoRA adapter: what is trained, whole, in files that any layout reads.

folder/adapter_config.json, adapter_model.safetensors    as peft writes them
folder/optimizer.pt                                      what the optimizer keeps of each matrix, by peft's names
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.backends.megatron.adapters import MegatronAdapter
from trainers.backends.megatron.moments import MAIN, Kept, kept
from trainers.backends.saved_files import read_saved

FILE = "optimizer.pt"


def save_adapter(folder: Path, adapter: MegatronAdapter, optimizer: Any) -> None:
    """Every rank calls it; rank 0 writes."""
    adapter.save(folder)
    own = list(kept(optimizer))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, ({name for one in own for name in one.names()}, max(map(_step, own), default=0.0)))
    state: dict[str, Any] = {"step": max(step for _, step in told)}
    for name in sorted(set().union(*(names for names, _ in told))):
        values = {one.weight: one.everywhere(name) for one in own}
        state[name] = {key: value.cpu() for key, value in adapter.state(values.__getitem__)}
    if dist.get_rank() == 0:
        torch.save(state, folder / FILE)


def load_adapter(folder: Path, adapter: MegatronAdapter, optimizer: Any) -> None:
    """Puts back what ``save_adapter`` wrote. Every rank calls it.

    Raises:
        FileNotFoundError: the folder is not one of a run with an adapter.
        ValueError: the adapter has other weights than this model's.
    """
    adapter.load(folder)
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {FILE}, so no training can continue from it")
    optimizer.reload_model_params()
    state = read_saved(folder / FILE)
    step = state.pop("step")
    for one in kept(optimizer):
        one.forget()
        if not step:
            continue
        for name, wholes in state.items():
            if name != MAIN or one.has_main:
                one.take(name, adapter.shard(one.weight, wholes))
        one.count(step)


def _step(one: Kept) -> float:
    return one.step() or 0.0
