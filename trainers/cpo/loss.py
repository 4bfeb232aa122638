"""The losses of CPO, SimPO and ORPO, as ``Policy.step`` calls them, and of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainers.batch import on_device
from trainers.cpo.config import CPOConfig, ORPOConfig, PairConfig
from trainers.data.preferences import Preferences
from trainers.losses.preference import Completions, add_preference_metrics, cpo_loss, orpo_loss
from trainers.losses.tokens import masked
from trainers.metrics import Metrics


@dataclass(frozen=True)
class PairCounts:
    """What the loss of a whole optimizer step is divided by."""

    num_pairs: float
    num_learned_tokens: float  # of the chosen sequences, with the prompts if ORPO learns them


def pair_loss(
    config: PairConfig,
    counts: PairCounts,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
    *,
    mean_logits_BT: torch.Tensor,
    is_top1_BT: torch.Tensor,
) -> torch.Tensor:
    """The loss of one micro-batch of pairs, divided by the counts of the whole optimizer step.

    B are its sequences, twice as many: all chosen, then all rejected.
    """
    halves = {"chosen": slice(0, len(micro)), "rejected": slice(len(micro), None)}
    masks = {"chosen": completion_mask(mask_BT[halves["chosen"]], micro), "rejected": mask_BT[halves["rejected"]]}
    weights = micro.nll_weights
    weights_B = None if weights is None else on_device(torch.from_numpy(weights), logps_BT.device)
    chosen, rejected = (Completions(logps_BT[half], masks[name]) for name, half in halves.items())
    if isinstance(config, CPOConfig):
        loss, diagnostics = cpo_loss(
            chosen,
            rejected,
            num_pairs=counts.num_pairs,
            num_chosen_tokens=counts.num_learned_tokens,
            nll_weights_B=weights_B,
            loss_type=config.loss_type,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            cpo_alpha=config.cpo_alpha,
            simpo_gamma=config.simpo_gamma,
            alpha=config.alpha,
        )
    else:
        assert isinstance(config, ORPOConfig)
        loss, diagnostics = orpo_loss(
            chosen,
            rejected,
            mask_BT[halves["chosen"]],
            num_pairs=counts.num_pairs,
            num_learned_tokens=counts.num_learned_tokens,
            nll_weights_B=weights_B,
            beta=config.beta,
        )
    add_preference_metrics(metrics, diagnostics)
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    for name, half in halves.items():
        logits_BT = masked(mean_logits_BT[half], masks[name], "mean_logits_BT")
        metrics.mean(f"logits/{name}", logits_BT.sum(), masks[name].sum())
    return loss


def completion_mask(mask_BT: torch.Tensor, micro: Preferences) -> torch.Tensor:
    """(B, T) ``mask_BT`` of the chosen sequences without the targets that belong to the prompt."""
    if micro.num_prompt_targets is None:
        return mask_BT
    num_prompt_targets_B = on_device(torch.tensor(micro.num_prompt_targets), mask_BT.device)
    return mask_BT & (torch.arange(mask_BT.shape[1], device=mask_BT.device) >= num_prompt_targets_B.unsqueeze(1))
