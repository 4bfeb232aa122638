"""Embedding models: texts that belong together become vectors that lie together.

    driver                                 policy (role train)
    ------                                 -------------------
    rows ─► tokenize
    batch of rows ───────────────────────► values      vectors of all texts; balanced, flatten
    loss of each pool ◄──────────────────┘
    its gradient by the vectors ─────────► step        one optimizer step; balanced, merge

The loss of a row may look at all rows of a pool, wherever they are computed. So the vectors are computed first, without
gradients. The driver finds the loss and its gradient by each vector, and the step passes the texts through the model
once more, with that gradient: gradient caching (arXiv 2101.06983). It is the gradient of the whole pool, and the same
for every number of workers. Losses of single rows need no first pass. What is exported loads with AutoModel and with
sentence-transformers. Losses and rows are those of ms-swift's ``task_type: embedding``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.batch import Ragged
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_by_rows_of, sequences_per_step, total_steps
from trainers.data.images.processor import is_one_piece, is_speaking
from trainers.data.packs import batches_of
from trainers.data.texts.groups import Groups, read_groups
from trainers.embedding.config import EmbeddingConfig, Pooling
from trainers.embedding.correlations import correlations
from trainers.embedding.loss import PoolOf, embedding_loss, loss_of_rows, similarity_metrics
from trainers.embedding.sentence_files import SentenceFiles, sentence_files, write_sentence_files
from trainers.embedding.texts import TextEncoder
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.model_checks import configuration_of, is_encoder
from trainers.parts.policy import Policy
from trainers.parts.tokenizer import token_id
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "margin", "learning_rate")
ROWS_OF_POOL = "rows of a pool"
NO_VIDEOS = "embedding models read pictures, but not videos. Use rows without videos"


@RayHelper.worker(group="train")
class EmbeddingTrainer:
    """``EmbeddingTrainer(config).train()``; its one role is ``train``."""

    def __init__(self, config: EmbeddingConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=loss_of_rows, head="embedding", values_at="target")
        self.prepare()

    @staticmethod
    def check(config: EmbeddingConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        if Path(config.model).is_dir():
            check_embedding(config, configuration_of(config.model, config.trust_remote_code))

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        found = configuration_of(self.model_path, config.trust_remote_code)
        check_embedding(config, found)
        self.files = sentence_files(config.model)
        self.hidden_size = found.get_text_config().hidden_size
        self.pooling = pooling_of(config, self.files, found)
        self.images = image_reader(config, self.model_path, self.tokenizer, no_videos=NO_VIDEOS)
        is_plain = self.files.are_there or is_encoder(found) or not self.tokenizer.chat_template
        self.encoder = TextEncoder(
            self.tokenizer,
            not is_plain if config.use_chat_template is None else config.use_chat_template,
            config.max_length,
            config.truncation_mode,
            self.images,
            config.system,
            end_id_of(config, self.tokenizer),
        )
        self.rows = self.read(*config.training_data)
        self.eval_rows = self.read(*config.evaluation_data) if config.evaluates else None

    def read(self, source: Any, split: str) -> Groups:
        """The rows of a dataset."""
        config = self.config
        rows = read_rows(dataclasses.replace(config, system=None), source, split, self.images)  # of every text
        with mistakes_of("dataset"):
            groups = read_groups(
                rows,
                self.encoder,
                self.images,
                skip=config.skip_broken_rows,
                max_length=config.max_length,
                drops=config.truncation_mode == "drop",
                num_proc=config.dataset_num_proc,
            )
            if config.loss_type != "infonce":
                check_labels(config, groups)
            elif config.infonce_hard_negatives is not None and (groups.lengths.lengths < 3).any():
                raise ConfigError("dataset: infonce_hard_negatives needs a negative in every row; some have none")
            return groups

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        saved = saved_order(config)
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved)
        pool_size = int((saved or {}).get(ROWS_OF_POOL, self.pool_size(config.per_device_train_batch_size)))
        batches = batches_of(self.rows.row_lengths(), batch_size, **order_by_rows_of(config))
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.policy.build(self.model_path, num_steps, pooling=self.pooling)
        order = {"rows": len(self.rows), SEQUENCES_PER_STEP: batch_size, ROWS_OF_POOL: pool_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.rows) as run:
            for step in run.rounds(self):
                with run.phase("data"):
                    rows = dataclasses.replace(self.rows[batches[step]], row_ids=batches[step])
                    rows = with_hard_negatives(rows, config.infonce_hard_negatives, (config.seed, step))
                with run.phase("update"):
                    metrics = self.update(rows, PoolOf(len(rows), pool_size, self.files.normalize))
                metrics.sum("num_tokens", len(rows.input_ids.values))
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.export, self.tokenizer)

    def pool_size(self, rows_of_worker: int) -> int:
        """Rows whose texts are each other's negatives. Hard pairs are chosen among the rows of one worker."""
        return rows_of_worker * (self.policy.num_shards() if self.config.loss_type == "infonce" else 1)

    def update(self, rows: Groups, step: PoolOf) -> Metrics:
        """One optimizer step."""
        if not self.config.is_pooled:
            return self.policy.step(rows, step)
        vectors = torch.tensor(self.policy.values(rows, as_in_step=True).values).requires_grad_()
        found = Metrics()
        loss = embedding_loss(self.config, step, vectors, rows, found)
        (gradient,) = torch.autograd.grad(loss, vectors)
        rows = dataclasses.replace(rows, gradients=Ragged.split(gradient.numpy(), rows.lengths.lengths))
        found.sum("loss", loss)
        return Metrics.merge([self.policy.step(rows, step).without("loss"), found])

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation rows, under training's names with ``eval_`` before them."""
        config, rows = self.config, self.eval_rows
        assert rows is not None
        rows = with_hard_negatives(rows, config.infonce_hard_negatives, (config.seed,))
        size = config.per_device_eval_batch_size
        vectors = torch.tensor(self.policy.values(rows, micro_batch_size=size).values)
        step = PoolOf(len(rows), self.pool_size(size), self.files.normalize)
        metrics = Metrics()
        metrics.sum("loss", embedding_loss(config, step, vectors, rows, Metrics()))
        if step.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        counts = rows.lengths.lengths
        similarity_metrics(config, vectors, torch.tensor(counts), metrics)  # among all rows
        found = metrics.values("eval_")
        if config.loss_type == "infonce":
            return found
        assert rows.labels is not None
        first = np.cumsum(counts) - counts
        measured = correlations(vectors.numpy()[first], vectors.numpy()[first + 1], rows.labels)
        return found | {f"eval_{name}": value for name, value in measured.items()}

    def export(self, folder: Path) -> None:
        """Writes the model, with the files by which sentence-transformers loads it."""
        self.policy.export(folder)
        self.write_files(folder)

    @RayHelper.function(group="driver", execute="first")
    def write_files(self, folder: Path) -> None:
        """Writes the files of sentence-transformers."""
        write_sentence_files(folder, self.config.model, self.files, self.pooling, self.hidden_size)

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def with_hard_negatives(rows: Groups, count: int | None, seed: tuple[int, ...]) -> Groups:
    """Rows with ``count`` negatives each: the first ones, or some drawn again where there are fewer."""
    if count is None:
        return rows
    random = np.random.default_rng(seed)
    members = []
    for length in rows.lengths.lengths.tolist():
        own = np.arange(2, length)[:count]
        members.append(np.concatenate([[0, 1], own, random.choice(own, size=count - len(own))]))
    return rows.chosen(np.arange(len(rows)), members)


