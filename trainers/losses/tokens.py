"""What all losses are made of, and the supervised one: plain functions of tensors.

No configuration, no collectives, no logging. Every loss is a sum over the micro-batch divided by a ``normaliser`` of
the whole optimizer step (all micro-batches, all workers), which the caller counts beforehand. So losses and gradients
of micro-batches and workers simply *add up*, and no way of cutting a batch changes them. Sizes in names: B sequences,
T tokens, V vocabulary (or those of its columns that this process holds: ``vocabulary.py``); X is T or 1, one value a
sequence. Masks are True where the loss counts a token; what stands
elsewhere, NaN included, is never looked at.

Diagnostics come back as sums beside the loss, and the ``add_..._metrics`` of each writes them down under TRL's names.
The other losses stand in ``policy.py``, ``preference.py``, ``reward_model.py`` and
``distillation.py``.
"""

from __future__ import annotations

from typing import get_args

import torch

from trainers.losses.types import LARGEST_LOG_RATIO, SFTLossType
from trainers.losses.vocabulary import WHOLE, Vocabulary


def token_logps(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, *, vocabulary: Vocabulary = WHOLE
) -> torch.Tensor:
    """float32 log-probabilities of ``ids`` (...) under softmax(``logits`` / temperature) (..., V).

    ``logits[..., t, :]`` must be the logits that predict ``ids[..., t]``: the caller shifts them.
    """
    scaled = logits.float() / temperature
    return vocabulary.pick(scaled, ids) - vocabulary.logsumexp(scaled)


def token_entropy(logits: torch.Tensor, temperature: float = 1.0, *, vocabulary: Vocabulary = WHOLE) -> torch.Tensor:
    """float32 entropy (...), in nats, of softmax(``logits`` / temperature) (..., V); logits must be finite."""
    scaled = logits.float() / temperature
    return vocabulary.logsumexp(scaled) - vocabulary.total(vocabulary.softmax(scaled) * scaled)


def sft_loss(
    logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    normaliser: float,
    loss_type: SFTLossType = "nll",
    weights_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """The supervised loss: -sum(weights x logps) / normaliser, the number of loss tokens of the optimizer step.

    ``weights_BT`` None: 1. ``dft`` also weights each token by its own probability, held constant (arXiv 2508.05629). A
    normaliser of 0 (a step without loss tokens) gives 0.
    """
    check_choice("loss_type", loss_type, SFTLossType)
    logps = masked(logps_BT, mask_BT, "logps_BT")
    probabilities = logps.detach().exp() if loss_type == "dft" else 1.0
    weights = 1.0 if weights_BT is None else masked(weights_BT, mask_BT, "weights_BT")
    return -(weights * probabilities * logps).sum() / (normaliser or 1.0)


def present(diagnostics: object) -> dict[str, torch.Tensor]:
    """The fields of a dataclass of 0-dim tensors that are not None, by name."""
    return {name: value for name, value in vars(diagnostics).items() if value is not None}


def held(log_ratios: torch.Tensor) -> torch.Tensor:
    """The log-ratios within [-20, 20], without gradient beyond; NaN stays.

    e^20 is 5e8, far outside of any clipping range, and e^89 is no float32 any more. verl holds those of its policy loss
    and of its KL within the same bounds (verl/trainer/ppo/core_algos.py: ``negative_approx_kl``, ``kl_penalty``).
    """
    return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def masked(values_BT: torch.Tensor, mask_BT: torch.Tensor, name: str) -> torch.Tensor:
    """``values_BT`` with 0 where the mask is False, so that neither values nor gradients there can be NaN."""
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"{name} must have the mask's shape {tuple(mask_BT.shape)}, got {tuple(values_BT.shape)}")
    return values_BT.masked_fill(~mask_BT.bool(), 0.0)


def per_token(name: str, values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """``values`` of shape (B, T), cleared outside the mask, or (B, 1), as it is."""
    num_sequences, num_tokens = mask_BT.shape
    if values.shape == (num_sequences, num_tokens):
        return masked(values, mask_BT, name)
    if values.shape == (num_sequences, 1):
        return values
    raise ValueError(
        f"{name} must hold one value per sequence ({num_sequences}) or one per token {(num_sequences, num_tokens)}, "
        f"got {tuple(values.shape)}"
    )


def check_choice(name: str, value: str, choices: object) -> None:
    """Raises ValueError if the value is none of a Literal's."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
