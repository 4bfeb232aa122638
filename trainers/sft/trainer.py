"""Supervised fine-tuning, and pretraining as its text-only form.

    driver                                 policy (role train)
    ------                                 -------------------
    rows ─► tokenize ─► pack
    batch of sequences ──────────────────► step        one optimizer step; balanced, merge

The loss is the mean over the loss tokens of the whole optimizer step, over all workers, however the batch is cut into
micro-batches and slices; ``loss_scale`` may weigh the tokens. Names, defaults and metrics are TRL's.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import Sequences
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_by_rows_of, sequences_per_step, total_steps
from trainers.data.broken_rows import supervised_mistake, without_broken
from trainers.data.images.conversations import COLUMNS
from trainers.data.images.processor import seen_too
from trainers.data.loss_scale import parsed
from trainers.data.packs import batches_of
from trainers.data.rows import pack, tokenize_sft
from trainers.data.streaming import RowStream, StreamedSequences
from trainers.data.texts.plain import without_template
from trainers.data.texts.thoughts import written
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.policy import Policy
from trainers.parts.tokenizer import check_end
from trainers.run.run import Run, saved_order
from trainers.sft.config import PretrainConfig, SFTConfig
from trainers.sft.loss import supervised_loss

HEADLINE = ("loss", "mean_token_accuracy", "learning_rate")


@RayHelper.worker(group="train")
class SFTTrainer:
    """``SFTTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        noise: dict[str, Any] = (
            {"neftune_noise_alpha": config.neftune_noise_alpha} if config.neftune_noise_alpha else {}
        )
        self.policy = Policy(config, loss=supervised_loss, measure=mean_loss, **noise)
        self.prepare()

    @staticmethod
    def check(config: SFTConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        check_end(config.eos_token, config)

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        self.images = image_reader(config, self.model_path, self.tokenizer)
        self.writer = written(self.tokenizer, config, self.images)
        if not config.streaming:
            self.sequences = self.read(*config.training_data)
        found = self.read(*config.evaluation_data) if config.evaluates else None
        self.eval_sequences = None if found is None else found[: config.max_eval_sequences]

    def read(self, source: Any, split: str) -> Sequences:
        """The sequences of a dataset, packed if asked for."""
        config = self.config
        rows = read_rows(config, source, split, self.images)
        cuts_rows = config.packing and config.packing_strategy != "bfd"
        with mistakes_of("dataset"):
            field = config.dataset_text_field
            is_broken = seen_too(partial(supervised_mistake, text_field=field), self.images)
            columns = ("prompt", "completion", "messages", field, *COLUMNS)
            rows = without_broken(rows, is_broken, *columns, skip=config.skip_broken_rows)
            if isinstance(config, PretrainConfig) and not config.use_chat_template:
                rows = without_template(rows, field)
            scale = parsed(config.loss_scale)
            sequences = tokenize_sft(
                rows,
                self.writer,
                max_length=None if cuts_rows else config.max_length,
                truncation_mode=config.truncation_mode,
                completion_only_loss=False if scale and scale.base == "all" else config.completion_only_loss,
                assistant_only_loss=config.assistant_only_loss,
                text_field=field,
                eos=config.eos_token,
                num_proc=config.dataset_num_proc,
                loss_scale=scale,
                images=self.images,
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
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        if config.streaming:
            return self.train_on_stream(batch_size)
        batches = batches_of(self.sequences.input_ids.lengths, batch_size, **order_by_rows_of(config))
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.policy.build(self.model_path, num_steps)
        order = {"sequences": len(self.sequences), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.sequences) as run:
            for step in run.rounds(self):
                with run.phase("data"):
                    batch = dataclasses.replace(self.sequences[batches[step]], row_ids=batches[step])
                with run.phase("update"):
                    metrics = self.policy.step(batch, int(batch.target_mask.values.sum()))
                metrics.sum("num_tokens", len(batch.input_ids.values))
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def train_on_stream(self, batch_size: int) -> dict[str, float]:
        """The same with rows that are read on the way. A resumed run goes on where its checkpoint was in the stream."""
        config = self.config
        self.policy.build(self.model_path, config.max_steps)
        source, split = config.training_data
        rows = RowStream(
            source,
            split,
            seed=config.seed,
            buffer=config.shuffle_buffer_size if config.shuffle_dataset else 0,
        )
        order = {"streaming": True, "shuffle_buffer_size": rows.buffer, SEQUENCES_PER_STEP: batch_size}
        with Run(config, config.max_steps, headline=HEADLINE, order=order) as run:
            read = partial(self.read, split=split)
            stream = StreamedSequences(rows, read, batch_size=batch_size, state=run.trainer_state)
            for step in run.rounds(self, lambda: stream.state):
                with run.phase("data"):
                    batch = stream.next()
                with run.phase("update"):
                    metrics = self.policy.step(batch, int(batch.target_mask.values.sum()))
                metrics.sum("num_tokens", len(batch.input_ids.values))
                with run.phase("data"):
                    num_epochs = stream.num_epochs
                run.log_step(metrics, epoch=(step + 1) / config.max_steps, num_epochs=num_epochs)
            return run.finish(self.policy.export, self.tokenizer)

    def evaluate(self) -> dict[str, float]:
        """The mean loss over the loss tokens of the evaluation data."""
        return self.policy.measure(self.eval_sequences).values("eval_")

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def mean_loss(backend: Backend, config: SFTConfig, sequences: Sequences, _: None) -> Metrics:
    """The loss of a worker's slice of evaluation data."""
    logps = backend.token_logps(sequences, micro_batch_size=config.per_device_eval_batch_size)
    metrics = Metrics()
    weighed = logps.values if sequences.weights is None else logps.values * sequences.weights.values
    metrics.mean("loss", -float(weighed.sum(dtype="float64")), len(logps.values))
    return metrics