def end_id_of(config: EmbeddingConfig, tokenizer: Any) -> int | None:
    """The id of ``end_token``. Raises ConfigError for what is not a token of the model."""
    if config.end_token is None:
        return None
    found = token_id(tokenizer, config.end_token)
    if found is None:
        raise ConfigError(f"end_token: {config.end_token!r} is not a token of the model. Write one, or remove it")
    return found


def pooling_of(config: EmbeddingConfig, files: SentenceFiles, found: Any) -> Pooling:
    """The key, what the model's files say, or what models of its kind have."""
    return config.pooling or files.pooling or ("mean" if is_encoder(found) else "last")


def check_labels(config: EmbeddingConfig, groups: Groups) -> None:
    """Raises ConfigError for rows without the labels that the loss needs."""
    if groups.labels is None or np.isnan(groups.labels).any():
        raise ConfigError(f"dataset: loss_type {config.loss_type} needs a column 'label' in every row, a number")
    if config.loss_type != "cosine_similarity" and not np.isin(groups.labels, (0, 1)).all():
        raise ConfigError(f"dataset: labels of loss_type {config.loss_type} are 0 and 1")


def check_embedding(config: EmbeddingConfig, found: Any) -> None:
    """Raises ConfigError for a model whose embeddings are not built, and keys that it has no use for."""
    files = sentence_files(config.model)
    pooling = pooling_of(config, files, found)
    if config.sequence_parallel_size > 1 and (pooling != "last" or is_encoder(found)):
        raise ConfigError(
            f"sequence_parallel_size is {config.sequence_parallel_size}, but workers share only rows of decoders with "
            f"pooling last, and pooling is {pooling}. Remove it."
        )
    if is_speaking(found) or is_one_piece(found):
        raise ConfigError(
            f"model: {config.model!r} ({found.model_type}) has no embeddings of texts here: transformers has no class "
            "of the model without its head. Take another vision model."
        )
    if config.backend == "megatron" and pooling != "last":
        raise ConfigError(f"backend: megatron has only pooling last, and pooling is {pooling}. Write backend: fsdp.")
    if config.padding_free and is_encoder(found):
        raise ConfigError(
            f"padding_free is true, but {config.model!r} ({found.model_type}) attends to later tokens, and would mix "
            "the texts of a row. Write padding_free: false."
        )
