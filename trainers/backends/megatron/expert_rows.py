"""Tokens on their way to their experts and back: a row for each expert that a token goes to, sorted by expert.

In the place of three functions of megatron-core's transformer/moe/moe_utils.py, with their arguments and answers.
There, without TransformerEngine, what several experts make of a token (and in the backward pass the gradients of its
rows) is added up on a GPU by atomic additions in the model's dtype: rounded at every addition, in another order in each
run. Rows are sorted piece by piece, and their number is asked of the device though it is known. Here sums are in
float32 and in one order, and nothing waits for the device.

That is for tokens that go to K experts each, as ``moe_token_dispatcher_type: alltoall`` has them. Where a token's
experts are fewer, by ``allgather`` (this worker's alone) or a capacity factor, megatron-core's functions are called:
their ``num_out_tokens`` is a tensor. (``flex``, which settings.py refuses, would have a number there.)

S tokens, E experts of which each token goes to K, R = S K rows, H or N features.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from trainers.backends.megatron.parts import in_one_pass


def permute(
    tokens_SH: torch.Tensor,
    routing_map_SE: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(R, H) rows, (R,) their probabilities of (S, E) ``probs``, and (R,) the token of each row."""
    if fused or drop_and_pad or not isinstance(num_out_tokens, int) or not num_out_tokens:
        return moe_utils.permute(  # type: ignore[no-any-return]
            tokens_SH, routing_map_SE, probs, num_out_tokens=num_out_tokens, fused=fused, drop_and_pad=drop_and_pad
        )
    num_tokens = len(routing_map_SE)
    device = tokens_SH.device
    experts_SK = routing_map_SE.byte().topk(num_out_tokens // num_tokens, dim=1).indices.sort(dim=1).values
    before_ES = routing_map_SE.T.flatten().cumsum(0) - 1  # rows before: of experts before this, of tokens before this
    place_SK = before_ES[experts_SK * num_tokens + torch.arange(num_tokens, device=device)[:, None]]
    choice_R = inverse(place_SK.flatten())  # which of all (token, expert) is in a row
    token_R = choice_R // place_SK.shape[1]
    token_R.place_SK = place_SK  # type: ignore[attr-defined]  # for the way back
    rows_RH = copied(tokens_SH, token_R, place_SK)
    if probs is None:
        return rows_RH, None, token_R
    probs_R = copied(probs.gather(1, experts_SK).view(-1, 1), choice_R, place_SK.view(-1, 1))[:, 0]
    return rows_RH, probs_R, token_R


def unpermute(
    rows_RH: torch.Tensor,
    token_R: torch.Tensor,
    restore_shape: torch.Size,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """(S, H) the sum of each token's rows; ``token_R`` is ``permute``'s."""
    place_SK = getattr(token_R, "place_SK", None)
    if place_SK is None or probs is not None:
        return moe_utils.unpermute(  # type: ignore[no-any-return]
            rows_RH, token_R, restore_shape, probs, routing_map, fused=fused, drop_and_pad=drop_and_pad
        )
    return summed(rows_RH, token_R, place_SK)


def sort_chunks_by_idxs(
    rows_RH: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows, and (R,) ``probs`` with them, in pieces of ``split_sizes``, in the order that ``sorted_idxs`` says."""
    if fused or split_sizes.is_cuda or sorted_idxs.is_cuda:
        return moe_utils.sort_chunks_by_idxs(  # type: ignore[no-any-return]
            rows_RH, split_sizes, sorted_idxs, probs=probs, fused=fused
        )
    if torch.equal(sorted_idxs, torch.arange(len(sorted_idxs))):
        return rows_RH, probs
    from_R = order_of_pieces(split_sizes, sorted_idxs, rows_RH.shape[0], rows_RH.device)
    to_R1 = inverse(from_R)[:, None]
    if probs is not None:
        probs = copied(probs[:, None], from_R, to_R1)[:, 0]
    return copied(rows_RH, from_R, to_R1), probs


def order_of_pieces(sizes_P: torch.Tensor, order_P: torch.Tensor, num_rows: int, device: torch.device) -> torch.Tensor:
    """(R,) which row comes in each place, if pieces of so many rows are put in that order."""
    starts_P = sizes_P.cumsum(0) - sizes_P
    sizes_P, starts_P = sizes_P[order_P], starts_P[order_P]
    shifts_P, sizes_P = torch.stack([starts_P - (sizes_P.cumsum(0) - sizes_P), sizes_P]).to(device, non_blocking=True)
    shifts_R = shifts_P.repeat_interleave(sizes_P, output_size=num_rows)
    from_R: torch.Tensor = shifts_R + torch.arange(num_rows, device=device)
    return from_R


def inverse(permutation_R: torch.Tensor) -> torch.Tensor:
    """(R,) where each number stands in a permutation of 0 to R - 1."""
    numbers_R = torch.arange(len(permutation_R), device=permutation_R.device)
    return torch.empty_like(permutation_R).scatter_(0, permutation_R, numbers_R)


def copied(tokens_SH: torch.Tensor, token_R: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
    """(R, H) rows: in each the token that ``token_R`` says. Rows ``place_SK`` are those of a token."""
    rows_RH: torch.Tensor = _Copied.apply(tokens_SH, token_R, place_SK)  # type: ignore[no-untyped-call]
    return rows_RH


def summed(rows_RH: torch.Tensor, token_R: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
    """(S, H) of each token the sum of its rows: the other direction of ``copied``."""
    sums_SH: torch.Tensor = _Summed.apply(rows_RH, token_R, place_SK)  # type: ignore[no-untyped-call]
    return sums_SH


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_SH: torch.Tensor, token_R: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place_SK)
        return tokens_SH.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, gradient_RH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place_SK,) = ctx.saved_tensors
        return sum_of_rows(gradient_RH, place_SK), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, token_R: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_R)
        return sum_of_rows(rows_RH.detach(), place_SK)  # compiled once, whether or not there is a gradient

    @staticmethod
    def backward(ctx: Any, gradient_SH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return gradient_SH.index_select(0, token_R), None, None


def sum_of_rows(rows_RH: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
    """(S, H): the K rows of each place added up in float32."""
    if place_SK.shape[1] == 1:
        return rows_RH.index_select(0, place_SK[:, 0])
    return in_one_pass(_sum_of_rows, (rows_RH, place_SK))


def _sum_of_rows(rows_RH: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
    total_SH = rows_RH[place_SK[:, 0]].float()
    for place_S in place_SK.unbind(1)[1:]:
        total_SH = total_SH + rows_RH[place_S].float()
    return total_SH.to(rows_RH.dtype)
