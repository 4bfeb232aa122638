"""Reward models: a number for a prompt and its completion, learned from pairs of a better and a worse one.

    driver                                 train workers
    ------                                 -------------
    rows ─► tokenize
    batch of pairs ──────────────────────► update      one optimizer step; slice, merge

A language model with a linear layer in place of its vocabulary, read off at the last token (Bradley-Terry; the papers
stand in ``losses/reward_model.py``). What is exported loads with AutoModelForSequenceClassification, as a reward of
GRPO and PPO for example (``rewards/models.py``). Names, defaults and metrics are TRL's. A batch counts pairs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayhelper import DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import on_device
from trainers.configuration.shared import SEQUENCES_PER_STEP, sequences_per_step, total_steps
from trainers.data.preferences import Preferences, tokenize_comparisons
from trainers.data.rows import Batches
from trainers.losses.reward_model import add_reward_model_metrics, reward_model_loss
from trainers.metrics import Metrics
from trainers.reward.config import RewardConfig
from trainers.run.run import (
    Run,
    build_backend,
    check_before_start,
    load_model_and_tokenizer,
    mistakes_of,
    num_shards,
    read_rows,
    saved_order,
)


@RayHelper.worker(group="train")
class RewardTrainer:
    """``RewardTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.prepare()

    @staticmethod
    def check(config: RewardConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        self.pairs = self.read(config.dataset, config.dataset_split)
        self.eval_pairs = self.read(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None

    def read(self, source: Any, split: str) -> Preferences:
        """The pairs of a dataset."""
        config = self.config
        rows = read_rows(config, source, split)
        with mistakes_of("dataset"):
            return tokenize_comparisons(
                rows, self.tokenizer, max_length=config.max_length, num_proc=config.dataset_num_proc
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.num_train_shards(), saved_order(config))
        batches = Batches(len(self.pairs), batch_size, seed=config.seed, shuffle=config.shuffle_dataset)
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(self.model_path, num_steps, self.tokenizer.pad_token_id)
        headline = ("loss", "accuracy", "margin")
        order = {"pairs": len(self.pairs), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=headline, order=order) as run:
            run.resume(self.load)
            if config.val_before_train and run.step == 0:
                run.evaluate(self.evaluate)
            while run.step < num_steps:
                with run.phase("data"):
                    pairs = self.pairs[batches[run.step]]
                with run.phase("update"):
                    metrics = self.update(pairs, len(pairs))
                metrics.sum("num_tokens", pairs.num_tokens)
                run.log_step(metrics, epoch=(run.step + 1) / batches.steps_per_epoch)
                if run.due(config.eval_steps):
                    run.evaluate(self.evaluate)
                if run.due(config.save_steps):
                    run.save_checkpoint(self.save, self.tokenizer)
            if self.eval_pairs is not None:
                run.evaluate(self.evaluate)
            return run.finish(self.export, self.tokenizer)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation pairs, under training's names with ``eval_`` before them."""
        assert self.eval_pairs is not None
        metrics = self.measure(self.eval_pairs, len(self.eval_pairs))
        return {f"eval_{name}": value for name, value in metrics.values().items()}

    @RayHelper.function(group="train", execute="first")
    def num_train_shards(self) -> int:
        return num_shards(self.config)

    @RayHelper.function(group="train")
    def build(self, model: str, num_steps: int, pad_token_id: int) -> None:
        """The padding token goes into the model's configuration, by which transformers finds the last token."""
        self.backend: Backend = build_backend(
            self.config,
            model,
            num_training_steps=num_steps,
            head="value",
            values_at="target",
            model_init_kwargs={**self.config.model_init_kwargs, "pad_token_id": pad_token_id},
        )

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def update(self, pairs: Preferences, num_pairs: int) -> Metrics:
        """One optimizer step over all train workers; ``num_pairs`` are those of the whole step."""
        loss = partial(comparison_loss, self.config.center_rewards_coefficient, num_pairs)
        return self.backend.step(pairs, loss, micro_batch_size=self.config.per_device_train_batch_size)

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def measure(self, pairs: Preferences, num_pairs: int) -> Metrics:
        """Loss and metrics without learning, of ``num_pairs`` over all workers."""
        size = 2 * self.config.per_device_eval_batch_size
        values = self.backend.token_values(pairs.as_sequences(), micro_batch_size=size)
        metrics = Metrics()
        loss = partial(comparison_loss, self.config.center_rewards_coefficient, num_pairs)
        metrics.sum("loss", loss(values.padded(), values.mask(), pairs, metrics))
        return metrics

    @RayHelper.function(group="train")
    def save(self, folder: Path) -> None:
        self.backend.save(folder)

    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None:
        self.backend.export(folder)

    @RayHelper.function(group="train")
    def load(self, folder: Path) -> None:
        self.backend.load(folder)


def comparison_loss(
    center_rewards_coefficient: float | None,
    num_pairs: int,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch of pairs, divided by the pairs of the whole optimizer step.

    B are its sequences, twice as many: all chosen, then all rejected. Each has one target, so T is 1.
    """
    rewards_B = values_BT.sum(1)
    loss, diagnostics = reward_model_loss(
        rewards_B[: len(micro)],
        rewards_B[len(micro) :],
        # a copy: what came through Ray is read-only
        None if micro.margins is None else on_device(torch.tensor(micro.margins), rewards_B.device).to(rewards_B.dtype),
        num_pairs=num_pairs,
        center_rewards_coefficient=center_rewards_coefficient,
    )
    add_reward_model_metrics(metrics, diagnostics)
    return loss
