"""Keys and values of the sequences in slots: one row of fixed length per slot, as a cache of transformers.

A forward pass reads one token of each of the first slots (``decoding``), or beginnings of prompts that are written into
rows (``filling``), or what comes behind the beginnings that rows have (``extending``). ``probing`` learns what a layer
keeps per token, before there are rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from trainers.rollout.hf.attention import has_kernels

KNOWN = (DynamicLayer, DynamicSlidingWindowLayer)  # what transformers keeps for attention; recurrent layers have others


def foreign_layers(config: Any) -> list[str]:
    """What a model's cache has beside keys and values, by the names of its layers; slots do not know it."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return sorted(kind.__name__ for kind in kinds if kind not in KNOWN) if kinds else ["no known kind"]


class View:
    """What the forward pass that is next reads and writes; all layers share it."""

    mode: Literal["probing", "filling", "extending", "decoding"] = "probing"
    positions: torch.Tensor  # decoding, extending: (B,), where each row's first new token stands
    rows: torch.Tensor  # decoding: (B,), 0 to B - 1; filling: (N,), the slots to write; extending: (B,)
    sources: torch.Tensor  # filling: (N,), for each slot the row of the batch
    length: int  # decoding, extending: what is read of a row
    places: dict[tuple[int, int], torch.Tensor]  # decoding: where tokens are written, by heads and length of rows

    def places_of(self, num_heads: int, length: int) -> torch.Tensor:
        """(B x H,) where each row's token is written, in what is kept as (S x H x T, D)."""
        key = num_heads, length
        if key not in self.places:
            heads = torch.arange(num_heads, device=self.rows.device)
            self.places[key] = ((self.rows[:, None] * num_heads + heads) * length + self.positions[:, None]).flatten()
        return self.places[key]


