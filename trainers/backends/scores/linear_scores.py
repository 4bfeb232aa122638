"""Log-probabilities and entropies of a linear head, with a backward pass written by hand.

Autograd keeps several tensors of the size of the logits for each chunk of tokens. Here there is one, and one more in
the dtype of the matrix product: what the head costs beside the gradient of its weight is about 1.5 x the logits of a
chunk. Values and gradients are those of the plain formulas in ``losses/tokens.py``.

The logits of a chunk are computed again in the backward pass, but for the first tokens if there is room: of these the
gradient of the log-probability by the logits (1 - p at the id, -p elsewhere) is kept in the dtype of the product. What
comes from the loss multiplies whole rows, so it may as well multiply what the products take or give.

Where the weight's rows lie in shards over ranks, each rank looks at its own logits alone, and the ranks exchange five
numbers a token (``_fill_of_shards``).
"""

from __future__ import annotations

from typing import Any

import torch

from trainers.backends.scores.vocabulary import ShardedVocabulary
from trainers.losses.vocabulary import Vocabulary

MANY = 8192  # tokens of which something is kept that are multiplied at once


class LinearScores(torch.autograd.Function):
    """``LinearScores.apply(features_NH, weight_VH, ids_N, scale, rows, entropy_gradient, vocabulary, room)``.

    Three float32 (N,): log-probabilities of ``ids_N`` under softmax(scale x features weight^T), entropies, and 1.0
    where the id is the most probable.

    Products run in the dtype of autocast, ``rows`` tokens at a time; all else in float32. The entropy has a gradient
    only if asked for. ``weight_VH`` are the rows of ``vocabulary`` that are here; where others are elsewhere, the
    gradient of the features is a part of theirs (``Vocabulary.spread`` sums it). ``room``: bytes to keep for the
    backward pass at most; 0 if there is none.
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
        vocabulary: Vocabulary,
        room: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kind = features_NH.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features_NH.dtype
        ctx.scale, ctx.rows, ctx.entropy_gradient = scale, rows, entropy_gradient
        weight = weight_VH.to(ctx.dtype)
        places_N = vocabulary.places(ids_N)
        columns = tuple(torch.empty(len(ids_N), device=ids_N.device, dtype=torch.float32) for _ in range(4))
        num_kept = 0 if entropy_gradient else min(len(ids_N), room // max(1, weight[:, :1].nbytes))
        kept_KV = torch.empty(num_kept, len(weight), device=weight.device, dtype=ctx.dtype)
        with torch.autocast(kind, enabled=False):
            for chunk in _chunks(len(ids_N), rows):
                logits = _logits(features_NH[chunk].to(ctx.dtype), weight)
                filled = [column[chunk] for column in columns]
                own = logits.clone() if chunk.start < num_kept and not logits.is_cuda else logits  # kernels only read
                if isinstance(vocabulary, ShardedVocabulary):
                    _fill_of_shards(vocabulary, own, places_N[chunk], scale, *filled)
                else:
                    _fill(own, places_N[chunk], scale, *filled)
                if chunk.start < num_kept:
                    kept = kept_KV[chunk]
                    places, _, log_totals, entropy, _ = (column[: len(kept)] for column in (places_N[chunk], *filled))
                    of_loss = (torch.ones_like(entropy), torch.zeros_like(entropy))
                    _fill_gradient(kept, logits[: len(kept)], places, scale, log_totals, entropy, *of_loss)
        logps_N, log_totals_N, entropy_N, is_top1_N = columns
        ctx.save_for_backward(features_NH, weight_VH, places_N, log_totals_N, entropy_N, kept_KV)
        ctx.mark_non_differentiable(*([is_top1_N] if entropy_gradient else [entropy_N, is_top1_N]))
        return logps_N, entropy_N, is_top1_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        features_NH, weight_VH, places_N, log_totals_N, entropy_N, kept_KV = ctx.saved_tensors
        logps_gradient_N, entropy_gradient_N, _ = gradients
        if not ctx.entropy_gradient:
            entropy_gradient_N = torch.zeros_like(logps_gradient_N)
        weight = weight_VH.to(ctx.dtype)
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        features_gradient = torch.empty_like(features_NH) if needs_features else None
        weight_gradient = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        with torch.autocast(features_NH.device.type, enabled=False):
            many = max(ctx.rows, MANY) if kept_KV.is_cuda else ctx.rows  # without a GPU products are of float32 copies
            for chunk in _chunks(len(kept_KV), many):
                kept, factors = kept_KV[chunk], logps_gradient_N[chunk].unsqueeze(1)
                if features_gradient is not None:
                    features_gradient[chunk] = _product(kept, weight).mul_(factors)
                if weight_gradient is not None:
                    add_product(weight_gradient, kept.T, (features_NH[chunk] * factors).to(ctx.dtype))
            for chunk in _chunks(len(places_N), ctx.rows, start=len(kept_KV)):
                features = features_NH[chunk].to(ctx.dtype)
                logits = _logits(features, weight)
                given = (log_totals_N[chunk], entropy_N[chunk], logps_gradient_N[chunk], entropy_gradient_N[chunk])
                gradient = torch.empty(logits.shape, device=logits.device, dtype=ctx.dtype)
                _fill_gradient(gradient, logits, places_N[chunk], ctx.scale, *given)
                if features_gradient is not None:
                    features_gradient[chunk] = gradient @ weight
                if weight_gradient is not None:
                    add_product(weight_gradient, gradient.T, features)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight_VH.dtype)
        return features_gradient, weight_gradient, *[None] * 6


def _logits(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(rows, V) float32, a tensor of its own."""
    return _product(features, weight.T)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32, on a GPU not even rounded to the dtype of the product."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, in the total's dtype: what many chunks add up to must not be rounded at each."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)


