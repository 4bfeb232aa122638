"""A whole and its parts are freed together, when the driver has none of them left; the same on the workers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, agreed, raised, says, story

ALIVE: dict[str, weakref.WeakSet[Any]] = {}  # what lives in this process, by class


def born(instance: Any) -> None:
    ALIVE.setdefault(type(instance).__name__, weakref.WeakSet()).add(instance)


@RayHelper.worker(group="train")
class Policy:
    def __init__(self) -> None:
        born(self)
        self.steps = 0

    @RayHelper.function(group="train", collect=agreed)
    def step(self) -> int:
        self.steps += 1
        return self.steps


@RayHelper.worker(group="rollout")
class Generator:
    def __init__(self, policy: Any) -> None:
        born(self)
        self.policy = policy

    @RayHelper.function(group="rollout", execute="first")
    def complete(self) -> str:
        return "completed"


@RayHelper.worker(group="train")
class Crew:
    def __init__(self) -> None:
        born(self)
        self.policy = Policy()


@RayHelper.worker(group=["train", "rollout"])
class Trainer:
    def __init__(self, failing: bool = False) -> None:
        born(self)
        self.policy = Policy()
        self.generator = Generator(self.policy)
        self.crew = Crew()
        self.listed = [Policy()]
        if failing and RayHelper.current().rank == RayHelper.current().world_size - 1:
            raise ValueError("this one fails at its end")

    @RayHelper.function(group="train", execute="first")
    def size(self) -> int:
        return 1


@RayHelper.worker(group=["train", "rollout", "judge"])
class Census:
    """Constructing one is when workers free what is gone; it says what lives on them."""

    @RayHelper.function(group="train", execute="first")
    def on_train(self) -> dict[str, int]:
        return living()

    @RayHelper.function(group="rollout", execute="first")
    def on_rollout(self) -> dict[str, int]:
        return living()


def living() -> dict[str, int]:
    gc.collect()
    return {name: len(instances) for name, instances in sorted(ALIVE.items()) if len(instances)}


def counted() -> list[dict[str, int]]:
    gc.collect()
    census = Census()
    return [census.on_train(), census.on_rollout()]


@story
def all_gone() -> Any:
    trainer = Trainer()
    trainer.policy.step()
    trainer.generator.complete()
    trainer.crew.policy.step()
    there = counted()
    del trainer
    return [all(each for each in there), counted()]


def test_a_whole_and_its_parts_are_freed_together(run: Run) -> None:
    assert run(all_gone) == [True, [{}, {}]]


@story
def one_of_two_gone() -> Any:
    one, two = Trainer(), Trainer()
    one.policy.step()
    two.policy.step()
    del one
    counts = counted()
    return (
        counts == counted(),
        two.policy.step(),
        two.generator.complete(),
        two.listed[0].step(),
        two.crew.policy.step(),
    )


def test_freeing_one_whole_leaves_the_parts_of_another(run: Run) -> None:
    assert run(one_of_two_gone) == [True, 2, "completed", 1, 1]


@story
def a_part_alone() -> Any:
    policy = Trainer().policy
    counted()
    steps = policy.step(), policy.step()
    Trainer().policy.step()
    counted()
    return steps, policy.step()


def test_a_part_that_alone_is_kept_goes_on(run: Run) -> None:
    assert run(a_part_alone) == [[1, 2], 3]


@story
def a_part_alone_then_gone() -> Any:
    listed = Trainer().listed
    counted()
    listed[0].step()
    inner = Trainer().crew.policy
    counted()
    inner.step()
    del listed, inner
    return counted()


def test_a_part_that_was_kept_alone_is_freed_with_what_its_whole_left(run: Run) -> None:
    assert run(a_part_alone_then_gone) == [{}, {}]


@story
def a_future_alone() -> Any:
    future = Trainer().policy.step.defer()
    counted()
    value = future.result()
    del future
    return value, counted()


def test_a_future_of_a_part_outlives_it(run: Run) -> None:
    assert run(a_future_alone) == [1, [{}, {}]]


@story
def a_construction_that_failed() -> Any:
    seen = raised(Trainer, failing=True)
    return seen, counted(), Trainer().policy.step()


def test_nothing_stays_of_a_whole_whose_construction_failed(run: Run) -> None:
    seen, left, after = run(a_construction_that_failed)
    assert says(seen, "ValueError", "fails at its end")
    assert left == [{}, {}]
    assert after == 1


@RayHelper.worker(group="rollout")
class Broken:
    def __init__(self) -> None:
        born(self)
        raise ValueError("a part that cannot be built")


@RayHelper.worker(group=["train", "rollout"])
class WithBroken:
    def __init__(self) -> None:
        born(self)
        self.policy = Policy()
        self.broken = Broken()


@RayHelper.worker(group="train")
class Undeclared:
    """Its part's role is missing: refused when the part is built."""

    def __init__(self) -> None:
        born(self)
        self.policy = Policy()
        self.generator = Generator(self.policy)


@story
def parts_that_failed() -> Any:
    broken, undeclared = raised(WithBroken), raised(Undeclared)
    return broken, undeclared, counted(), Trainer().policy.step()


def test_nothing_stays_of_a_whole_whose_part_could_not_be_built(run: Run) -> None:
    broken, undeclared, left, after = run(parts_that_failed)
    assert says(broken, "ValueError", "cannot be built")
    assert says(undeclared, "DecorationError", "rollout")
    assert left == [{}, {}]
    assert after == 1
