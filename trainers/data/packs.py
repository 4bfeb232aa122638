"""The order of rows that are packed before they are batched: ms-swift's ``packing``, of all trainers but SFT.

    batches = batches_of(lengths, batch_size=8, pack_length=4096)     # batches[step]: indices of rows, as Batches gives

A *pack* is some rows that hold ``pack_length`` tokens together at most. A batch is ``batch_size`` packs, so that its
number of rows differs from step to step, and its tokens hardly do. Losses are means over the rows of a step, whatever
their number.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import partial

import numpy as np

from trainers.data.batches import Batches


@dataclass(frozen=True)
class PackedBatches:
    """``Batches`` of packs; indices are of rows."""

    packs: list[np.ndarray]
    batches: Batches

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that ``step`` belongs to."""
        return self.batches.epoch(step)

    def __getitem__(self, step: int) -> np.ndarray:
        return np.concatenate([self.packs[pack] for pack in self.batches[step]])


def batches_of(
    lengths: np.ndarray,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
    drop_last: bool = False,
    num_rounds: int = 1,
    by_length: bool = False,
    pack_length: int | None = None,
) -> Batches | PackedBatches:
    """Batches of ``batch_size`` rows, or of as many packs where there is a ``pack_length``. ``lengths``: in tokens.

    ``by_length``: rows of about the same length come together (of rows that are not packed).
    """
    order = partial(Batches, batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    if pack_length is None:
        return order(len(lengths), num_rounds=num_rounds, lengths=lengths if by_length else None)
    packs = packed(lengths, pack_length)
    return PackedBatches(packs, order(len(packs), num_rounds=num_rounds))


def packed(lengths: np.ndarray, pack_length: int) -> list[np.ndarray]:
    """Rows (int64) of each pack: the longest first, each into the fullest pack that has room for it.

    A row of more than ``pack_length`` tokens is a pack of its own.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted: the room that is left, and whose
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        fullest = bisect.bisect_left(rooms, (length, 0))
        if fullest < len(rooms):
            room, pack = rooms.pop(fullest)
        else:
            room, pack = pack_length, len(packs)
            packs.append([])
        packs[pack].append(row)
        if room > length:
            bisect.insort(rooms, (room - length, pack))
    return [np.array(pack, np.int64) for pack in packs]
