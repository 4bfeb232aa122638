"""Numbers that are measured in parts and reported whole.

A worker adds what it saw of a step; ``Metrics.merge`` joins the parts of all micro-batches and all workers into the
value the whole batch would have given. So a mean is kept as sum and weight, never as a mean of means. Writing them to
the console or to files is ``run/trackers.py``.

A number may be a tensor of one element: it is copied, and read when somebody asks, with all others at once, so that
whoever measures need not wait for a device that computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch  # reading a configuration need not wait for it

    Number = float | torch.Tensor

Reduction = Literal["sum", "mean", "max", "min", "same"]
Entry = tuple[Reduction, float, float]


class Metrics:
    """Named numbers, each with the rule that joins its parts."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._unread: list[tuple[str, Reduction, Number, Number]] = []
        self._reductions: dict[str, Reduction] = {}  # of those
        self.bad_rows: list[int] = []  # places in the data of rows whose loss was not finite

    def sum(self, name: str, value: Number) -> None:
        """Parts add up: a loss that is already divided by its global normaliser, a token count."""
        self._add(name, "sum", value)

    def mean(self, name: str, total: Number, weight: Number) -> None:
        """The reported value is sum(total) / sum(weight). NaN totals and zero weights are ignored."""
        self._add(name, "mean", total, weight)

    def max(self, name: str, value: Number, *, count: Number = 1.0) -> None:
        """The largest value. NaN is ignored, and so is a value of ``count`` 0."""
        self._add(name, "max", value, count)

    def min(self, name: str, value: Number, *, count: Number = 1.0) -> None:
        """The smallest value, with the rules of ``max``."""
        self._add(name, "min", value, count)

    def same(self, name: str, value: Number) -> None:
        """Every worker reports the same value (gradient norm, learning rate): the first one is kept."""
        self._add(name, "same", value)

    def _add(self, name: str, reduction: Reduction, value: Number, weight: Number = 1.0) -> None:
        if self._unread or hasattr(value, "detach") or hasattr(weight, "detach"):
            known = self._reductions.setdefault(name, self._entries[name][0] if name in self._entries else reduction)
            _check(name, known, reduction)
            self._unread.append((name, reduction, _copied(value), _copied(weight)))
        else:
            self._join(name, reduction, float(value), float(weight))

    @property
    def entries(self) -> dict[str, Entry]:
        """For each name: the rule that joins its parts, the value, and the weight of a mean."""
        numbers = iter(_read([number for *_, value, weight in self._unread for number in (value, weight)]))
        unread, self._unread, self._reductions = self._unread, [], {}
        for name, reduction, *_ in unread:
            self._join(name, reduction, next(numbers), next(numbers))
        return self._entries

    @entries.setter
    def entries(self, entries: dict[str, Entry]) -> None:
        self._entries, self._unread, self._reductions = entries, [], {}

    def __getstate__(self) -> tuple[dict[str, Entry], list[int]]:
        return self.entries, self.bad_rows

    def __setstate__(self, state: tuple[dict[str, Entry], list[int]]) -> None:
        self.entries, self.bad_rows = state

    def _join(self, name: str, reduction: Reduction, value: float, weight: float) -> None:
        if reduction in ("mean", "max", "min") and (math.isnan(value) or not weight):
            return
        if name not in self._entries:
            self._entries[name] = (reduction, value, weight if reduction == "mean" else 1.0)
            return
        known, total, weights = self._entries[name]
        _check(name, known, reduction)
        if reduction in ("sum", "mean"):
            self._entries[name] = (reduction, total + value, weights + weight)
        elif reduction == "max":
            self._entries[name] = (reduction, max(total, value), 1.0)
        elif reduction == "min":
            self._entries[name] = (reduction, min(total, value), 1.0)

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """The metrics of the whole from the metrics of its parts, for ``collect=Metrics.merge``."""
        whole = cls()
        for part in parts:
            for name, (reduction, value, weight) in part.entries.items():
                whole._join(name, reduction, value, weight)
            whole.bad_rows += part.bad_rows
        whole.bad_rows = sorted(set(whole.bad_rows))
        return whole

    def without(self, *names: str) -> Metrics:
        """These metrics without some names. Missing names are ignored."""
        return self._with({name: entry for name, entry in self.entries.items() if name not in names})

    def renamed(self, names: Mapping[str, str]) -> Metrics:
        """These metrics under the new names of ``names``. They replace metrics that had these names before."""
        found = {new: self.entries[old] for old, new in names.items() if old in self.entries}
        return self._with({name: self.entries[name] for name in self.entries if name not in names} | found)

    def only(self, prefix: str) -> Metrics:
        """The metrics whose names begin with the prefix."""
        return self._with({name: entry for name, entry in self.entries.items() if name.startswith(prefix)})

    def _with(self, entries: dict[str, Entry]) -> Metrics:
        metrics = Metrics()
        metrics.entries, metrics.bad_rows = entries, self.bad_rows
        return metrics

    def values(self, prefix: str = "") -> dict[str, float]:
        """The reported numbers by name, with ``prefix`` before each name."""
        return {
            f"{prefix}{name}": value / weight if reduction == "mean" else value
            for name, (reduction, value, weight) in self.entries.items()
        }


def _check(name: str, known: Reduction, reduction: Reduction) -> None:
    if known != reduction:
        raise ValueError(f"metric {name!r} was joined by {known!r} before and by {reduction!r} now")


def _copied(number: Any) -> Any:
    """In double precision, without graph; neither the tensor nor what it is a view of is kept."""
    if not hasattr(number, "detach"):
        return number
    import torch

    return number.detach().reshape(()).to(torch.float64, copy=True)


def _read(numbers: list[Any]) -> list[float]:
    """Plain numbers, those of a device in one transfer."""
    by_device: dict[Any, list[int]] = {}
    for place, number in enumerate(numbers):
        if hasattr(number, "detach"):
            by_device.setdefault(number.device, []).append(place)
    if by_device:
        import torch

    read = list(numbers)
    for places in by_device.values():
        values = torch.stack([numbers[place] for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            read[place] = value
    return [float(number) for number in read]
