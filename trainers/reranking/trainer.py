"""Rerankers: a score for a query and a document, learned from right and wrong documents.

    driver                                 policy (role train)
    ------                                 -------------------
    rows ─► tokenize
    batch of queries, documents drawn ───► step        one optimizer step; balanced, merge

A *reranker* is a language model or an encoder with a linear layer; what is exported loads with
AutoModelForSequenceClassification. A *generative_reranker* stays a language model, which says yes or no. Losses, rows
and metrics are those of ms-swift's tasks of these names. A batch counts queries.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.scores.evaluated import evaluated
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.packs import pack_length
from trainers.configuration.shared import SEQUENCES_PER_STEP, changed, order_by_rows_of, sequences_per_step, total_steps
from trainers.data.packs import batches_of
from trainers.data.texts.groups import Groups, read_groups
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.model_checks import configuration_of, is_encoder
from trainers.parts.policy import Policy
from trainers.parts.tokenizer import token_id
from trainers.reranking.config import RerankingConfig
from trainers.reranking.loss import Counts, YesOrNo, answered_loss, reranking_loss, scored_loss
from trainers.reranking.texts import PairEncoder
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "accuracy", "mrr")
NO_VIDEOS = "rerankers read pictures, but not videos. Use rows without videos"


@RayHelper.worker(group="train")
class RerankingTrainer:
    """``RerankingTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: RerankingConfig) -> None:
        self.config = config
        self.policy: Policy
        if config.is_generative:
            self.policy = Policy(config, loss=answered_loss, measure=measured_answers, token_function=YesOrNo())
        else:
            head: dict[str, Any] = {"head": "value", "values_at": "target"}
            self.policy = Policy(config, loss=scored_loss, measure=measured_scores, **head)
        self.prepare()

    @staticmethod
    def check(config: RerankingConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        if Path(config.model).is_dir():
            check_reranker(config, configuration_of(config.model, config.trust_remote_code))

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        found = configuration_of(self.model_path, config.trust_remote_code)
        check_reranker(config, found)
        self.images = image_reader(config, self.model_path, self.tokenizer, no_videos=NO_VIDEOS)
        is_plain = is_encoder(found) or not self.tokenizer.chat_template
        self.answers = answer_ids(config, self.tokenizer) if config.is_generative else None
        self.encoder = PairEncoder(
            self.tokenizer,
            not is_plain if config.use_chat_template is None else config.use_chat_template,
            None if self.answers is None else self.answers[0],
            config.instruction,
            self.images,
        )
        self.rows = self.read(*config.training_data)
        self.eval_rows = self.read(*config.evaluation_data) if config.evaluates else None

    def read(self, source: Any, split: str) -> Groups:
        """The rows of a dataset, each with all of its documents."""
        config = self.config
        rows = read_rows(config, source, split, self.images)
        with mistakes_of("dataset"):
            groups = read_groups(
                rows,
                self.encoder,
                self.images,
                skip=config.skip_broken_rows,
                max_length=config.max_length,
                drops=True,
                num_proc=config.dataset_num_proc,
            )
        no_ids = None if self.answers is None else np.full(len(groups), self.answers[1], np.int64)
        return dataclasses.replace(groups, labels=None, no_ids=no_ids)

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = batches_of(
            self.rows.unpadded_lengths(), batch_size, pack_length=pack_length(config), **order_by_rows_of(config)
        )
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(num_steps)
        order = {"rows": len(self.rows), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.rows) as run:
            for step in run.rounds(self):
                with run.phase("data"):
                    rows = dataclasses.replace(self.rows[batches[step]], row_ids=batches[step])
                    rows = drawn(rows, config, (config.seed, step))
                with run.phase("update"):
                    metrics = self.policy.step(rows, self.counts(rows))
                metrics.sum("num_tokens", len(rows.input_ids.values))
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """The padding token goes into a classifier's configuration, by which transformers finds the last token."""
        kwargs = dict(self.config.model_init_kwargs)
        kwargs |= {} if self.config.is_generative else {"pad_token_id": self.tokenizer.pad_token_id}
        if self.config.backend == "fsdp":
            self.policy.build(self.model_path, num_steps, model_init_kwargs=kwargs)
        else:
            self.policy.build(self.model_path, num_steps)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation rows, under training's names with ``eval_`` before them."""
        assert self.eval_rows is not None
        rows = drawn(self.eval_rows, self.config, (self.config.seed,))
        return self.policy.measure(rows, self.counts(rows)).without("mean_token_accuracy").values("eval_")

    def counts(self, rows: Groups) -> Counts:
        """What losses are divided by."""
        lengths = rows.lengths.lengths
        num_lists = int((lengths >= self.config.listwise_reranker_min_group_size).sum())
        return Counts(int(lengths.sum()), num_lists, len(rows), self.policy.num_shards())

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def measured_scores(backend: Backend, config: RerankingConfig, rows: Groups, counts: Counts) -> Metrics:
    """Loss and metrics of a worker's slice of evaluation rows, of a model that gives scores."""
    metrics = Metrics()
    size = config.per_device_eval_batch_size
    sequences = rows.as_sequences()
    longest = int(rows.lengths.lengths.max(initial=1))
    values = backend.token_values(sequences, micro_batch_size=size * longest)
    metrics.sum("loss", reranking_loss(config, counts, torch.tensor(values.values), rows, metrics))
    return metrics


def measured_answers(backend: Backend, config: RerankingConfig, rows: Groups, counts: Counts) -> Metrics:
    """The same, of a model that says yes or no."""
    return evaluated(
        backend,
        rows,
        partial(answered_loss, config, counts),
        YesOrNo(),
        micro_batch_size=config.per_device_eval_batch_size,
        num_rows=counts.rows,
        num_shards=counts.num_shards,
    )


def drawn(rows: Groups, config: RerankingConfig, seed: tuple[int, ...]) -> Groups:
    """Of each row some right documents, each with some wrong ones: in any order, and anew for every ``seed``."""
    random = np.random.default_rng(seed)
    assert rows.num_positives is not None
    found, members = [], []
    for row, (right, length) in enumerate(zip(rows.num_positives.tolist(), rows.lengths.lengths.tolist(), strict=True)):
        for one in random.choice(right, min(right, config.max_positive_samples), replace=False):
            count = min(length - right, config.max_negative_samples)
            wrong = right + random.choice(length - right, count, replace=False) if count else np.zeros(0, np.int64)
            found.append(row)
            members.append(np.concatenate([[one], wrong]).astype(np.int64))
    return rows.chosen(np.array(found, np.int64), members)


def answer_ids(config: RerankingConfig, tokenizer: Any) -> tuple[int, int]:
    """The tokens that say yes and no. Raises ConfigError for words that are no token of their own."""
    ids = []
    for name in ("generative_reranker_positive_token", "generative_reranker_negative_token"):
        found = token_id(tokenizer, getattr(config, name))
        if found is None:
            raise ConfigError(f"{name}: {getattr(config, name)!r} is not a token of the model. Write one")
        ids.append(found)
    return ids[0], ids[1]


def check_reranker(config: RerankingConfig, found: Any) -> None:
    """Raises ConfigError for a model that is no reranker of this kind, or that has more than one label."""
    has_code = bool(getattr(found, "auto_map", None))
    names = found.architectures or ()
    is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
    if has_code and not config.is_generative and not is_classifier:
        raise ConfigError(
            f"model: {config.model!r} ({', '.join(names)}) has its own reranker code, which RayHelper does not "
            "train. Use a language model, or a reranker of transformers."
        )
    if config.is_generative and is_encoder(found):
        raise ConfigError(f"model: {config.model!r} writes no answer. Write task_type: reranker")
    if is_classifier and not config.is_generative and found.num_labels != 1:
        raise ConfigError(f"model: {config.model!r} is a classifier of {found.num_labels} labels; a reranker has one.")
    if not is_encoder(found):
        return
    for name, value in changed(config, ("padding_free", "packing", "sequence_parallel_size")):
        raise ConfigError(
            f"{name} is {value}, but {config.model!r} ({found.model_type}) attends to later tokens over whole rows. "
            "Remove it."
        )
    if getattr(found, "type_vocab_size", 0) > 1:
        raise ConfigError(
            f"model: {config.model!r} ({found.model_type}) needs token types for query and document, which RayHelper "
            "does not pass. Use an encoder without them, such as ModernBERT or XLM-RoBERTa."
        )
