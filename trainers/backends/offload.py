"""Memory of a GPU that is given back for a while: what lies there waits in pinned memory of the host.

Tensors stay the objects they are, with their shapes and views; only the memory behind them is freed and, later,
allocated anew. So whoever holds them (FSDP's shards, an optimizer, views into one buffer) need not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

SLAB = 256 * 2**20  # bytes of a piece of pinned memory: torch rounds up to a power of two
ALIGNMENT = 512
WEIGHTS, MEMORY = "the model's weights", "the optimizer's states"  # what backends move


class HostMemory:
    """Memory of the host for what comes from devices of a ``kind``, kept for the next time: pinning is slow."""

    def __init__(self, kind: str = "cuda", slab: int = SLAB) -> None:
        self.kind, self.slab = kind, slab
        self.slabs: list[torch.Tensor] = []
        self.used = 0  # bytes of all slabs together

    def homes(self, tensors: Iterable[torch.Tensor]) -> list[Home]:
        """Room for those that lie on a device of the kind, each memory once. What is away has none here."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.device.type == self.kind and storage.nbytes():
                storages[storage.data_ptr()] = storage
        return [Home(storage, storage.nbytes(), self._places(storage.nbytes())) for storage in storages.values()]

    def _places(self, num_bytes: int) -> list[torch.Tensor]:
        """The next that is free, over as many slabs as it takes."""
        places = []
        while num_bytes:
            slab, start = divmod(self.used, self.slab)
            if slab == len(self.slabs):
                self.slabs.append(torch.empty(self.slab, dtype=torch.uint8, pin_memory=self.kind == "cuda"))
            length = min(num_bytes, self.slab - start)
            places.append(self.slabs[slab][start : start + length])
            num_bytes -= length
            self.used += -(-length // ALIGNMENT) * ALIGNMENT
        return places


@dataclass(frozen=True, eq=False)
class Home:
    """Where the memory behind tensors is kept while it is away."""

    storage: torch.UntypedStorage
    num_bytes: int
    places: list[torch.Tensor]

    def take(self) -> None:
        """Copies it there, as soon as the stream comes to it."""
        for piece, place in zip(self._pieces(), self.places, strict=True):
            place.copy_(piece, non_blocking=True)

    def free(self) -> None:
        self.storage.resize_(0)

    def allocate(self) -> None:
        self.storage.resize_(self.num_bytes)

    def give(self) -> None:
        """Copies it back, as soon as the stream comes to it."""
        for piece, place in zip(self._pieces(), self.places, strict=True):
            piece.copy_(place, non_blocking=True)

    def _pieces(self) -> tuple[torch.Tensor, ...]:
        memory = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        pieces: tuple[torch.Tensor, ...] = memory.split([len(place) for place in self.places])
        return pieces


class Offload:
    """What is away. ``kind``: of the devices that give memory back (tests: cpu)."""

    def __init__(self, kind: str = "cuda", slab: int = SLAB) -> None:
        self.kind = kind
        self.memory = HostMemory(kind, slab)
        self.what_is_away: list[str] = []
        self.away: list[Home] = []

    def offload(self, tensors: Iterable[torch.Tensor], what: str = "") -> int:
        """Bytes moved: of those tensors that lie on a GPU, each memory once. What is away already stays away.

        ``what`` they are, for ``check_here``.
        """
        moved = self.memory.homes(tensors)
        for home in moved:
            home.take()
        if moved:
            self._wait()
            for home in moved:
                home.free()
            self.what_is_away.append(what)
        self.away += moved
        return sum(home.num_bytes for home in moved)

    def reload(self) -> int:
        """Bytes brought back: all that is away."""
        num_moved = sum(home.num_bytes for home in self.away)
        for home in self.away:
            home.allocate()
            home.give()
        if self.away:
            self._wait()
        self.away, self.memory.used, self.what_is_away = [], 0, []
        return num_moved

    def check_here(self, *needed: str) -> None:
        """Raises RuntimeError if something that was moved under one of these names is away."""
        missing = [what for what in needed if what in self.what_is_away]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} are in the memory of the host: call reload() first")

    def _wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()
