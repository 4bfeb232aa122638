"""A user's class as mypy sees it: checked by ``test_types.py``, never run."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any, assert_type

from rayhelper import Future, RayHelper


@RayHelper.worker(group=["train", "judge"])
class Trainer:
    def __init__(self, lr: float) -> None:
        self.lr = lr

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def update(self, batch: list[int], scale: float = 1.0) -> list[float]:
        return [scale * item for item in batch]

    @RayHelper.function(group="judge", execute="first")
    async def judge(self, text: str) -> bool:
        return bool(text)

    @RayHelper.function(group="train")
    @classmethod
    def name(cls, suffix: str) -> str:
        return cls.__name__ + suffix


def right(trainer: Trainer) -> None:
    assert_type(Trainer(0.1), Trainer)
    assert_type(trainer.update([1, 2], scale=2.0), list[float])
    assert_type(trainer.update.defer([1]), Future[list[float]])
    assert_type(trainer.update.defer([1]).result(), list[float])
    assert_type(trainer.update.stream([1]), Iterator[list[float]])
    judged: Coroutine[Any, Any, bool] = trainer.judge("a")
    judged.close()
    assert_type(trainer.name("!"), str)
    assert_type(RayHelper.whole([1]), list[int])


def wrong(trainer: Trainer) -> None:
    Trainer("fast")  # E: arg-type
    trainer.update("text")  # E: arg-type
    trainer.update([1], factor=2)  # E: call-arg
    trainer.update.defer()  # E: call-arg
    trainer.judge(5).close()  # E: arg-type
    RayHelper.function(group="train", dispatch="slices")  # E: arg-type
    RayHelper.function(group="train", execute="one")  # E: arg-type
