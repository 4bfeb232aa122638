"""Attention over the rows of a ``SlotCache``, through transformers' interfaces of attention and of masks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

NAME = "slots"
MOST_SIZE = 256  # of a head, for the kernel
ways = Counter[str]()  # by which single queries attended: "kernel", which reads the filled part of a row, or "torch"


def register() -> None:
    """Makes the attention known to transformers. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, slot_mask)


@contextlib.contextmanager
def attending(module: Any) -> Iterator[bool]:
    """Inside, the model attends by ``slot_attention``; gives whether its class lets it. Afterwards as before."""
    register()
    before = module.config.get_text_config()._attn_implementation
    module.set_attn_implementation(NAME)
    try:
        yield module.config.get_text_config()._attn_implementation == NAME
    finally:
        module.set_attn_implementation(before)


def slot_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: torch.Tensor | int,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    """(B, 1, Q, K) bool, True where a query sees a key. ``q_offset`` may be (B,): the position of each first query."""

    def counted(size: int) -> torch.Tensor:
        return torch.arange(size, device=device)

    offset = q_offset.view(-1, 1, 1, 1) if isinstance(q_offset, torch.Tensor) else q_offset
    queries = offset + counted(q_length)[None, None, :, None]
    rows, heads = counted(batch_size)[:, None, None, None], counted(1)[None, :, None, None]
    mask = mask_function(rows, heads, queries, counted(kv_length)).expand(batch_size, 1, q_length, kv_length)
    if q_length == 1 and has_kernels(device):
        mask = mask.contiguous()
        mask.spans_B2 = spans(mask[:, 0, 0])  # type: ignore[attr-defined]  # for all layers that get this very mask
    return mask


def spans(mask_BT: torch.Tensor) -> torch.Tensor:
    """(B, 2) int32: the first place that is True in each row, and the one behind the last."""
    places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device, dtype=torch.int32)
    first_B = torch.where(mask_BT, places_T, mask_BT.shape[1]).amin(1)
    last_B = torch.where(mask_BT, places_T + 1, 0).amax(1)
    return torch.stack([first_B, last_B], 1)


def has_kernels(device: torch.device) -> bool:
    """Whether ``decoding_kernels.py`` runs there."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def slot_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(B, T, H, D) under the signature of transformers' attention functions; keys and values may have fewer heads.

    ``softcap`` bounds the scores (Gemma 2); ``s_aux`` (H,) are scores of attention sinks (gpt-oss).

    Raises:
        ValueError: the architecture adds a bias by position.
    """
    if others.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} adds a bias by position to its scores")
    batch, num_heads, length, _ = query_BHTD.shape
    num_key_heads = key_BHTD.shape[1]
    spans_B2 = getattr(attention_mask, "spans_B2", None)
    if length == 1 and softcap is None and s_aux is None and spans_B2 is not None and _fits(key_BHTD, value_BHTD):
        from trainers.rollout.hf.decoding_kernels import attend

        ways["kernel"] += 1
        seen_BT = attention_mask[:, 0, 0]
        return attend(query_BHTD[:, :, 0], key_BHTD, value_BHTD, seen_BT, spans_B2, scaling)[:, None], None
    ways["torch"] += length == 1
    # Under autocast norms leave queries and keys in float32
    query_BHTD, key_BHTD = query_BHTD.to(value_BHTD.dtype), key_BHTD.to(value_BHTD.dtype)
    # The queries of one key head stand behind each other, so that keys and values need no copies per query head
    num_groups = num_heads // num_key_heads
    grouped = query_BHTD.reshape(batch, num_key_heads, num_groups * length, -1)
    mask = attention_mask.repeat(1, 1, num_groups, 1) if length > 1 else attention_mask
    if softcap is None and s_aux is None:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            grouped, key_BHTD, value_BHTD, attn_mask=mask.expand(-1, -1, num_groups * length, -1), scale=scaling
        )
    else:
        sinks = None if s_aux is None else s_aux.view(num_key_heads, num_groups).repeat_interleave(length, 1)
        mixed = _by_scores(grouped, key_BHTD, value_BHTD, mask, scaling, softcap, sinks)
    return mixed.reshape(batch, num_heads, length, -1).transpose(1, 2).contiguous(), None


def _fits(key_BHTD: torch.Tensor, value_BHTD: torch.Tensor) -> bool:
    """Whether the kernel takes them."""
    is_dense = key_BHTD.stride(3) == value_BHTD.stride(3) == 1
    return is_dense and key_BHTD.dtype == value_BHTD.dtype and max(key_BHTD.shape[3], value_BHTD.shape[3]) <= MOST_SIZE


def _by_scores(
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks_HT: torch.Tensor | None,
) -> torch.Tensor:
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query_BHTD @ key_BHTD.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).float()
    if sinks_HT is None:
        weights = scores.softmax(-1)
    else:
        sinks = sinks_HT.float()[None, :, :, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(value_BHTD.dtype) @ value_BHTD
