"""PPO's order of events: which rows a batch of completions has, and which of these an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.configuration.shared import SEQUENCES_PER_STEP, sequences_per_step, steps_of
from trainers.ppo.config import PPOConfig


@dataclass(frozen=True)
class BatchPlan:
    """How rows become batches and batches become optimizer steps. Sizes are completions over all workers.

    The last batch of an epoch holds what is left of the rows; it has fewer optimizer steps, none of them empty.
    With ``dataloader_drop_last`` what is left is not among ``num_rows``.
    """

    num_rows: int
    batch_size: int
    step_size: int
    num_ppo_epochs: int
    max_steps: int
    num_train_epochs: float

    @classmethod
    def of(cls, config: PPOConfig, num_rows: int, num_workers: int, saved_order: Mapping[str, Any]) -> BatchPlan:
        """A resumed run keeps the sizes it began with, which stand in ``saved_order``."""
        step_size = sequences_per_step(config, num_workers, saved_order)
        batch_size = step_size * config.num_mini_batches
        if config.dataloader_drop_last:
            num_rows -= num_rows % batch_size
        return cls(num_rows, batch_size, step_size, config.num_ppo_epochs, config.max_steps, config.num_train_epochs)

    def order(self) -> dict[str, int]:
        """What decides which rows a step sees."""
        names = ("num_rows", "batch_size", "num_ppo_epochs")
        return {SEQUENCES_PER_STEP: self.step_size, **{name: getattr(self, name) for name in names}}

    def num_updates(self, size: int) -> int:
        """Optimizer steps on a batch of so many completions."""
        return -(-size // self.step_size) * self.num_ppo_epochs

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole * self.num_updates(self.batch_size) + self.num_updates(rest)

    def num_episodes(self, batch: int) -> int:
        """Completions of the first ``batch`` batches."""
        epochs, rest = divmod(batch, -(-self.num_rows // self.batch_size))
        return epochs * self.num_rows + rest * self.batch_size

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps if self.max_steps > 0 else steps_of(self.num_train_epochs, self.steps_per_epoch)

    def batch(self, step: int) -> int:
        """The batch that optimizer step ``step`` (from 0) learns from."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * -(-self.num_rows // self.batch_size) + rest // self.num_updates(self.batch_size)

    def mini_batches(self, size: int, seed: tuple[int, int]) -> Iterator[np.ndarray]:
        """The rows of each optimizer step on a batch of ``size`` completions."""
        for epoch in range(self.num_ppo_epochs):
            order = np.random.default_rng([*seed, epoch]).permutation(size)
            yield from np.array_split(order, -(-size // self.step_size))
