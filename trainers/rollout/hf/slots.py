"""One decoding step of all slots: model, draw, log-probability and end of completions, without a look by the host.

All buffers have fixed places and sizes, S slots by L + 1 tokens; what a slot that has finished writes goes to the last
column, which nobody reads. So a step is the same kernels each time, and can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainers.losses.tokens import token_logps
from trainers.rollout.base import Sampling
from trainers.rollout.hf.attention import has_kernels
from trainers.rollout.hf.biases import Biases
from trainers.rollout.hf.cache import SlotCache
from trainers.rollout.hf.draws import drawn, truncations


class Slots:
    """What is known of each slot on the device; ``sampling`` and ``stops`` are the same for all that run.

    Of ``sampling`` the limit counts for nothing: each slot has its own.
    """

    ids_S: torch.Tensor  # the token that the next step reads
    positions_S: torch.Tensor  # where it stands
    counts_S: torch.Tensor  # tokens that were drawn
    limits_S: torch.Tensor
    is_running_S: torch.Tensor
    uniform_SL: torch.Tensor
    drawn_SL: torch.Tensor
    logps_SL: torch.Tensor
    is_seen_SV: torch.Tensor  # only for a repetition penalty

    def __init__(self, module: Any, cache: SlotCache, sampling: Sampling, stops: Sequence[int]) -> None:
        self.module, self.cache, self.device = module, cache, module.device
        self.temperature, self.penalty = sampling.temperature, sampling.repetition_penalty
        self.truncations = truncations(sampling, self.device) if self.temperature else []
        # Softmax and nothing else: no token is cut off, so none has to be sorted
        no_cuts = len(self.truncations) == (self.temperature != 1.0)
        self.biases = Biases(sampling, stops, self._num_tokens, self.device)
        self.is_plain = bool(self.temperature) and self.penalty == 1.0 and no_cuts and not self.biases.is_on
        self.stops = torch.tensor(list(stops), device=self.device)
        self.num_slots = self.limit = 0
        self._make(0, 0)

    def _make(self, num_slots: int, limit: int) -> None:
        size = self._num_tokens if self.penalty != 1.0 else 0
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "ids_S": ((num_slots,), torch.int64),
            "positions_S": ((num_slots,), torch.int64),
            "counts_S": ((num_slots,), torch.int64),
            "limits_S": ((num_slots,), torch.int64),
            "is_running_S": ((num_slots,), torch.bool),
            "uniform_SL": ((num_slots, limit + 1), torch.float64),
            "drawn_SL": ((num_slots, limit + 1), torch.int64),
            "logps_SL": ((num_slots, limit + 1), torch.float32),
            "is_seen_SV": ((num_slots, size), torch.bool),
        }
        for name, (shape, dtype) in shapes.items():
            new = torch.zeros(shape, dtype=dtype, device=self.device)
            if self.num_slots:
                old = getattr(self, name)
                part = tuple(slice(min(pair)) for pair in zip(old.shape, shape, strict=True))
                new[part] = old[part]
            setattr(self, name, new)
        self.rows_S = torch.arange(num_slots, device=self.device)
        self.num_slots, self.limit = num_slots, limit

    @property
    def _num_tokens(self) -> int:
        return int(self.module.get_input_embeddings().weight.shape[0])

    def resize(self, num_slots: int, limit: int) -> None:
        """So many slots, of at most so many tokens; what is in them stays."""
        self._make(num_slots, limit)

    def enter(
        self, slots: Sequence[int], prompts: Sequence[Any], limits: Sequence[int], uniform_NL: torch.Tensor
    ) -> None:
        """Begins completions; the cache has their prompts but for the last token. ``uniform_NL`` (N, at most L)."""
        where = torch.tensor(slots, device=self.device)

        def put(name: str, values: Any) -> None:
            buffer = getattr(self, name)
            buffer.index_copy_(0, where, torch.as_tensor(values, dtype=buffer.dtype).to(self.device))

        put("ids_S", [int(prompt[-1]) for prompt in prompts])
        put("positions_S", [len(prompt) - 1 for prompt in prompts])
        put("counts_S", [0] * len(slots))
        put("limits_S", list(limits))
        put("is_running_S", [True] * len(slots))
        self.uniform_SL[where, : uniform_NL.shape[1]] = uniform_NL.to(self.device)
        if self.penalty != 1.0:
            seen = torch.zeros(len(slots), self.is_seen_SV.shape[1], dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[torch.as_tensor(prompt)] = True
            put("is_seen_SV", seen)

    def move(self, origins: Sequence[int], targets: Sequence[int]) -> None:
        """What is in slots goes to free ones."""
        sources, places = (torch.tensor(slots, device=self.device) for slots in (origins, targets))
        self.cache.move(sources, places)
        for name, buffer in vars(self).items():
            if isinstance(buffer, torch.Tensor) and name.partition("_S")[1] and name != "rows_S":
                buffer.index_copy_(0, places, buffer.index_select(0, sources))
        self.is_running_S[sources] = False

    def step(self, width: int, length: int) -> None:
        """A token for each of the first ``width`` slots, none of which has more than ``length`` tokens by then."""
        positions_B = self.positions_S[:width]
        self.cache.decode(self.rows_S[:width], positions_B, length)
        logits_BV = self.module(
            input_ids=self.ids_S[:width, None],
            position_ids=positions_B[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        is_running_B = self.is_running_S[:width]
        place_B1 = torch.where(is_running_B, self.counts_S[:width], self.limit)[:, None]
        if self.is_plain and has_kernels(self.device):
            from trainers.rollout.hf.decoding_kernels import draw

            uniform_B1 = self.uniform_SL[:width].gather(1, place_B1)
            chosen_B, logps_B = draw(logits_BV, uniform_B1[:, 0], self.temperature)
            chosen_B1 = chosen_B[:, None]
        else:
            chosen_B1 = self._chosen(logits_BV.float(), width, place_B1)
            chosen_B = chosen_B1[:, 0]
            logps_B = token_logps(logits_BV, chosen_B, self.temperature or 1.0)
        self.drawn_SL[:width].scatter_(1, place_B1, chosen_B1)
        self.logps_SL[:width].scatter_(1, place_B1, logps_B[:, None])
        if self.penalty != 1.0:
            self.is_seen_SV[:width].scatter_(1, chosen_B1, True)
        self.ids_S[:width].copy_(torch.where(is_running_B, chosen_B, self.ids_S[:width]))
        positions_B.add_(is_running_B)
        self.counts_S[:width].add_(is_running_B)
        is_stop_B = (chosen_B1 == self.stops).any(1)
        is_running_B.logical_and_(~is_stop_B & (self.counts_S[:width] < self.limits_S[:width]))

    def _chosen(self, scores_BV: torch.Tensor, width: int, place_B1: torch.Tensor) -> torch.Tensor:
        """(B, 1) tokens, by transformers' order: biases, repetition penalty, temperature, truncations, draw."""
        scores_BV = self.biases(scores_BV, self.counts_S[:width])
        if self.penalty != 1.0:
            penalised_BV = torch.where(scores_BV < 0, scores_BV * self.penalty, scores_BV / self.penalty)
            scores_BV = torch.where(self.is_seen_SV[:width], penalised_BV, scores_BV)
        if not self.temperature:
            return scores_BV.argmax(-1, keepdim=True)
        for truncate in self.truncations:
            scores_BV = truncate(None, scores_BV)
        return drawn(scores_BV, self.uniform_SL[:width].gather(1, place_B1))
