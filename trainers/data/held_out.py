"""Rows of the training data that are evaluated and never learned from: ``split_dataset_ratio``.

    Part("rows.jsonl", ratio=0.1, seed=42, is_held_out=True)     # as a source of rows: a tenth of them
    Part("rows.jsonl", ratio=0.1, seed=42, is_held_out=False)    # the other nine tenths

Each source of a list is divided by itself, as ms-swift divides it (``DatasetMeta.post_process``). Which rows are held
out depends on the seed and the number of rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Part:
    """The rows of ``source`` that are held out, or the others. ``ratio`` is the share that is held out, in (0, 1)."""

    source: Any
    ratio: float
    seed: int
    is_held_out: bool
    holds_last: bool = False
    """The last rows are held out; false: rows drawn at random."""

    def of(self, source: Any) -> Part:
        """The same part of another source."""
        return replace(self, source=source)

    def indices(self, num_rows: int, count: int | None = None, *, is_first: bool = False) -> np.ndarray:
        """(rows,) int64 of a source of ``num_rows``, of which ``count`` are used (``name#500``; None: all).

        ``is_first``: the first ``count`` rows (``name#:500``). Where the last rows are held out, they are the source's.
        At least one row is held out. Where ``count`` is more than there are, rows to learn from come again, and those
        held out do not.

        Raises:
            ValueError: no row is left to learn from.
        """
        count = num_rows if count is None else count
        num_held = max(int(min(num_rows, count) * self.ratio), 1)
        if self.holds_last:
            held, others = np.split(np.arange(num_rows), [num_rows - num_held])[::-1]
        else:
            order = np.random.default_rng([self.seed, 1]).permutation(min(num_rows, count) if is_first else num_rows)
            held, others = order[:num_held], order[num_held:]
        if not len(others) or count <= num_held:
            raise ValueError(
                f"split_dataset_ratio {self.ratio} leaves none of {min(num_rows, count)} rows to learn from"
            )
        return held if self.is_held_out else np.resize(others, count - num_held)
