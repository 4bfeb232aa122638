"""CPO, SimPO and ORPO: make chosen completions likelier than rejected ones, without a reference model.

    driver                                 policy (role train)
    ------                                 -------------------
    rows ─► tokenize
    batch of pairs ──────────────────────► step        one optimizer step; balanced, merge

Contrastive preference optimization (arXiv 2401.08417), simple preference optimization (arXiv 2405.14734) and odds ratio
preference optimization (arXiv 2403.07691); formulas stand in ``losses/preference.py``. The configuration's type says
which. Names, defaults and metrics are TRL's. A batch counts pairs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from rayhelper import DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.scores.evaluated import TargetNumbers, evaluated
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.packs import pack_length
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_by_rows_of, sequences_per_step, total_steps
from trainers.cpo.config import ORPOConfig, PairConfig
from trainers.cpo.loss import PairCounts, pair_loss
from trainers.data.broken_rows import pair_mistake, without_broken
from trainers.data.images.conversations import COLUMNS
from trainers.data.images.processor import seen_too
from trainers.data.packs import batches_of
from trainers.data.preferences import Preferences, tokenize_preferences, with_prompt
from trainers.data.texts.thoughts import written
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.policy import Policy
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "rewards/accuracies", "rewards/margins")


@RayHelper.worker(group="train")
class CPOTrainer:
    """``CPOTrainer(config).train()``, with a CPOConfig, SimPOConfig or ORPOConfig; its one role is ``train``."""

    def __init__(self, config: PairConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=pair_loss, measure=measured, token_function=TargetNumbers())
        self.prepare()

    @staticmethod
    def check(config: PairConfig, groups: DeviceGroups | None) -> None:
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
        learned = config.learns_prompts if isinstance(config, ORPOConfig) else False
        rows = read_rows(config, source, split, self.images)
        with mistakes_of("dataset"):
            columns = ("chosen", "rejected", "prompt", "margin", *COLUMNS)
            rows = without_broken(
                rows, seen_too(pair_mistake, self.images, with_prompt), *columns, skip=config.skip_broken_rows
            )
            pairs = tokenize_preferences(
                rows,
                self.writer,
                max_length=config.max_length,
                truncation_mode=config.truncation_mode,
                num_proc=config.dataset_num_proc,
                images=self.images,
                learns_answers=learned == "answers",
            )
        return pairs.with_prompt_targets() if learned is True else pairs

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = batches_of(
            self.pairs.unpadded_lengths(), batch_size, pack_length=pack_length(config), **order_by_rows_of(config)
        )
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.policy.build(self.model_path, num_steps)
        order = {"pairs": len(self.pairs), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.pairs) as run:
            for step in run.rounds(self):
                with run.phase("data"):
                    pairs = dataclasses.replace(self.pairs[batches[step]], row_ids=batches[step])
                    pairs = pairs.with_nll_batches(config.nll_batch_size)
                with run.phase("update"):
                    metrics = self.policy.step(pairs, counts_of(pairs))
                metrics.sum("num_tokens", pairs.num_tokens)
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation pairs, under training's names with ``eval_`` before them."""
        assert self.eval_pairs is not None
        size = self.config.per_device_eval_batch_size if self.config.nll_batch_size else None
        pairs = self.eval_pairs.with_nll_batches(size)
        return self.policy.measure(pairs, counts_of(pairs)).values("eval_")

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def measured(backend: Backend, config: PairConfig, pairs: Preferences, counts: PairCounts) -> Metrics:
    """Loss and metrics of a worker's slice of evaluation pairs."""
    return evaluated(
        backend,
        pairs,
        partial(pair_loss, config, counts),
        TargetNumbers(),
        micro_batch_size=config.per_device_eval_batch_size,
        num_rows=int(counts.num_pairs),
        num_shards=RayHelper.current().shard.count,
    )


def counts_of(pairs: Preferences) -> PairCounts:
    return PairCounts(len(pairs), pairs.num_chosen_tokens)
