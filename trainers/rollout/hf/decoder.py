"""Continuous batching: prompts wait, enter free slots together, and leave as completions.

    submit ──► waiting ──► prompts into rows of the cache ──► steps of all slots ──► completions
                 ▲ no slot, or no memory                        the host looks after every few

Equal prompts that enter together are read once, and their keys and values copied to every row. A prompt that begins
with a completion and its prompt, as the next turn of an episode does, enters its slot, and only the rest is read. The
cache takes at most a share of the free memory; what has no room waits. All that run at a time are drawn by one
``Sampling`` apart from its limit; a prompt with another waits until they have finished.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainers.rollout.base import Completion
from trainers.rollout.hf.attention import has_kernels, ways
from trainers.rollout.hf.cache import KeptRows, SlotCache
from trainers.rollout.hf.graphs import Graphs
from trainers.rollout.hf.requests import Request
from trainers.rollout.hf.slots import Slots

PROMPT_TOKENS = 16384  # of one forward pass over prompts, padding included


class Decoder:
    """Completes what is submitted, with a model that ``attending`` has prepared.

    ``max_slots`` None: as many as there is memory for, on GPUs at most 512. ``memory_share``: of the free memory, for
    the cache. ``num_steps`` and ``num_idle_steps``: between two looks of the host.

    Raises:
        ValueError: the architecture keeps something else than keys and values.
    """

    def __init__(
        self, module: Any, *, max_slots: int | None = None, memory_share: float = 0.5, uses_graphs: bool = True
    ) -> None:
        self.module = module
        is_gpu = module.device.type == "cuda"
        self.max_slots = max_slots or (512 if is_gpu else 1 << 20)
        self.memory_share = memory_share
        self.num_steps = 8 if is_gpu else 1
        self.num_idle_steps = 16 if is_gpu else 1  # where nobody waits for a slot that becomes free
        self.unit = 64 if is_gpu else 16  # lengths are rounded up to it, so that few shapes occur
        self.graphs = Graphs(is_on=is_gpu and uses_graphs)
        self.cache = SlotCache(module.config)
        self.slots: Slots | None = None
        self.kind: Any = None
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot
        self.counts: dict[int, int] = {}  # tokens that each has, as the host knows
        self.kept = KeptRows()
        self.places: list[int] = []  # of weights
        self.reads_filled = False  # attention reads of each row what is filled, however long the row is
        self.has_new = False  # somebody began to wait, and room was not made yet
        keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.only_last = {"logits_to_keep": 1} if keeps else {}

    def probe(self) -> None:
        """Learns what the model keeps per token; once, before anything else. Tries to decode and extend two rows.

        Raises:
            ValueError, or what the model raises: the architecture does not know how.
        """
        if not self.cache.bytes_per_token:
            self.cache.probe()
            zero_11 = torch.zeros(1, 1, dtype=torch.long, device=self.module.device)
            self.module(input_ids=zero_11, position_ids=zero_11, past_key_values=self.cache, use_cache=True)
            if not self.cache.bytes_per_token:
                raise ValueError("it does not use the cache that it is given")
            self.cache.resize(2, self.unit)
            positions_2 = torch.arange(2, device=self.module.device)
            self.cache.decode(positions_2, positions_2, self.unit)
            before = ways["torch"]
            self.module(
                input_ids=zero_11.expand(2, -1),
                position_ids=positions_2[:, None],
                past_key_values=self.cache,
                use_cache=True,
            )
            self.reads_filled = has_kernels(self.module.device) and ways["torch"] == before
            self.cache.extend(positions_2, positions_2, self.unit)
            self.module(
                input_ids=zero_11.expand(2, 2),
                position_ids=positions_2[:, None] + positions_2,
                past_key_values=self.cache,
                use_cache=True,
            )
            self.cache.resize(0, 0)

    def submit(self, request: Request) -> None:
        """It waits; ``advance`` begins it."""
        self.waiting.append(request)
        self.has_new = True

    def advance(self, version: int, most_steps: int | None = None) -> list[Completion]:
        """At most ``most_steps`` steps of all that runs; those that have finished by then. ``version``: of weights."""
        self.kept.are_of(version)
        self._admit()
        if not self.running:
            return []
        assert self.slots is not None
        for slot, request in self.running.items():
            if not request.versions or request.versions[-1][0] != version:
                request.versions.append((version, self.counts[slot]))
        left = max(request.sampling.max_completion_length - self.counts[slot] for slot, request in self.running.items())
        wanted = self.num_steps if self.waiting else self.num_idle_steps
        num_steps = min(wanted, most_steps or wanted, left)
        width = self._width(max(self.running) + 1)
        longest = max(len(request.prompt_ids) + self.counts[slot] for slot, request in self.running.items())
        length = min(self._rounded(longest + num_steps), self.cache.length)
        if self.reads_filled:
            length = self.cache.length  # one shape, and one graph
        slots = self.slots
        for _ in range(num_steps):
            self.graphs.run((width, length, self.kind), lambda: slots.step(width, length))
        finished = self._look(width)
        self._close_up()
        return finished

    def abort(self) -> None:
        """Gives up all that waits and runs."""
        self.waiting.clear()
        self.running.clear()
        self.counts.clear()
        self.kept.clear()
        if self.slots is not None:
            self.slots.is_running_S.fill_(False)

    def release(self) -> None:
        """Frees the cache; nothing may be running."""
        assert not self.running, "completions are running"
        self.graphs.clear()
        self.kept.clear()
        self.cache.resize(0, 0)
        self.slots = self.kind = None

    def weights_lie_at(self, places: list[int]) -> None:
        """Graphs read weights where they were captured: others forget them."""
        if places != self.places:
            self.graphs.clear()
            self.places = places

    def usage(self) -> float:
        """The share of the cache's memory that running completions have taken."""
        taken = sum(len(request.prompt_ids) + self.counts[slot] for slot, request in self.running.items())
        return taken / max(1, self.cache.num_slots * self.cache.length)

    # Who enters

    def _admit(self) -> None:
        if not self.waiting:
            return
        if not self.running and self.kind != self.waiting[0].kind:
            first = self.waiting[0]
            self.kind = first.kind
            self.graphs.clear()
            self.kept.clear()  # new slots write to the beginnings of rows
            self.slots = Slots(self.module, self.cache, first.sampling, first.stops)
            self.slots.resize(self.cache.num_slots, 0)
        if self.has_new or not self.running:
            self._make_room()
            self.has_new = False
        if len(self.running) == self.cache.num_slots:
            return
        entering: dict[int, Request] = {}
        starts: dict[int, int] = {}  # of what is to be read, where a row has the beginning
        free = self.kept.last([slot for slot in range(self.cache.num_slots) if slot not in self.running])
        while free and self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            slot, start = self.kept.taken(request.prompt_ids, free)
            free.remove(slot)
            entering[slot] = request
            if start:
                starts[slot] = start
        if entering:
            self._enter(entering, starts)

    def _fits(self, request: Request) -> bool:
        assert self.slots is not None
        limit = request.sampling.max_completion_length
        return request.kind == self.kind and request.length <= self.cache.length and limit <= self.slots.limit

    def _make_room(self) -> None:
        """Enlarges the cache for those that wait, as far as memory allows."""
        assert self.slots is not None
        alike = [request for request in self.waiting if request.kind == self.kind]
        if not alike:
            return
        limit = max(self.slots.limit, *(request.sampling.max_completion_length for request in alike))
        length = max(self.cache.length, self._rounded(max(request.length for request in alike)))
        wanted = min(self.max_slots, len(self.running) + len(alike))
        if length == self.cache.length and limit == self.slots.limit and wanted <= self.cache.num_slots:
            return
        capacity = max(1, int(self._budget() // (length * self.cache.bytes_per_token)))
        num_slots = min(max(wanted, self.cache.num_slots), capacity)
        if num_slots <= max(self.running, default=-1) or (
            (num_slots, length, limit) == (self.cache.num_slots, self.cache.length, self.slots.limit)
        ):
            return  # longer rows would be too few: those that need them wait
        self.graphs.clear()
        if (num_slots, length) != (self.cache.num_slots, self.cache.length):
            self.kept.drop(range(num_slots, self.cache.num_slots))
            if not (self.running or self.kept.tokens):
                self.cache.resize(0, 0)
            self.cache.resize(num_slots, length)
        self.slots.resize(num_slots, limit)

    def _budget(self) -> float:
        """Bytes that the cache may have in all."""
        own = self.cache.num_slots * self.cache.length * self.cache.bytes_per_token
        if self.module.device.type == "cuda":
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            free = torch.cuda.mem_get_info()[0] + unused
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.memory_share * (free + own)

    def _enter(self, entering: dict[int, Request], starts: dict[int, int]) -> None:
        """Reads all prompts but for their last tokens, which the next step reads. ``starts``: what rows have."""
        assert self.slots is not None
        alike: dict[bytes, list[int]] = {}
        for slot, request in entering.items():
            if slot in starts:
                continue
            alike.setdefault(request.prompt_ids.tobytes(), []).append(slot)
        groups = sorted(alike.values(), key=lambda slots: len(entering[slots[0]].prompt_ids))
        batch: list[list[int]] = []
        for group in groups:
            if batch and (len(batch) + 1) * len(entering[group[0]].prompt_ids) > PROMPT_TOKENS:
                self._read(batch, entering)
                batch = []
            batch.append(group)
        self._read(batch, entering)
        self._read_on({slot: (entering[slot].prompt_ids, start) for slot, start in starts.items()})
        requests = list(entering.values())
        width = max(len(request.uniform_L) for request in requests)
        uniform_NL = np.zeros((len(requests), width))
        for row, request in zip(uniform_NL, requests, strict=True):
            row[: len(request.uniform_L)] = request.uniform_L
        limits = [request.sampling.max_completion_length for request in requests]
        prompts = [request.prompt_ids for request in requests]
        self.slots.enter(list(entering), prompts, limits, torch.from_numpy(uniform_NL))
        self.running |= entering
        self.counts |= dict.fromkeys(entering, 0)

    def _read(self, groups: Sequence[Sequence[int]], entering: dict[int, Request]) -> None:
        """One forward pass over the prompt of each group of slots, padded on the right."""
        groups = [group for group in groups if len(entering[group[0]].prompt_ids) > 1]
        if not groups:
            return
        prompts = [entering[group[0]].prompt_ids[:-1] for group in groups]
        ids_BT = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        for row, prompt in zip(ids_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        device = self.module.device
        sources = [source for source, group in enumerate(groups) for _ in group]
        rows = [slot for group in groups for slot in group]
        self.cache.fill(torch.tensor(rows, device=device), torch.tensor(sources, device=device))
        self.module(
            input_ids=torch.from_numpy(ids_BT).to(device),
            position_ids=torch.arange(ids_BT.shape[1], device=device).expand(len(ids_BT), -1),
            past_key_values=self.cache,
            use_cache=True,
            **self.only_last,
        )

    def _read_on(self, prompts: dict[int, tuple[np.ndarray, int]]) -> None:
        """Forward passes over what rows do not have of their prompts, by slot: the prompt, and where that begins."""
        device = self.module.device
        rest = {slot: prompt[start:-1] for slot, (prompt, start) in prompts.items() if len(prompt) - 1 > start}
        slots = sorted(rest, key=lambda slot: len(rest[slot]))
        while slots:
            most = max(1, PROMPT_TOKENS // len(rest[slots[-1]]))  # the longest last: all others fit as well
            batch, slots = slots[-most:], slots[:-most]
            ids_BT = np.zeros((len(batch), len(rest[batch[-1]])), np.int64)
            for row, slot in zip(ids_BT, batch, strict=True):
                row[: len(rest[slot])] = rest[slot]
            starts_B = torch.tensor([prompts[slot][1] for slot in batch], device=device)
            longest = max(prompts[slot][1] for slot in batch) + ids_BT.shape[1]
            length = min(self._rounded(longest), self.cache.length)
            self.cache.extend(torch.tensor(batch, device=device), starts_B, length)
            self.module(
                input_ids=torch.from_numpy(ids_BT).to(device),
                position_ids=starts_B[:, None] + torch.arange(ids_BT.shape[1], device=device),
                past_key_values=self.cache,
                use_cache=True,
                **self.only_last,
            )

    # Who leaves

    def _look(self, width: int) -> list[Completion]:
        slots = self.slots
        assert slots is not None
        counts, is_running = torch.stack([slots.counts_S[:width], slots.is_running_S[:width].long()]).tolist()
        done = []
        for slot in list(self.running):
            self.counts[slot] = counts[slot]
            if not is_running[slot]:
                done.append(slot)
        if not done:
            return []
        where = torch.tensor(done, device=slots.device)
        drawn_NL, logps_NL = slots.drawn_SL[where].cpu().numpy(), slots.logps_SL[where].cpu().numpy()
        finished = []
        for slot, drawn, logps in zip(done, drawn_NL, logps_NL, strict=True):
            request, count = self.running.pop(slot), self.counts.pop(slot)
            ids = drawn[:count].copy()
            versions = np.full(count, request.versions[0][0])
            for version, start in request.versions[1:]:
                versions[start:] = version
            if len(request.versions) == 1:
                self.kept.keep(slot, np.concatenate([request.prompt_ids, ids[:-1]]))  # the last one was not read
            is_truncated = int(ids[-1]) not in request.stops
            finished.append(
                Completion(request.number, request.prompt_ids, ids, logps[:count].copy(), versions, is_truncated)
            )
        return finished

    def _close_up(self) -> None:
        """When half of the slots would do, those behind move to the front."""
        if self.waiting or not self.running:
            return
        width = self._width(len(self.running))
        behind = [slot for slot in self.running if slot >= width]
        if not behind:
            return
        assert self.slots is not None
        free = [slot for slot in range(width) if slot not in self.running][: len(behind)]
        self.kept.drop(free)
        self.slots.move(behind, free)
        for origin, target in zip(behind, free, strict=True):
            self.running[target], self.counts[target] = self.running.pop(origin), self.counts.pop(origin)

    def _width(self, num_slots: int) -> int:
        """So many slots are stepped: all, or a half, a quarter and so on."""
        width = self.cache.num_slots
        while width > 8 and width // 2 >= num_slots:
            width //= 2
        return width

    def _rounded(self, length: int) -> int:
        return -(-length // self.unit) * self.unit
