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
            "called": changed_config.CALLED,
            "arguments": getattr(changed_config.ARGS, "lr", None),
            "namespace": changed_config.CHOICE.lr,
            "added": getattr(changed_config.GIVEN, "lr", None),
            "default": changed_config.settings.rate,
            "argument": changed_config.faster.rate,
            "set in init": changed_config.settings.kept,
            "of a field": changed_config.config.names,
            "given to a dataclass": changed_config.given.lr,
            "method": settings.own(),
            "class method": settings.of_class(),
            "static method": settings.static(),
            "property": settings.shown,
            "own global": STEP,
            "own class": self.width,
            "own method": self._own(),
            "mode": changed_config.MODE,
        }

    @RayHelper.function(group="train", execute="first")
    def process(self) -> list[int]:
        own = [changed_config.PROCESS, changed_config.CHOICE.process, settings.process, settings.cached()]
        return [*own, changed_config.COUNT, len(changed_config.REGISTRY)]
