"""Classes with one seeded mistake a line, marked by its rule; ``test_check.py`` finds all of them and nothing else.

Every class is wrong only where it is marked. What cannot even be defined is in ``check_fixture_undefined.py``.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayhelper import RayHelper

COUNT = 0
SEEN: list[int] = []


@RayHelper.worker(group=["train", "rollout"])
class StateAcrossRoles:
    """Three ways to lean on what another process holds."""

    def __init__(self) -> None:
        self.version = 0
        self.model: Any = None
        self.history: list[float] = []

    @RayHelper.function(group="train")
    def build(self) -> None:
        self.model = object()
        self._load()

    def _load(self) -> None:
        self.weights = {"a": 1}

    @RayHelper.function(group="train")
    def update(self, loss: float) -> None:
        self.version += 1
        self.history.append(loss)

    @RayHelper.function(group="rollout")
    def generate(self) -> None:
        print(self.model)  # finding: state-across-roles
        self._show()

    def _show(self) -> None:
        assert self.weights is not None  # finding: state-across-roles

    def run(self) -> int:
        self.build()
        self.update(0.5)
        self.generate()
        print(self.history[-1])  # finding: state-from-worker
        return self.version  # finding: state-from-worker


@RayHelper.worker(group="train")
class StateFromDriver:
    """What changes on the driver after construction stays there."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.temperature = 1.0
        self.rows: dict[str, int] = {}
        self.read()

    @RayHelper.function(group="driver")
    def read(self) -> None:
        self.tokenizer = str.split

    @RayHelper.function(group="train")
    def sample(self, text: str) -> None:
        print(self.temperature)  # finding: state-from-driver
        print(self.tokenizer(text))  # finding: state-from-driver
        print(self.config.learning_rate)  # finding: state-from-driver
        print(self.config.seed, len(self.rows))  # finding: state-from-driver

    def run(self) -> None:
        self.temperature *= 0.5
        self.config.learning_rate = 0.1
        self.rows["a"] = 1
        self.sample("a b")


@RayHelper.worker(group=["train", "rollout"])
class OtherNames:
    """Constant names, another name of self, a method in a variable, a helper that is given self."""

    def __init__(self) -> None:
        self.plain = 0
        self.config: Any = object()

    @RayHelper.function(group="train")
    def build(self) -> None:
        setattr(self, "other", 2)  # noqa: B010
        setattr(self, "by_name", 1)  # noqa: B010
        setattr(self.config, "rate", 0.5)  # noqa: B010
        self.plain = 1
        me = self
        again = me
        again.alias = 1  # type: ignore[attr-defined]
        equip(self, [1])
        equip_more(size=2, trainer=me)

    @RayHelper.function(group="rollout")
    def generate(self) -> None:
        print(self.plain)  # finding: state-across-roles
        print(getattr(self, "by_name"))  # noqa: B009  # finding: state-across-roles
        print(getattr(self, "other", 0))  # finding: state-across-roles
        me = self
        print(me.alias)  # type: ignore[attr-defined]  # finding: state-across-roles
        print(self.tools)  # type: ignore[attr-defined]  # finding: state-across-roles
        assert hasattr(self, "size")  # finding: state-across-roles
        print(self.config.rate)  # finding: state-across-roles

    @RayHelper.function(group="rollout", execute="first")
    def step(self) -> int:
        train = self.build
        train()  # finding: call-across-roles
        me = self
        me.build()  # finding: call-across-roles
        getattr(self, "build")()  # noqa: B009  # finding: call-across-roles
        start(self)
        return 1

    def run(self) -> None:
        self.build()
        self.generate()
        self.step()
        tell(self)


def equip(trainer: Any, tools: list[int]) -> None:
    trainer.tools = tools


def equip_more(size: int, *, trainer: Any) -> None:
    me = trainer
    me.size = size


def start(trainer: Any) -> None:
    start_it = trainer.build
    start_it.defer()  # finding: call-across-roles


def tell(trainer: Any) -> None:
    print(trainer.plain)  # finding: state-from-worker


