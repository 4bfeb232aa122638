"""A user's class with roles that reads settings of another module."""

from __future__ import annotations

from typing import Any

from rayhelper import RayHelper
from tests.rayhelper import changed_config
from tests.rayhelper.changed_config import SCALE as SCALE_AS_IMPORTED
from tests.rayhelper.changed_config import settings

STEP = 1


@RayHelper.worker(group="train")
class User:
    width = 1

    def _own(self) -> str:
        return "own"

    @RayHelper.function(group="train", execute="first")
    def seen(self) -> dict[str, Any]:
        return {
            "global": changed_config.SCALE,
            "through a function": changed_config.scaled(2),
            "imported before": SCALE_AS_IMPORTED,
            "dict": changed_config.OPTIONS,
            "list": changed_config.NAMES,
            "class": changed_config.Settings.lr,
            "object": settings.lr,
            "dataclass": changed_config.config.lr,
            "late": changed_config.LATE,
            "own global": STEP,
            "own class": self.width,
            "own method": self._own(),
            "mode": changed_config.MODE,
        }

    @RayHelper.function(group="train", execute="first")
    def process(self) -> list[int]:
        return [changed_config.PROCESS, changed_config.COUNT, len(changed_config.REGISTRY)]
