"""DPO: make chosen completions likelier than rejected ones, measured against a reference model.

    driver                     reference                 policy (role default)
    ------                     ---------                 ---------------------
    pairs of a step ─────────► logps
          ◄─────────────────── slice, flatten
    pairs ─────────────────────────────────────────────► step             one optimizer step
    metrics ◄─────────────────────────────────────────── balanced, merge
                               mix ◄──────────────────── weights          now and then, if sync_ref_model

Direct preference optimization (arXiv 2305.18290); the papers of its many variants stand beside their formulas in
``losses/preference.py``. Names, defaults and metrics are TRL's. A batch counts pairs. With LoRA the reference is the
policy without its adapter, and role ``reference`` has nothing to do.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.scores.evaluated import TargetNumbers, evaluated
from trainers.batch import Ragged
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.packs import pack_length
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_by_rows_of, sequences_per_step, total_steps
from trainers.data.broken_rows import pair_mistake, without_broken
from trainers.data.images.conversations import COLUMNS
from trainers.data.images.processor import seen_too
from trainers.data.packs import batches_of
from trainers.data.preferences import Preferences, tokenize_preferences, with_prompt
from trainers.data.texts.thoughts import written
from trainers.dpo.config import DPOConfig, weighted_losses
from trainers.dpo.loss import PairCounts, dpo_loss, share_of_dpo_loss
from trainers.dpo.scores import RunningMean, mean_reward, pair_logps
from trainers.losses.preference import SORTING_LOSSES
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start, num_train_shards
from trainers.parts.frozen import Reference
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.policy import DefaultPolicy
from trainers.run.run import Run, saved_order

HEADLINE = ("loss", "rewards/accuracies", "rewards/margins")
PairLogps = tuple[Ragged, Ragged]  # of the chosen and of the rejected completions


@RayHelper.worker(group=["default", "reference"])
class DPOTrainer:
    """``DPOTrainer(config).train()``; roles ``default`` (the policy) and ``reference`` may share a device group.

    The reference shares the policy's workers where no device group names it.
    """

    def __init__(self, config: DPOConfig) -> None:
        self.config = config
        self.policy = DefaultPolicy(
            config,
            loss=dpo_loss,
            measure=measured,
            token_function=TargetNumbers(config.use_weighting),
            score=pair_logps,
        )
        self.reference = Reference(
            config,
            every=config.ref_model_sync_steps if config.sync_ref_model else None,
            share=config.ref_model_mixup_alpha,
            score=pair_logps,
        )
        self.rewards = RunningMean()
        self.prepare()

    @staticmethod
    def check(config: DPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        num_workers = num_train_shards(config, groups, "default")
        num_pairs = sequences_per_step(config, num_workers, saved_order(config))
        sorting = SORTING_LOSSES & set(weighted_losses(config)[0])
        if sorting and config.packing:
            raise ConfigError(
                f"loss_type {', '.join(sorted(sorting))} sorts all pairs of an optimizer step, which must be one "
                "micro-batch. packing: true sets the tokens of a micro-batch instead. Remove packing."
            )
        if sorting and (num_workers > 1 or num_pairs > config.per_device_train_batch_size or config.token_budget):
            raise ConfigError(
                f"loss_type {', '.join(sorted(sorting))} sorts all pairs of an optimizer step: they must be one "
                f"micro-batch of one worker. A step has {num_pairs} pairs on {num_workers} workers, a micro-batch "
                f"per_device_train_batch_size={config.per_device_train_batch_size} (token_budget "
                f"{config.token_budget}). Make them equal, with one worker and without token_budget."
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
        self.pairs = self.read(*config.training_data)
        self.eval_pairs = self.read(*config.evaluation_data) if config.evaluates else None

    def read(self, source: Any, split: str) -> Preferences:
        """The pairs of a dataset."""
        config = self.config
        rows = read_rows(config, source, split, self.images)
        with mistakes_of("dataset"):
            columns = ("chosen", "rejected", "prompt", "margin", *COLUMNS)
            rows = without_broken(
                rows, seen_too(pair_mistake, self.images, with_prompt), *columns, skip=config.skip_broken_rows
            )
            return tokenize_preferences(
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
        batches = batches_of(
            self.pairs.unpadded_lengths(), batch_size, pack_length=pack_length(config), **order_by_rows_of(config)
        )
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.prepare_reference()
        self.policy.build(self.model_path, num_steps)
        order = {"pairs": len(self.pairs), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=HEADLINE, order=order, rows=self.pairs) as run:
            self.rewards = RunningMean(**run.trainer_state)
            for step in run.rounds(self, self.state):
                with run.phase("data"):
                    pairs = dataclasses.replace(self.pairs[batches[step]], row_ids=batches[step])
                    pairs = pairs.with_nll_batches(config.nll_batch_size)
                with run.phase("logps"):
                    pairs = self.with_reference(pairs, config.per_device_train_batch_size)
                if config.bco_shift:
                    with run.phase("logps"):
                        self.rewards.add(mean_reward(pairs, self.policy.logps(pairs), config.beta))
                with run.phase("update"):
                    counts = counts_of(pairs, self.rewards.mean)
                    metrics = with_chosen_accuracy(self.policy.step(pairs, counts))
                if config.bco_shift:
                    metrics.same("bco_shift", self.rewards.mean)
                metrics.sum("num_tokens", pairs.num_tokens)
                run.log_step(metrics, epoch=(step + 1) / batches.steps_per_epoch)
                with run.phase("sync"):
                    self.reference.follow(self.policy, run.step)
            return run.finish(self.policy.export, self.tokenizer)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to know of the rewards so far."""
        return dataclasses.asdict(self.rewards) if self.config.bco_shift else {}

    def prepare_reference(self) -> None:
        """Loads the reference model; or, to precompute, takes from it all there is to know and frees it."""
        config = self.config
        if not config.precompute_ref_log_probs:
            if not config.reference_free and not config.is_own_reference:
                self.reference.build(self.reference_path)
            return
        size = config.precompute_ref_batch_size or config.per_device_train_batch_size
        parts = [self.pairs] + ([] if self.eval_pairs is None else [self.eval_pairs])
        known = self.reference.precomputed(self.reference_path, parts, micro_batch_size=size)
        halves = [(logps[: len(part)], logps[len(part) :]) for part, logps in zip(parts, known, strict=True)]
        self.pairs = with_logps(self.pairs, halves[0])
        self.eval_pairs = None if self.eval_pairs is None else with_logps(self.eval_pairs, halves[1])

    def with_reference(self, pairs: Preferences, micro_batch_size: int) -> Preferences:
        """The pairs with the reference's log-probabilities, unless they have them or there is no reference."""
        if self.config.reference_free or pairs.ref_chosen_logps is not None:
            return pairs
        is_own = self.config.is_own_reference  # the policy without its adapter
        judge = self.policy if is_own else self.reference
        return with_logps(pairs, judge.logps(pairs, adapter=not is_own, micro_batch_size=micro_batch_size))

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation pairs, under training's names with ``eval_`` before them."""
        assert self.eval_pairs is not None
        size = self.config.per_device_eval_batch_size
        pairs = self.with_reference(self.eval_pairs, size)
        pairs = pairs.with_nll_batches(size if self.config.nll_batch_size else None)
        counts = counts_of(pairs, self.rewards.mean)
        return with_chosen_accuracy(self.policy.measure(pairs, counts)).values("eval_")

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


def measured(backend: Backend, config: DPOConfig, pairs: Preferences, counts: PairCounts) -> Metrics:
    """Loss and metrics of a worker's slice of evaluation pairs; what sorts, sorts micro-batches."""
    return evaluated(
        backend,
        pairs,
        partial(share_of_dpo_loss, config, counts),
        TargetNumbers(config.use_weighting),
        micro_batch_size=config.per_device_eval_batch_size,
        num_rows=int(counts.num_pairs),
        num_shards=RayHelper.current().shard.count,
    )


def counts_of(pairs: Preferences, bco_shift: float = 0.0) -> PairCounts:
    return PairCounts(len(pairs), pairs.num_chosen_tokens, bco_shift)


def with_logps(pairs: Preferences, logps: PairLogps) -> Preferences:
    """The pairs with the reference's log-probabilities."""
    return dataclasses.replace(pairs, ref_chosen_logps=logps[0], ref_rejected_logps=logps[1])


def with_chosen_accuracy(metrics: Metrics) -> Metrics:
    """As in TRL, the ``mean_token_accuracy`` of the chosen completions alone, in place of the backend's of all."""
    name = "mean_token_accuracy"
    return metrics.without(name).renamed({"chosen_token_accuracy": name})
