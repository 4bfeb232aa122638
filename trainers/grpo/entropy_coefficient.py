"""The coefficient of the entropy bonus over the steps of a run: as it was set, or moved towards a target entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainers.grpo.config import GRPOConfig
from trainers.losses.entropy import applied_entropy_coefficient, next_entropy_coefficient
from trainers.metrics import Metrics


@dataclass(frozen=True)
class EntropyCoefficient:
    """What the bonus is weighed with in the next step (``applied``), and after it (``after``)."""

    config: GRPOConfig
    coefficient: float
    entropy: float | None = None  # mean of the last step that measured one; None: there was none

    @classmethod
    def of(cls, config: GRPOConfig, state: Mapping[str, Any]) -> EntropyCoefficient:
        """At the beginning of a run, or, from a checkpoint's ``state``, where it was."""
        return cls(config, state.get("entropy_coef", config.entropy_coef), state.get("entropy"))

    @property
    def is_on(self) -> bool:
        """Whether there ever is a bonus."""
        return self.config.entropy_coef > 0 or self.config.use_adaptive_entropy

    @property
    def applied(self) -> float:
        if not self.config.use_adaptive_entropy:
            return self.coefficient
        return applied_entropy_coefficient(self.coefficient, self.entropy, target=self.config.entropy_target)

    def after(self, metrics: Metrics) -> EntropyCoefficient:
        """After a step that reported these metrics, which get the coefficient too if there ever is a bonus."""
        following = self._moved(metrics)
        if following.is_on:
            metrics.same("entropy_coef", following.coefficient)
        return following

    def _moved(self, metrics: Metrics) -> EntropyCoefficient:
        """Without an entropy the step had no tokens: the coefficient stays."""
        config = self.config
        name = "entropy" if config.top_entropy_quantile == 1 else "top_entropy"
        if not config.use_adaptive_entropy or (entropy := metrics.values().get(name)) is None:
            return self
        coefficient = next_entropy_coefficient(
            self.coefficient,
            entropy,
            target=config.entropy_target,
            delta=config.entropy_coef_delta,
            minimum=config.entropy_coef_min,
            maximum=config.entropy_coef_max,
        )
        return replace(self, coefficient=coefficient, entropy=entropy)

    def state(self) -> dict[str, float | None]:
        return {"entropy_coef": self.coefficient, "entropy": self.entropy}
