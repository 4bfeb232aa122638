"""The loss of reward models: pairs of a chosen and a rejected completion, one score each (Bradley-Terry).

As in ``tokens.py``: sums over the micro-batch divided by the pairs of the whole optimizer step, so that losses and
gradients of micro-batches and workers add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from trainers.losses.tokens import present
from trainers.metrics import Metrics


@dataclass(frozen=True)
class RewardDiagnostics:
    """What a reward model gave to one micro-batch: 0-dim tensors on its device, without gradient."""

    num_pairs: torch.Tensor
    accurate: torch.Tensor  # pairs whose chosen completion has the higher reward
    margins: torch.Tensor  # sum of chosen - rejected
    rewards: torch.Tensor  # sum over both completions of every pair
    min_reward: torch.Tensor  # inf in an empty micro-batch
    max_reward: torch.Tensor  # -inf in an empty micro-batch


def reward_model_loss(
    chosen_rewards_B: torch.Tensor,
    rejected_rewards_B: torch.Tensor,
    margins_B: torch.Tensor | None = None,
    *,
    num_pairs: float,
    center_rewards_coefficient: float | None = None,
) -> tuple[torch.Tensor, RewardDiagnostics]:
    """The Bradley-Terry loss of a reward model, a mean over the ``num_pairs`` of the whole step, and its diagnostics.

    It is -log sigmoid(chosen - rejected - margin) + ``center_rewards_coefficient`` x (chosen + rejected)^2. The margin
    (0 by default) says how much better the chosen completion was judged (Llama 2, arXiv 2307.09288). The second term
    keeps the mean reward near 0 (arXiv 2312.09244). With equal micro-batches it equals TRL.

    Raises: ValueError for shapes other than (B,).
    """
    columns = {"chosen_rewards_B": chosen_rewards_B, "rejected_rewards_B": rejected_rewards_B, "margins_B": margins_B}
    for name, column in columns.items():
        if column is not None and (column.dim() != 1 or column.shape != chosen_rewards_B.shape):
            raise ValueError(
                f"{name} must hold one number per pair, as chosen_rewards_B {tuple(chosen_rewards_B.shape)} must, got "
                f"{tuple(column.shape)}"
            )
    differences_B = chosen_rewards_B - rejected_rewards_B
    losses_B = -logsigmoid(differences_B if margins_B is None else differences_B - margins_B)
    if center_rewards_coefficient is not None:
        losses_B = losses_B + center_rewards_coefficient * (chosen_rewards_B + rejected_rewards_B).square()
    return losses_B.sum() / (num_pairs or 1.0), _reward_diagnostics(chosen_rewards_B, rejected_rewards_B)


def add_reward_model_metrics(metrics: Metrics, diagnostics: RewardDiagnostics) -> None:
    """Writes the diagnostics of one micro-batch under TRL's names.

    ``min_reward`` and ``max_reward`` are over all completions of the step; TRL averages those of micro-batches.
    """
    seen = present(diagnostics)
    pairs = seen["num_pairs"]
    metrics.mean("accuracy", seen["accurate"], pairs)
    metrics.mean("margin", seen["margins"], pairs)
    metrics.mean("mean_reward", seen["rewards"], 2 * pairs)
    metrics.min("min_reward", seen["min_reward"], count=pairs)
    metrics.max("max_reward", seen["max_reward"], count=pairs)


@torch.no_grad()
def _reward_diagnostics(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> RewardDiagnostics:
    both = torch.cat([chosen_B, rejected_B])
    return RewardDiagnostics(
        num_pairs=torch.ones_like(chosen_B).sum(),
        accurate=(chosen_B > rejected_B).sum(),
        margins=(chosen_B - rejected_B).sum(),
        rewards=both.sum(),
        min_reward=torch.cat([both, both.new_full((1,), math.inf)]).amin(),  # the one more makes B = 0 possible
        max_reward=torch.cat([both, both.new_full((1,), -math.inf)]).amax(),
    )
