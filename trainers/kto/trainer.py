"""KTO: make desirable completions likelier and undesirable ones less likely, each judged by itself.

    driver                         reference                 policy (role default)
    ------                         ---------                 ---------------------
    completions of a step ───────► logps ──────────────────► (with the rows)
    prompts with completions ────► logps ─┐
      of other rows          ────────────────────────────► logps
                                   KL ◄───┴────────────────── mean of the differences
    completions, KL ───────────────────────────────────────► step             one optimizer step
    metrics ◄─────────────────────────────────────────────── balanced, merge
                                   mix ◄──────────────────── weights          now and then, if sync_ref_model

Kahneman-Tversky optimization (arXiv 2402.01306); formulas stand in ``losses/kto.py``. Names, defaults and metrics are
TRL's. A batch counts completions. With LoRA the reference is the policy without its adapter, and role ``reference`` has
nothing to do.

The KL is estimated on the driver from all completions of the optimizer step (or of ``kl_batch_size`` consecutive ones),
before the policy learns from any of them. So neither micro-batches nor workers change it.
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
from trainers.backends.scores.evaluated import TargetNumbers, evaluated
from trainers.batch import Ragged, Sequences
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.packs import pack_length
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_of_steps, sequences_per_step, total_steps
from trainers.data.batches import Batches
from trainers.data.broken_rows import judged_mistake, without_broken
from trainers.data.images.conversations import COLUMNS as PICTURES
from trainers.data.images.processor import seen_too
from trainers.data.packs import PackedBatches, batches_of
from trainers.data.texts.thoughts import written
from trainers.data.unpaired import COLUMNS, Judged, UnpairedPreferences, tokenize_unpaired
from trainers.kto.config import KTOConfig
from trainers.kto.loss import judged_loss
from trainers.losses.kto import kl_estimates
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start, num_train_shards
from trainers.parts.frozen import Reference
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.policy import DefaultPolicy
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "rewards/margins", "kl")


@RayHelper.worker(group=["default", "reference"])
class KTOTrainer:
    """``KTOTrainer(config).train()``; roles ``default`` (the policy) and ``reference`` may share a device group.

    The reference shares the policy's workers where no device group names it.
    """

    def __init__(self, config: KTOConfig) -> None:
        self.config = config
        self.policy = DefaultPolicy(config, loss=judged_loss, measure=measured, token_function=TargetNumbers())
        self.reference = Reference(
            config,
            every=config.ref_model_sync_steps if config.sync_ref_model else None,
            share=config.ref_model_mixup_alpha,
        )
        self.prepare()

    @staticmethod
    def check(config: KTOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        num_rows = sequences_per_step(config, num_train_shards(config, groups, "default"), saved_order(config))
        if config.estimates_kl and num_rows < 2:
            held = "is one pack, which may be one row" if config.packing else "has one row"
            raise ConfigError(
                f"loss_type kto estimates the KL from completions of other rows of the step, and a step {held}. "
                "Raise global_batch_size (or per_device_train_batch_size), or set loss_type: apo_zero_unpaired."
            )

    # The driver's part

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads and tokenizes the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        self.images = image_reader(config, self.model_path, self.tokenizer)
        self.writer = written(self.tokenizer, config, self.images)
        self.reference_path = self.model_path
        if config.ref_model is not None:
            self.reference_path = resolved_models(config, self.model_path, [config.ref_model])[config.ref_model]
            check_same_tokens(
                "ref_model", self.reference_path, self.tokenizer, config.trust_remote_code, policy=self.model_path
            )
        self.rows = self.read(*config.training_data)
        self.eval_rows = self.read(*config.evaluation_data) if config.evaluates else None
        self.known: Known | None = None
        self.eval_known: Known | None = None

    def read(self, source: Any, split: str) -> UnpairedPreferences:
        """The completions of a dataset."""
        config = self.config
        rows = read_rows(config, source, split, self.images)
        with mistakes_of("dataset"):
            mistake = seen_too(judged_mistake, self.images)
            rows = without_broken(rows, mistake, *COLUMNS, *PICTURES, skip=config.skip_broken_rows)
            return tokenize_unpaired(
                rows,
                self.writer,
                max_length=config.max_length,
                truncation_mode=config.truncation_mode,
                num_proc=config.dataset_num_proc,
                images=self.images,
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = batches_of(self.pack_lengths(), batch_size, pack_length=pack_length(config), **order_of_steps(config))
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.prepare_reference(batches)
        self.policy.build(self.model_path, num_steps)
        order = {"completions": len(self.rows), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.rows) as run:
            for step in run.rounds(self):
                with run.phase("logps"):
                    rows = self.rows[batches[step]]
                    known = None if self.known is None else self.known.of(batches[step])
                    judged = self.with_reference(rows, known, config.per_device_train_batch_size)
                    judged = dataclasses.replace(judged, row_ids=batches[step])
                with run.phase("update"):
                    metrics = with_margins(self.policy.step(judged, len(judged)))
                metrics.sum("num_tokens", len(judged.input_ids.values))
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
                with run.phase("sync"):
                    self.reference.follow(self.policy, run.step)
            return run.finish(self.policy.export, self.tokenizer)

    def pack_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of a step that each row adds.

        Prompts with completions of other rows are as many tokens as the rows themselves, as completions go round.
        """
        lengths = self.rows.sequence_lengths(self.config.max_length)
        return 2 * lengths if self.config.estimates_kl else lengths

    def prepare_reference(self, batches: Batches | PackedBatches) -> None:
        """Loads the reference model; or, to precompute, takes from it all there is to know and frees it."""
        config = self.config
        if not config.precompute_ref_log_probs:
            if not config.is_own_reference:
                self.reference.build(self.reference_path)
            return
        parts: list[Sequences] = [self.judged(self.rows)]
        if config.estimates_kl:  # rows are not shuffled, so that an epoch has the steps of every other one
            steps = [batches[step] for step in range(batches.steps_per_epoch)]
            parts.append(Sequences.concat([self.mismatched(self.rows[rows]) for rows in steps]))
        if self.eval_rows is not None:
            parts += [self.judged(self.eval_rows)]
            parts += [self.mismatched(self.eval_rows)] if config.estimates_kl else []
        size = config.precompute_ref_batch_size or config.per_device_train_batch_size
        found = iter(self.reference.precomputed(self.reference_path, parts, micro_batch_size=size))
        self.known = Known(next(found), None)
        if config.estimates_kl:  # a step holds rows of anywhere where they are packed
            places = np.zeros(len(self.rows), np.int64)  # a row that no step has gets another's, which nobody reads
            seen = np.concatenate(steps)
            places[seen] = np.arange(len(seen))
            self.known = Known(self.known.matched, next(found)[places])
        if self.eval_rows is not None:
            self.eval_known = Known(next(found), next(found) if config.estimates_kl else None)

    def with_reference(self, rows: UnpairedPreferences, known: Known | None, micro_batch_size: int) -> Judged:
        """The rows of a step with the reference's log-probabilities (``known``, if they are), and the KL."""
        judged = self.judged(rows)
        ref_logps = self.reference_logps(judged, micro_batch_size) if known is None else known.matched
        kl = np.zeros(len(rows), np.float32)
        if self.config.estimates_kl:
            others = self.mismatched(rows)
            logps = self.policy.logps(others, micro_batch_size=micro_batch_size)
            ref_kl_logps = None if known is None else known.mismatched
            if ref_kl_logps is None:
                ref_kl_logps = self.reference_logps(others, micro_batch_size)
            log_ratios_B = torch.from_numpy(sums(logps) - sums(ref_kl_logps))
            kl = kl_estimates(log_ratios_B, self.kl_group(rows)).numpy()
        return dataclasses.replace(judged, ref_logps=ref_logps, kl=kl)

    def reference_logps(self, samples: Sequences, micro_batch_size: int) -> Ragged:
        """The reference's log-probabilities, or those of the policy without its adapter."""
        is_own = self.config.is_own_reference
        judge = self.policy if is_own else self.reference
        logps: Ragged = judge.logps(samples, adapter=not is_own, micro_batch_size=micro_batch_size)
        return logps

    def judged(self, rows: UnpairedPreferences) -> Judged:
        """Prompts with their completions, cut."""
        return rows.judged(max_length=self.config.max_length, truncation_mode=self.config.truncation_mode)

    def mismatched(self, rows: UnpairedPreferences) -> Sequences:
        """Prompts with the completions of other rows, cut."""
        group = self.kl_group(rows)
        others = rows.mismatched(group if group > 1 else len(rows))
        return others.sequences(max_length=self.config.max_length, truncation_mode=self.config.truncation_mode)

    def kl_group(self, rows: UnpairedPreferences) -> int:
        """How many consecutive rows share one estimate of the KL."""
        return self.config.kl_batch_size or len(rows)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation rows, under training's names with ``eval_`` before them."""
        assert self.eval_rows is not None
        judged = self.with_reference(self.eval_rows, self.eval_known, self.config.per_device_eval_batch_size)
        return with_margins(self.policy.measure(judged, len(judged))).values("eval_")

    def save(self, folder: Path) -> None:
        """The policy as it trains; the reference beside it if it has moved."""
        self.policy.save(folder)
        if self.config.sync_ref_model:
            self.reference.save(folder / "reference")

    def load(self, folder: Path) -> None:
        """The reference first: where both share a process, its random state is the policy's."""
        if self.config.sync_ref_model:
            self.reference.load(folder / "reference")
        self.policy.load(folder)


