"""Fingerprints of weights: what leaves them alone, and what does not."""

from __future__ import annotations

import pytest
import torch

from trainers.parts.fingerprints import fingerprint, fingerprints, layer_of

MODULUS = 2**64


def plain(rows: list[bytes], width: int) -> int:
    """Word by word, in Python's own integers."""
    total = 0
    for row in rows:
        for place in range(len(row) // width):
            word = int.from_bytes(row[place * width : (place + 1) * width], "little", signed=True)
            total += word * (2 * place + 1) * 0x1E3779B97F4A7C15
    total %= MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@pytest.mark.parametrize(
    ("shape", "dtype", "width"),
    [
        ((5, 8), torch.bfloat16, 8),
        ((5, 6), torch.bfloat16, 4),
        ((5, 3), torch.bfloat16, 2),
        ((4, 2), torch.float32, 8),
        ((4, 3), torch.float32, 4),
        ((7,), torch.float32, 4),
        ((2, 3, 4), torch.float32, 8),
        ((3, 5), torch.uint8, 1),
    ],
)
def test_a_fingerprint_is_the_plain_sum(shape: tuple[int, ...], dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    weight = torch.randint(0, 200, shape, dtype=dtype) if dtype == torch.uint8 else torch.randn(shape).to(dtype)
    bits = weight.reshape(-1, shape[-1]).contiguous().view(torch.uint8)
    assert int(fingerprint(weight)) == plain([bytes(row.numpy()) for row in bits], width)


def test_it_does_not_matter_how_rows_are_stacked_nor_where_they_lie() -> None:
    q, k, v = (torch.randn(rows, 12) for rows in (8, 4, 4))
    apart = {f"model.layers.0.{name}.weight": weight for name, weight in (("q", q), ("k", k), ("v", v))}
    together = {"model.layers.0.qkv.weight": torch.cat([q, k, v, torch.zeros(3, 12)])}
    assert fingerprints(apart.items()) == fingerprints(together.items())
    shifted = torch.zeros(1 + 8 * 12)[1:].view(8, 12).copy_(q)  # in memory that is not aligned to words of 64 bits
    assert int(fingerprint(shifted)) == int(fingerprint(q)) == int(fingerprint(q.T.contiguous().T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_may_be_stacked_as_the_rows_of_their_weights_are(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(rows).to(dtype) for rows in (7, 4, 2))
    apart = {f"model.layers.0.{name}_proj.bias": bias for name, bias in (("q", q), ("k", k), ("v", v))}
    together = {"model.layers.0.qkv_proj.bias": torch.cat([q, k, v])}
    assert fingerprints(apart.items()) == fingerprints(together.items())
    stale = {"model.layers.0.qkv_proj.bias": torch.cat([q, k, v * 1.01])}
    assert fingerprints(apart.items()) != fingerprints(stale.items())
    norm = {"model.norm.weight": q}
    assert fingerprints(norm.items()) != fingerprints({"model.norm.weight": q.flip(0)}.items())


def test_any_other_bit_or_order_of_columns_shows() -> None:
    weight = torch.randn(6, 8)
    changed = weight.clone()
    changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(9.0))
    others = {"one bit": changed, "columns": weight.flip(1), "two columns": weight[:, [1, 0, *range(2, 8)]]}
    for name, other in others.items():
        assert int(fingerprint(other)) != int(fingerprint(weight)), name


def test_layers_are_told_apart() -> None:
    assert layer_of("model.layers.11.mlp.experts.3.up_proj.weight") == "model.layers.11"
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens.weight"
    assert fingerprints([]) == {}


def test_gate_and_up_outside_of_layers_are_those_of_their_stack() -> None:
    """As in the merger of GLM-4.6V's tower."""
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    apart = {"visual.merger.gate_proj.weight": gate, "visual.merger.up_proj.weight": up}
    joined = {"visual.merger.gate_up_proj.weight": torch.cat([gate, up])}
    assert fingerprints(apart.items()) == fingerprints(joined.items())


def test_parts_of_rows_add_up_to_the_whole() -> None:
    whole = torch.randn(6, 16, dtype=torch.float64).bfloat16()
    parts = [fingerprint(whole[:, start : start + 4], first_column=start, num_columns=16) for start in range(0, 16, 4)]
    assert int(sum(parts)) == int(fingerprint(whole))
    with pytest.raises(ValueError, match="columns 2 to 6 do not begin and end with words"):
        fingerprint(whole[:, 2:6], first_column=2, num_columns=16)
