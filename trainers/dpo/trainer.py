"""DPO: make chosen completions likelier than rejected ones, measured against a reference model.

    driver                     reference workers         policy workers (role default)
    ------                     -----------------         -----------------------------
    pairs of a step ─────────► reference_logps
          ◄─────────────────── slice, flatten
    pairs ─────────────────────────────────────────────► update           one optimizer step
    metrics ◄─────────────────────────────────────────── slice, merge
                               mix_reference ◄────────── export_weights   now and then, if sync_ref_model

Direct preference optimization (arXiv 2305.18290); the papers of its many variants stand beside their formulas in
``losses/preference.py``. Names, defaults and metrics are TRL's. A batch counts pairs. With LoRA the reference is the
policy without its adapter, and role ``reference`` has nothing to do.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import Ragged
from trainers.configuration.shared import SEQUENCES_PER_STEP, sequences_per_step, total_steps
from trainers.data.preferences import Preferences, tokenize_preferences
from trainers.data.rows import Batches
from trainers.dpo.config import DPOConfig, weighted_losses
from trainers.dpo.reference_store import read_reference_logps, write_reference_logps
from trainers.dpo.scores import PairNumbers, evaluated, pair_logps
from trainers.losses.preference import SORTING_LOSSES, Completions, add_preference_metrics, preference_loss
from trainers.losses.tokens import masked
from trainers.metrics import Metrics
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.weights import exported, first_of
from trainers.run.run import (
    Run,
    build_backend,
    check_before_start,
    load_model_and_tokenizer,
    mistakes_of,
    num_shards,
    num_train_shards,
    read_rows,
    resumed_state,
    saved_order,
)

PairLogps = tuple[Ragged, Ragged]  # of the chosen and of the rejected completions


@RayHelper.worker(group=["default", "reference"])
class DPOTrainer:
    """``DPOTrainer(config).train()``; roles ``default`` (the policy) and ``reference`` may share a device group.

    The reference shares the policy's workers where no device group names it.
    """

    def __init__(self, config: DPOConfig) -> None:
        self.config = config
        self.backend: Backend | None = None
        self.reference: Backend | None = None
        self.prepare()

    @staticmethod
    def check(config: DPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        num_workers = num_train_shards(config, groups, "default")
        num_pairs = sequences_per_step(config, num_workers, saved_order(config))
        sorting = SORTING_LOSSES & set(weighted_losses(config)[0])
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
        self.reference_path = self.model_path
        if config.ref_model is not None:
            self.reference_path = resolved_models(config, self.model_path, [config.ref_model])[config.ref_model]
            check_same_tokens("ref_model", self.reference_path, self.tokenizer, config.trust_remote_code)
        self.pairs = self.read(config.dataset, config.dataset_split)
        self.eval_pairs = self.read(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None

    def read(self, source: Any, split: str) -> Preferences:
        """The pairs of a dataset."""
        config = self.config
        rows = read_rows(config, source, split)
        with mistakes_of("dataset"):
            return tokenize_preferences(
                rows,
                self.tokenizer,
                max_length=config.max_length,
                truncation_mode=config.truncation_mode,
                num_proc=config.dataset_num_proc,
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.num_train_shards(), saved_order(config))
        batches = Batches(len(self.pairs), batch_size, seed=config.seed, shuffle=config.shuffle_dataset)
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.prepare_reference()
        self.build_policy(self.model_path, num_steps)
        headline = ("loss", "rewards/accuracies", "rewards/margins")
        order = {"pairs": len(self.pairs), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=headline, order=order) as run:
            run.resume(self.load)
            if config.val_before_train and run.step == 0:
                run.evaluate(self.evaluate)
            while run.step < num_steps:
                with run.phase("data"):
                    pairs = self.pairs[batches[run.step]]
                with run.phase("logps"):
                    pairs = self.with_reference(pairs, config.per_device_train_batch_size)
                with run.phase("update"):
                    metrics = self.update(pairs, len(pairs), pairs.num_chosen_tokens)
                metrics.sum("num_tokens", pairs.num_tokens)
                run.log_step(metrics, epoch=(run.step + 1) / batches.steps_per_epoch)
                if config.sync_ref_model and run.step % config.ref_model_sync_steps == 0:
                    with run.phase("sync"):
                        weights: Any = self.export_weights.defer()  # from worker to workers, not through the driver
                        self.mix_reference(weights)
                if run.due(config.eval_steps):
                    run.evaluate(self.evaluate)
                if run.due(config.save_steps):
                    run.save_checkpoint(self.save, self.tokenizer)
            if self.eval_pairs is not None:
                run.evaluate(self.evaluate)
            return run.finish(self.export, self.tokenizer)

    def prepare_reference(self) -> None:
        """Loads the reference model; or, to precompute, takes from it all there is to know and frees it.

        A resumed run reads what the run before it precomputed. A new run never does: a folder may by now hold another
        model.
        """
        config = self.config
        if not config.precompute_ref_log_probs:
            if not config.reference_free and not config.is_own_reference:
                self.build_reference(self.reference_path)
            return
        checkpoint, _ = resumed_state(config)
        parts = [self.pairs] + ([] if self.eval_pairs is None else [self.eval_pairs])
        known = None if checkpoint is None else read_reference_logps(checkpoint.parent, parts, self.reference_path)
        if known is None:
            size = config.precompute_ref_batch_size or config.per_device_train_batch_size
            self.build_reference(self.reference_path)
            known = [self.reference_logps(part, size) for part in parts]
            self.free_reference()
            write_reference_logps(Path(config.output_dir), parts, self.reference_path, known)
        self.pairs = with_logps(self.pairs, known[0])
        self.eval_pairs = None if self.eval_pairs is None else with_logps(self.eval_pairs, known[1])

    def with_reference(self, pairs: Preferences, micro_batch_size: int) -> Preferences:
        """The pairs with the reference's log-probabilities, unless they have them or there is no reference."""
        if self.config.reference_free or pairs.ref_chosen_logps is not None:
            return pairs
        logps_of = self.adapter_free_logps if self.config.is_own_reference else self.reference_logps
        return with_logps(pairs, logps_of(pairs, micro_batch_size))

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of all evaluation pairs, under training's names with ``eval_`` before them."""
        assert self.eval_pairs is not None
        size = self.config.per_device_eval_batch_size
        pairs = self.with_reference(self.eval_pairs, size)
        most = -(-len(pairs) // self.num_train_shards())
        metrics = self.measure(pairs, len(pairs), pairs.num_chosen_tokens, num_passes=-(-most // size))
        return {f"eval_{name}": value for name, value in metrics.values().items()}

    def save(self, folder: Path) -> None:
        """The policy as it trains; the reference beside it if it has moved."""
        self.save_policy(folder)
        if self.config.sync_ref_model:
            self.save_reference(folder / "reference")

    def load(self, folder: Path) -> None:
        """The reference first: where both share a process, its random state is the policy's."""
        if self.config.sync_ref_model:
            self.load_reference(folder / "reference")
        self.load_policy(folder)

    # Role reference

    @RayHelper.function(group="reference")
    def build_reference(self, model: str) -> None:
        self.reference = build_backend(self.config, model, num_training_steps=None)

    @RayHelper.function(group="reference")
    def free_reference(self) -> None:
        self.reference = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @RayHelper.function(group="reference", dispatch="slice", collect="flatten")
    def reference_logps(self, pairs: Preferences, micro_batch_size: int) -> PairLogps:
        return pair_logps(built(self.reference), pairs, micro_batch_size=micro_batch_size)

    @RayHelper.function(group="reference")
    def mix_reference(self, weights: dict[str, torch.Tensor]) -> None:
        built(self.reference).mix_weights(weights.items(), self.config.ref_model_mixup_alpha)

    @RayHelper.function(group="reference")
    def save_reference(self, folder: Path) -> None:
        built(self.reference).save(folder)

    @RayHelper.function(group="reference")
    def load_reference(self, folder: Path) -> None:
        built(self.reference).load(folder)

    # Role default: the policy

    @RayHelper.function(group="default", execute="first")
    def num_train_shards(self) -> int:
        return num_shards(self.config)

    @RayHelper.function(group="default")
    def build_policy(self, model: str, num_steps: int) -> None:
        self.backend = build_backend(self.config, model, num_training_steps=num_steps)

    @RayHelper.function(group="default", dispatch="slice", collect="flatten")
    def adapter_free_logps(self, pairs: Preferences, micro_batch_size: int) -> PairLogps:
        return pair_logps(built(self.backend), pairs, micro_batch_size=micro_batch_size, adapter=False)

    @RayHelper.function(group="default", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def update(self, pairs: Preferences, num_pairs: int, num_chosen_tokens: int) -> Metrics:
        """One optimizer step over all workers; ``num_pairs`` and ``num_chosen_tokens`` are those of the whole step."""
        metrics = built(self.backend).step(
            pairs,
            partial(dpo_loss, self.config, num_pairs, num_chosen_tokens),
            micro_batch_size=self.config.per_device_train_batch_size,
            token_function=PairNumbers(self.config.use_weighting),
        )
        return with_chosen_accuracy(metrics)

    @RayHelper.function(group="default", dispatch="slice", collect=Metrics.merge)
    def measure(self, pairs: Preferences, num_pairs: int, num_chosen_tokens: int, num_passes: int) -> Metrics:
        """Loss and metrics without learning, of ``num_pairs`` over all workers; what sorts, sorts micro-batches."""
        metrics = evaluated(
            built(self.backend),
            pairs,
            partial(share_of_dpo_loss, self.config, num_pairs, num_chosen_tokens),
            PairNumbers(self.config.use_weighting),
            micro_batch_size=self.config.per_device_eval_batch_size,
            num_passes=num_passes,
        )
        return with_chosen_accuracy(metrics)

    @RayHelper.function(group="default", collect=first_of)
    def export_weights(self) -> dict[str, torch.Tensor]:
        return exported(built(self.backend))

    @RayHelper.function(group="default")
    def save_policy(self, folder: Path) -> None:
        built(self.backend).save(folder)

    @RayHelper.function(group="default")
    def export(self, folder: Path) -> None:
        built(self.backend).export(folder)

    @RayHelper.function(group="default")
    def load_policy(self, folder: Path) -> None:
        built(self.backend).load(folder)


def built(backend: Backend | None) -> Backend:
    assert backend is not None, "build_policy and build_reference come first"
    return backend


def with_logps(pairs: Preferences, logps: PairLogps) -> Preferences:
    """The pairs with the reference's log-probabilities."""
    return dataclasses.replace(pairs, ref_chosen_logps=logps[0], ref_rejected_logps=logps[1])


def dpo_loss(
    config: DPOConfig,
    num_pairs: float,
    num_chosen_tokens: float,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
    *,
    mean_logits_BT: torch.Tensor,
    is_top1_BT: torch.Tensor,
    log_sum_sq_probs_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of one micro-batch of pairs, divided by the counts of the whole optimizer step.

    B are its sequences, twice as many: all chosen, then all rejected.
    """
    ref_logps_BT = None
    if micro.ref_chosen_logps is not None and micro.ref_rejected_logps is not None:
        ref_logps_BT = Ragged.concat([micro.ref_chosen_logps, micro.ref_rejected_logps]).padded(0, logps_BT.device)

    def completions(half: slice) -> Completions:
        tensors = (logps_BT, mask_BT, ref_logps_BT, log_sum_sq_probs_BT)
        return Completions(*(None if tensor is None else tensor[half] for tensor in tensors))  # type: ignore[arg-type]

    chosen, rejected = slice(0, len(micro)), slice(len(micro), None)
    loss_types, loss_weights = weighted_losses(config)
    loss, diagnostics = preference_loss(
        completions(chosen),
        completions(rejected),
        num_pairs=num_pairs,
        num_chosen_tokens=num_chosen_tokens,
        loss_type=loss_types,
        loss_weights=loss_weights,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        ld_alpha=config.ld_alpha,
        discopop_tau=config.discopop_tau,
    )
    add_preference_metrics(metrics, diagnostics)
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    for name, half in (("chosen", chosen), ("rejected", rejected)):
        logits_BT = masked(mean_logits_BT[half], mask_BT[half], "mean_logits_BT")
        metrics.mean(f"logits/{name}", logits_BT.sum(), mask_BT[half].sum())
    metrics.mean("chosen_token_accuracy", is_top1_BT[chosen].sum(), mask_BT[chosen].sum())
    return loss


def share_of_dpo_loss(
    config: DPOConfig,
    num_pairs: int,
    num_chosen_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
    **numbers: torch.Tensor,
) -> torch.Tensor:
    """``dpo_loss`` as if the micro-batch were the whole, times its share of it: what losses that sort need."""
    share = len(micro) / num_pairs
    tokens = share * num_chosen_tokens
    return share * dpo_loss(config, len(micro), tokens, logps_BT, entropy_BT, mask_BT, micro, metrics, **numbers)


def with_chosen_accuracy(metrics: Metrics) -> Metrics:
    """As in TRL, the ``mean_token_accuracy`` of the chosen completions alone, in place of the backend's of all."""
    metrics.entries.pop("mean_token_accuracy", None)
    chosen = metrics.entries.pop("chosen_token_accuracy", None)
    if chosen is not None:
        metrics.entries["mean_token_accuracy"] = chosen
    return metrics
