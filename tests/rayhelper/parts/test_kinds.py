"""Parts have methods of every kind, subclasses and overrides; futures go from one part into another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, agreed, raised, says, story


@RayHelper.worker(group="train")
class Maker:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def make(self, items: list[int]) -> list[int]:
        return [self.factor * item for item in items]

    @RayHelper.function(group="train", execute="first")
    def fail(self) -> list[int]:
        raise KeyError("cannot make")

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(cost=len), collect="flatten")
    def upper(self, words: list[str]) -> list[str]:
        return [word.upper() for word in words]


@RayHelper.worker(group="rollout")
class User:
    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def use(self, items: list[int], more: Any = 0) -> list[int]:
        return [item + more for item in items]

    @RayHelper.function(group="rollout", execute="first")
    def joined(self, *parts: Any, **named: Any) -> list[Any]:
        return [*parts, *named.values()]


@RayHelper.worker(group=["train", "rollout"])
class Factory:
    def __init__(self) -> None:
        self.maker = Maker()
        self.tenfold = Maker(10)
        self.user = User()

    @RayHelper.function(group="train", execute="first")
    def total(self, items: list[int]) -> int:
        return sum(items)


@story
def a_future_of_one_part_into_another() -> Any:
    factory = Factory()
    made = factory.maker.make.defer([1, 2, 3])
    used = factory.user.use(made)
    return used, made.result(), factory.user.use(items=factory.tenfold.make.defer([1, 2]), more=5)


def test_a_future_of_one_part_is_an_argument_of_another(run: Run) -> None:
    assert run(a_future_of_one_part_into_another) == [[2, 4, 6], [2, 4, 6], [15, 25]]


@story
def futures_of_two_parts_of_one_class() -> Any:
    factory = Factory()
    doubled, tenfold = factory.maker.make.defer([1, 2]), factory.tenfold.make.defer([1, 2])
    chained = factory.tenfold.make.defer(factory.maker.make.defer([1, 2, 3]))
    return factory.user.joined(doubled, last=tenfold), chained.result(), factory.total(chained)


def test_futures_of_two_parts_of_one_class_keep_apart(run: Run) -> None:
    assert run(futures_of_two_parts_of_one_class) == [[[2, 4], [10, 20]], [20, 40, 60], 120]


@story
def a_balanced_future() -> Any:
    factory = Factory()
    return factory.user.joined(factory.maker.upper.defer(["a", "bbbb", "cc", "ddd"]))


def test_a_balanced_future_of_a_part_arrives_in_the_callers_order(run: Run) -> None:
    assert run(a_balanced_future) == [["A", "BBBB", "CC", "DDD"]]


@story
def a_future_that_failed() -> Any:
    factory = Factory()
    return raised(lambda: factory.user.use(factory.maker.fail.defer())), factory.user.use([1])


def test_a_part_that_failed_fails_the_part_that_needs_its_value(run: Run) -> None:
    failed, after = run(a_future_that_failed)
    assert says(failed, "KeyError", "cannot make")
    assert after == [1]


@story
def completed_in_any_order() -> Any:
    factory = Factory()
    waiting = [factory.maker.make.defer([1]), factory.tenfold.make.defer([2]), factory.user.use.defer([3])]
    return sorted(future.result() for future in RayHelper.as_completed(waiting))


def test_as_completed_takes_futures_of_several_parts(run: Run) -> None:
    assert run(completed_in_any_order) == [[2], [3], [20]]


@RayHelper.worker(group="train")
class Every:
    """A method of every kind."""

    def __init__(self, base: int) -> None:
        self.base = base

    @RayHelper.function(group="train", execute="first")
    async def waits(self, value: int) -> int:
        await asyncio.sleep(0)
        return self.base + value

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def counts(self, items: list[int]) -> Iterator[int]:
        for item in items:
            yield self.base + item

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    async def ticks(self, items: list[int]) -> AsyncIterator[int]:
        for item in items:
            await asyncio.sleep(0)
            yield self.base - item

    @RayHelper.function(group="train", execute="first")
    @staticmethod
    def static(value: int) -> int:
        return 3 * value

    @staticmethod
    @RayHelper.function(group="train", execute="first")
    def static_below(value: int) -> int:
        return 4 * value

    @RayHelper.function(group="train", execute="first")
    @classmethod
    def named(cls, suffix: str) -> str:
        return cls.__name__ + suffix

    @property
    @RayHelper.function(group="train", execute="first")
    def size(self) -> int:
        return self.base


async def drained(items: AsyncIterator[int]) -> list[int]:
    return [item async for item in items]


@RayHelper.worker(group="train")
class Kinds:
    def __init__(self) -> None:
        self.every = Every(100)
        self.other = Every(1000)

    @RayHelper.function(group="train", execute="first")
    async def all_on_worker(self) -> list[Any]:
        """Every kind of method, called by a method of the whole."""
        every = self.every
        awaited = await every.waits(1), await drained(every.ticks([1, 2])), list(every.counts([1, 2]))
        return [*awaited, every.static(2), every.static_below(2), every.named("!"), every.size]


EVERY_KIND = [101, [99, 98], [101, 102], 6, 8, "Every!", 100]


@story
def every_kind_of_method() -> Any:
    every = Kinds().every
    asynchronous = asyncio.run(every.waits(1)), asyncio.run(drained(every.ticks([1, 2])))
    return [
        *asynchronous,
        list(every.counts([1, 2])),
        every.static(2),
        every.static_below(2),
        every.named("!"),
        every.size,
    ]


def test_a_part_has_every_kind_of_method(run: Run) -> None:
    assert run(every_kind_of_method) == EVERY_KIND


@story
def every_kind_of_method_on_a_worker() -> Any:
    return asyncio.run(Kinds().all_on_worker())


def test_a_method_of_the_whole_calls_every_kind_of_method_of_a_part(run: Run) -> None:
    assert run(every_kind_of_method_on_a_worker) == EVERY_KIND


@story
def deferred_and_streamed() -> Any:
    kinds = Kinds()
    every = kinds.every
    deferred = [every.waits.defer(1), every.counts.defer([1, 2]), every.ticks.defer([1, 2]), every.static.defer(2)]
    return [future.result() for future in deferred], list(kinds.other.waits.stream(1)), every.named.defer("?").result()


def test_methods_of_every_kind_of_a_part_are_deferred_and_streamed(run: Run) -> None:
    assert run(deferred_and_streamed) == [[101, [101, 102], [99, 98], 6], [1001], "Every?"]


@story
def gathered() -> Any:
    kinds = Kinds()

    async def together() -> list[int]:
        return list(await asyncio.gather(kinds.every.waits(1), kinds.other.waits(2)))

    return asyncio.run(together())


def test_asynchronous_methods_of_two_parts_are_awaited_together(run: Run) -> None:
    assert run(gathered) == [101, 1002]


class CarefulMaker(Maker):
    """An undecorated subclass of a part's class, with state of its own and overrides of both kinds."""

    def __init__(self, factor: int, extra: int) -> None:
        super().__init__(factor)
        self.extra = extra
        self.helper = Maker(100)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def make(self, items: list[int]) -> list[int]:
        return [item + self.extra for item in super().make(items)]

    def upper(self, words: list[str]) -> list[str]:  # type: ignore[override]
        return ["careful", *super().upper(words)]

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def make_with_helper(self, items: list[int]) -> list[int]:
        return self.helper.make(items)


