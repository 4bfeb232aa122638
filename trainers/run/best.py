"""The best checkpoint of a run, by the evaluation at its step, and the end of a run that gets no better.

``metric_for_best_model`` says by which number; ``early_stop_interval`` how many checkpoints in a row may be no better.
At the end of a run: what evaluation found before and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, RayHelper
from trainers.configuration.saving import SavingConfig
from trainers.manifest import damage


class Best:
    """The best evaluation so far, and the best checkpoint; ``state()`` goes into every checkpoint."""

    def __init__(self, config: SavingConfig, state: Mapping[str, Any]) -> None:
        self.config = config
        self.metric: float | None = state.get("best_metric")  # of the checkpoint
        self.checkpoint: str | None = state.get("best_model_checkpoint")  # its folder's name
        self.seen: float | None = state.get("best_seen", self.metric)  # of all evaluations
        self.seen_at_save: float | None = state.get("best_seen_at_save")  # when a checkpoint was last saved
        self.no_better: int | None = state.get("checkpoints_no_better")  # in a row; None: none was saved

    def state(self) -> dict[str, Any]:
        return {
            "best_metric": self.metric,
            "best_model_checkpoint": self.checkpoint,
            "best_seen": self.seen,
            "best_seen_at_save": self.seen_at_save,
            "checkpoints_no_better": self.no_better,
        }

    @property
    def ends_run(self) -> bool:
        """Whether as many checkpoints as ``early_stop_interval`` says were no better."""
        limit = self.config.early_stop_interval
        return limit is not None and self.no_better is not None and self.no_better >= limit

    def see(self, numbers: Mapping[str, float]) -> bool:
        """Notes an evaluation; whether it is better than all before.

        Raises ConfigError if it does not hold the number that ``metric_for_best_model`` names.
        """
        value = judged_by(self.config, numbers)
        if not self._is_better(value, self.seen):
            return False
        self.seen = value
        return True

    def judge(self, folder: Path, numbers: Mapping[str, float]) -> None:
        """Notes ``folder`` as the best checkpoint if ``numbers``, of its evaluation, are better than ever before.

        Counts it as no better if no evaluation since the checkpoint before was better than all earlier ones; the first
        checkpoint is what later ones are compared with.
        """
        value = judged_by(self.config, numbers)
        if value is None:
            return
        is_first = self.no_better is None
        self.no_better = 0 if is_first or self._is_better(self.seen, self.seen_at_save) else (self.no_better or 0) + 1
        self.seen_at_save = self.seen
        if self._is_better(value, self.metric):
            self.metric, self.checkpoint = value, folder.name

    def is_beaten_by(self, numbers: Mapping[str, float]) -> bool:
        """Whether ``numbers`` are better than those of the best checkpoint, or there is none."""
        return self.checkpoint is None or self._is_better(judged_by(self.config, numbers), self.metric)

    def check_there(self, output_dir: Path) -> None:
        """Raises ConfigError if the best checkpoint is to be loaded at the end and is not in ``output_dir``."""
        name = self.checkpoint
        if self.config.load_best_model_at_end and name is not None and not (output_dir / name).is_dir():
            raise ConfigError(
                f"load_best_model_at_end: the best checkpoint of the continued run is {name}, which is not in "
                f"{output_dir}. Copy it there, or remove load_best_model_at_end."
            )

    @RayHelper.function(group="driver", execute="first")
    def whole(self, folder: Path) -> Path:
        """The folder of the best checkpoint. Raises ConfigError if a file of it has changed since it was written."""
        if told := damage(folder):
            raise ConfigError(
                f"load_best_model_at_end: the best checkpoint {folder} is damaged: {told}. Remove "
                "load_best_model_at_end, and resume from the newest checkpoint to get its model."
            )
        return folder

    def told(self, output_dir: Path) -> str:
        """One line of the best checkpoint; empty without one."""
        name = self.config.metric_for_best_model
        if self.checkpoint is None or name is None:
            return ""
        return f"the best checkpoint is {output_dir / self.checkpoint} ({name} {self.metric:.4g})"

    def _is_better(self, value: float | None, than: float | None) -> bool:
        """Whether ``value`` is a number, and better; anything is better than None."""
        if value is None or math.isnan(value):
            return False
        sign = 1 if is_greater_better(self.config) else -1
        return than is None or sign * value > sign * than


def judged_by(config: SavingConfig, numbers: Mapping[str, float]) -> float | None:
    """The number by which checkpoints are compared; None if they are not. Raises ConfigError if it is not there."""
    name = config.metric_for_best_model
    if name is None:
        return None
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in numbers:
        raise ConfigError(f"metric_for_best_model: evaluation gives no {name!r}; it gives {', '.join(numbers)}")
    return numbers[name]


def is_greater_better(config: SavingConfig) -> bool:
    """``greater_is_better``, or what the name of the metric says of it."""
    if config.greater_is_better is None:
        return not str(config.metric_for_best_model).endswith("loss")
    return config.greater_is_better


def before_and_after(first: Mapping[str, float], last: Mapping[str, float]) -> Iterator[str]:
    """A line for each reward, loss and accuracy that an evaluation gave before the first step and at the end."""
    for name, after in last.items():
        before = first.get(name)
        is_reward = "rewards/" in name and name.endswith("/mean")
        if before is None or not (is_reward or name.endswith(("loss", "accuracy", "accuracies"))):
            continue
        is_share = not name.endswith("loss") and min(before, after) >= 0 and max(before, after) <= 1
        told = [f"{value:.1%}" if is_share else f"{value:.4g}" for value in (before, after)]
        yield f"{name}: {told[0]} before, {told[1]} after"
