"""Correct trainers of parts, of every shape that a careless check would stumble over: no finding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayhelper import RayHelper

ROLES = ("train", "judge")


def total(values: list[int]) -> int:
    return sum(values)


def engine_of(name: str, backend: dict[str, str] | None) -> dict[str, Any]:
    return {"name": name, "shared": backend is not None}


class Model:
    """Methods of whichever role the class has, helpers of its workers, and what ``check`` cannot place."""

    def __init__(self, config: Any, *, rests: bool = False, **settings: Any) -> None:
        self.config = config
        self.rests, self.settings = rests, settings
        self.backend: dict[str, str] | None = None

    @RayHelper.function(group="own")
    def build(self, name: str) -> None:
        self.backend = self.new_backend(name)

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def logps(self, items: list[int]) -> list[int]:
        with self.at_hand() as backend:
            return [len(backend) * item for item in items]

    @RayHelper.function(group="own", execute="first")
    def num_shards(self) -> int:
        return 1

    @RayHelper.function(group="own", execute="first")
    def me(self) -> Model:
        return self

    @RayHelper.function(group="own")
    def take(self, value: Any, others: Any = None) -> None:
        self.taken = value, others

    def new_backend(self, name: str) -> dict[str, str]:
        return {"name": name}

    @property
    def built(self) -> dict[str, str]:
        if self.backend is None:
            raise RuntimeError("build comes first")
        return self.backend

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[dict[str, str]]:
        yield self.built

    def size(self) -> int:
        """For code on the workers of the role, none of which is here."""
        assert self.backend is not None
        return len(self.backend)


@RayHelper.worker(group="train")
class Policy(Model):
    """Learns."""

    @RayHelper.function(group="train", dispatch="slice", collect=total)
    def step(self, items: list[int]) -> int:
        self.count = getattr(self, "count", 0) + 1
        return len(self.built) + len(items)

    @RayHelper.function(group="train", collect=lambda values: values[0])
    def weights(self) -> dict[str, str]:
        return dict(self.built)


@RayHelper.worker(group="judge")
class Judge(Model):
    """Scores, and follows the policy."""

    @classmethod
    def of(cls, config: Any) -> Judge:
        return cls(config, rests=True)

    def follow(self, policy: Policy, step: int) -> None:
        if step % 2 == 0:
            self.mix(policy.weights.defer())

    def __call__(self, items: list[int]) -> list[int]:
        scores = self.logps.defer(items)
        return scores.result()

    @RayHelper.function(group="judge")
    def mix(self, weights: Any) -> None:
        self.built.update(weights)

    @RayHelper.function(group="driver")
    def write(self, text: str) -> None:
        self.lines = [*getattr(self, "lines", []), text]


@RayHelper.worker(group="rollout")
class Generator:
    """It reads a sibling that may live elsewhere, and knows that it may."""

    def __init__(self, config: Any, policy: Policy, judge: Judge | None = None) -> None:
        self.config, self.policy, self.judge = config, policy, judge
        self.engine: Any = None
        self.is_due = True

    def build(self) -> None:
        self.start("engine")
        self.update()

    def update(self) -> None:
        if self.is_due:
            sent = self.policy.weights.defer()
            self.receive(sent)
        self.is_due = False

    @RayHelper.function(group="rollout")
    def start(self, name: str) -> None:
        config, backend = self.config, self.policy.backend
        self.engine = self.new_engine(name)
        self.shared = None if backend is None else backend["name"]
        self.limit = config.limit
        self.note = None if self.judge is None else self.judge.settings

    def new_engine(self, name: str) -> dict[str, Any]:
        return engine_of(name, self.policy.backend)

    @RayHelper.function(group="rollout")
    def receive(self, weights: Any) -> None:
        if self.policy.backend is not None:
            weights = self.policy.backend
        self.weights = weights

    @RayHelper.function(group="rollout")
    def peek(self) -> None:
        """Leaves where the sibling does not live."""
        if self.policy.backend is None:
            return
        print(self.policy.logps([1]), self.policy.backend["name"])

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, items: list[int]) -> list[int]:
        if "train" in RayHelper.current().roles:
            items = self.policy.logps(items)
        return [item + len(self.engine) for item in items]


@RayHelper.worker(group=["train", "rollout", "judge"])
class Trainer:
    """A loop over parts that are built in every way, alike on every process."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.policy = Policy(config, loss=total)
        self.judge = Judge(config) if config.judge else None
        if config.lora_rank > 0:
            self.adapter = Policy(config)
        self.judges = [Judge(config) for _ in range(config.num_judges)]
        self.named = {"policy": self.policy, "judge": Judge.of(config)}
        self.built = helped(config)
        more = []
        for _ in range(2):
            more.append(Judge(config))
        self.more = more
        self.by_role: dict[str, Model] = {}
        for role in ROLES:
            self.by_role[role] = Policy(config) if role == "train" else Judge(config)
        self.generator = Generator(config, self.policy, judge=self.judge)
        self.listener = Listener(self)
        equip(self, config)
        self.version = 0
        self.callbacks = [self.evaluate, self.extend]
        self.prepare()

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        self.rows = [1, 2, 3]
        self.built.write("prepared")

    @RayHelper.function(group="train", dispatch="slice", collect=total)
    def learn(self, items: list[int]) -> int:
        scores = self.policy.logps(items)
        return self.policy.step(scores) + self.by_role["train"].num_shards()

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def score(self, items: list[int], role: str) -> list[int]:
        items = self.by_role[role].logps(items)
        for judge in self.judges:
            items = judge.logps(items)
        return self.named["judge"].logps(items)

    def train(self) -> int:
        self.policy.build("policy")
        for judge in [*self.judges, *self.more]:
            judge.build("judge")
        for role, part in self.by_role.items():
            part.build(role)
        self.generator.build()
        shards = self.policy.num_shards()
        for step, row in enumerate(self.rows):
            items = self.generator.generate([row] * shards)
            if self.judge is not None:
                items = self.judge(items)
                self.judge.follow(self.policy, step)
            self.policy.take(self.policy, others=[self.judges[0], self])
            self.version += self.learn(self.score(items, "judge"))
            self.judges[0].write(str(self.version))
        self.finish(self.policy.weights)
        learned: int = self.judges[0].me().num_shards()
        return learned + self.evaluate() + self.listener.heard()

    def evaluate(self) -> int:
        """Builds a whole of its own, on the driver."""
        judge = Judge(self.config)
        judge.build("evaluation")
        self.evaluation = Policy(self.config)
        self.evaluation.build("evaluation")
        return sum(judge.logps([1])) + self.evaluation.step([1])

    @RayHelper.function(group="driver")
    def extend(self) -> int:
        self.extra = Judge(self.config)
        return self.extra.num_shards()

    def finish(self, weights: Callable[[], Any]) -> None:
        print(weights(), partial(self.policy.logps, [1])())


