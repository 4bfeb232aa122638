"""Memory of a GPU that is given back for a while: what lies there waits in pinned memory of the host.

Tensors stay the objects they are, with their shapes and views; only the memory behind them is freed and, later,
allocated anew. So whoever holds them (FSDP's shards, an optimizer, views into one buffer) need not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

SLAB = 256 * 2**20  # bytes of a piece of pinned memory: torch rounds up to a power of two
ALIGNMENT = 512
WEIGHTS, MEMORY = "the model's weights", "what the optimizer remembers"  # what backends move


class Offload:
    """What is away, and the pinned memory for it, which is kept for the next time: pinning is slow.

    ``kind``: of the devices that give memory back (tests: cpu).
    """

    def __init__(self, kind: str = "cuda", slab: int = SLAB) -> None:
        self.kind, self.slab = kind, slab
        self.slabs: list[torch.Tensor] = []
        self.used = 0  # bytes of all slabs together
        self.what_is_away: list[str] = []
        self.away: list[tuple[torch.UntypedStorage, int, list[torch.Tensor]]] = []  # memory, its bytes, where they are

    def offload(self, tensors: Iterable[torch.Tensor], what: str = "") -> int:
        """Bytes moved: of those tensors that lie on a GPU, each memory once. What is away already stays away.

        ``what`` they are, for ``check_here``.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.device.type == self.kind and storage.nbytes():
                storages[storage.data_ptr()] = storage
        moved = [(storage, storage.nbytes(), self._places(storage.nbytes())) for storage in storages.values()]
        for storage, _, places in moved:
            for piece, host in _pieces(storage, places):
                host.copy_(piece, non_blocking=True)
        if moved:
            self._wait()
            for storage, *_ in moved:
                storage.resize_(0)
            self.what_is_away.append(what)
        self.away += moved
        return sum(num_bytes for _, num_bytes, _ in moved)

    def reload(self) -> int:
        """Bytes brought back: all that is away."""
        num_moved = sum(num_bytes for _, num_bytes, _ in self.away)
        for storage, num_bytes, places in self.away:
            storage.resize_(num_bytes)
            for piece, host in _pieces(storage, places):
                piece.copy_(host, non_blocking=True)
        if self.away:
            self._wait()
        self.away, self.used, self.what_is_away = [], 0, []
        return num_moved

    def check_here(self, *needed: str) -> None:
        """Raises RuntimeError if something that was moved under one of these names is away."""
        missing = [what for what in needed if what in self.what_is_away]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} wait in the memory of the host: reload() comes first")

    def _wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def _places(self, num_bytes: int) -> list[torch.Tensor]:
        """Pinned memory for so many bytes: the next that is free, over as many slabs as it takes."""
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


def _pieces(storage: torch.UntypedStorage, places: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory cut as its places are, each piece beside its place."""
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    yield from zip(memory.split([len(place) for place in places]), places, strict=True)
