"""The loss of KTO, as ``DefaultPolicy.step`` calls it, and of evaluation."""

from __future__ import annotations

import numpy as np
import torch

from trainers.batch import on_device
from trainers.data.unpaired import Judged
from trainers.kto.config import KTOConfig
from trainers.losses.kto import add_kto_metrics, kto_loss
from trainers.losses.tokens import masked
from trainers.metrics import Metrics


def judged_loss(
    config: KTOConfig,
    num_rows: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Judged,
    metrics: Metrics,
    *,
    mean_logits_BT: torch.Tensor,
    is_top1_BT: torch.Tensor,
) -> torch.Tensor:
    """The loss of one micro-batch of completions, divided by the completions of the whole optimizer step."""
    assert micro.is_desirable is not None
    assert micro.ref_logps is not None
    assert micro.kl is not None
    is_desirable_B, kl_B = (_tensor(column, logps_BT.device) for column in (micro.is_desirable, micro.kl))
    loss, diagnostics = kto_loss(
        masked(logps_BT, mask_BT, "logps_BT").sum(1),
        micro.ref_logps.padded(0, logps_BT.device).sum(1),
        is_desirable_B,
        kl_B,
        num_rows=num_rows,
        loss_type=config.loss_type,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    add_kto_metrics(metrics, diagnostics)
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    for name, is_one_B in (("chosen", is_desirable_B), ("rejected", ~is_desirable_B)):
        counted_BT = mask_BT & is_one_B.unsqueeze(1)
        metrics.mean(f"logits/{name}", masked(mean_logits_BT, counted_BT, "mean_logits_BT").sum(), counted_BT.sum())
    return loss


def _tensor(column: np.ndarray, device: torch.device) -> torch.Tensor:
    return on_device(torch.tensor(column), device)  # a copy: what came through Ray is read-only
