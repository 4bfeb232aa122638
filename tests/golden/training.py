"""What the tests that train beside TRL share: how TRL is told to train, what both leave behind, what must be equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

TRL_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}
OUR_ARGUMENTS: dict[str, Any] = {
    "shuffle_dataset": False,
    "dtype": "float32",
    "report_to": ["none"],
    "save_steps": 0,
}
Steps = list[dict[str, float]]


@dataclass
class Training:
    """What a run leaves behind: the logged numbers and the clipped gradients of every step, and the last weights."""

    steps: Steps
    gradients: list[list[torch.Tensor]]
    weights: dict[str, torch.Tensor]


def recorded(train: Callable[[], tuple[Steps, torch.nn.Module]]) -> Training:
    """Runs ``train``, which gives the logged steps and the trained model, and looks at what its optimizer is given."""
    gradients: list[list[torch.Tensor]] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients.append([parameter.grad.clone() for parameter in parameters])

    hook = register_optimizer_step_pre_hook(keep)
    try:
        steps, model = train()
    finally:
        hook.remove()
    return Training(steps, gradients, {name: weight.detach() for name, weight in model.named_parameters()})


def logged_steps(output_dir: Path) -> Steps:
    """The lines of our ``metrics.jsonl``."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(ours: Training, theirs: Training, *, unlike: Sequence[str] = ()) -> None:
    """Equal logs, gradients and weights. Compared is every number TRL logs, but those that begin as in ``unlike``."""
    assert len(ours.steps) == len(theirs.steps) == len(ours.gradients) == len(theirs.gradients)
    for number, (our_step, their_step) in enumerate(zip(ours.steps, theirs.steps, strict=True), start=1):
        compared = {name: v for name, v in their_step.items() if not name.startswith(("step_time", *unlike))}
        assert_same_numbers(our_step, compared, f"step {number}")
    for our_gradients, their_gradients in zip(ours.gradients, theirs.gradients, strict=True):
        largest = max(float(gradient.abs().max()) for gradient in their_gradients)
        for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
            torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-4, atol=1e-5 * largest)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_numbers(ours: Mapping[str, float], theirs: Mapping[str, float], where: str) -> None:
    """Every number of ``theirs`` is in ``ours``: the loss to 1e-5, the gradient norm to 1e-4 of itself, ..."""
    for name, value in theirs.items():
        assert name in ours, f"{where}: TRL logs {name}, we do not"
        exact = name in ("learning_rate", "epoch", "step", "num_tokens")
        near = {"loss": {"abs": 1e-5, "rel": 0}, "grad_norm": {"rel": 1e-4, "abs": 1e-9}}
        tolerance = {"rel": 1e-12} if exact else near.get(name, {"abs": 1e-4, "rel": 1e-4})
        assert ours[name] == pytest.approx(value, **tolerance), f"{where}: {name}"
