"""``group="own"``: methods written once, in an undecorated class, and played by the one role of each that inherits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rayhelper import ConfigError, DecorationError, DeviceGroups, RayHelper
from tests.rayhelper.parts.stories import Run, agreed, raised, says, story


class Model:
    """What any model does, whatever its role."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.loads = 0
        self.load()

    @RayHelper.function(group="own", collect=agreed)
    def load(self) -> None:
        self.loads += 1

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def scores(self, items: list[int]) -> list[str]:
        return [f"{self.path} {item}" for item in items]

    @RayHelper.function(group="own", collect=agreed)
    def where(self) -> tuple[str, str, int]:
        return self.path, self.role(), self.loads

    @RayHelper.function(group="own", execute="first")
    def whose(self) -> str:
        return RayHelper.current().group

    @RayHelper.function(group="own", execute="first")
    def fail(self) -> None:
        raise KeyError(self.path)

    @RayHelper.function(group="own", execute="first")
    async def waits(self, value: int) -> str:
        await asyncio.sleep(0)
        return f"{self.path} {value}"

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def counts(self, items: list[int]) -> Iterator[str]:
        for item in items:
            yield f"{self.path} {item}"

    @RayHelper.function(group="own", execute="first")
    @staticmethod
    def static(value: int) -> tuple[int, str]:
        return 2 * value, RayHelper.current().group

    @RayHelper.function(group="own", execute="first")
    @classmethod
    def named(cls) -> tuple[str, str]:
        return cls.__name__, RayHelper.current().group

    def role(self) -> str:
        return "none"


class Frozen(Model):
    """An undecorated class between."""

    @RayHelper.function(group="own", execute="first")
    def frozen(self) -> str:
        return f"frozen {self.path}"


@RayHelper.worker(group="train")
class Policy(Model):
    def role(self) -> str:
        return "train"

    @RayHelper.function(group="train", execute="first")
    def step(self) -> str:
        return f"step {self.path}"


@RayHelper.worker(group="rollout")
class Reference(Frozen):
    def role(self) -> str:
        return "rollout"

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def scores(self, items: list[int]) -> list[str]:
        return [f"reference of {score}" for score in super().scores(items)]


@RayHelper.worker(group="judge")
class Teacher(Frozen):
    def role(self) -> str:
        return "judge"

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def scores(self, items: list[int]) -> list[str]:
        return [f"teacher of {score}" for score in super().scores(items)]


class CarefulTeacher(Teacher):
    def scores(self, items: list[int]) -> list[str]:  # type: ignore[override]
        return ["careful", *super().scores(items)]


@RayHelper.worker(group=["train", "rollout", "judge"])
class Trainer:
    def __init__(self) -> None:
        self.policy = Policy("p")
        self.reference = Reference("r")
        self.teacher = Teacher("t")
        self.careful = CarefulTeacher("c")

    @RayHelper.function(group="train", execute="first")
    def ask_reference(self) -> str:
        return self.reference.frozen()


def wholes() -> list[Any]:
    return [Policy("p"), Reference("r"), Teacher("t")]


def parts() -> list[Any]:
    trainer = Trainer()
    return [trainer.policy, trainer.reference, trainer.teacher]


@story
def each_in_its_group() -> Any:
    return [[model.whose() for model in models] for models in (parts(), wholes())]


def test_a_method_with_own_goes_to_the_group_of_the_class_that_inherits_it(run: Run) -> None:
    groups = ["off"] * 3 if run.is_off else [run.layout.group(role) for role in ("train", "rollout", "judge")]
    assert run(each_in_its_group) == [groups, groups]


@story
def state_of_each() -> Any:
    return [[model.where() for model in models] for models in (parts(), wholes())]


def test_a_call_with_own_in_the_base_classs_constructor_runs_on_the_workers_of_the_role(run: Run) -> None:
    each = [["p", "train", 1], ["r", "rollout", 1], ["t", "judge", 1]]
    assert run(state_of_each) == [each, each]


