"""A user's class as type checkers see it, everything right: checked by ``test_types.py``, never run.

A decorated method keeps the type of the undecorated one, in every kind of method and every way to call it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar, assert_type

from rayhelper import Future, RayHelper

T = TypeVar("T")


def every_other(n: int, i: int, data: list[int]) -> list[int]:
    return data[i::n]


@RayHelper.worker(group=["train", "judge"])
class Trainer:
    """Every kind of method."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def update(self, batch: list[int], scale: float = 1.0) -> list[float]:
        """The batch, scaled."""
        return [scale * item + self.shifted(item) for item in batch]

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def same(self, items: list[T], *others: Any, **named: dict[str, Any]) -> list[T]:
        return items

    @RayHelper.function(group="judge", execute="first")
    async def judge(self, text: str) -> bool:
        return bool(text)

    @RayHelper.function(group="train")
    def count(self, stop: int) -> Iterator[int]:
        yield from range(stop)

    @RayHelper.function(group="train")
    async def tokens(self, text: str) -> AsyncIterator[str]:
        for token in text.split():
            yield token

    @RayHelper.function(group="train")
    @staticmethod
    def shifted(value: int, by: int = 1) -> int:
        return value + by

    @staticmethod
    @RayHelper.function(group="train")
    def scaled(value: float, by: float = 2.0) -> float:
        return value * by

    @RayHelper.function(group="train")
    @staticmethod
    def version() -> str:
        return "1"

    @RayHelper.function(group="train")
    @classmethod
    def name(cls, suffix: str) -> str:
        return cls.__name__ + suffix

    @classmethod
    @RayHelper.function(group="train")
    def build(cls, lr: float) -> Trainer:
        return cls(lr)

    @property
    @RayHelper.function(group="train", execute="first")
    def loss(self) -> float:
        return self.lr

    @RayHelper.function(group="train", dispatch=every_other, collect=max)
    def largest(self, items: list[int]) -> int:
        return max(items)

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(cost=len), collect="flatten")
    def upper(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]

    @RayHelper.function(group="driver")
    def load(self) -> list[int]:
        return []


class Careful(Trainer):
    """Inherits, overrides, calls its parent."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def update(self, batch: list[int], scale: float = 1.0) -> list[float]:
        return super().update(batch, scale=scale)


def calls(trainer: Trainer, careful: Careful) -> None:
    assert_type(Trainer(0.1), Trainer)
    assert_type(Careful(lr=0.1), Careful)
    assert_type(trainer.update([1, 2], scale=2.0), list[float])
    assert_type(careful.update([1]), list[float])
    assert_type(trainer.same(["a"]), list[str])
    assert_type(trainer.count(3), Iterator[int])
    assert_type(trainer.shifted(1, by=2), int)
    assert_type(careful.shifted(1), int)
    assert_type(trainer.scaled(1.0, by=2.0), float)
    assert_type(trainer.version(), str)
    assert_type(trainer.name("!"), str)
    assert_type(careful.name(suffix="!"), str)
    assert_type(trainer.build(0.1), Trainer)
    assert_type(trainer.loss, float)
    assert_type(trainer.largest([1]), int)
    assert_type(trainer.upper(["a"]), list[str])
    assert_type(trainer.load(), list[int])
    as_a_value: Callable[[list[int]], list[float]] = trainer.update
    as_a_value([1])


async def asynchronous_calls(trainer: Trainer, careful: Careful) -> None:
    assert_type(await trainer.judge("a"), bool)
    assert_type(await careful.judge(text="a"), bool)
    async for token in trainer.tokens("a b"):
        assert_type(token, str)


def deferred_calls(trainer: Trainer) -> None:
    assert_type(trainer.update.defer([1]), Future[list[float]])
    assert_type(trainer.update.defer([1], scale=2.0).result(timeout_s=1.0), list[float])
    assert_type(trainer.judge.defer("a"), Future[bool])
    assert_type(trainer.count.defer(3), Future[list[int]])
    assert_type(trainer.tokens.defer("a"), Future[list[str]])
    assert_type(trainer.shifted.defer(1), Future[int])
    assert_type(trainer.scaled.defer(1.0), Future[float])
    assert_type(trainer.name.defer("!"), Future[str])
    assert_type(trainer.update.defer([1]).cancel(), bool)
    for future in RayHelper.as_completed([trainer.shifted.defer(1), trainer.shifted.defer(2)]):
        assert_type(future, Future[int])


def streamed_calls(trainer: Trainer) -> None:
    assert_type(trainer.update.stream([1]), Iterator[list[float]])
    assert_type(trainer.judge.stream("a"), Iterator[bool])
    assert_type(trainer.count.stream(3), Iterator[list[int]])
    assert_type(trainer.largest.stream([1]), Iterator[int])


def around_the_calls(trainer: Trainer) -> None:
    assert_type(RayHelper.whole([1]), list[int])
    assert_type(trainer.update(RayHelper.whole([1])), list[float])
    assert_type(RayHelper.current().world_size, int)
    with RayHelper.session({"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}, runtime="inprocess") as nothing:
        assert_type(nothing, None)
    with RayHelper.local():
        RayHelper.shard(0, 1)
