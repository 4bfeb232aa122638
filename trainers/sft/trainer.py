"""Supervised fine-tuning, and pretraining as its text-only form.

    driver                                 train workers
    ------                                 -------------
    rows ─► tokenize ─► pack
    batch of sequences ──────────────────► update      one optimizer step; slice, merge

The loss is the mean over the loss tokens of the whole optimizer step, over all workers, however the batch is cut into
micro-batches and slices. Names, defaults and metrics are TRL's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import Sequences
from trainers.configuration.shared import SEQUENCES_PER_STEP, sequences_per_step, total_steps
from trainers.data.rows import Batches, pack, tokenize_sft
from trainers.losses.tokens import sft_loss
from trainers.losses.types import SFTLossType
from trainers.metrics import Metrics
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
from trainers.sft.config import SFTConfig


@RayHelper.worker(group="train")
class SFTTrainer:
    """``SFTTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        self.prepare()

    @staticmethod
    def check(config: SFTConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        self.sequences = self.read(config.dataset, config.dataset_split)
        self.eval_sequences = self.read(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None

    def read(self, source: Any, split: str) -> Sequences:
        """The sequences of a dataset, packed if asked for."""
        config = self.config
        rows = read_rows(config, source, split)
        cuts_rows = config.packing and config.packing_strategy != "bfd"
        with mistakes_of("dataset"):
            sequences = tokenize_sft(
                rows,
                self.tokenizer,
                max_length=None if cuts_rows else config.max_length,
                truncation_mode=config.truncation_mode,
                completion_only_loss=config.completion_only_loss,
                assistant_only_loss=config.assistant_only_loss,
                text_field=config.dataset_text_field,
                eos=config.eos_token,
                num_proc=config.dataset_num_proc,
            )
        if config.packing:
            assert config.max_length is not None
            sequences = pack(sequences, max_length=config.max_length, strategy=config.packing_strategy)
        if not len(sequences):
            raise ConfigError(f"no row of {source!r} has a token to learn within max_length={config.max_length}")
        return sequences

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.num_train_shards(), saved_order(config))
        batches = Batches(len(self.sequences), batch_size, seed=config.seed, shuffle=config.shuffle_dataset)
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(self.model_path, num_steps)
        headline = ("loss", "mean_token_accuracy", "learning_rate")
        order = {"sequences": len(self.sequences), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=headline, order=order) as run:
            run.resume(self.load)
            if config.val_before_train and run.step == 0:
                run.evaluate(self.evaluate)
            while run.step < num_steps:
                with run.phase("data"):
                    batch = self.sequences[batches[run.step]]
                with run.phase("update"):
                    metrics = self.update(batch, int(batch.target_mask.values.sum()))
                metrics.sum("num_tokens", len(batch.input_ids.values))
                run.log_step(metrics, epoch=(run.step + 1) / batches.steps_per_epoch)
                if run.due(config.eval_steps):
                    run.evaluate(self.evaluate)
                if run.due(config.save_steps):
                    run.save_checkpoint(self.save, self.tokenizer)
            if self.eval_sequences is not None:
                run.evaluate(self.evaluate)
            return run.finish(self.export, self.tokenizer)

    def evaluate(self) -> dict[str, float]:
        """The mean loss over the loss tokens of the evaluation data."""
        assert self.eval_sequences is not None
        return {f"eval_{name}": value for name, value in self.measure(self.eval_sequences).values().items()}

    @RayHelper.function(group="train", execute="first")
    def num_train_shards(self) -> int:
        return num_shards(self.config)

    @RayHelper.function(group="train")
    def build(self, model: str, num_steps: int) -> None:
        self.backend: Backend = build_backend(self.config, model, num_training_steps=num_steps)

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def update(self, batch: Sequences, num_tokens: int) -> Metrics:
        """One optimizer step over all train workers; ``num_tokens`` are the loss tokens of the whole step."""
        loss = partial(supervised_loss, self.config.loss_type, num_tokens)
        return self.backend.step(batch, loss, micro_batch_size=self.config.per_device_train_batch_size)

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def measure(self, sequences: Sequences) -> Metrics:
        """Loss without learning."""
        logps = self.backend.token_logps(sequences, micro_batch_size=self.config.per_device_eval_batch_size)
        metrics = Metrics()
        metrics.mean("loss", -float(logps.values.sum(dtype="float64")), len(logps.values))
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


def supervised_loss(
    loss_type: SFTLossType,
    num_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Sequences,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch, divided by the loss tokens of the whole optimizer step."""
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    return sft_loss(logps_BT, mask_BT, normaliser=num_tokens, loss_type=loss_type)