def _fill(logits: torch.Tensor, places: torch.Tensor, scale: float, *columns: torch.Tensor) -> None:
    """Fills the four columns: log-probabilities, logs of totals, entropies, top-1 hits."""
    fill = _kernels().statistics if logits.is_cuda else _statistics
    fill(logits, places, scale, *columns)


def _fill_gradient(gradient: torch.Tensor, logits: torch.Tensor, *given: Any) -> None:
    """Fills it with d loss / d logits; see ``_gradient``."""
    fill = _kernels().gradient if logits.is_cuda else _gradient
    fill(gradient, logits, *given)


def _fill_of_shards(
    vocabulary: ShardedVocabulary,
    logits: torch.Tensor,
    places: torch.Tensor,
    scale: float,
    logps: torch.Tensor,
    log_totals: torch.Tensor,
    entropy: torch.Tensor,
    is_top1: torch.Tensor,
) -> None:
    """What ``_fill`` fills, of the columns of all ranks; ``places`` -1 where the id is another rank's.

    With L_r and H_r of rank r's columns alone, L = log sum_r exp(L_r) and H = sum_r exp(L_r - L) (H_r + L - L_r).
    """
    vocabulary.check(logits)
    none = torch.finfo(torch.float32).min
    own = logits.new_empty(5, len(places))
    wanted, largest, own_totals, own_entropy, own_top1 = own
    if logits.shape[1]:
        elsewhere, places = places < 0, places.clamp(min=0)
        largest.copy_(logits.amax(1))
        wanted.copy_(logits.gather(1, places.unsqueeze(1)).squeeze(1)).mul_(scale)
        _fill(logits, places, scale, torch.empty_like(wanted), own_totals, own_entropy, own_top1)
        wanted.masked_fill_(elsewhere, none)
        own_top1.masked_fill_(elsewhere, 0.0)
    else:
        own.copy_(own.new_tensor([none, none, none, 0.0, 0.0]).unsqueeze(1))
    wanted_R, largest_R, totals_R, entropy_R, top1_R = vocabulary.gather(own).unbind(1)
    log_totals.copy_(totals_R.logsumexp(0))
    logps.copy_(wanted_R.amax(0) - log_totals)
    above_R = log_totals - totals_R
    entropy.copy_(((-above_R).exp() * (entropy_R + above_R)).sum(0))
    is_top1.copy_(top1_R.gather(0, largest_R.argmax(0, keepdim=True)).squeeze(0))


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
    gradient: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    scale: float,
    log_totals: torch.Tensor,
    entropy: torch.Tensor,
    logps_gradient: torch.Tensor,
    entropy_gradient: torch.Tensor,
) -> None:
    """d loss / d logits: of a log-probability 1 - p at its id and -p elsewhere, of the entropy -p (log p + H).

    An id of -1 is in none of these columns. The logits are overwritten.
    """
    logps = logits.mul_(scale).sub_(log_totals.unsqueeze(1))
    wanted = logps_gradient.unsqueeze(1)
    inner = entropy_gradient.unsqueeze(1) * (logps + entropy.unsqueeze(1)) if entropy_gradient.any() else 0.0
    exact = logps.exp_().mul_(-(wanted + inner))
    (here,) = torch.where(ids >= 0)
    exact[here, ids[here]] += logps_gradient[here]
    gradient.copy_(exact.mul_(scale))


def _kernels() -> Any:
    from trainers.backends.scores import linear_kernels

    return linear_kernels


def _chunks(length: int, rows: int, start: int = 0) -> list[slice]:
    return [slice(first, min(first + rows, length)) for first in range(start, length, rows)]