@story
def scores_of_each() -> Any:
    trainer = Trainer()
    models: list[Any] = [trainer.policy, trainer.reference, trainer.teacher, trainer.careful]
    return [model.scores([1, 2]) for model in models], trainer.reference.frozen(), trainer.policy.step()


def test_methods_with_own_are_overridden_with_super(run: Run) -> None:
    scores = [
        ["p 1", "p 2"],
        ["reference of r 1", "reference of r 2"],
        ["teacher of t 1", "teacher of t 2"],
        ["careful", "teacher of c 1", "teacher of c 2"],
    ]
    assert run(scores_of_each) == [scores, "frozen r", "step p"]


@story
def kinds_of_each() -> Any:
    return [
        [asyncio.run(model.waits(1)), list(model.counts([1, 2])), model.static(2), model.named()]
        for model in (*parts(), *wholes())
    ]


def test_methods_with_own_are_of_every_kind(run: Run) -> None:
    groups = ["off"] * 3 if run.is_off else [run.layout.group(role) for role in ("train", "rollout", "judge")]
    each = [
        [f"{name} 1", [f"{name} 1", f"{name} 2"], [4, group], [cls, group]]
        for name, cls, group in zip("prt", ("Policy", "Reference", "Teacher"), groups, strict=True)
    ]
    assert run(kinds_of_each) == [*each, *each]


@story
def deferred_with_own() -> Any:
    policy, reference, teacher = parts()
    future = policy.scores.defer([1])
    return reference.scores(future), [one.scores.defer([5]).result() for one in (policy, teacher)]


def test_methods_with_own_are_deferred(run: Run) -> None:
    assert run(deferred_with_own) == [["reference of r p 1"], [["p 5"], ["teacher of t 5"]]]


@story
def errors_with_own() -> Any:
    trainer = Trainer()
    return raised(trainer.teacher.fail), raised(trainer.ask_reference)


def test_an_error_names_the_role_that_own_means(run: Run) -> None:
    failed, asked = run(errors_with_own)
    if run.is_off:
        assert failed["raised"] == "KeyError"
    else:
        assert says(failed, "KeyError", "'judge'", "Trainer.teacher.fail")
        assert not any("'own'" in text for text in failed["text"])
    if run.layout.together("train", "rollout"):
        assert asked == {"returned": "frozen r"}
    else:
        assert says(asked, "RoleError", "'rollout'", "train")


def test_a_class_of_two_roles_cannot_inherit_own() -> None:
    with pytest.raises(DecorationError, match=r"Both.*own") as caught:

        @RayHelper.worker(group=["train", "judge"])
        class Both(Model):
            pass

    assert "train" in str(caught.value)
    assert "judge" in str(caught.value)


def test_a_second_role_on_a_class_that_plays_own_is_refused() -> None:
    with pytest.raises(DecorationError, match="own"):

        @RayHelper.worker(group="judge")
        class Second(Policy):
            pass


def test_two_roles_are_fine_where_nothing_is_own() -> None:
    @RayHelper.worker(group=["train", "judge"])
    class Fine:
        @RayHelper.function(group="train")
        def step(self) -> int:
            return 1

    assert Fine().step() == 1


@pytest.mark.parametrize("group", ["own", ["own"], ["train", "own"]], ids=str)
def test_own_is_no_role_of_a_class(group: Any) -> None:
    with pytest.raises(DecorationError, match="'own' is reserved"):
        RayHelper.worker(group=group)


@pytest.mark.parametrize(
    "groups",
    [
        {"all": {"device": "CPU", "ranks": 1, "workers": ["train", "own"]}},
        {"train": {"gpus": 1}, "own": {"gpus": 1}},
    ],
    ids=["groups of ranks", "one section a role"],
)
def test_a_device_group_cannot_host_own(groups: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'own'"):
        DeviceGroups.parse(groups)


@story
def without_a_role() -> Any:
    return raised(lambda: Model("m").whose())


def test_a_method_with_own_on_a_class_without_a_role_says_so(run: Run) -> None:
    """With Ray off it is a plain method."""
    seen = run(without_a_role)
    if run.is_off:
        assert seen == {"returned": "off"}
    else:
        assert says(seen, "RoleError", "Model", "@RayHelper.worker")
