"""A GRPO trainer whose model nobody wants: it is not written at the end, which takes a benchmark of 4 B 15 seconds."""

from __future__ import annotations

from typing import Any

from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer


class MeasuredGRPO(GRPOTrainer):
    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.policy.export: Any = lambda folder: None  # type: ignore[method-assign]
