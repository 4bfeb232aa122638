"""The order in which a run goes through its rows: which of them each optimizer step gets, and these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayhelper import ConfigError


@dataclass(frozen=True)
class Batches:
    """Indices of the rows of each step. They are a pure function of the step, so a resumed run needs only its number.

    ``batches[step]`` (batch_size,) int64, for every step >= 0. An epoch has all rows once, in an order drawn from
    (seed, epoch) if ``shuffle``. Its last batch holds the remaining rows, unless ``drop_last``. A batch may be
    ``num_rounds`` micro-batches of all workers. Then ``drop_last`` leaves out only an incomplete micro-batch, as in
    transformers' Trainer. With ``lengths`` (num_rows,) the rows of a batch are about equally long, in the order that
    ``transformers.trainer_pt_utils.get_length_grouped_indices`` draws.
    """

    num_rows: int
    batch_size: int
    seed: int = 42
    shuffle: bool = True
    drop_last: bool = False
    num_rounds: int = 1
    lengths: np.ndarray | None = field(default=None, compare=False, repr=False)
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.batch_size < 1:
            raise ValueError(f"batches need rows and a size, got {self.num_rows} rows, batch_size {self.batch_size}")
        if not self.num_used:
            raise nothing_left(self.round_size)

    @property
    def round_size(self) -> int:
        """Rows of a micro-batch of all workers, which ``drop_last`` does not divide."""
        return self.batch_size if self.batch_size % self.num_rounds else self.batch_size // self.num_rounds

    @property
    def num_used(self) -> int:
        """Rows of an epoch that are not left out."""
        return self.num_rows - self.num_rows % self.round_size if self.drop_last else self.num_rows

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_used // self.batch_size)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that ``step`` belongs to."""
        return step // self.steps_per_epoch

    def __getitem__(self, step: int) -> np.ndarray:
        if step < 0:
            raise IndexError(f"steps start at 0, got {step}")
        start = step % self.steps_per_epoch * self.batch_size
        return self._order(self.epoch(step))[start : min(start + self.batch_size, self.num_used)].copy()

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders.clear()  # of the epoch before
            self._orders[epoch] = self._drawn(np.random.default_rng([self.seed, epoch]))
        return self._orders[epoch]

    def _drawn(self, random: np.random.Generator) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self.lengths is None:
            return random.permutation(self.num_rows)
        import torch
        from transformers.trainer_pt_utils import get_length_grouped_indices

        generator = torch.Generator().manual_seed(int(random.integers(2**63)))
        return np.array(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator), np.int64)


def nothing_left(batch_size: int) -> ConfigError:
    """The error for rows that do not fill one batch where only whole batches are taken."""
    return ConfigError(
        f"dataloader_drop_last: the rows fill no batch of {batch_size}, and incomplete batches are dropped. Write "
        "dataloader_drop_last: false, or make batches smaller."
    )


class DrawnRows:
    """The rows of a ``datasets.Dataset`` at ``places``, each read once however often it is drawn and gone through.

    ``len``, iteration, ``[:]`` and ``select`` are the data set's. What they give is the caller's own: a reward function
    or an environment that writes into a row changes no other.
    """

    def __init__(self, dataset: Any, places: np.ndarray) -> None:
        self.column_names: list[str] = dataset.column_names
        distinct, self._places = np.unique(places, return_inverse=True)
        self._rows: list[dict[str, Any]] = list(dataset.select(distinct))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (_own(self._rows[place]) for place in self._places)

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        """The columns of a part."""
        rows = [self._rows[place] for place in self._places[part]]
        return {name: [_own(row[name]) for row in rows] for name in self.column_names}

    def select(self, places: np.ndarray) -> DrawnRows:
        """Those at ``places`` among these."""
        chosen = object.__new__(DrawnRows)
        chosen.column_names, chosen._rows, chosen._places = self.column_names, self._rows, self._places[places]
        return chosen


def _own(value: Any) -> Any:
    """A copy of what a cell of a table is made of."""
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    return [_own(item) for item in value] if isinstance(value, list) else value
