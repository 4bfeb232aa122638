"""AdaLoRA (arXiv 2303.10512): adapters whose ranks a run divides among layers, by what each rank is worth.

    after the backward pass   regularize   the gradient of orth_reg_weight * mean |A A^T - 1|, |B^T B - 1|
    after the optimizer       allocate     peft's RankAllocator sets to zero what is worth least

peft adds the regularizer to every loss that it computes, so to every micro-batch; here it counts once a step, however
the step is cut. Weights may lie in shards: peft's code is given them whole.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainers.backends.fsdp.sharding import as_placed, full
from trainers.backends.saved_files import read_saved

FILE = "adalora.pt"  # beside the adapter in a checkpoint


def ranks_of(adapted: Any) -> Ranks | None:
    """The ranks of a model with an AdaLoRA adapter; None for any other."""
    return Ranks(adapted) if adapted is not None and adapted.peft_config["default"].peft_type == "ADALORA" else None


class Ranks:
    """The ranks of ``adapted``, a PeftModel with an AdaLoRA adapter. Every rank of the process group calls it alike."""

    def __init__(self, adapted: Any) -> None:
        self.tuner = adapted.base_model
        self.config = adapted.peft_config["default"]

    def regularize(self) -> float:
        """The regularizer before this step; its gradient is added to that of the matrices."""
        weights = {name: weight for name, weight in self._weights() if ".lora_A." in name or ".lora_B." in name}
        total = 0.0
        for name, weight in weights.items():
            whole = full(weight.detach()).requires_grad_()
            product = whole @ whole.T if ".lora_A." in name else whole.T @ whole
            away = product - torch.eye(len(product), device=product.device, dtype=product.dtype)
            term = self.config.orth_reg_weight / len(weights) * torch.linalg.matrix_norm(away)
            (gradient,) = torch.autograd.grad(term, whole)
            total += float(term.detach())
            gradient = as_placed(gradient, weight)
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return total

    def allocate(self, step: int) -> None:
        """After optimizer step ``step`` (from 1) and before its gradients are forgotten: takes ranks away."""
        whole = {name: _whole(weight) for name, weight in self._weights()}
        peft = type(self.tuner)
        stand_in: Any = SimpleNamespace(
            peft_config=self.tuner.peft_config,
            trainable_adapter_name=self.tuner.trainable_adapter_name,
            rankallocator=self.tuner.rankallocator,
            model=SimpleNamespace(named_parameters=whole.items),
        )
        peft.update_and_allocate(stand_in, step)
        with torch.no_grad():
            for name, weight in self._weights():
                if isinstance(weight, DTensor) and ".lora_E." in name:
                    weight.copy_(as_placed(whole[name].data, weight))

    def save(self, folder: Path) -> None:
        """Writes what the next allocations depend on, whole. One rank calls it."""
        ranks = self.tuner.rankallocator
        state = {"sensitivity": dict(ranks.exp_avg_ipt), "uncertainty": dict(ranks.exp_avg_unc)}
        torch.save({**state, "pattern": self.config.rank_pattern}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Takes what ``save`` wrote."""
        ranks, places, state = self.tuner.rankallocator, dict(self._weights()), read_saved(folder / FILE)
        ranks.exp_avg_ipt = {name: value.to(places[name].device) for name, value in state["sensitivity"].items()}
        ranks.exp_avg_unc = {name: value.to(places[name].device) for name, value in state["uncertainty"].items()}
        ranks.ipt = {name: torch.zeros_like(value) for name, value in ranks.exp_avg_ipt.items()}
        self.config.rank_pattern = state["pattern"]

    def _weights(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = self.tuner.model.named_parameters()
        return [(name, weight) for name, weight in named if weight.requires_grad and ".lora_" in name]


def _whole(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """The weight with its gradient; if it lies in shards, a copy that does not."""
    if not isinstance(weight, DTensor):
        return weight
    whole = torch.nn.Parameter(full(weight.detach()).clone())
    whole.grad = None if weight.grad is None else full(weight.grad)
    return whole
