"""From the numbers of a micro-batch's targets to its loss, in every backend: what a ``LossFunction`` is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainers.backends.scores.head import Scores
from trainers.backends.scores.inputs import num_targets
from trainers.batch import Sequences, on_device
from trainers.metrics import Metrics


def token_loss(
    scores: Scores | tuple[torch.Tensor],
    names: tuple[str, ...],
    loss_function: Any,
    micro: Any,
    sequences: Sequences,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of ``micro``, whose rows are ``sequences``, from ``Scores`` (``names``: of further ones) or (values,).

    It reaches every weight, with gradients of zero, whatever the loss looks at, and if there are no rows: then the loss
    is not called.

    Raises (in the backward pass):
        ValueError: the loss needs the gradient of entropies, for which ``step`` was not asked.
    """
    nothing: torch.Tensor = scores[0][:0].sum()
    if not len(micro):
        return nothing
    mask_BT, table = target_table(sequences, nothing.device)
    loss: torch.Tensor
    if not isinstance(scores, Scores):
        loss = loss_function(table(scores[0]), mask_BT, micro, metrics)
        return loss + nothing
    metrics.mean("mean_token_accuracy", scores.is_top1_N.sum(), len(scores.is_top1_N))
    further = {f"{name}_BT": table(values) for name, values in zip(names, scores.further, strict=True)}
    entropy_N = scores.entropy_N
    if scores.logps_N.requires_grad and not entropy_N.requires_grad:
        entropy_N = _WithoutGradient.apply(entropy_N, scores.logps_N)  # type: ignore[no-untyped-call]
    loss = loss_function(table(scores.logps_N), table(entropy_N), mask_BT, micro, metrics, **further)
    return loss + nothing


class _WithoutGradient(torch.autograd.Function):
    """Entropies whose gradient was not computed: a loss may look at them, but a term of it would teach nothing."""

    @staticmethod
    def forward(ctx: Any, entropy_N: torch.Tensor, logps_N: torch.Tensor) -> torch.Tensor:
        return entropy_N.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if gradients[0].count_nonzero():
            raise ValueError(
                "the loss has a term with entropies, and the step computes no gradient for them. Call "
                "policy.step(samples, numbers, entropy_gradient=True), or use entropy_BT.detach()."
            )
        return None, torch.zeros_like(gradients[0])


def target_table(
    sequences: Sequences, device: torch.device
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """(B, T) where rows have targets, left-aligned; what lays numbers of all targets, (N,) or (N, K), out like that.

    By their places: the gradient of ``masked_scatter`` would wait for the device.
    """
    counts_B = num_targets(sequences)
    known_BT = np.arange(counts_B.max())[None, :] < counts_B[:, None]
    mask_BT, places_N = (on_device(torch.from_numpy(x), device) for x in (known_BT, np.flatnonzero(known_BT)))

    def table(values_N: torch.Tensor) -> torch.Tensor:
        shape = values_N.shape[1:]
        flat = torch.zeros(known_BT.size, *shape, device=device).index_copy(0, places_N, values_N)
        return flat.view(*mask_BT.shape, *shape)

    return mask_BT, table
