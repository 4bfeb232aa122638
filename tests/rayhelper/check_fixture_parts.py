"""Trainers of parts with one seeded mistake a line, marked by its rule; see ``check_fixture.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rayhelper import RayHelper


class Model:
    """Methods of whichever role the class has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend: Any = None
        self.steps = 0

    @RayHelper.function(group="own")
    def build(self) -> None:
        self.backend = {"name": self.name}

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def logps(self, items: list[int]) -> list[float]:
        self.steps += 1
        return [0.5 for _ in items]

    @RayHelper.function(group="own")
    def loss(self) -> float:
        return 0.5

    @RayHelper.function(group="own")
    def take(self, value: Any, other: Any = None) -> None:
        self.taken = value, other

    def summary(self) -> str:
        return f"{self.name} after {self.steps}"  # finding: state-from-worker

    def scaled(self, value: float) -> float:
        return 2 * value


@RayHelper.worker(group="train")
class Policy(Model):
    """Nothing of its own."""


@RayHelper.worker(group="judge")
class Judge(Model):
    """As the policy, of another role."""

    @RayHelper.function(group="judge", execute="first")
    def best(self) -> int:
        return 1

    @RayHelper.function(group="driver")
    def write(self, text: str) -> None:
        print(text)


@RayHelper.worker(group="rollout")
class Generator:
    """It is given a sibling."""

    def __init__(self, policy: Policy, limit: int = 3) -> None:
        self.policy, self.limit = policy, limit

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, items: list[int]) -> list[int]:
        print(self.policy.backend)  # finding: state-across-roles
        self.policy.logps(items)  # finding: call-across-roles
        policy = self.policy
        policy.loss.defer()  # finding: call-across-roles
        return items

    def report(self) -> None:
        print(self.policy.steps)  # finding: state-from-worker
        loss = self.policy.loss()  # finding: none-value-used
        print(loss)


@RayHelper.worker(group=["train", "rollout", "judge"])
class Calls:
    """Calls of parts and of parts of parts, from workers and from the driver."""

    def __init__(self) -> None:
        self.policy = Policy("policy")
        self.generator = Generator(self.policy)
        self.scorers = [Judge(name) for name in "ab"]
        self.named = {"policy": self.policy, "judge": self.scorers[0]}

    @RayHelper.function(group="train")
    def update(self) -> None:
        self.policy.logps([1])
        self.generator.generate([1])  # finding: call-across-roles
        for scorer in self.scorers:
            scorer.loss()  # finding: call-across-roles
        self.named["judge"].write("a")  # finding: call-to-driver
        _score(self.scorers[1])

    def run(self) -> None:
        self.update()
        self.generator.report()
        self.policy.summary()
        loss = self.scorers[1].loss()  # finding: none-value-used
        for scorer in self.scorers:
            print(loss, scorer.loss.defer().result())  # finding: none-value-used
        print(self.generator.policy.backend)  # finding: state-from-worker
        self.policy.limit = 3
        self.policy.logps({1, 2})  # type: ignore[arg-type]  # finding: argument-cannot-be-sliced
        self.policy.take(open("a", "wb"))  # noqa: SIM115  # finding: argument-cannot-travel
        self.policy.take(self.scorers[0].scaled)  # finding: argument-cannot-travel
        self.policy.take(1, other=lambda: self.policy.name)  # finding: argument-cannot-travel


def _score(judge: Judge) -> None:
    judge.best()  # finding: call-across-roles


@RayHelper.worker(group=["train", "judge"])
class Inner:
    """A part that has parts."""

    def __init__(self) -> None:
        self.policy = Policy("inner")
        self.size = self.policy.loss()  # finding: init-value-used
        self.first = first_judge()
        self.prepare()

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        self.policy.build()  # finding: skipped-in-construction

    @RayHelper.function(group="judge")
    def ask(self) -> None:
        self.policy.build()  # finding: call-across-roles


def first_judge() -> Judge:
    judge = Judge("first")
    judge.build()
    return judge


@RayHelper.worker(group=["train", "judge"])
class Outer:
    def __init__(self) -> None:
        self.inner = Inner()

    @RayHelper.function(group="train")
    def step(self) -> None:
        self.inner.first.best()  # finding: call-across-roles

    def run(self) -> float:
        self.step()
        self.inner.ask()
        print(self.inner.size)
        return self.inner.policy.loss()  # finding: none-value-used


@RayHelper.worker(group="train")
class RolesNotNamed:
    def __init__(self) -> None:
        self.policy = Policy("policy")
        self.judges = {
            "a": Judge("a"),  # finding: part-role-not-named
        }
        self.generator = Generator(policy=self.policy)  # finding: part-role-not-named


@RayHelper.worker(group=["train", "rollout"])
class OuterNotNamed:
    """Each whole names the roles of its own parts."""

    def __init__(self) -> None:
        self.inner = Inner()  # finding: part-role-not-named


@RayHelper.worker(group=["train", "judge"])
class NotEverywhere:
    """Parts that some processes build and others do not."""

    def __init__(self, config: Any) -> None:
        self.always = Policy("always")
        if RayHelper.current().rank == 0:
            self.first = Policy("first")  # finding: part-not-everywhere
        me = RayHelper.current()
        rank = int(os.environ.get("RANK", "0"))
        self.by_role = Judge("a") if "judge" in me.roles else None  # finding: part-not-everywhere
        self.each = [Judge("b") for _ in range(me.world_size)]  # finding: part-not-everywhere
        self.either = rank == 0 and Policy("c")  # finding: part-not-everywhere
        self.read()
        self.build()
        if rank:
            self._more()
        self.helped = helped(config)
        if os.environ["LOCAL_RANK"] != "0":
            return
        self.late = Policy("late")  # finding: part-not-everywhere

    @RayHelper.function(group="driver")
    def read(self) -> None:
        self.rows = [1]
        self._load()

    def _load(self) -> None:
        self.loaded = Judge("loaded")  # finding: part-not-everywhere

    @RayHelper.function(group="train")
    def build(self) -> None:
        self.built = Policy("built")  # finding: part-not-everywhere

    def _more(self) -> None:
        self.more = Policy("more")  # finding: part-not-everywhere


def helped(config: Any) -> Policy | None:
    if RayHelper.current().rank > config.limit:
        return Policy("helped")  # finding: part-not-everywhere
    return None


@RayHelper.worker(group="train")
class Items:
    """Generators of a part do not travel, as those of the class itself."""

    def __init__(self) -> None:
        self.policy = Numbers()

    def run(self) -> None:
        self.policy.take(self.policy.numbers())  # finding: argument-cannot-travel


@RayHelper.worker(group="train")
class Numbers:
    @RayHelper.function(group="train")
    def take(self, values: Any) -> None:
        print(values)

    def numbers(self) -> Iterator[int]:
        yield from range(3)


class Undecorated:
    """Has no roles itself: what it builds are wholes, each with its own role."""

    def __init__(self) -> None:
        self.policy = Policy("policy")
        self.judge = Judge("judge")

    def run(self) -> float:
        self.policy.build()
        print(self.policy.backend)  # finding: state-from-worker
        return self.judge.loss()  # finding: none-value-used
