"""What the workers of ``sizes.py`` run. Nothing here loads torch, so that 128 of them fit in a small machine."""

from __future__ import annotations

from rayhelper import RayHelper


class Actor:
    def noop(self) -> None:
        return None

    def plus_one_each(self, items: list[int]) -> list[int]:
        return [item + 1 for item in items]


@RayHelper.worker(group="work")
class Trainer:
    @RayHelper.function(group="work")
    def noop(self) -> None:
        return None

    @RayHelper.function(group="work", dispatch="slice", collect="flatten")
    def plus_one_each(self, items: list[int]) -> list[int]:
        return [item + 1 for item in items]
