"""Numbers that tell whether two processes hold the same weights, however these are joined into larger ones.

An inference engine keeps some weights side by side in one tensor (query, key and value; gate and up; experts) and pads
vocabularies with zeros. A fingerprint is the sum, modulo 2^64, of the bits of every word (64 bits of a row, or what it
divides into) times a number of its place in the row, over all weights of a layer. It is the same however rows are
stacked, and another one if a weight is missing, stale, rounded, or has its columns in another order. A bias has one
number per row of its weight, so engines stack biases as they stack rows: ``rows_of`` makes each number a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)  # the widest that rows and memory divide into
_GATE_OR_UP = re.compile(r"\.(?:gate|up)_proj(\.\w+)$")  # which engines stack
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def fingerprints(named_weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """By layer (``model.layers.3``), and by name for what stands in none."""
    layers: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, weight in named_weights:
        layers.setdefault(layer_of(name), []).append(_columns(rows_of(name, weight)))
    # a layer's weights together: what takes time here is to launch kernels
    prints = ((layer, _added_up(*map(torch.cat, zip(*parts, strict=True)))) for layer, parts in layers.items())
    return added_up(prints)


def added_up(
    prints: Iterable[tuple[str, torch.Tensor]], over_ranks: Callable[[torch.Tensor], object] | None = None
) -> dict[str, int]:
    """The same of weights whose fingerprints are known: () int64 tensors, which one transfer brings to the host.

    ``over_ranks`` adds up, in place, what ranks have that hold parts of the weights.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in prints:
        layer = layer_of(name)
        found[layer] = found[layer] + value if layer in found else value
    if not found:
        return {}
    totals = torch.stack(list(found.values()))
    if over_ranks is not None:
        over_ranks(totals)
    return dict(zip(found, totals.tolist(), strict=True))


def rows_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight as ``fingerprint`` takes it: a bias (N,) as (N, 1), all others as they are."""
    return weight.unsqueeze(-1) if weight.dim() == 1 and name.endswith("bias") else weight


def fingerprint(weight: torch.Tensor, *, first_column: int = 0, num_columns: int | None = None) -> torch.Tensor:
    """() int64, on the weight's device; a bias goes through ``rows_of`` first.

    ``first_column`` and ``num_columns``: where its rows stand in those of the whole weight, and how long these are.
    """
    return _added_up(*_columns(weight, first_column, num_columns))


def _added_up(columns: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return (columns * places).sum()


def _columns(
    weight: torch.Tensor, first_column: int = 0, num_columns: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(words of a row,) int64 each: the sums over all rows, and what they are multiplied by."""
    width = weight.shape[-1] if weight.dim() else 1
    size = weight.element_size()
    whole_bytes = (width if num_columns is None else num_columns) * size
    word = next(word for word in _WORDS if whole_bytes % word.itemsize == 0)
    first_word, rest = divmod(first_column * size, word.itemsize)
    if rest or width * size % word.itemsize:
        raise ValueError(f"columns {first_column} to {first_column + width} do not begin and end with words")
    rows = weight.detach().reshape(-1, width).contiguous()
    if rows.data_ptr() % word.itemsize:
        rows = rows.clone()
    columns = rows.view(word).sum(0, dtype=torch.int64)
    return columns, _places(first_word, len(columns), rows.device)


@lru_cache(maxsize=256)
def _places(first_word: int, num_words: int, device: torch.device) -> torch.Tensor:
    """(words,) odd numbers, which words of those places are multiplied by; kept, as they take some launches."""
    places = first_word + torch.arange(num_words, device=device, dtype=torch.int64)
    return (2 * places + 1) * 0x1E3779B97F4A7C15


def layer_of(name: str) -> str:
    """``model.layers.3`` of what is in the layer, else the name; of gate and up that of their stack."""
    match = _LAYER.match(name)
    return match.group(1) if match else _GATE_OR_UP.sub(r".gate_up_proj\1", name)
