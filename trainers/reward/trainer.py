"""Reward models: a number for a prompt and its completion, learned from pairs of a better and a worse one.

    driver                                 policy (role train)
    ------                                 -------------------
    rows ─► tokenize
    batch of pairs ──────────────────────► step        one optimizer step; balanced, merge

A language model with a linear layer in place of its vocabulary, read off at the last token (Bradley-Terry; the papers
stand in ``losses/reward_model.py``). What is exported loads with AutoModelForSequenceClassification, as a reward of
GRPO and PPO for example (``rewards/models.py``). A vision model sees the pictures of prompts. Names, defaults and
metrics are TRL's. A batch counts pairs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rayhelper import DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.packs import pack_length
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_by_rows_of, sequences_per_step, total_steps
from trainers.data.broken_rows import pair_mistake, without_broken
from trainers.data.images.conversations import COLUMNS as PICTURES
from trainers.data.images.processor import seen_too
from trainers.data.packs import batches_of
from trainers.data.preferences import Preferences, tokenize_comparisons, with_prompt
from trainers.data.texts.thoughts import written
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.policy import Policy
from trainers.reward.config import RewardConfig
from trainers.reward.loss import comparison_loss
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "accuracy", "margin")


@RayHelper.worker(group="train")
class RewardTrainer:
    """``RewardTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=comparison_loss, measure=measured, head="value", values_at="target")
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
        self.images = image_reader(config, self.model_path, self.tokenizer)
        self.writer = written(self.tokenizer, config, self.images)
        self.pairs = self.read(*config.training_data)
        self.eval_pairs = self.read(*config.evaluation_data) if config.evaluates else None

    def read(self, source: Any, split: str) -> Preferences:
        """The pairs of a dataset."""
        config = self.config
        rows = read_rows(config, source, split, self.images)
        with mistakes_of("dataset"):
            mistake = seen_too(pair_mistake, self.images, with_prompt)
            columns = ("chosen", "rejected", "prompt", "margin", *(() if self.images is None else PICTURES))
            rows = without_broken(rows, mistake, *columns, skip=config.skip_broken_rows)
            return tokenize_comparisons(
                rows,
                self.writer,
                max_length=config.max_length,
                num_proc=config.dataset_num_proc,
                images=self.images,
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = batches_of(
            self.pairs.unpadded_lengths(), batch_size, pack_length=pack_length(config), **order_by_rows_of(config)
        )
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(num_steps)
        order = {"pairs": len(self.pairs), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.pairs) as run:
            for step in run.rounds(self):
                with run.phase("data"):
                    pairs = dataclasses.replace(self.pairs[batches[step]], row_ids=batches[step])
                with run.phase("update"):
                    metrics = self.policy.step(pairs, len(pairs))
                metrics.sum("num_tokens", pairs.num_tokens)
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """The padding token goes into the model's configuration, by which transformers finds the last token."""
        kwargs = {**self.config.model_init_kwargs, "pad_token_id": self.tokenizer.pad_token_id}
        self.policy.build(self.model_path, num_steps, model_init_kwargs=kwargs)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation pairs, under training's names with ``eval_`` before them."""
        assert self.eval_pairs is not None
        return self.policy.measure(self.eval_pairs, len(self.eval_pairs)).values("eval_")

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def measured(backend: Backend, config: RewardConfig, pairs: Preferences, num_pairs: int) -> Metrics:
    """Loss and metrics of a worker's slice of ``num_pairs`` evaluation pairs."""
    values = backend.token_values(pairs.as_sequences(), micro_batch_size=2 * config.per_device_eval_batch_size)
    metrics = Metrics()
    loss = comparison_loss(config, num_pairs, values.padded(), values.mask(), pairs, metrics)
    metrics.sum("loss", loss)
    return metrics