@dataclasses.dataclass(frozen=True)
class Known:
    """The reference's log-probabilities of the targets of each row, computed beforehand."""

    matched: Ragged
    mismatched: Ragged | None  # of the row's prompt with the completion of another; None: no KL is estimated

    def of(self, rows: np.ndarray) -> Known:
        """Those of some rows."""
        return Known(self.matched[rows], None if self.mismatched is None else self.mismatched[rows])


def measured(backend: Backend, config: KTOConfig, judged: Judged, num_rows: int) -> Metrics:
    """Loss and metrics of a worker's slice of evaluation rows."""
    return evaluated(
        backend,
        judged,
        partial(judged_loss, config, num_rows),
        TargetNumbers(),
        micro_batch_size=config.per_device_eval_batch_size,
        num_rows=num_rows,
        num_shards=RayHelper.current().shard.count,
    )


def sums(logps: Ragged) -> np.ndarray:
    """(rows,) float32, the log-probability of each whole completion."""
    return np.array([row.sum(dtype=np.float64) for row in logps], np.float32)


def with_margins(metrics: Metrics) -> Metrics:
    """As in TRL: where there are completions of both kinds, how far their mean rewards are apart."""
    found = metrics.values()
    if {"rewards/chosen", "rewards/rejected"} <= found.keys():
        metrics.mean("rewards/margins", found["rewards/chosen"] - found["rewards/rejected"], 1.0)
    return metrics
