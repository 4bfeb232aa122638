"""What megatron-core's optimizers keep of each weight, as whole tensors of its shape, whichever optimizer keeps it.

A distributed optimizer has of a weight the entries from one to another, on each data-parallel worker others; the plain
ones have all of them everywhere. Whole tensors fit any of the two, in any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MAIN = "param"  # the float32 weight that is stepped, where the model computes with another


@dataclass(frozen=True)
class Kept:
    """What one optimizer of this worker keeps of a weight."""

    weight: torch.nn.Parameter
    main: torch.Tensor | None  # what is stepped: all entries, or (N,) those from ``start`` on; None: another has them
    start: int
    inner: torch.optim.Optimizer
    group: dist.ProcessGroup | None  # the workers that have the other entries; None: there are none

    @property
    def has_main(self) -> bool:
        return self.weight.dtype != torch.float32

    def names(self) -> list[str]:
        """Of the tensors that it keeps, as ``whole`` and ``take`` know them; a worker without entries knows of none."""
        if self.main is None:
            return []
        entries = self.inner.state.get(self.main, {})
        found = [name for name, value in entries.items() if torch.is_tensor(value) and value.shape == self.main.shape]
        return [MAIN, *found] if self.has_main else found

    def step(self) -> float | None:
        """How many steps it counts; None: it does not count, or has not begun."""
        if self.main is None:
            return None
        own = self.inner.state.get(self.main, {}).get("step")
        groups = [group["step"] for group in self.inner.param_groups if own is None and "step" in group]
        return float(own) if own is not None else float(groups[0]) if groups else None

    def whole(self, name: str, owner: int) -> torch.Tensor | None:
        """float32, on the CPU, for the worker ``owner`` of ``group`` alone; each worker of it calls."""
        value = None
        if self.main is not None:
            value = self.main.detach() if name == MAIN else self.inner.state[self.main][name]
            assert value.dtype == torch.float32, f"{name} is {value.dtype}, and would change when it is restored"
        if self.group is None:
            assert value is not None, "no other worker has it"
            return value.to("cpu", copy=True)
        whole = torch.zeros(self.weight.numel(), device=self.weight.device)
        if value is not None:
            whole[self.start : self.start + value.numel()] = value.flatten()
        if self.group.size() > 1:
            dist.reduce(whole, dist.get_global_rank(self.group, owner), group=self.group)
        return whole.view(self.weight.shape).cpu() if self.group.rank() == owner else None

    def everywhere(self, name: str) -> torch.Tensor:
        """float32, whole, on each worker of ``group``, all of which call; 0 where nothing of the name is kept."""
        whole = torch.zeros(self.weight.shape, device=self.weight.device)
        if name in self.names():
            assert self.main is not None, "it has names"
            value = self.main.detach() if name == MAIN else self.inner.state[self.main][name]
            whole.view(-1)[self.start : self.start + value.numel()] = value.flatten()
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(whole, group=self.group)
        return whole

    def forget(self) -> None:
        """Back to what it was before its first step."""
        if self.main is not None:
            self.inner.state.pop(self.main, None)

    @torch.no_grad()
    def take(self, name: str, whole: torch.Tensor) -> None:
        """Puts back this worker's entries of what ``whole`` gave."""
        if self.main is None:
            return
        part = whole.flatten()[self.start : self.start + self.main.numel()].view(self.main.shape)
        entries = self.inner.state[self.main]
        if name != MAIN and name not in entries:
            entries[name] = torch.empty_like(self.main)
        (self.main if name == MAIN else entries[name]).copy_(part)

    def count(self, step: float) -> None:
        """Goes on counting from ``step``; each weight has a count of its own, as torch's optimizers add to each."""
        if self.main is None:
            return
        if isinstance(self.inner, torch.optim.AdamW | torch.optim.Adam):
            device = self.main.device if self.inner.defaults.get("fused") else "cpu"
            self.inner.state[self.main]["step"] = torch.tensor(step, dtype=torch.float32, device=device)
        else:
            for group in self.inner.param_groups:
                group["step"] = int(step)


def kept(optimizer: Any) -> Iterator[Kept]:
    """What the optimizers of this worker keep of each weight, in an order that the workers of a group share.

    Raises:
        ValueError: an optimizer that keeps its weights in another precision or place.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        if inner is None:  # this worker has no weights of the kind
            continue
        if isinstance(one, DistributedOptimizer) and not one.config.use_precision_aware_optimizer:
            yield from _distributed(one)
        elif isinstance(one, Float16OptimizerWithFloat16Params):
            for lows, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                for weight, main in zip(lows, mains, strict=True):
                    yield Kept(weight, main, 0, inner, None)
            for weight in (weight for group in one.fp32_from_fp32_groups for weight in group):
                yield Kept(weight, weight, 0, inner, None)
        elif isinstance(one, FP32Optimizer):
            for weight in one.get_parameters():
                yield Kept(weight, weight, 0, inner, None)
        else:
            raise ValueError(
                f"checkpoints of {type(one).__name__} over {type(inner).__name__} are not supported: remove the "
                "optimizer setting of megatron that needs it, such as use_precision_aware_optimizer"
            )


def _distributed(one: Any) -> Iterator[Kept]:
    for buffer in one.buffers:
        for weight in buffer.param_index_map:
            main, start = None, 0
            if weight in one.model_param_group_index_map:
                group, place = one.model_param_group_index_map[weight]
                main = one.optimizer.param_groups[group]["params"][place]
                start = one._get_model_param_range_map(weight)["param"].start
            yield Kept(weight, main, start, one.optimizer, one.data_parallel_group)
