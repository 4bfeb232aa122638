"""The keys that say when a run evaluates, saves and ends, and which values of them have a meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SavingConfig:
    """When a run evaluates, saves and ends."""

    # Evaluation and checkpoints
    eval_strategy: Literal["steps", "epoch", "no"] = "steps"
    """When to evaluate, in addition to the end. steps: every ``eval_steps``. epoch: at the end of every epoch. no:
    never, and not at the end."""
    eval_steps: int | None = None
    """Optimizer steps between evaluations. null: only at the end."""
    val_before_train: bool = False
    """Also evaluate before the first step."""
    save_strategy: Literal["steps", "epoch", "best", "no"] = "steps"
    """When a checkpoint is saved. steps: every ``save_steps``. epoch: at the end of every epoch. best: after each
    evaluation that is better than all earlier ones. no: only the final model is saved."""
    save_steps: int = 500
    """Optimizer steps between checkpoints. 0: only the final model is saved."""
    save_total_limit: int | None = None
    """Checkpoints to keep. The oldest are removed first. The best one is kept if ``metric_for_best_model`` is set."""
    metric_for_best_model: str | None = None
    """The metric of an evaluation (with or without eval_) that decides which checkpoint is best."""
    greater_is_better: bool | None = None
    """Whether a larger ``metric_for_best_model`` is better. null: true, except for names that end in loss."""
    load_best_model_at_end: bool = False
    """The final model comes from the best checkpoint, unless the last evaluation is better."""
    early_stop_interval: int | None = None
    """The run ends after this number of consecutive checkpoints without a better ``metric_for_best_model``, as in
    ms-swift. null: never."""
    end_after_epochs: int | None = None
    """The run ends after this number of epochs, even if ``max_steps`` or ``num_train_epochs`` is larger. It also
    applies to a stream. The schedule does not change. null: no limit."""
    resume_from_checkpoint: bool | str | None = None
    """auto (or true): continues from the newest undamaged checkpoint of output_dir; without one, from step 0. A folder:
    continues from that checkpoint."""
    resume_without_manifest: bool = False
    """Also continues from a checkpoint without ``manifest.json``, although nothing proves that its files are
    complete."""
    resume_on_failure: int = 0
    """With Ray: how often a run may continue after workers died or exceeded ``timeout_s``. All workers are then started
    again, and the run continues from its newest checkpoint."""
    save_before_s: float | None = None
    """Seconds from the start of the command. After them, the run finishes its step, saves a checkpoint and ends with
    exit code 0. null: no limit."""
    stop_grace_s: float | None = None
    """Seconds that the current step may take after SIGTERM. A longer step ends the run without a checkpoint, and the
    run reports where it hangs. null: 20, or twice the longest step so far if that is longer. Saving may take at least
    60 seconds, or twice the longest checkpoint so far. The first checkpoint may take 0.32 seconds per million
    parameters, and at most 1800."""
    save_on_interrupt: bool = False
    """The first Ctrl-C finishes the step, saves a checkpoint and ends the run. The second Ctrl-C interrupts at once."""

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints before the end."""
        return self.save_strategy != "no" and (self.save_strategy != "steps" or self.save_steps > 0)

    @property
    def evaluates_before_end(self) -> bool:
        """Whether there are evaluations before the end, behind the first step."""
        return self.eval_strategy == "epoch" or (self.eval_strategy == "steps" and bool(self.eval_steps))


def saving_mistakes(config: SavingConfig, *, has_rows: bool) -> Iterator[str]:
    """What the keys break. ``has_rows``: there are rows to evaluate on."""
    if config.eval_steps is not None and config.eval_strategy != "steps":
        yield f"eval_steps is {config.eval_steps}, but eval_strategy is {config.eval_strategy}. Remove one of them."
    if config.save_steps not in (0, SavingConfig.save_steps) and config.save_strategy != "steps":
        yield f"save_steps is {config.save_steps}, but save_strategy is {config.save_strategy}. Remove one of them."
    asks = {
        f"eval_steps is {config.eval_steps}": config.eval_steps is not None,
        "eval_strategy is epoch": config.eval_strategy == "epoch",
        "val_before_train is set": config.val_before_train,
    }
    for told in [told for told, is_asked in asks.items() if is_asked and not has_rows]:
        yield f"{told}, but there is no eval_dataset to evaluate on. Add one, or remove the key."
    if config.eval_strategy == "no" and config.val_before_train:
        yield "val_before_train is set, but eval_strategy is no. Remove one of them."
    yield from _best_mistakes(config, has_rows=has_rows)


def _best_mistakes(config: SavingConfig, *, has_rows: bool) -> Iterator[str]:
    if config.metric_for_best_model is None:
        asks = {"greater_is_better": config.greater_is_better is not None}
        asks["load_best_model_at_end"] = config.load_best_model_at_end
        asks["early_stop_interval"] = config.early_stop_interval is not None
        for name in [name for name, is_set in asks.items() if is_set]:
            yield f"{name} is set, but metric_for_best_model is not. Set both, or neither."
        if config.save_strategy == "best":
            yield "save_strategy best saves the best model so far. Set metric_for_best_model, the metric that decides."
        return
    if config.early_stop_interval is not None and config.save_strategy == "best":
        yield (
            "early_stop_interval counts checkpoints that are not better, and save_strategy best saves none of them. "
            "Write save_strategy: steps or epoch, or remove early_stop_interval."
        )
    if not has_rows:
        asked = "early_stop_interval" if config.early_stop_interval is not None else "metric_for_best_model"
        asked = "load_best_model_at_end" if config.load_best_model_at_end else asked
        yield f"{asked} compares evaluations, but there is no eval_dataset to evaluate on. Add one, and eval_steps."
        return
    told = f"metric_for_best_model={config.metric_for_best_model} judges a checkpoint by the evaluation at its step: "
    saves, evaluates = config.save_strategy, config.eval_strategy
    if saves == "best" and not config.evaluates_before_end:
        yield f"{told}save_strategy best needs eval_steps, or eval_strategy: epoch"
    elif saves == "no":
        yield f"{told}save_strategy is no, so there is no checkpoint. Remove one of them."
    elif saves == "steps" and evaluates == "steps":
        if not config.eval_steps or not config.save_steps or config.save_steps % config.eval_steps:
            got = f"{config.save_steps} and {config.eval_steps}"
            yield f"{told}save_steps must be a multiple of eval_steps; got {got}"
    elif saves in ("steps", "epoch") and saves != evaluates:
        yield f"{told}save_strategy and eval_strategy must be the same; got {saves} and {evaluates}"
