"""``token_budget: auto``: how many tokens a micro-batch has, by what the first ones of the first step kept.

Small micro-batches leave a GPU waiting for the host, which starts some hundred kernels a layer whatever their size;
beyond ``ENOUGH`` tokens nothing is gained. Gradients of micro-batches add up, so that a step may change the size on its
way: its numbers are those of any other cut, within rounding. Passes that only score are not measured.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rayhelper import ConfigError
from rayhelper.planning.memory import Work, scoring, training
from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.parallel_sizes import ParallelSizes
from trainers.backends.base import token_lengths
from trainers.backends.scores.inputs import micro_batches

ENOUGH = 32768  # of 135 M parameters on an H100: 0.53 s a step with 34,816 tokens, 1.3 s with 8,704
CAPTURED = 4096  # the same model in CUDA graphs: 1.91 s a GRPO step and 13.0 GiB; with 8,192 tokens 1.81 s and 22.1 GiB
TELLING = 4096  # tokens of a pass: of a smaller one, much of what it kept are gathered weights
MOST_LOOKS = 4  # at passes that are smaller
SHARE = 0.5  # of the free memory: the backward pass needs some beside what the forward pass has kept
STATES = 12  # bytes a trained number: float32 gradient and both moments, which the first step makes

logger = logging.getLogger(__name__)


class TokenRoom:
    """Measures forward passes with gradients: ``before`` each, and ``cut`` after it, until it ``is_known``. On GPUs."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.num_looks = 0
        self.is_known = False  # the same on all ranks

    @classmethod
    def of(cls, module: torch.nn.Module, device: torch.device) -> TokenRoom | None:
        """None where there is no GPU, and nothing to gain."""
        return cls(module, device) if device.type == "cuda" else None

    def before(self) -> None:
        """A forward pass is about to begin."""
        self.held = self.allocated()

    def cut(self, batch: Any, rows: list[np.ndarray], k: int, *, padding_free: bool) -> int:
        """The pass over ``rows[k]`` of ``batch`` has ended: cuts those behind it anew, in place; gives the budget.

        A rank without rows passes nothing, and leaves it to the others.
        """
        lengths = token_lengths(batch, padded=not padding_free)
        num_tokens = 0
        if k < len(rows):
            own = lengths[rows[k]]
            num_tokens = int(own.sum() if padding_free else own.max() * len(own))
        budget = self.budget(num_tokens)
        if k + 1 < len(rows):
            rest = np.concatenate(rows[k + 1 :])
            parts = micro_batches(lengths[rest], 1, token_budget=budget, padding_free=padding_free)
            rows[k + 1 :] = [rest[part] for part in parts]
        return budget

    def budget(self, num_tokens: int) -> int:
        """Tokens of a micro-batch, the same on all ranks; ``num_tokens`` were in the pass that has ended.

        Never fewer than those that went well.
        """
        kept = max(1, self.allocated() - self.held)
        trained = sum(_own(weight).numel() for weight in self.module.parameters() if weight.requires_grad)
        free = SHARE * (self.free() - STATES * trained)
        fits = max(num_tokens, min(ENOUGH, int(free * num_tokens / kept))) if num_tokens else ENOUGH
        found = torch.tensor([fits, num_tokens or ENOUGH], device=self.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        budget, smallest = found.tolist()
        self.num_looks += 1
        self.is_known = smallest >= TELLING or self.num_looks >= MOST_LOOKS
        if self.is_known and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.info("token_budget: %d", budget)
        return int(budget)

    def allocated(self) -> int:
        """Bytes of the device in tensors."""
        return torch.cuda.memory_allocated(self.device)

    def free(self) -> int:
        """Bytes of the device that tensors may have beside those."""
        return _free(self.device)


class ScoringRoom:
    """How many tokens a pass without gradients has: ``ENOUGH``, or those whose widest layer fits by the plan."""

    def __init__(self, token_bytes: int, device: torch.device) -> None:
        self.token_bytes, self.device = token_bytes, device

    @classmethod
    def of(cls, module: Any, device: torch.device, dtype: torch.dtype) -> ScoringRoom | None:
        """None where there is no GPU, or the shape of the model is not known."""
        try:
            shape = ModelShape.of(module.config.to_dict())
        except ConfigError:
            return None
        if device.type != "cuda" or shape is None:
            return None
        terms = scoring(shape, ParallelSizes(), Work(micro_batch=1, length=1, compute_bytes=dtype.itemsize))
        return cls(sum(term.num_bytes for term in terms if term.name == "activations"), device)

    def budget(self) -> int | None:
        """None: there is so little room that rows are to say it."""
        fits = min(ENOUGH, int(SHARE * self.free() / self.token_bytes))
        return fits if fits >= TELLING else None

    def free(self) -> int:
        """Bytes of the device that tensors may have."""
        return _free(self.device)


def learning_tokens(module: Any, device: torch.device, dtype: torch.dtype) -> int | None:
    """Tokens of a pass that learns as a CUDA graph: ``CAPTURED``, or half of it and so on, as the plan says they fit.

    None: the plan does not know the shape, or there is so little room that passes are to be measured.
    """
    try:
        shape = ModelShape.of(module.config.to_dict())
    except ConfigError:
        return None
    if shape is None:
        return None
    work = Work(micro_batch=1, length=1, compute_bytes=dtype.itemsize)
    token_bytes = sum(t.num_bytes for t in training(shape, ParallelSizes(), work) if t.name == "activations")
    trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    tokens, free = CAPTURED, SHARE * (_free(device) - STATES * trained)
    while tokens >= TELLING // 4 and tokens * token_bytes > free:
        tokens //= 2
    return tokens if tokens >= TELLING // 4 else None


def rooms_of(
    module: Any, device: torch.device, dtype: torch.dtype, token_budget: int | str | None
) -> tuple[TokenRoom | None, ScoringRoom | None]:
    """Of passes that learn and that score; None where no memory is to be looked at."""
    if token_budget != "auto":
        return None, None
    return TokenRoom.of(module, device), ScoringRoom.of(module, device, dtype)


def _free(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _own(weight: torch.Tensor) -> torch.Tensor:
    """What of it lies here."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