@RayHelper.worker(group="rollout")
class RollingMaker(Maker):
    """A subclass that is decorated itself: its methods belong to two roles."""

    @RayHelper.function(group="rollout", collect=agreed)
    def factor_seen(self) -> int:
        return self.factor


class CarefulFactory(Factory):
    """A subclass of the whole: a part before, one in the place of an inherited one, and one after."""

    def __init__(self) -> None:
        self.early = Maker(3)
        super().__init__()
        self.maker = CarefulMaker(2, extra=1)
        self.rolling = RollingMaker(7)


@story
def subclasses() -> Any:
    factory = CarefulFactory()
    made = factory.maker.make([1, 2]), factory.maker.upper(["a"]), factory.maker.make_with_helper([1])
    return made, factory.early.make([1]), factory.tenfold.make([1]), factory.total([1, 2])


def test_subclasses_of_parts_and_wholes_override_and_call_super(run: Run) -> None:
    assert run(subclasses) == [[[3, 5], ["careful", "A"], [100]], [3], [10], 3]


@story
def a_subclass_with_another_role() -> Any:
    factory = CarefulFactory()
    return factory.rolling.make([1, 2]), factory.rolling.factor_seen(), factory.rolling.make.defer([3]).result()


def test_a_subclass_of_a_part_may_have_another_role(run: Run) -> None:
    assert run(a_subclass_with_another_role) == [[7, 14], 7, [21]]


@RayHelper.worker(group="train")
class Many:
    def __init__(self, count: int) -> None:
        self.makers = [Maker(k) for k in range(count)]


@story
def more_parts_than_slots() -> Any:
    many = Many(40)
    made = [maker.make([1, 2]) for maker in many.makers]
    again = [maker.make.defer([3]) for maker in many.makers]
    return made == [[k, 2 * k] for k in range(40)], [future.result() for future in again] == [
        [3 * k] for k in range(40)
    ]


def test_calls_to_many_parts_keep_apart(run: Run) -> None:
    assert run(more_parts_than_slots) == [True, True]
