"""The optimizers of torch and transformers by transformers' names, and their states as whole tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from rayhelper import ConfigError
from trainers.backends.fsdp.sharding import as_placed, full

OptimizerName = Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad", "muon"]

OF_ADAPTERS = re.compile(r"\.(modules_to_save\.default|lora_[AB]\.default)(?=\.)")  # what peft adds to names


def build_optimizer(
    name: OptimizerName,
    module: torch.nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    adam_betas: tuple[float, float],
    adam_epsilon: float,
    kwargs: Mapping[str, Any],
    rates: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of the weights that are trained; biases and norms do not decay.

    ``kwargs``: its further arguments. ``rates``: learning rates of single weights by their names.
    """
    groups = parameter_groups(module, weight_decay, rates or {})
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
        case "muon":
            found = muon_groups(module, weight_decay, rates or {})
            return Muon(*found, lr=learning_rate, betas=adam_betas, eps=adam_epsilon, **kwargs)


class Muon(torch.optim.Optimizer):
    """Muon of matrices, and AdamW of all other weights, as in Moonlight (arXiv 2502.16982, section 2.2).

    torch's own optimizers make the steps. A step of Muon is as large as one of AdamW would be: 0.2 sqrt(max(rows,
    columns)) times the learning rate. All weights decay. ``further``: arguments of ``torch.optim.Muon``, such as
    momentum and ns_steps.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        **further: Any,
    ) -> None:
        settings = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw", **further}
        self.inner: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self.inner["muon"] = torch.optim.Muon(matrices, lr=lr, **settings)
        if others:
            self.inner["adamw"] = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)
        groups = [group | {"kind": kind} for kind, inner in self.inner.items() for group in inner.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the loss is not computed again"
        for kind, inner in self.inner.items():  # what is loaded is new groups and states
            inner.param_groups = [group for group in self.param_groups if group["kind"] == kind]
            inner.state = self.state
            inner.step()


def muon_groups(
    module: Any, weight_decay: float, rates: Mapping[str, float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The matrices that are trained, but for embeddings and the head, and all other weights, by learning rates.

    Raises ConfigError for stacked experts and convolutions, which are no matrices.
    """
    ends = [getattr(module, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    names = [name for name, part in module.named_modules() if any(part is end for end in ends)]
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    groups: dict[tuple[bool, float | None], dict[str, Any]] = {}
    for name, weight in trained:
        if weight.ndim > 2:
            raise ConfigError(
                f"optim: muon changes matrices, and {name} has {weight.ndim} dimensions. Write optim: adamw_torch, or "
                "tuner_type: lora."
            )
        is_matrix = weight.ndim == 2 and not any(f".{end}." in f".{name}" for end in names)
        rate = rates.get(name)
        new = {"params": [], "weight_decay": weight_decay} | ({} if rate is None else {"lr": rate})
        groups.setdefault((is_matrix, rate), new)["params"].append(weight)
    matrices, others = ([group for (kind, _), group in groups.items() if kind == asked] for asked in (True, False))
    return matrices, others


def parameter_groups(
    module: torch.nn.Module, weight_decay: float, rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The weights that are trained, as transformers' Trainer divides them: no decay of biases and norms.

    Weights with a learning rate of their own (``rates``) are groups of their own behind these; what an adapter has
    beside a weight has its rate.
    """
    decayed = decayed_names(module)
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    known = {name: OF_ADAPTERS.sub("", name) for name, _ in trained}
    rates = {name: (rates or {})[plain] for name, plain in known.items() if plain in (rates or {})}
    groups = [(True, weight_decay), (False, 0.0)]
    found: list[dict[str, Any]] = []
    for rate in (None, *sorted({rates[name] for name, _ in trained if name in rates})):
        of_rate = [(name, weight) for name, weight in trained if rates.get(name) == rate]
        found += [
            {"params": [weight for name, weight in of_rate if (name in decayed) == decays], "weight_decay": decay}
            | ({} if rate is None else {"lr": rate})
            for decays, decay in groups
        ]
    return found


def decayed_names(module: torch.nn.Module) -> set[str]:
    """The weights that decay: those that transformers' Trainer takes neither for a bias nor for a norm."""
    from transformers.trainer_pt_utils import get_parameter_names

    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return set(get_parameter_names(module, [torch.nn.LayerNorm], forbidden))


def whole_state(
    optimizer: torch.optim.Optimizer,
    *,
    here: Callable[[torch.Tensor], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors on the CPU, for any number of ranks. Every rank calls it.

    Inside ``here(weight)`` the states of a weight are read.
    """
    found = optimizer.state_dict()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {}
    for index, entries in found["state"].items():
        with here(weights[index]):
            state[index] = {
                key: full(value).to("cpu", copy=True) if torch.is_tensor(value) else value
                for key, value in entries.items()
            }
    return {"state": state, "param_groups": found["param_groups"]}


def load_whole_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    loaded: Callable[[torch.Tensor], object] | None = None,
) -> None:
    """Puts back what ``whole_state`` gave, laid out as the weights are now.

    ``loaded`` is called for each weight that has its states, before those of the next are placed.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    known = dict[torch.Tensor, Any]()
    indices = list(state["state"])
    for part in [indices] if loaded is None or not indices else [[index] for index in indices]:
        placed = {index: _placed(state["state"][index], weights[index]) for index in part}
        optimizer.load_state_dict({"state": placed, "param_groups": state["param_groups"]})
        if loaded is not None and part:
            loaded(weights[part[0]])
        known |= optimizer.state
    optimizer.state.update(known)


def _placed(entries: Mapping[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    return {
        key: as_placed(value, weight) if torch.is_tensor(value) and value.shape == weight.shape else value
        for key, value in entries.items()
    }
