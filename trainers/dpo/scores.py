"""Log-probabilities of pairs, as policy and reference give them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainers.backends.base import Backend
from trainers.batch import Ragged
from trainers.data.preferences import Preferences


@dataclass
class RunningMean:
    """The mean of the numbers so far; each counts alike."""

    mean: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        self.count += 1
        self.mean += (number - self.mean) / self.count


def mean_reward(pairs: Preferences, logps: tuple[Ragged, Ragged], beta: float) -> float:
    """beta x the log-ratio to the reference of a completion, averaged over all chosen and rejected ones."""
    refs = (pairs.ref_chosen_logps, pairs.ref_rejected_logps)
    total = 0.0
    for own, ref in zip(logps, refs, strict=True):
        assert ref is not None, "the reference is asked first"
        total += float((own.values.astype(np.float64) - ref.values).sum())
    return beta * total / max(2 * len(pairs), 1)


def pair_logps(
    backend: Backend, pairs: Preferences, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
) -> tuple[Ragged, Ragged]:
    """float32 log-probabilities of the targets of chosen and rejected; ``micro_batch_size`` in pairs, no gradient.

    Micro-batches are those that ``Backend.step`` makes of the same pairs, so that equal weights give equal bits.
    """
    size = len(pairs)
    starts = np.arange(0, size, micro_batch_size)
    order = np.concatenate(
        [np.zeros(0, np.int64)]
        + [half + np.arange(start, min(start + micro_batch_size, size)) for start in starts for half in (0, size)]
    )
    logps = backend.token_logps(
        pairs.as_sequences()[order], micro_batch_size=2 * micro_batch_size, temperature=temperature, adapter=adapter
    )
    logps = logps[np.argsort(order, kind="stable")]
    return logps[:size], logps[size:]
