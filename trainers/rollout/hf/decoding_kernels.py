"""A decoding step's own work as Triton kernels: keys and values into rows, attention over them, and the draw.

Each reads what it needs once, and of a row of the cache the filled part alone. For GPUs; imported where Triton is.
Plain torch says the same in attention.py, cache.py, slots.py and the model, and is what these kernels are compared with
(``python -m benchmarks.gpu.decoding_kernels``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS = 64  # of a row that a program looks at together
ENTRIES = 4096  # of the vocabulary that a program looks at together


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    keys, values, new_keys, new_values, positions, k_b, k_h, k_t, v_b, v_h, v_t, nk_b, nk_h, nv_b, nv_h,
    size, value_size, padded: tl.constexpr,
):  # fmt: skip
    """One token's key and value of one head and slot."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.load(positions + slot)
    d = tl.arange(0, padded)
    key = tl.load(new_keys + slot * nk_b + head * nk_h + d, mask=d < size)
    tl.store(keys + slot * k_b + head * k_h + place * k_t + d, key.to(keys.dtype.element_ty), mask=d < size)
    value = tl.load(new_values + slot * nv_b + head * nv_h + d, mask=d < value_size)
    tl.store(values + slot * v_b + head * v_h + place * v_t + d, value.to(values.dtype.element_ty), mask=d < value_size)


def write(
    keys_SHTD: torch.Tensor,
    values_SHTD: torch.Tensor,
    new_keys_BHD: torch.Tensor,
    new_values_BHD: torch.Tensor,
    positions_B: torch.Tensor,
) -> None:
    """Puts a token of each of the first B slots where it stands. The last dimension is contiguous, in all of them."""
    size, value_size = keys_SHTD.shape[3], values_SHTD.shape[3]
    places = (*keys_SHTD.stride()[:3], *values_SHTD.stride()[:3], *new_keys_BHD.stride()[:2])
    padded = triton.next_power_of_2(max(size, value_size))
    _write[new_keys_BHD.shape[:2]](
        *(keys_SHTD, values_SHTD, new_keys_BHD, new_values_BHD, positions_B, *places, *new_values_BHD.stride()[:2]),
        *(size, value_size, padded),
        num_warps=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, keys, values, mask, spans, mixed, scale, q_b, q_h, k_b, k_h, k_t, v_b, v_h, v_t, m_b, o_b, o_h,
    groups: tl.constexpr, padded_groups: tl.constexpr, size: tl.constexpr, padded: tl.constexpr,
    value_size: tl.constexpr, padded_value: tl.constexpr, tokens: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """All queries of one key head and slot: a running maximum, sum of exponentials and weighted sum of values."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, last = tl.load(spans + 2 * slot), tl.load(spans + 2 * slot + 1)
    g, d, e, t = tl.arange(0, padded_groups), tl.arange(0, padded), tl.arange(0, padded_value), tl.arange(0, tokens)
    rows = head * groups + g
    is_query, is_size, is_value = g < groups, d < size, e < value_size
    query = tl.load(
        queries + slot * q_b + rows[:, None] * q_h + d[None, :], mask=is_query[:, None] & is_size[None, :], other=0.0
    )
    query = query.to(keys.dtype.element_ty)
    largest = tl.full([padded_groups], -1e30, tl.float32)
    total = tl.zeros([padded_groups], tl.float32)
    sums = tl.zeros([padded_groups, padded_value], tl.float32)
    for start in range(first, last, tokens):
        place = start + t
        inside = place < last
        seen = tl.load(mask + slot * m_b + place, mask=inside, other=0) != 0
        at = place.to(tl.int64)
        key = tl.load(
            keys + slot * k_b + head * k_h + at[:, None] * k_t + d[None, :],
            mask=inside[:, None] & is_size[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        value = tl.load(
            values + slot * v_b + head * v_h + at[:, None] * v_t + e[None, :],
            mask=inside[:, None] & is_value[None, :],
            other=0.0,
        )
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
        total = total * shrink + tl.sum(weights, 1)
        largest = new
    tl.store(
        mixed + slot * o_b + rows[:, None] * o_h + e[None, :],
        (sums / total[:, None]).to(mixed.dtype.element_ty),
        mask=is_query[:, None] & is_value[None, :],
    )


def attend(
    query_BHD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    mask_BT: torch.Tensor,
    spans_B2: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """(B, H, D) attention of one query a slot to the keys that ``mask_BT`` shows; all lie within ``spans_B2``.

    ``spans_B2`` int32: the first key of each slot and the end of the last. Keys may have fewer heads than queries.
    """
    batch, num_heads, size = query_BHD.shape
    num_key_heads, value_size = key_BHTD.shape[1], value_BHTD.shape[3]
    groups = num_heads // num_key_heads
    mixed_BHD = torch.empty(batch, num_heads, value_size, dtype=value_BHTD.dtype, device=query_BHD.device)
    precision = "ieee" if key_BHTD.dtype == torch.float32 else "tf32"  # which of bfloat16 says nothing
    _attend[(batch, num_key_heads)](
        *(query_BHD, key_BHTD, value_BHTD, mask_BT.view(torch.uint8), spans_B2, mixed_BHD),
        size**-0.5 if scale is None else scale,
        *(*query_BHD.stride()[:2], *key_BHTD.stride()[:3], *value_BHTD.stride()[:3], mask_BT.stride(0)),
        *mixed_BHD.stride()[:2],
        groups=groups,
        padded_groups=max(16, triton.next_power_of_2(groups)),
        size=size,
        padded=max(16, triton.next_power_of_2(size)),
        value_size=value_size,
        padded_value=max(16, triton.next_power_of_2(value_size)),
        tokens=TOKENS if size <= 128 else TOKENS // 2,
        precision=precision,
        num_warps=2 if size <= 64 else 4,
        num_stages=3 if size <= 128 else 2,
    )
    return mixed_BHD


@triton.jit  # type: ignore[untyped-decorator]
def _draw(logits, uniform, drawn, logps, width, row_stride, scale, entries: tl.constexpr):  # type: ignore
    """One program a row: the total of the exponentials, then the first token at which the cumulated ones pass."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, entries)
    largest = -float("inf")
    total = 0.0
    for start in range(0, width, entries):
        at = start + offsets
        z = tl.load(logits + row * row_stride + at, mask=at < width, other=-float("inf")).to(tl.float32) * scale
        new = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)
        largest = new
    target = (tl.load(uniform + row) * total).to(tl.float32)  # in float64
    below = 0.0
    chosen = width
    likely = 0  # the last token with a probability: where rounding leaves the total below the target
    for start in range(0, width, entries):
        at = start + offsets
        open_ = (at < width) & (chosen == width)
        z = tl.load(logits + row * row_stride + at, mask=open_, other=-float("inf")).to(tl.float32) * scale
        e = tl.exp(z - largest)
        passed = (below + tl.cumsum(e, 0) > target) & (e > 0)
        found = tl.min(tl.where(passed, at, width), 0)
        likely = tl.maximum(likely, tl.max(tl.where(e > 0, at, 0), 0))
        chosen = tl.where(chosen == width, found, chosen)
        below += tl.sum(e, 0)
    chosen = tl.where(chosen == width, likely, chosen)
    wanted = tl.load(logits + row * row_stride + chosen).to(tl.float32) * scale
    tl.store(drawn + row, chosen.to(tl.int64))
    tl.store(logps + row, wanted - (largest + tl.log(total)))


def draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) tokens, each as likely as softmax(logits / temperature) says, and their log-probabilities, float32.

    ``uniform_B`` float64 in [0, 1): the token is where the cumulated probabilities pass it.
    """
    batch, width = logits_BV.shape
    drawn_B = torch.empty(batch, dtype=torch.int64, device=logits_BV.device)
    logps_B = torch.empty(batch, dtype=torch.float32, device=logits_BV.device)
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    _draw[(batch,)](
        *(logits_BV, uniform_B, drawn_B, logps_B, width, logits_BV.stride(0), 1.0 / temperature),
        entries=ENTRIES,
        num_warps=8,
    )
    return drawn_B, logps_B


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(states, weight, out, size, eps, padded: tl.constexpr):  # type: ignore
    """One row: in float32, rounded to the dtype of the states before the weight multiplies, as transformers does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, padded)
    inside = at < size
    x = tl.load(states + row * size + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    w = tl.load(weight + at, mask=inside, other=0.0)
    y = y.to(states.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * size + at, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(states_BTH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """weight x states / sqrt(mean(states^2) + eps), in the dtype that torch would give their product."""
    states_BTH = states_BTH.contiguous()
    size = states_BTH.shape[-1]
    dtype = torch.promote_types(states_BTH.dtype, weight_H.dtype)
    out_BTH = torch.empty_like(states_BTH, dtype=dtype)
    padded = triton.next_power_of_2(size)
    rows = states_BTH.numel() // size
    if rows:
        warps = 1 if padded <= 256 else 4 if padded <= 4096 else 8
        _rms_norm[(rows,)](states_BTH, weight_H, out_BTH, size, eps, padded=padded, num_warps=warps)
    return out_BTH
