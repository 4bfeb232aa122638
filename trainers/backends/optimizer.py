"""The optimizers of torch and transformers by transformers' names, and their states as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from trainers.backends.sharding import as_placed, full

OptimizerName = Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad"]


def build_optimizer(
    name: OptimizerName,
    module: torch.nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    adam_betas: tuple[float, float],
    adam_epsilon: float,
    kwargs: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """The optimizer of the weights that are trained; biases and norms do not decay.

    ``kwargs``: its further arguments.
    """
    groups = parameter_groups(module, weight_decay)
    fused = next(module.parameters()).device.type == "cuda"
    match name:
        case "adamw_torch" | "adamw_torch_fused":
            settings = {"betas": adam_betas, "eps": adam_epsilon, "fused": fused, **kwargs}
            return torch.optim.AdamW(groups, lr=learning_rate, **settings)
        case "adafactor":
            from transformers import Adafactor

            return Adafactor(groups, lr=learning_rate, **{"scale_parameter": False, "relative_step": False, **kwargs})
        case "sgd":
            return torch.optim.SGD(groups, lr=learning_rate, **kwargs)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=learning_rate, **kwargs)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=learning_rate, **kwargs)


def parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The weights that are trained, as transformers' Trainer divides them: no decay of biases and norms."""
    from transformers.trainer_pt_utils import get_parameter_names

    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = set(get_parameter_names(module, [torch.nn.LayerNorm], forbidden))
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    groups = [(True, weight_decay), (False, 0.0)]
    return [
        {"params": [weight for name, weight in trained if (name in decayed) == decays], "weight_decay": decay}
        for decays, decay in groups
    ]


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors on the CPU, for any number of ranks. Every rank calls it."""
    found = optimizer.state_dict()
    state = {
        index: {key: full(value).cpu() if torch.is_tensor(value) else value for key, value in entries.items()}
        for index, entries in found["state"].items()
    }
    return {"state": state, "param_groups": found["param_groups"]}


def load_whole_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Puts back what ``whole_state`` gave, laid out as the weights are now."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    placed = {
        index: {
            key: as_placed(value, weights[index])
            if torch.is_tensor(value) and value.shape == weights[index].shape
            else value
            for key, value in entries.items()
        }
        for index, entries in state["state"].items()
    }
    optimizer.load_state_dict({"state": placed, "param_groups": state["param_groups"]})
