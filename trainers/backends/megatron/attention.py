"""Attention within documents, as megatron-core's layers ask for it; also where tokens are spread over workers.

megatron-core's own attention without TransformerEngine holds all scores of a row and knows neither documents nor
context parallelism. Here keys and values of all workers are gathered, and each piece of queries looks at those up to
its own end. Queries and keys are turned by their positions here too: once for all layers the angles are looked up.

A layer is told of documents by a number (``told``), in the place of a mask: what is recomputed in the backward pass may
get tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from trainers.backends.fsdp.packed_attention import ASKS_FOR_GROUPS
from trainers.backends.megatron.packing import Documents
from trainers.backends.megatron.parts import in_one_pass


class Rotation(NamedTuple):
    """Of the angles by which each token's queries and keys are turned."""

    cos_SR: torch.Tensor  # half as wide as a head, or as what is turned of it
    sin_S2R: torch.Tensor  # negative, for the first half of a head, and as it is, for the second


def rotation(angles_SR: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """``factor``: what queries and keys are multiplied by beside."""
    cos_SR, sin_SR = ((turn_SR * factor).to(dtype) for turn_SR in (angles_SR.cos(), angles_SR.sin()))
    return Rotation(cos_SR, torch.stack([-sin_SR, sin_SR], 1))


class Added(NamedTuple):
    """What a layer of the first stage adds to its output, of pictures (``vision/tower.py``)."""

    places_V: torch.Tensor
    features_VH: torch.Tensor


class Told(NamedTuple):
    """What layers know of a micro-batch."""

    documents: Documents
    turns: Rotation
    added: tuple[Added, ...]  # behind the first layers


_told: dict[int, Told] = {}


def told(documents: Documents, turns: Rotation, added: Sequence[Added] = ()) -> torch.Tensor:
    """What stands for them until ``forget``."""
    number = len(_told)
    _told[number] = Told(documents, turns, tuple(added))
    return torch.tensor([number])


def looked_up(number: torch.Tensor) -> Told:
    """What the number stands for."""
    return _told[int(number)]


def forget() -> None:
    """Behind the last backward pass of a step."""
    _told.clear()


def turned(heads_SHD: torch.Tensor, cos_SR: torch.Tensor, sin_S2R: torch.Tensor) -> torch.Tensor:
    """(S, H, D) turned by position, the first half of a head against the second (RoPE, arXiv 2104.09864).

    Where there are fewer angles than half of a head has channels, the last channels stay as they are.
    """
    width = 2 * cos_SR.shape[-1]
    halves_SH2R = heads_SHD[..., :width].unflatten(-1, (2, -1))
    turned_SH2R: torch.Tensor = halves_SH2R * cos_SR[:, None, None] + halves_SH2R.flip(-2) * sin_S2R[:, None]
    if width == heads_SHD.shape[-1]:
        return turned_SH2R.flatten(-2)
    return torch.cat([turned_SH2R.flatten(-2), heads_SHD[..., width:]], -1)


class DocumentAttention(torch.nn.Module):
    """megatron-core's core attention: (S, 1, heads, D) queries, keys and values of this worker to (S, 1, heads x D)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.context = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        documents, turns, _ = looked_up(attention_mask)
        query_SHD, key_SGD, value_SGD = (heads.squeeze(1) for heads in (query, key, value))
        query_SHD, key_SGD = (in_one_pass(turned, (heads, *turns)) for heads in (query_SHD, key_SGD))
        if self.context is not None:
            key_SGD, value_SGD = self._of_all_workers(key_SGD, value_SGD, documents)
        attend: Callable[..., torch.Tensor] = one_by_one
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            attend = by_kernel
        mixed_SHD = attend(query_SHD, key_SGD, value_SGD, documents, self.scale)
        return mixed_SHD.flatten(1).unsqueeze(1)

    def _of_all_workers(
        self, key_SGD: torch.Tensor, value_SGD: torch.Tensor, documents: Documents
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        both_S2GD = torch.stack([key_SGD, value_SGD], 1)
        both_T2GD = gather_from_sequence_parallel_region(
            both_S2GD, tensor_parallel_output_grad=True, group=self.context
        )
        assert documents.keys is not None, "the micro-batch was packed for several workers"
        both_K2GD = both_T2GD.index_select(0, documents.keys)
        return both_K2GD[:, 0], both_K2GD[:, 1]


def by_kernel(
    query_SHD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    """(S, H, D) by torch's FlashAttention kernel: bfloat16 or float16 on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    further: dict[str, Any] = {"enable_gqa": True} if ASKS_FOR_GROUPS else {}
    places = (documents.query_starts, documents.key_starts, documents.longest_query, documents.longest_key)
    mixed_SHD = varlen_attn(
        query_SHD, key_KGD.contiguous(), value_KGD.contiguous(), *places, scale=scale, window_size=(-1, 0), **further
    )
    assert isinstance(mixed_SHD, torch.Tensor), "a pair only if it is asked for"
    return mixed_SHD


def one_by_one(
    query_SHD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    """(S, H, D) by a loop over the pieces, on any device and in any dtype."""
    pieces = zip(pairwise(documents.query_starts.tolist()), pairwise(documents.key_starts.tolist()), strict=True)
    parts = []
    for (start, end), (first, last) in pieces:
        query = query_SHD[start:end].transpose(0, 1)[None]
        key, value = (heads[first:last].transpose(0, 1)[None] for heads in (key_KGD, value_KGD))
        mask, num_keys, num_queries = None, last - first, end - start
        if num_keys > num_queries:
            places = torch.arange(num_keys, device=query.device)
            mask = places <= places[num_keys - num_queries :, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)
