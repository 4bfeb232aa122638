"""The two older forms: several roles in one class, and one class a role under a trainer without roles."""

from __future__ import annotations

from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, agreed, raised, says, story


@RayHelper.worker(group=["train", "rollout", "judge"])
class Everything:
    """Several roles in one class."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        self.steps = 0
        self.set_up()

    @RayHelper.function(group="train", collect=agreed)
    def set_up(self) -> None:
        self.steps = 10

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def complete(self, prompts: list[int]) -> list[int]:
        return [self.scale * prompt for prompt in prompts]

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def judge(self, completions: list[int]) -> list[int]:
        return [completion % 7 for completion in completions]

    @RayHelper.function(group="train", collect=agreed)
    def update(self, rewards: list[int]) -> int:
        self.steps += sum(rewards)
        return self.steps

    @RayHelper.function(group="train", execute="first")
    def complete_as_train(self) -> list[int]:
        return self.complete([1])

    def train(self, prompts: list[int]) -> list[int]:
        return [self.update(self.judge(self.complete.defer(prompts))) for _ in range(2)]


@story
def several_roles_in_one_class() -> Any:
    everything = Everything(3)
    return everything.train([1, 2, 3]), raised(everything.complete_as_train)


def test_several_roles_in_one_class(run: Run) -> None:
    steps, nested = run(several_roles_in_one_class)
    assert steps == [10 + 11, 10 + 22]  # 3, 6, 9 modulo 7
    if run.layout.together("train", "rollout"):
        assert nested == {"returned": [3]}
    else:
        assert says(nested, "RoleError", "'rollout'", "train")


@RayHelper.worker(group="train")
class Policy:
    def __init__(self, start: int) -> None:
        self.steps = start

    @RayHelper.function(group="train", collect=agreed)
    def update(self, rewards: list[int]) -> int:
        self.steps += sum(rewards)
        return self.steps


@RayHelper.worker(group="rollout")
class Generator:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def complete(self, prompts: list[int]) -> list[int]:
        return [self.scale * prompt for prompt in prompts]


@RayHelper.worker(group="judge")
class Judge:
    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def judge(self, completions: list[int]) -> list[int]:
        return [completion % 7 for completion in completions]


class Trainer:
    """A trainer without roles: each of what it builds is a whole of its own."""

    def __init__(self) -> None:
        self.policy = Policy(10)
        self.generator = Generator(3)
        self.judge = Judge()
        self.second_policy = Policy(0)

    def train(self, prompts: list[int]) -> list[int]:
        return [
            self.policy.update(self.judge.judge(self.generator.complete.defer(prompts))),
            self.second_policy.update(self.judge.judge(prompts)),
        ]


@story
def one_class_a_role() -> Any:
    trainer = Trainer()
    return trainer.train([1, 2, 3]), trainer.train([1, 2, 3])


def test_one_class_a_role_under_a_trainer_without_roles(run: Run) -> None:
    assert run(one_class_a_role) == [[21, 6], [32, 12]]


@RayHelper.worker(group="train")
class Builder:
    """A method that runs on a worker after construction may build an object for that worker alone."""

    @RayHelper.function(group="train", collect=agreed)
    def build_and_use(self) -> int:
        return Policy(5).update([1, 2])


@story
def built_on_a_worker() -> Any:
    return Builder().build_and_use()


def test_an_object_that_a_workers_method_builds_is_that_workers_own(run: Run) -> None:
    assert run(built_on_a_worker) == 8


@RayHelper.worker(group="train")
class WithFunctions:
    """Two wholes built one after the other, one within a plain function that a driver's method calls later."""

    @RayHelper.function(group="driver")
    def open_another(self) -> Any:
        return Policy(100)

    @RayHelper.function(group="train", collect=agreed)
    def size(self) -> int:
        return 1


@story
def built_by_a_drivers_method_later() -> Any:
    whole = WithFunctions()
    policy = whole.open_another()
    return policy.update([1]), whole.size()


def test_an_object_that_the_driver_builds_later_is_a_whole_of_its_own(run: Run) -> None:
    assert run(built_by_a_drivers_method_later) == [101, 1]
