"""Rows of the training data that are evaluated and never learned from: ``split_dataset_ratio``.

    Part("rows.jsonl", ratio=0.1, seed=42, is_held_out=True)     # as a source of rows: a tenth of them
    Part("rows.jsonl", ratio=0.1, seed=42, is_held_out=False)    # the other nine tenths

Each source of a list is divided by itself, as ms-swift divides it (``DatasetMeta.post_process``). Which rows are held
out depends on the seed and the number of rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Part:
    """The rows of ``source`` that are held out, or the others. ``ratio`` is the share that is held out, in (0, 1)."""

    source: Any
    ratio: float
    seed: int
    is_held_out: bool

    def of(self, source: Any) -> Part:
        """The same part of another source."""
        return Part(source, self.ratio, self.seed, self.is_held_out)

    def indices(self, num_rows: int, count: int | None = None) -> np.ndarray:
        """(rows,) int64 of a source of ``num_rows``, of which ``count`` are used (``name#500``; None: all).

        At least one row is held out. Where ``count`` is more than there are, rows to learn from come again, and those
        held out do not.

        Raises:
            ValueError: no row is left to learn from.
        """
        count = num_rows if count is None else count
        order = np.random.default_rng([self.seed, 1]).permutation(num_rows)
        num_held = max(int(min(num_rows, count) * self.ratio), 1)
        held, others = order[:num_held], order[num_held:]
        if not len(others) or count <= num_held:
            raise ValueError(
                f"split_dataset_ratio {self.ratio} leaves none of {min(num_rows, count)} rows to learn from"
            )
        return held if self.is_held_out else np.resize(others, count - num_held)