def helped(config: Any) -> Judge:
    judge = Judge(config)
    judge.rests = True
    return judge


def equip(trainer: Trainer, config: Any) -> None:
    trainer.equipped = Policy(config)  # type: ignore[attr-defined]


@RayHelper.worker(group="rollout")
class Listener:
    """A part that is given its whole."""

    def __init__(self, whole: Trainer) -> None:
        self.whole = whole
        self.count = 0

    def heard(self) -> int:
        return self.whole.version + self.ask()

    @RayHelper.function(group="rollout", execute="first")
    def ask(self) -> int:
        self.count += 1
        return self.count + len(self.whole.generator.new_engine("again"))


@RayHelper.worker(group=["train", "judge"])
@dataclass
class Fields:
    """Parts that are fields."""

    policy: Policy
    judge: Judge
    limit: int = 3

    @RayHelper.function(group="train", execute="first")
    def count(self) -> int:
        return self.policy.num_shards() + self.limit

    def run(self) -> list[int]:
        return self.judge([self.count()])


@RayHelper.worker(group=["train", "judge"])
class Holder:
    """A part of parts, built through the constructor of a base class."""

    def __init__(self, config: Any) -> None:
        self.fields = Fields(Policy(config), judge=Judge(config))
        self.first, self.second = Policy(config), Policy(config)
        self.second.build("second")

    def run(self) -> list[int]:
        best = self.first if self.first.num_shards() > 1 else self.second
        return best.logps(self.fields.run())


class Derived(Holder):
    def __init__(self, config: Any, *, limit: int) -> None:
        super().__init__(config)
        self.limit = limit
        self.third = Judge(config)

    def run(self) -> list[int]:
        return [*super().run(), *self.third([self.limit])]


@RayHelper.worker(group="train")
class Recursive:
    """Builds itself, a few times."""

    def __init__(self, depth: int) -> None:
        self.inner = Recursive(depth - 1) if depth else None
        self.depth = depth

    @RayHelper.function(group="train", execute="first")
    def deepest(self) -> int:
        return self.depth if self.inner is None else self.inner.deepest()

    def run(self) -> int:
        return self.deepest()


class Undecorated:
    """One class a role, under a trainer without roles."""

    def __init__(self, config: Any) -> None:
        self.policy, self.judge = Policy(config), Judge(config)
        self.shards = self.policy.num_shards()
        if RayHelper.current().rank == 0:
            self.first = Policy(config)

    def run(self) -> list[int]:
        return self.judge(self.policy.logps([self.shards]))
