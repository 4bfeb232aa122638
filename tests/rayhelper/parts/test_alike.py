"""Every process builds the same parts: one that lacks a part, or has another in its place, is named with it."""

from __future__ import annotations

import gc
from typing import Any

from rayhelper import RayHelper
from rayhelper.roles.parts import Identity
from tests.rayhelper.parts.stories import Run, only, raised, runs, says, story

APART = ("two", "three", "shared")  # layouts in which some worker hosts no role train, or no role judge
BY_TWO = ("pair", "two", "three")  # layouts in which role judge has two workers


@RayHelper.worker(group="judge")
class Policy:
    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    @RayHelper.function(group="judge", execute="first")
    def counted(self) -> int:
        return self.steps


@RayHelper.worker(group="judge")
class Frozen(Policy):
    pass


@RayHelper.worker(group=["judge", "train"])
class Uneven:
    """Builds on some processes what the others do not."""

    def __init__(self, how: str) -> None:
        self.always = Policy(1)
        getattr(self, how)()
        self.last = Policy(3)

    def evenly(self) -> None:
        self.policy = Policy(2)

    def on_rank_0(self) -> None:
        if RayHelper.current().rank == 0:
            self.policy = Policy(2)

    def on_rank_1(self) -> None:
        if RayHelper.current().rank == 1:
            self.policy = Policy(2)

    def frozen_on_rank_1(self) -> None:
        self.policy = Frozen(2) if RayHelper.current().rank == 1 else Policy(2)

    def with_role_judge(self) -> None:
        if "judge" in RayHelper.current().roles:
            self.policy = Policy(2)

    def further_in(self) -> None:
        self.middle = Middle()

    def by_a_driver(self) -> None:
        self.load()

    def by_a_worker(self) -> None:
        self.build()

    @RayHelper.function(group="driver", execute="first")
    def load(self) -> None:
        self.policy = Policy(2)

    @RayHelper.function(group="judge")
    def build(self) -> None:
        self.policy = Policy(2)

    @RayHelper.function(group="judge", execute="first")
    def all_steps(self) -> list[int]:
        return [self.always.steps, self.policy.steps, self.last.steps]


@RayHelper.worker(group="judge")
class Middle:
    def __init__(self) -> None:
        if RayHelper.current().rank == 0:
            self.policy = Policy(2)


def afterwards() -> Any:
    """What workers do after a construction was refused: the same as ever."""
    gc.collect()
    even = Uneven("evenly")
    return even.all_steps(), even.policy.counted(), even.last.counted()


AFTERWARDS = [[1, 2, 3], 2, 3]


@story
def built_on_rank_0() -> Any:
    return raised(lambda: Uneven("on_rank_0").all_steps()), afterwards()


@only(runs("inprocess", "strict", "ray", layouts=BY_TWO) + runs("torchrun", layouts=BY_TWO))
def test_a_process_that_lacks_a_part_is_named_with_it(run: Run) -> None:
    seen, after = run(built_on_rank_0)
    assert says(seen, "RoleError", "rank 1", repr(run.layout.group("judge")), "policy", "Uneven")
    assert after == AFTERWARDS


@only(runs("off") + runs("inprocess", "strict", layouts=("one",)) + runs("ray", layouts=("shared",)))
def test_a_condition_that_is_true_everywhere_is_none(run: Run) -> None:
    assert run(built_on_rank_0) == [{"returned": [1, 2, 3]}, AFTERWARDS]


@story
def built_on_rank_1() -> Any:
    return raised(Uneven, "on_rank_1"), afterwards()


@only(runs("inprocess", "strict", "ray", "torchrun", layouts=BY_TWO))
def test_a_process_that_has_a_part_more_is_named_with_it(run: Run) -> None:
    seen, after = run(built_on_rank_1)
    assert says(seen, "RoleError", "rank 1", repr(run.layout.group("judge")), "policy")
    assert after == AFTERWARDS


@story
def of_another_class() -> Any:
    return raised(Uneven, "frozen_on_rank_1"), afterwards()


@only(runs("inprocess", "strict", "ray", "torchrun", layouts=BY_TWO))
def test_a_process_with_another_class_in_its_place_is_named_with_both(run: Run) -> None:
    seen, after = run(of_another_class)
    assert says(seen, "RoleError", "rank 1", repr(run.layout.group("judge")), "Policy", "Frozen")
    assert after == AFTERWARDS


@story
def where_the_role_is() -> Any:
    return raised(Uneven, "with_role_judge"), afterwards()


@only(runs("inprocess", "strict", "ray"))
def test_a_part_that_the_driver_lacks_is_named(run: Run) -> None:
    seen, after = run(where_the_role_is)
    assert says(seen, "RoleError", "the driver", "policy")
    assert after == AFTERWARDS


@story
def built_by_a_driver() -> Any:
    return raised(Uneven, "by_a_driver"), afterwards()


@only(runs("inprocess", "strict", "ray", "torchrun"))
def test_a_part_that_the_driver_alone_has_is_named(run: Run) -> None:
    seen, after = run(built_by_a_driver)
    if run.runtime == "torchrun":  # where process 0 alone runs the method
        assert says(seen, "RoleError", "Policy")
    else:
        assert says(seen, "RoleError", "rank 0", "policy")
    assert after == AFTERWARDS


@story
def built_by_a_worker() -> Any:
    return raised(Uneven, "by_a_worker"), afterwards()


@only(runs("inprocess", "strict", "ray"))
def test_a_part_that_a_workers_method_builds_is_one_that_the_driver_lacks(run: Run) -> None:
    seen, after = run(built_by_a_worker)
    assert says(seen, "RoleError", "the driver", "policy")
    assert after == AFTERWARDS


@story
def further_in() -> Any:
    return raised(Uneven, "further_in"), afterwards()


@only(runs("inprocess", "strict", "ray", "torchrun", layouts=BY_TWO))
def test_a_part_of_a_part_that_is_missing_is_named(run: Run) -> None:
    seen, after = run(further_in)
    assert says(seen, "RoleError", "rank 1", "middle", "policy")
    assert after == AFTERWARDS


@RayHelper.worker(group=["train", "judge"])
class Sorted:
    """Builds the same parts in another order on one of the groups."""

    def __init__(self) -> None:
        if "train" in RayHelper.current().roles:
            self.frozen, self.policy = Frozen(), Policy()
        else:
            self.policy, self.frozen = Policy(), Frozen()


@story
def in_another_order() -> Any:
    return raised(Sorted), afterwards()


@only(runs("inprocess", "strict", "ray"))
def test_another_order_is_another_class_in_its_place(run: Run) -> None:
    seen, after = run(in_another_order)
    assert says(seen, "RoleError", "rank 0", "Policy", "Frozen")
    assert after == AFTERWARDS


def test_a_class_of_a_function_is_the_same_one_by_value() -> None:
    """Pickled by value it keeps only the last part of its name."""
    here, there = (type("Inner", (), {"__qualname__": name}) for name in ("story.<locals>.Inner", "Inner"))
    assert Identity(here(), None, "0").record() == Identity(there(), None, "0").record()
