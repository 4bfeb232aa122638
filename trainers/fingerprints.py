"""Numbers that tell whether two processes hold the same weights, however these are joined into larger ones.

An inference engine keeps some weights side by side in one tensor (query, key and value; gate and up; experts) and pads
vocabularies with zeros. A fingerprint is the sum, modulo 2^64, of every entry's bits times a number of its column, over
all weights of a layer. It is the same however rows are stacked, and another one if a weight is missing, stale, rounded,
or has its columns in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def fingerprints(named_weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """By layer (``model.layers.3``), and by name for what stands in none."""
    return added_up((name, fingerprint(weight)) for name, weight in named_weights)


def added_up(prints: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """The same of weights whose fingerprints are known: () int64 tensors, which one transfer brings to the host."""
    found: dict[str, torch.Tensor] = {}
    for name, value in prints:
        layer = layer_of(name)
        found[layer] = found[layer] + value if layer in found else value
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """() int64, on the weight's device."""
    bits = weight.detach().contiguous().view(_BITS[weight.element_size()])
    columns = bits.reshape(-1, bits.shape[-1]).sum(0, dtype=torch.int64)
    odd = torch.arange(1, 2 * len(columns), 2, device=columns.device, dtype=torch.int64)
    return (columns * (odd * 0x1E3779B97F4A7C15)).sum()


def layer_of(name: str) -> str:
    """``model.layers.3`` of what is in the layer, else the name."""
    match = _LAYER.match(name)
    return match.group(1) if match else name
