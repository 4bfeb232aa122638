"""A class that cannot be defined: importing this module raises DecorationError."""

from __future__ import annotations

from typing import Any

from rayhelper import RayHelper

JUDGE = "judge"


@RayHelper.worker(group=["train", "rollout"])  # finding: role-not-hosted
class Undefined:
    @RayHelper.function(group="train", dispatch="slice", execute="first")  # finding: first-divides
    def first(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function("train", lambda n, i, data: data[i::n], "first")  # finding: first-divides
    def first_callable(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group=JUDGE)  # finding: role-not-declared
    def score(self) -> None:
        return None

    @RayHelper.function(group="train", dispatch="slices")  # type: ignore[arg-type]  # finding: unknown-setting
    def slices(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="rollout")
    def show(self) -> Any:
        return self.slices([1])  # finding: call-across-roles
