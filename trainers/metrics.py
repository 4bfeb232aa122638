"""Numbers that are measured in parts and reported whole.

A worker adds what it saw of a step; ``Metrics.merge`` joins the parts of all micro-batches and all workers into the
value the whole batch would have given. So a mean is kept as sum and weight, never as a mean of means. Writing them to
the console or to files is ``trackers.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

Reduction = Literal["sum", "mean", "max", "min", "same"]


class Metrics:
    """Named numbers, each with the rule by which its parts are joined."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Reduction, float, float]] = {}

    def sum(self, name: str, value: float) -> None:
        """Parts add up: a loss that is already divided by its global normaliser, a token count."""
        self._join(name, "sum", float(value), 1.0)

    def mean(self, name: str, total: float, weight: float) -> None:
        """The reported value is sum(total) / sum(weight); NaN totals or zero weights count nothing."""
        if weight and not math.isnan(total):
            self._join(name, "mean", float(total), float(weight))

    def max(self, name: str, value: float) -> None:
        if not math.isnan(value):
            self._join(name, "max", float(value), 1.0)

    def min(self, name: str, value: float) -> None:
        if not math.isnan(value):
            self._join(name, "min", float(value), 1.0)

    def same(self, name: str, value: float) -> None:
        """Every worker reports the same value (gradient norm, learning rate): the first one is kept."""
        self._join(name, "same", float(value), 1.0)

    def _join(self, name: str, reduction: Reduction, value: float, weight: float) -> None:
        if name not in self.entries:
            self.entries[name] = (reduction, value, weight)
            return
        known, total, weights = self.entries[name]
        if known != reduction:
            raise ValueError(f"metric {name!r} was joined by {known!r} before and by {reduction!r} now")
        if reduction in ("sum", "mean"):
            self.entries[name] = (reduction, total + value, weights + weight)
        elif reduction == "max":
            self.entries[name] = (reduction, max(total, value), 1.0)
        elif reduction == "min":
            self.entries[name] = (reduction, min(total, value), 1.0)

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """The metrics of the whole from those of its parts; fit for ``collect=Metrics.merge``."""
        whole = cls()
        for part in parts:
            for name, (reduction, value, weight) in part.entries.items():
                whole._join(name, reduction, value, weight)
        return whole

    def values(self) -> dict[str, float]:
        """The reported numbers, by name."""
        return {
            name: value / weight if reduction == "mean" else value
            for name, (reduction, value, weight) in self.entries.items()
        }
