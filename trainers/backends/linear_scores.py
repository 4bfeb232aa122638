"""Log-probabilities and entropies of a linear head, with a backward pass written by hand.

Autograd keeps several tensors of the size of the logits for each chunk of tokens. Here there is one, and one more in
the dtype of the matrix product: what the head costs beside the gradient of its weight is about 1.5 x the logits of a
chunk. Values and gradients are those of the plain formulas in ``losses/tokens.py``.
"""

from __future__ import annotations

from typing import Any

import torch


class LinearScores(torch.autograd.Function):
    """``LinearScores.apply(features_NH, weight_VH, ids_N, scale, rows, entropy_gradient)``.

    Three float32 (N,): log-probabilities of ``ids_N`` under softmax(scale x features weight^T), entropies, and 1.0
    where the id is the most probable.

    Products run in the dtype of autocast, ``rows`` tokens at a time; all else in float32. The entropy has a gradient
    only if asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        ids_N: torch.Tensor,
        scale: float,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kind = features_NH.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features_NH.dtype
        ctx.scale, ctx.rows, ctx.entropy_gradient = scale, rows, entropy_gradient
        weight = weight_VH.to(ctx.dtype)
        columns = tuple(torch.empty(len(ids_N), device=ids_N.device, dtype=torch.float32) for _ in range(4))
        with torch.autocast(kind, enabled=False):
            for chunk in _chunks(len(ids_N), rows):
                logits = _logits(features_NH[chunk].to(ctx.dtype), weight)
                fill = _kernels().statistics if logits.is_cuda else _statistics
                fill(logits, ids_N[chunk], scale, *(column[chunk] for column in columns))
        logps_N, log_totals_N, entropy_N, is_top1_N = columns
        ctx.save_for_backward(features_NH, weight_VH, ids_N, log_totals_N, entropy_N)
        ctx.mark_non_differentiable(*([is_top1_N] if entropy_gradient else [entropy_N, is_top1_N]))
        return logps_N, entropy_N, is_top1_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        features_NH, weight_VH, ids_N, log_totals_N, entropy_N = ctx.saved_tensors
        logps_gradient_N, entropy_gradient_N, _ = gradients
        if not ctx.entropy_gradient:
            entropy_gradient_N = torch.zeros_like(logps_gradient_N)
        weight = weight_VH.to(ctx.dtype)
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        features_gradient = torch.empty_like(features_NH) if needs_features else None
        weight_gradient = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        with torch.autocast(features_NH.device.type, enabled=False):
            for chunk in _chunks(len(ids_N), ctx.rows):
                features = features_NH[chunk].to(ctx.dtype)
                logits = _logits(features, weight)
                find = _kernels().gradient if logits.is_cuda else _gradient
                given = (log_totals_N[chunk], entropy_N[chunk], logps_gradient_N[chunk], entropy_gradient_N[chunk])
                product = find(logits, ids_N[chunk], ctx.scale, *given, ctx.dtype)
                if features_gradient is not None:
                    features_gradient[chunk] = product @ weight
                if weight_gradient is not None:
                    _add_product(weight_gradient, product.T, features)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight_VH.dtype)
        return features_gradient, weight_gradient, None, None, None, None


def _logits(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(rows, V) float32, a tensor of its own; on a GPU not even rounded to the dtype of the product."""
    if features.is_cuda and features.dtype != torch.float32:
        return torch.mm(features, weight.T, out_dtype=torch.float32)
    return (features @ weight.T).float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, in float32: what many chunks add up to must not be rounded at each."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _statistics(
    logits: torch.Tensor,
    ids: torch.Tensor,
    scale: float,
    logps: torch.Tensor,
    log_totals: torch.Tensor,
    entropy: torch.Tensor,
    is_top1: torch.Tensor,
) -> None:
    is_top1.copy_(logits.argmax(1) == ids)
    log_totals.copy_(logits.mul_(scale).logsumexp(1))
    logits -= log_totals.unsqueeze(1)
    logps.copy_(logits.gather(1, ids.unsqueeze(1)).squeeze(1))
    entropy.copy_(-torch.linalg.vecdot(logits.exp(), logits))


def _gradient(
    logits: torch.Tensor,
    ids: torch.Tensor,
    scale: float,
    log_totals: torch.Tensor,
    entropy: torch.Tensor,
    logps_gradient: torch.Tensor,
    entropy_gradient: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """d loss / d logits: of a log-probability 1 - p at its id and -p elsewhere, of the entropy -p (log p + H)."""
    logps = logits.mul_(scale).sub_(log_totals.unsqueeze(1))
    wanted = logps_gradient.unsqueeze(1)
    inner = entropy_gradient.unsqueeze(1) * (logps + entropy.unsqueeze(1)) if entropy_gradient.any() else 0.0
    gradient = logps.exp_().mul_(-(wanted + inner))
    gradient.scatter_add_(1, ids.unsqueeze(1), wanted)
    return gradient.mul_(scale).to(dtype)


def _kernels() -> Any:
    from trainers.backends import linear_kernels

    return linear_kernels


def _chunks(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
