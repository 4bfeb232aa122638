"""The loss of KTO, which judges each completion by itself: desirable, or not.

As in ``tokens.py``: plain functions of tensors, sums over a micro-batch divided by a count of the whole optimizer step.
Sizes in names: B completions, one judged a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainers.losses.tokens import check_choice, present
from trainers.losses.types import KTOLossType
from trainers.metrics import Metrics


@dataclass(frozen=True)
class KTODiagnostics:
    """Sums over the completions of one micro-batch: 0-dim tensors on its device, without gradient.

    A reward is beta x log-ratio to the reference.
    """

    num_desirable: torch.Tensor
    num_undesirable: torch.Tensor
    desirable_rewards: torch.Tensor
    undesirable_rewards: torch.Tensor
    desirable_logps: torch.Tensor
    undesirable_logps: torch.Tensor
    kl: torch.Tensor


def kto_loss(
    logps_B: torch.Tensor,
    ref_logps_B: torch.Tensor,
    is_desirable_B: torch.Tensor,
    kl_B: torch.Tensor,
    *,
    num_rows: float,
    loss_type: KTOLossType = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, KTODiagnostics]:
    """The loss of a micro-batch, and its diagnostics.

    ``logps_B`` and ``ref_logps_B``: log-probabilities of whole completions under policy and reference. r is their
    difference, and s is the sigmoid. z is ``kl_B``, the distance of the policy from the reference on completions of
    other prompts (``kl_estimates``), without gradient. ``num_rows``: the completions of the optimizer step.

    =================  ==============================================================  ==========================
    kto                1 - s(beta (r - z)) if desirable, 1 - s(beta (z - r)) if not     arXiv 2402.01306, eq. 7
    apo_zero_unpaired  1 - s(beta r) if desirable, s(beta r) if not                     arXiv 2408.06266, eq. 7
    =================  ==============================================================  ==========================

    Departure from the papers, as in TRL: the loss is a mean over completions. A weighted completion counts as one.

    Raises: ValueError for another loss type.
    """
    check_choice("loss_type", loss_type, KTOLossType)
    log_ratios_B = logps_B - ref_logps_B
    sign_B = torch.where(is_desirable_B, 1.0, -1.0).to(log_ratios_B.dtype)
    weights_B = torch.where(is_desirable_B, desirable_weight, undesirable_weight)
    from_B = log_ratios_B - kl_B.detach() if loss_type == "kto" else log_ratios_B
    losses_B = weights_B * (-beta * sign_B * from_B).sigmoid()
    diagnostics = _diagnostics(beta * log_ratios_B.detach(), logps_B.detach(), is_desirable_B, kl_B.detach())
    return losses_B.sum() / (num_rows or 1.0), diagnostics


def kl_estimates(log_ratios_B: torch.Tensor, group_size: int) -> torch.Tensor:
    """(B,) the KL of policy and reference, estimated in each group of ``group_size`` consecutive rows, at least 0.

    ``log_ratios_B``: log-probability under the policy minus that under the reference, of completions of other prompts.
    An estimate is their mean over the group (arXiv 2402.01306, section 4.1); the last group may be smaller.
    """
    groups = log_ratios_B.split(group_size)
    return torch.cat([group.mean().clamp(min=0).expand(len(group)) for group in groups])


def add_kto_metrics(metrics: Metrics, diagnostics: KTODiagnostics) -> None:
    """Writes the diagnostics of one micro-batch under TRL's names.

    Joined over micro-batches and workers they weigh every completion of the step alike; TRL averages micro-batches.
    """
    seen = present(diagnostics)
    desirable, undesirable = seen["num_desirable"], seen["num_undesirable"]
    metrics.mean("rewards/chosen", seen["desirable_rewards"], desirable)
    metrics.mean("rewards/rejected", seen["undesirable_rewards"], undesirable)
    metrics.mean("logps/chosen", seen["desirable_logps"], desirable)
    metrics.mean("logps/rejected", seen["undesirable_logps"], undesirable)
    metrics.mean("kl", seen["kl"], desirable + undesirable)


def _diagnostics(
    rewards_B: torch.Tensor, logps_B: torch.Tensor, is_desirable_B: torch.Tensor, kl_B: torch.Tensor
) -> KTODiagnostics:
    def of(values_B: torch.Tensor, is_counted_B: torch.Tensor) -> torch.Tensor:
        return values_B.masked_fill(~is_counted_B, 0.0).sum()

    return KTODiagnostics(
        num_desirable=is_desirable_B.sum(),
        num_undesirable=(~is_desirable_B).sum(),
        desirable_rewards=of(rewards_B, is_desirable_B),
        undesirable_rewards=of(rewards_B, ~is_desirable_B),
        desirable_logps=of(logps_B, is_desirable_B),
        undesirable_logps=of(logps_B, ~is_desirable_B),
        kl=kl_B.sum(),
    )
