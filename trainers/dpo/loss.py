"""The loss of DPO and its family, as ``DefaultPolicy.step`` calls it, and of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainers.batch import on_device
from trainers.data.preferences import Preferences
from trainers.dpo.config import DPOConfig, weighted_losses
from trainers.losses.preference import Completions, add_preference_metrics, preference_loss
from trainers.losses.tokens import masked
from trainers.metrics import Metrics


@dataclass(frozen=True)
class PairCounts:
    """What the loss of a whole optimizer step is divided by."""

    num_pairs: float
    num_chosen_tokens: float
    bco_shift: float = 0.0  # subtracted from rewards in bco_pair


def dpo_loss(
    config: DPOConfig,
    counts: PairCounts,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
    *,
    mean_logits_BT: torch.Tensor,
    is_top1_BT: torch.Tensor,
    log_sum_sq_probs_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of one micro-batch of pairs, divided by the counts of the whole optimizer step.

    B are its sequences, twice as many: all chosen, then all rejected.
    """
    ref_logps = micro.ref_logps
    ref_logps_BT = None if ref_logps is None else ref_logps.padded(0, logps_BT.device)

    def completions(half: slice) -> Completions:
        tensors = (logps_BT, mask_BT, ref_logps_BT, log_sum_sq_probs_BT)
        return Completions(*(None if tensor is None else tensor[half] for tensor in tensors))  # type: ignore[arg-type]

    chosen, rejected = slice(0, len(micro)), slice(len(micro), None)
    weights = micro.nll_weights
    loss_types, loss_weights = weighted_losses(config)
    loss, diagnostics = preference_loss(
        completions(chosen),
        completions(rejected),
        num_pairs=counts.num_pairs,
        num_chosen_tokens=counts.num_chosen_tokens,
        nll_weights_B=None if weights is None else on_device(torch.from_numpy(weights), logps_BT.device),
        loss_type=loss_types,
        loss_weights=loss_weights,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        ld_alpha=config.ld_alpha,
        discopop_tau=config.discopop_tau,
        bco_shift=counts.bco_shift,
    )
    add_preference_metrics(metrics, diagnostics)
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    for name, half in (("chosen", chosen), ("rejected", rejected)):
        logits_BT = masked(mean_logits_BT[half], mask_BT[half], "mean_logits_BT")
        metrics.mean(f"logits/{name}", logits_BT.sum(), mask_BT[half].sum())
    metrics.mean("chosen_token_accuracy", is_top1_BT[chosen].sum(), mask_BT[chosen].sum())
    return loss


def share_of_dpo_loss(
    config: DPOConfig,
    counts: PairCounts,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
    **numbers: torch.Tensor,
) -> torch.Tensor:
    """``dpo_loss`` as if the micro-batch were the whole, times its share of it: what losses that sort need."""
    share = len(micro) / counts.num_pairs
    own = PairCounts(len(micro), share * counts.num_chosen_tokens, counts.bco_shift)
    return share * dpo_loss(config, own, logps_BT, entropy_BT, mask_BT, micro, metrics, **numbers)
