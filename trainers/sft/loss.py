"""The loss of SFT and pretraining, as ``Policy.step`` calls it."""

from __future__ import annotations

import torch

from trainers.batch import Sequences
from trainers.losses.tokens import sft_loss
from trainers.metrics import Metrics
from trainers.sft.config import SFTConfig


def supervised_loss(
    config: SFTConfig,
    num_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Sequences,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch, divided by the loss tokens of the whole optimizer step."""
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    weights_BT = None if micro.weights is None else micro.weights.padded(0.0, device=logps_BT.device)
    return sft_loss(logps_BT, mask_BT, normaliser=num_tokens, loss_type=config.loss_type, weights_BT=weights_BT)