@RayHelper.worker(group="train")
class SetByName:
    """Names that are in no source hide what this process may have set, and nothing else."""

    @RayHelper.function(group="train")
    def load(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.loss = 0.5
        print(self.rows)

    @RayHelper.function(group="train", execute="first")
    def measure(self) -> None:
        self.score = 1

    @RayHelper.function(group="train")
    def show(self) -> None:
        print(self.score)  # finding: state-on-first-worker

    def run(self) -> None:
        self.rows = [1]
        self.load({"rows": [2]})
        self.measure()
        self.show()
        print(self.loss)  # finding: state-from-worker


@RayHelper.worker(group=["train", "judge"])
class Construction:
    """Values of calls that are skipped in some of the processes that construct the class."""

    def __init__(self) -> None:
        self.size = self.count()  # finding: init-value-used
        self.rows = self.read()  # finding: init-value-used
        half = self.count() // 2  # finding: init-value-used
        self.mine = self.count()
        setattr(self, "named", self.count())  # noqa: B010  # finding: init-value-used
        setattr(self, "own", self.count())  # noqa: B010
        self.half = half
        self.prepare()

    @RayHelper.function(group="train", execute="first")
    def count(self) -> int:
        return 4

    @RayHelper.function(group="driver")
    def read(self) -> list[int]:
        return [1, 2]

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        self._start()

    def _start(self) -> None:
        self.warm_up()  # finding: skipped-in-construction

    @RayHelper.function(group="train")
    def warm_up(self) -> None:
        print(self.mine, self.own, self.rows)  # type: ignore[attr-defined]

    def run(self) -> int:
        return self.size + self.half + int(getattr(self, "named"))  # noqa: B009


@RayHelper.worker(group=["train", "rollout"])
class CallsAcross:
    """Workers that call what they do not host."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def step(self, items: list[int]) -> list[int]:
        self._log("step")
        return self.generate(items)  # finding: call-across-roles

    def _log(self, text: str) -> None:
        self.write(text)  # finding: call-to-driver
        self.tick.defer()  # finding: call-across-roles

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, items: list[int]) -> list[int]:
        return items

    @RayHelper.function(group="rollout")
    def tick(self) -> None:
        return None

    @RayHelper.function(group="driver")
    def write(self, text: str) -> None:
        print(text)

    def run(self) -> list[int]:
        return self.step([1, 2])


@RayHelper.worker(group="train")
class Values:
    """Values that differ in shape, and what cannot be cut or joined."""

    @RayHelper.function(group="train")
    def loss(self) -> float:
        return 0.5

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def lengths(self, items: list[str]) -> Any:
        return len(items)  # finding: flatten-of-scalar

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def measured(self, items: list[float]) -> float:  # finding: flatten-of-scalar
        total = 0.0
        for item in items:
            total += item
        return total

    @RayHelper.function(group="train", collect="flatten")
    def metrics(self, loss: torch.Tensor) -> dict[str, Any]:
        return {"loss": loss.item()}  # finding: flatten-of-scalar

    @RayHelper.function(group="train", dispatch="slice")  # finding: nothing-to-slice
    def refresh(self) -> None:
        return None

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def double(self, items: list[int] | None = None, factor: int = 2) -> list[int]:
        return [item * factor for item in items or []]

    def run(self) -> float:
        loss = self.loss()  # finding: none-value-used
        for item in self.loss.defer().result():  # type: ignore[attr-defined]  # finding: none-value-used
            print(item)
        self.double(factor=3)  # finding: nothing-to-slice
        self.double({1, 2})  # type: ignore[arg-type]  # finding: argument-cannot-be-sliced
        self.double(map(int, "12"))  # type: ignore[arg-type]  # finding: argument-cannot-be-sliced
        return loss


@RayHelper.worker(group="train")
class Travel:
    """What belongs to a process and is handed to another."""

    @RayHelper.function(group="train")
    def use(self, value: Any, other: Any = None) -> None:
        print(value, other)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def double(self, items: Any) -> Any:
        return (item * 2 for item in items)  # finding: return-cannot-travel

    @RayHelper.function(group="train", execute="first")
    def configure(self) -> Any:
        return self._scale  # finding: return-cannot-travel

    def _numbers(self) -> Iterator[int]:
        yield from range(3)

    def _scale(self, value: int) -> int:
        return 2 * value

    def run(self, path: str) -> None:
        lock = threading.Lock()
        self.use(lock)  # finding: argument-cannot-travel
        self.use(1, other=self._scale)  # finding: argument-cannot-travel
        self.use(lambda value: self._scale(value))  # finding: argument-cannot-travel
        self.use(functools.partial(self._scale, 2))  # finding: argument-cannot-travel
        self.double(number for number in range(3))  # finding: argument-cannot-travel
        self.double(self._numbers())  # finding: argument-cannot-travel
        with open(path, "wb") as file:
            self.use(file)  # finding: argument-cannot-travel


@RayHelper.worker(group="train")
class Arguments:
    """Changes of arguments that are copies."""

    @RayHelper.function(group="train")
    def collect(self, results: list[float], seen: dict[str, bool]) -> None:
        results.append(0.5)  # finding: argument-mutated
        seen["now"] = True  # finding: argument-mutated

    @RayHelper.function(group="train")
    def normalise(self, scores: np.ndarray, weight: torch.Tensor) -> Any:
        scores[0] = 1.0  # finding: argument-mutated
        return scores, weight.mul_(2)  # finding: argument-mutated

    @RayHelper.function(group="train")
    def clean(self, rows: dict[str, str], extra: list[str]) -> None:
        for name in rows:
            rows[name] = rows[name].strip()  # finding: argument-mutated
        extra += ["done"]  # finding: argument-mutated


@RayHelper.worker(group="train")
class Processes:
    """The module, the environment, ranks and collectives."""

    @RayHelper.function(group="train")
    def count(self) -> None:
        global COUNT
        COUNT += 1
        remember(3)
        print(os.environ["MY_SETTING"])  # finding: environment-state

    @RayHelper.function(group="train", execute="first")
    def total(self, value: torch.Tensor) -> None:
        summed(value)
        self.table = [1]

    @RayHelper.function(group="train")
    def show(self) -> None:
        print(self.table)  # finding: state-on-first-worker

    def run(self) -> None:
        os.environ["MY_SETTING"] = "1"
        self.count()
        self.total(torch.ones(1))
        self.show()
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # finding: rank-on-driver
            print(COUNT, len(SEEN))  # finding: global-state
        dist.barrier()  # finding: collective-on-driver


def remember(value: int) -> None:
    SEEN.append(value)


def summed(value: torch.Tensor) -> None:
    torch.distributed.all_reduce(value)  # finding: collective-on-first


class Plain(StateFromDriver):
    """Its own method is in place of a decorated one."""

    def sample(self, text: str) -> None:  # type: ignore[override]  # finding: override-runs-on-driver
        print(text)


def registered(cls: type) -> Any:
    return cls


@registered  # finding: worker-not-topmost
@RayHelper.worker(group="train")
class Order:
    @torch.no_grad()  # finding: mode-above-function
    @RayHelper.function(group="train")
    def measure(self) -> None:
        return None


class Undecorated:  # finding: class-without-worker
    @RayHelper.function(group="train")
    def update(self) -> None:
        return None