class SlotLayer(CacheLayerMixin):
    """One layer's keys (S, H, T, D) and values."""

    is_compileable = True
    keys: Any  # tensors once there are rows
    values: Any
    dtype: torch.dtype
    device: torch.device

    def __init__(self, view: View, *, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view, self.is_sliding = view, is_sliding
        self.shapes: tuple[tuple[int, int], ...] = ()  # heads and head size of keys and of values; empty: keeps nothing

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes what there is per token. Keys are kept in the dtype of values, in which attention takes them."""
        self.dtype, self.device = value_states.dtype, value_states.device
        self.shapes = (key_states.shape[1], key_states.shape[3]), (value_states.shape[1], value_states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes what is new; gives all that its queries may look at."""
        view = self.view
        if view.mode == "probing":
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        pairs = ((self.keys, key_states), (self.values, value_states))
        if view.mode == "filling":
            for kept, new in pairs:
                written = kept[:, :, : new.shape[2]]
                written.index_copy_(0, view.rows, new.to(kept.dtype).index_select(0, view.sources))
            return key_states, value_states
        if view.mode == "extending":
            return self._extended(self.keys, key_states), self._extended(self.values, value_states)
        if has_kernels(self.device):
            from trainers.rollout.hf.decoding_kernels import write

            new_keys, new_values = (_dense(new[:, :, 0]) for _, new in pairs)
            write(self.keys, self.values, new_keys, new_values, view.positions)
        else:
            for kept, new in pairs:
                places = view.places_of(*kept.shape[1:3])
                kept.view(-1, kept.shape[3]).index_copy_(0, places, new.to(kept.dtype).flatten(0, 2))
        width = len(view.rows)
        return self.keys[:width, :, : view.length], self.values[:width, :, : view.length]

    def _extended(self, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The rows with what is new. Padding goes behind it, where decoding writes before it reads."""
        view = self.view
        counted = torch.arange(new.shape[2], device=new.device)
        places_BT = (view.positions[:, None] + counted).clamp(max=kept.shape[2] - 1)
        kept[view.rows[:, None], :, places_BT] = new.to(kept.dtype).transpose(1, 2)
        return kept.index_select(0, view.rows)[:, :, : view.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys ``update`` gives, and the position of the first."""
        return self.view.length if self.view.mode in ("decoding", "extending") else query_length, 0

    def get_seq_length(self) -> Any:
        """Where the first query stands; in decoding and extending (B,), one position per row."""
        return self.view.positions if self.view.mode in ("decoding", "extending") else 0

    def get_max_length(self) -> int:
        """No maximum: ``SlotCache.resize`` makes rows longer."""
        return -1


def _dense(values_BHD: torch.Tensor) -> torch.Tensor:
    """With numbers of a head behind each other."""
    return values_BHD if values_BHD.stride(2) == 1 else values_BHD.contiguous()


class SlotCache(Cache):
    """A model's cache. There are no rows before ``resize``.

    Raises:
        ValueError: the architecture keeps something else than keys and values.
    """

    def __init__(self, config: Any) -> None:
        self.view = View()
        if foreign := foreign_layers(config):
            raise ValueError(f"its cache has layers of {', '.join(foreign)}")
        theirs = DynamicCache(config=config).layers
        self.num_slots = self.length = 0
        self.all = [SlotLayer(self.view, is_sliding=isinstance(layer, DynamicSlidingWindowLayer)) for layer in theirs]
        super().__init__(layers=list(self.all))

    @property
    def bytes_per_token(self) -> int:
        """Of all layers; known when the model has run once in mode ``probing``."""
        return sum(heads * size * layer.dtype.itemsize for layer in self.keeping for heads, size in layer.shapes)

    @property
    def keeping(self) -> list[SlotLayer]:
        """Layers that keep something: in some architectures layers share what one of them keeps."""
        return [layer for layer in self.all if layer.shapes]

    def resize(self, num_slots: int, length: int) -> None:
        """Rows for so many slots and tokens; what they hold stays, as far as there is room. 0 slots: frees all."""
        kept_slots, kept_length = min(num_slots, self.num_slots), min(length, self.length)
        for layer in self.keeping:
            for name, (heads, size) in zip(("keys", "values"), layer.shapes, strict=True):
                new = torch.zeros(num_slots, heads, length, size, dtype=layer.dtype, device=layer.device)
                if kept_slots:
                    new[:kept_slots, :, :kept_length] = getattr(layer, name)[:kept_slots, :, :kept_length]
                setattr(layer, name, new)
            layer.is_initialized = True
        self.num_slots, self.length = num_slots, length

    def move(self, origins: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies rows from slots to slots."""
        for layer in self.keeping:
            for kept in (layer.keys, layer.values):
                kept.index_copy_(0, targets, kept.index_select(0, origins))

    def probe(self) -> None:
        """The next forward pass shows what layers keep."""
        self.view.mode = "probing"

    def fill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """The next forward pass reads beginnings of prompts: row ``sources[i]`` is for slot ``rows[i]``."""
        self.view.mode, self.view.rows, self.view.sources = "filling", rows, sources

    def extend(self, rows: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        """The next forward pass reads what follows in ``rows`` from ``positions``, and ``length`` tokens of them."""
        self.view.mode, self.view.rows = "extending", rows
        self.view.positions, self.view.length = positions, length

    def decode(self, rows: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        """The next forward pass reads a token of each of the first slots, and ``length`` tokens of their rows."""
        self.view.mode, self.view.rows = "decoding", rows
        self.view.positions, self.view.length, self.view.places = positions, length, {}


class KeptRows:
    """The tokens whose keys and values the rows of free slots have; off (``is_on``), none are kept.

    A prompt that begins with them need not be read again: the next turn of an episode begins with all that was said.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.tokens: dict[int, np.ndarray] = {}  # by slot, the oldest first
        self.version: int | None = None

    def are_of(self, version: int) -> None:
        """Forgets rows of other weights than these."""
        if version != self.version:
            self.clear()
            self.version = version

    def keep(self, slot: int, tokens: np.ndarray) -> None:
        """The row of a slot that has become free."""
        if self.is_on:
            self.tokens[slot] = tokens

    def taken(self, prompt: np.ndarray, free: list[int]) -> tuple[int, int]:
        """The slot of ``free`` that a prompt enters, and how many tokens of it the row already has.

        The longest row is taken that the prompt begins with, otherwise the first slot.
        """
        fitting = [
            slot
            for slot, tokens in self.tokens.items()
            if len(tokens) < len(prompt) and tokens[-1] == prompt[len(tokens) - 1]
            if np.array_equal(tokens, prompt[: len(tokens)])
        ]
        slot = max(fitting, key=lambda one: len(self.tokens[one])) if fitting else free[0]
        tokens = self.tokens.pop(slot, None)
        return slot, len(tokens) if fitting and tokens is not None else 0

    def last(self, slots: list[int]) -> list[int]:
        """The slots, those with rows behind the others, the oldest first."""
        return [slot for slot in slots if slot not in self.tokens] + list(self.tokens)

    def drop(self, slots: Iterable[int]) -> None:
        """Other prompts enter these slots."""
        for slot in slots:
            self.tokens.pop(slot, None)

    def clear(self) -> None:
        """Forgets all rows."""
        self.tokens.clear()
