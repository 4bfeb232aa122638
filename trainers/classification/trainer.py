"""Sequence classification, and regression: numbers for a row, learned from its label.

    driver                                 policy (role train)
    ------                                 -------------------
    rows ─► tokenize
    batch of labelled rows ──────────────► step        one optimizer step; balanced, merge

A language model with a linear layer of ``num_labels`` numbers in place of its vocabulary, read off at the last token.
A vision model sees the pictures of conversations (backend: fsdp). What is exported loads with
AutoModelForSequenceClassification. Keys and rows are those of ms-swift's ``task_type: seq_cls``, losses those of
transformers.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.fsdp.vision.classifier import classifier_class
from trainers.classification.config import ClassificationConfig
from trainers.classification.loss import label_loss
from trainers.classification.rows import COLUMNS, Labelled, label_mistake, tokenize_labelled
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.packs import pack_length
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_by_rows_of, sequences_per_step, total_steps
from trainers.data.broken_rows import without_broken
from trainers.data.images.conversations import COLUMNS as PICTURES
from trainers.data.images.processor import seen_too
from trainers.data.packs import batches_of
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.model_checks import configuration_of
from trainers.parts.policy import Policy
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "accuracy", "learning_rate")


@RayHelper.worker(group="train")
class ClassificationTrainer:
    """``ClassificationTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: ClassificationConfig) -> None:
        self.config = config
        head: dict[str, Any] = {"head": "value", "values_at": "target", "num_labels": config.num_labels}
        self.policy = Policy(config, loss=label_loss, measure=measured, **head)
        self.prepare()

    @staticmethod
    def check(config: ClassificationConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        check_classifier(config)

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        # the text of a turn as it is has no places for pictures
        reads = config.use_chat_template
        self.images = image_reader(config, self.model_path, self.tokenizer) if reads else None
        self.rows = self.read(*config.training_data)
        self.eval_rows = self.read(*config.evaluation_data) if config.evaluates else None

    def read(self, source: Any, split: str) -> Labelled:
        """The rows of a dataset."""
        config = self.config
        rows = read_rows(config, source, split, self.images)
        with mistakes_of("dataset"):
            if "label" not in rows.column_names:
                raise ConfigError(
                    f"dataset: rows to classify need a column 'label', got {', '.join(rows.column_names)}. Rename with "
                    "`columns`."
                )
            is_broken = partial(label_mistake, problem=config.problem, num_labels=config.num_labels)
            columns = (*COLUMNS, *(() if self.images is None else PICTURES))
            rows = without_broken(rows, seen_too(is_broken, self.images), *columns, skip=config.skip_broken_rows)
            return tokenize_labelled(
                rows,
                self.tokenizer,
                problem=config.problem,
                num_labels=config.num_labels,
                use_chat_template=config.use_chat_template,
                max_length=config.max_length,
                truncation_mode=config.truncation_mode,
                num_proc=config.dataset_num_proc,
                images=self.images,
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = batches_of(
            self.rows.row_lengths(), batch_size, pack_length=pack_length(config), **order_by_rows_of(config)
        )
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(num_steps)
        order = {"rows": len(self.rows), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.rows) as run:
            for step in run.rounds(self):
                with run.phase("data"):
                    rows = dataclasses.replace(self.rows[batches[step]], row_ids=batches[step])
                with run.phase("update"):
                    metrics = self.policy.step(rows, len(rows))
                metrics.sum("num_tokens", len(rows.input_ids.values))
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """What transformers needs to know goes into the model's configuration: the loss, and the token of padding."""
        known = {"problem_type": self.config.problem, "pad_token_id": self.tokenizer.pad_token_id}
        self.policy.build(self.model_path, num_steps, model_init_kwargs={**self.config.model_init_kwargs, **known})

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy of all evaluation rows, under training's names with ``eval_`` before them."""
        assert self.eval_rows is not None
        return self.policy.measure(self.eval_rows, len(self.eval_rows)).values("eval_")

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def measured(backend: Backend, config: ClassificationConfig, rows: Labelled, num_rows: int) -> Metrics:
    """Loss and accuracy of a worker's slice of ``num_rows`` evaluation rows."""
    values = backend.token_values(rows.as_sequences(), micro_batch_size=config.per_device_eval_batch_size)
    metrics = Metrics()
    metrics.sum("loss", label_loss(config, num_rows, torch.from_numpy(values.values), values.mask(), rows, metrics))
    return metrics


def check_classifier(config: ClassificationConfig) -> None:
    """Raises ConfigError for a model without a classifier that can be trained here, and one of another ``num_labels``.

    A model by a hub name, or of a plugin, is not there yet.
    """
    if not Path(config.model).is_dir():
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    found = configuration_of(config.model, config.trust_remote_code)
    classifier_class(found)  # of a vision model there is one from now on
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(found), None)
    if kind is not None:
        with torch.device("meta"):
            built = kind(found)
    if kind is None or not callable(getattr(built, "score", None)):
        raise ConfigError(
            f"model: {config.model!r} ({found.model_type}) has no classifier with a linear layer named score. Use a "
            "decoder such as Qwen3 or Llama; encoders such as BERT are not supported."
        )
    is_classifier = any(name.endswith("ForSequenceClassification") for name in found.architectures or ())
    if is_classifier and found.num_labels != config.num_labels:
        raise ConfigError(
            f"num_labels is {config.num_labels}, but {config.model!r} is a classifier of {found.num_labels} labels. "
            f"Write num_labels: {found.num_labels}, or use the model that it was trained from."
        )
