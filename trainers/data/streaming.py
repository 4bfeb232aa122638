"""Rows that are read while a run goes on: chunks of a stream, and batches of what becomes of them.

    stream = StreamedSequences(rows, prepare, batch_size=16)     # prepare: a list of rows -> Sequences
    batch = stream.next()                                        # the next 16 sequences; ``stream.state`` is the place

A chunk is read, prepared (tokenized, packed) and used up before the next one is read. What a batch holds is a pure
function of the source, the seed and the number of batches before it, so a resumed run sees what it would have seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from trainers.batch import Sequences
from trainers.data.sources import stream_source

CHUNK_ROWS = 1000  # prepared together; TRL packs as many at once
Rows = list[dict[str, Any]]
START = {"epoch": 0, "row": 0, "used": 0, "place": 0}


@dataclasses.dataclass(frozen=True)
class RowStream:
    """The rows of a source, epoch after epoch. ``buffer`` rows at a time are shuffled; 0: the order of the data."""

    source: Any
    split: str = "train"
    seed: int = 42
    buffer: int = 0
    chunk_rows: int = CHUNK_ROWS

    def chunks(self, epoch: int, row: int) -> Iterator[Rows]:
        """The rows of an epoch from ``row`` on, ``chunk_rows`` at a time."""
        rows = stream_source(self.source, self.split)
        if self.buffer:
            rows = rows.shuffle(seed=self.seed, buffer_size=self.buffer)
            rows.set_epoch(epoch)
        # skip() leaves rows out before they are shuffled, islice() afterwards
        left = itertools.islice(rows, row, None) if self.buffer else iter(rows.skip(row) if row else rows)
        while chunk := list(itertools.islice(left, self.chunk_rows)):
            yield chunk


class StreamedSequences:
    """Batches of the sequences that ``prepare`` makes of a stream's chunks.

    An epoch's last batch holds what is left of it, as where rows are held in memory. ``state`` is where the next batch
    begins: the epoch, the first row of its chunk, the sequences of the chunk that are used, and those of the epoch.
    """

    def __init__(
        self,
        rows: RowStream,
        prepare: Callable[[Rows], Sequences],
        *,
        batch_size: int,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self.rows = rows
        self.prepare = prepare
        self.batch_size = batch_size
        self.state = {**START, **(state or {})}
        self.chunks: Iterator[Rows] | None = None
        self.chunk: Sequences | None = None
        self.num_rows = 0  # of the chunk

    def next(self) -> Sequences:
        """The next batch; its ``row_ids`` are places in the epoch. Raises ValueError for a source without rows."""
        parts: list[Sequences] = []
        missing = self.batch_size
        place = self.state["place"]
        while missing:
            if self.chunk is None and not self._read():
                if parts:
                    break
                if not self.state["row"]:
                    raise ValueError(
                        f"the stream of {self.rows.source!r} has no rows. Check its split and its filters."
                    )
                self.state, self.chunks, place = {**START, "epoch": self.state["epoch"] + 1}, None, 0
                continue
            assert self.chunk is not None
            used = self.state["used"]
            part = self.chunk[used : used + missing]
            parts += [part] if len(part) else []
            missing -= len(part)
            self.state |= {"used": used + len(part), "place": self.state["place"] + len(part)}
            if self.state["used"] >= len(self.chunk):
                self.state |= {"row": self.state["row"] + self.num_rows, "used": 0}
                self.chunk = None
        batch = Sequences.concat(parts)
        return dataclasses.replace(batch, row_ids=np.arange(place, place + len(batch)))

    @property
    def num_epochs(self) -> int:
        """How often the stream has been gone through to its end; reads ahead to know it."""
        has_ended = self.chunk is None and not self._read()
        return self.state["epoch"] + has_ended

    def _read(self) -> bool:
        """Prepares the chunk at ``state``; False at the end of the epoch."""
        if self.chunks is None:
            self.chunks = self.rows.chunks(self.state["epoch"], self.state["row"])
        rows = next(self.chunks, None)
        if rows is None:
            return False
        self.chunk, self.num_rows = self.prepare(rows), len(rows)
        return True
