"""A trainer of parts as type checkers see it, everything right: checked by ``test_types.py``, never run.

A part keeps its class, and its methods their types: from the driver, from the whole's methods and from a sibling's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

from rayhelper import Future, RayHelper


class Model:
    """Methods that several roles play."""

    def __init__(self, path: str) -> None:
        self.path = path

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def scores(self, items: list[int], scale: float = 1.0) -> list[float]:
        return [scale * item for item in items]

    @RayHelper.function(group="own", execute="first")
    async def ready(self) -> bool:
        return True

    @RayHelper.function(group="own")
    @staticmethod
    def version(of: str) -> int:
        return len(of)

    @RayHelper.function(group="own", execute="first")
    @classmethod
    def kind(cls) -> str:
        return cls.__name__


@RayHelper.worker(group="train")
class Policy(Model):
    def __init__(self, path: str, steps: int = 0) -> None:
        super().__init__(path)
        self.steps = steps

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect=sum)
    def step(self, items: list[float]) -> float:
        return sum(items)

    @RayHelper.function(group="train", execute="first")
    def best_of(self, policies: list[Policy]) -> Policy:
        return policies[0]


@RayHelper.worker(group="reference")
class Reference(Model):
    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def scores(self, items: list[int], scale: float = 1.0) -> list[float]:
        return super().scores(items, scale=scale)


@RayHelper.worker(group="rollout")
class Generator:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @RayHelper.function(group="rollout")
    def complete(self, prompts: list[str]) -> Iterator[str]:
        assert_type(self.policy.step([1.0]), float)
        yield from prompts

    @RayHelper.function(group="rollout", execute="first")
    def judged_by(self, model: Model) -> str:
        return model.path


@RayHelper.worker(group=["train", "rollout", "reference"])
class Trainer:
    def __init__(self) -> None:
        self.policy = Policy("policy", steps=3)
        self.generator = Generator(self.policy)
        self.references = [Reference("a"), Reference("b")]
        self.named = {"old": Policy("old")}

    @RayHelper.function(group="train")
    def steps(self) -> int:
        assert_type(self.policy, Policy)
        assert_type(self.references[0].scores([1]), list[float])
        return self.policy.steps

    def train(self) -> float:
        return self.policy.step(self.references[0].scores([1, 2]))


class CarefulTrainer(Trainer):
    """A subclass of a whole, with a part more."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Reference("c")


def calls(trainer: Trainer, careful: CarefulTrainer) -> None:
    assert_type(trainer.policy, Policy)
    assert_type(trainer.policy.steps, int)
    assert_type(trainer.policy.scores([1], scale=2.0), list[float])
    assert_type(trainer.policy.step([1.0]), float)
    assert_type(trainer.policy.version("a"), int)
    assert_type(trainer.policy.kind(), str)
    assert_type(trainer.references[1].scores([1]), list[float])
    assert_type(trainer.named["old"].step([1.0]), float)
    assert_type(trainer.generator.policy.steps, int)
    assert_type(trainer.generator.complete(["a"]), Iterator[str])
    assert_type(careful.extra.scores([1]), list[float])
    assert_type(careful.steps(), int)


def objects_as_arguments(trainer: Trainer) -> None:
    assert_type(trainer.generator.judged_by(trainer.policy), str)
    assert_type(trainer.generator.judged_by(trainer.references[0]), str)
    assert_type(trainer.policy.best_of([trainer.policy, *trainer.named.values()]), Policy)
    assert_type(trainer.policy.best_of([trainer.policy]).step([1.0]), float)


def futures_between_parts(trainer: Trainer) -> None:
    scores = trainer.references[0].scores.defer([1, 2])
    assert_type(scores, Future[list[float]])
    assert_type(trainer.policy.step.defer(scores.result()), Future[float])
    assert_type(trainer.policy.ready.defer(), Future[bool])
    assert_type(trainer.generator.complete.defer(["a"]), Future[list[str]])
    assert_type(trainer.references[0].scores.stream([1]), Iterator[list[float]])


async def asynchronous_calls(trainer: Trainer) -> None:
    assert_type(await trainer.policy.ready(), bool)
    assert_type(await trainer.references[0].ready(), bool)


def models(trainer: Trainer) -> list[Model]:
    """Parts of several roles in one list of what they have in common."""
    found: list[Model] = [trainer.policy, *trainer.references]
    assert_type(found[0].scores([1]), list[float])
    return found
