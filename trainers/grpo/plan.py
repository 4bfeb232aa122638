"""GRPO's order of events: which rows a generation has, and which of its completions an optimizer step.

Without ``dynamic_sample`` the rows of a generation follow from its number (``data.Batches``). With it a generation asks
for more rows the fewer of its prompts have something to tell, so that ``RowStream`` counts how many have been drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayhelper import ConfigError
from trainers.batch import Samples
from trainers.configuration.shared import SEQUENCES_PER_STEP, sequences_per_step, steps_of_epochs
from trainers.data.batches import Batches, nothing_left
from trainers.grpo.config import GRPOConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationPlan:
    """How rows become generations and generations become optimizer steps. Sizes are sequences over all workers.

    The last generation of an epoch holds what is left of the rows; it has fewer optimizer steps, none of them empty.
    With ``dataloader_drop_last`` what is left is not among ``num_rows``.
    With ``is_dynamic`` all are full, and an epoch is as many as go into the rows: the steps of a run are counted as if
    nothing were drawn again.
    """

    num_rows: int
    num_generations: int  # completions a prompt, G
    num_prompts: int  # a generation
    step_size: int  # sequences an optimizer step
    num_iterations: int
    max_steps: int
    num_epochs: float
    is_dynamic: bool = False
    shuffles: bool = True
    num_workers: int = 1  # in whose order steps divide a generation that is not shuffled

    @classmethod
    def of(cls, config: GRPOConfig, num_rows: int, num_workers: int, saved_order: Mapping[str, Any]) -> GenerationPlan:
        """A resumed run keeps the sizes it began with, which stand in ``saved_order``.

        Raises ConfigError if groups, generations and steps do not fit into each other.
        """
        step_size = sequences_per_step(config, num_workers, saved_order)
        size = config.generation_batch_size
        if size is None and config.steps_per_generation is not None:
            size = config.per_device_train_batch_size * config.steps_per_generation * num_workers
            size = saved_order.get("num_prompts", 0) * config.num_generations or size
        size = step_size if size is None else size
        is_part = size < step_size and step_size % size == 0 and size % config.num_generations == 0
        if is_part and config.num_iterations == 1:  # as in TRL one policy draws all generations of a step
            logger.info("the %d generations of an optimizer step are drawn at once", step_size // size)
            size = step_size
        if size % step_size:
            raise ConfigError(
                f"a generation of {size} completions must be a multiple of the {step_size} sequences of an "
                "optimizer step. Change generation_batch_size (or steps_per_generation) or the batch size"
            )
        if size % config.num_generations:
            raise ConfigError(
                f"a generation of {size} completions must be a multiple of num_generations={config.num_generations}, "
                "so that groups stay whole. Change generation_batch_size, the batch size, or num_generations"
            )
        if config.loss_name == "real" and size != step_size:
            raise ConfigError(
                f"loss_type: real classifies the completions of a prompt in one optimizer step. A step has {step_size} "
                f"completions, a generation {size}. Make them equal (generation_batch_size, steps_per_generation)."
            )
        num_prompts = size // config.num_generations
        if config.dataloader_drop_last and not config.dynamic_sample:
            num_rows -= num_rows % num_prompts
        return cls(
            num_rows,
            config.num_generations,
            num_prompts,
            step_size,
            config.num_iterations,
            config.max_steps,
            config.num_train_epochs,
            bool(config.dynamic_sample),
            config.shuffle_generation,
            1 if config.shuffle_generation else num_workers,
        )

    def check_rows(self) -> None:
        """Raises ConfigError if there are not rows enough to fill a generation and to replace one of its prompts."""
        if not self.num_rows:
            raise nothing_left(self.num_prompts)
        if self.is_dynamic and self.num_rows <= self.num_prompts:
            raise ConfigError(
                f"dynamic_sample has no further prompts to draw. A generation has {self.num_prompts} prompts, "
                "each row "
                f"once, and the dataset {self.num_rows} rows; lower generation_batch_size or remove dynamic_sample"
            )

    def num_updates(self, num_prompts: int) -> int:
        """Optimizer steps on a generation of so many prompts."""
        return -(-num_prompts * self.num_generations // self.step_size) * self.num_iterations

    def order(self) -> dict[str, Any]:
        """What decides which rows a step sees."""
        names = ("num_rows", "num_generations", "num_prompts", "num_iterations")
        order = {SEQUENCES_PER_STEP: self.step_size, **{name: getattr(self, name) for name in names}}
        return {**order, "dynamic_sample": self.is_dynamic}

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_rows, self.num_prompts)
        if self.is_dynamic:
            return max(1, whole) * self.num_updates(self.num_prompts)
        return whole * self.num_updates(self.num_prompts) + (self.num_updates(rest) if rest else 0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps if self.max_steps > 0 else steps_of_epochs(self.num_epochs, self.steps_per_epoch)

    def generation(self, step: int) -> int:
        """The generation that optimizer step ``step`` (from 0) learns from."""
        if self.is_dynamic:
            return step // self.num_updates(self.num_prompts)
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * -(-self.num_rows // self.num_prompts) + rest // self.num_updates(self.num_prompts)

    def chunks(self, samples: Samples, seed: tuple[int, int]) -> Iterator[Samples]:
        """The samples of each optimizer step of a generation.

        Several steps share them in a random order, or, without ``shuffles``, each step has the next ones of every
        worker, to which completions go in equal parts.
        """
        num_chunks = -(-len(samples) // self.step_size)
        in_order = np.arange(len(samples))
        if len(samples) % (self.num_workers * num_chunks) == 0:
            in_order = in_order.reshape(self.num_workers, num_chunks, -1).swapaxes(0, 1).reshape(-1)
        for iteration in range(self.num_iterations):
            order = in_order
            if num_chunks > 1 and self.shuffles:
                order = np.random.default_rng([*seed, iteration]).permutation(len(samples))
            for part in np.array_split(order, num_chunks):
                yield samples if num_chunks == 1 else samples[part]


class RowStream:
    """The rows in the order of the data, epoch after epoch, each epoch in an order of its own; every row once in each.

    ``num_drawn`` says where the stream is, the rows that were passed over included: it is all that a run that is
    resumed between two generations needs to know.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, num_drawn: int = 0) -> None:
        self.epochs = Batches(num_rows, num_rows, seed=seed, shuffle=shuffle)
        self.num_drawn = num_drawn

    @property
    def epoch(self) -> float:
        """How often the rows have been gone through."""
        return self.num_drawn / self.epochs.num_rows

    def take(self, count: int, held: Collection[int] = ()) -> np.ndarray:
        """(count,) int64: the next rows that are neither in ``held`` nor taken here already; fewer if there are none.

        Only where one epoch ends and the next begins can a row come up again; it is passed over in that epoch.
        """
        seen = set(held)
        taken: list[int] = []
        order = None
        while len(taken) < count and len(seen) < self.epochs.num_rows:
            epoch, place = divmod(self.num_drawn, self.epochs.num_rows)
            if order is None or place == 0:
                order = self.epochs[epoch]
            self.num_drawn += 1
            if (row := int(order[place])) not in seen:
                seen.add(row)
                taken.append(row)
        return np.array(taken, np.int64)
