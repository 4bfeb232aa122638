"""The files of a checkpoint: the model or its adapter, the optimizer and its schedule. Weights may lie in shards.

Every rank that has a part calls these functions, so that whole tensors can be gathered; the one that ``writes`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainers.backends.fsdp.hf_model import untied, write_model
from trainers.backends.fsdp.optimizer import load_whole_state, whole_state
from trainers.backends.fsdp.resting_optimizer import RestingOptimizer
from trainers.backends.fsdp.tuners.adalora import Ranks
from trainers.backends.fsdp.tuners.adapters import own_weights, saved_weights, write_adapter
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.backends.saved_files import read_saved

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def save_model(folder: Path, module: Any, config: Any, *, vision: Vision | None = None, writes: bool) -> None:
    """Writes the weights as they are in memory, and ``config``; of a model that sees pictures its processor too."""
    weights = dict(own_weights(module, untied(module)))
    if writes:
        write_model(module, weights, folder, dtype=module.dtype, config=config)
        if vision is not None:
            vision.export(folder)


def export_model(
    folder: Path,
    module: Any,
    adapted: Any,
    config: Any,
    dtype: torch.dtype,
    *,
    vision: Vision | None = None,
    writes: bool,
) -> None:
    """Writes the model alone in ``dtype``, an adapter merged; the adapter stands alone in ``adapter``.

    ``vision``: of a model that sees pictures, whose processor is written too.
    """
    weights = dict(own_weights(module, untied(module)))
    adapter = saved_weights(adapted)
    if not writes:
        return
    if vision is not None:
        weights |= vision.unread_weights()
    write_model(module, weights, folder, dtype=dtype, config=config)
    if adapter:
        write_adapter(adapted, folder / "adapter", adapter)
    if vision is not None:
        vision.export(folder)


def save_adapter(folder: Path, adapted: Any, ranks: Ranks | None, *, writes: bool) -> None:
    """Writes the adapter alone, as peft writes it."""
    weights = saved_weights(adapted)
    if writes:
        write_adapter(adapted, folder, weights, ranks)


def save_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer | RestingOptimizer, scheduler: Any, *, writes: bool
) -> None:
    """Writes the states of the optimizer, as whole tensors, and the schedule."""
    states = optimizer.whole_state() if isinstance(optimizer, RestingOptimizer) else whole_state(optimizer)
    if writes:
        torch.save(states, folder / OPTIMIZER)
        torch.save(scheduler.state_dict(), folder / SCHEDULER)


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer | RestingOptimizer, scheduler: Any) -> None:
    """Takes what ``save_optimizer`` wrote.

    Raises:
        FileNotFoundError: it wrote nothing there.
        ConfigError: a file holds more than tensors, numbers and text.
    """
    states = read_saved(folder / OPTIMIZER)
    if isinstance(optimizer, RestingOptimizer):
        optimizer.load_whole_state(states)
    else:
        load_whole_state(optimizer, states)
    scheduler.load_state_dict(read_saved(folder / SCHEDULER))
