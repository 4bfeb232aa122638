"""A GRPO trainer whose model nobody wants: it is not written at the end, which takes a benchmark of 4 B 15 seconds."""

from __future__ import annotations

from pathlib import Path

from rayhelper import RayHelper
from trainers.grpo.trainer import GRPOTrainer


class MeasuredGRPO(GRPOTrainer):
    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None: ...
