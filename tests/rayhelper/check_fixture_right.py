"""Correct code of every shape that a careless check would stumble over: no finding."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.distributed as dist

from rayhelper import RayHelper

CACHE: dict[str, int] = {}
LIMIT = 10


def cached(name: str) -> int:
    if name not in CACHE:
        CACHE[name] = len(name)
    return CACHE[name]


def total(values: list[int]) -> int:
    return sum(values)


def scaled(value: float, factor: float = 2.0) -> float:
    return factor * value


@dataclass
class Batch:
    items: list[int]

    @classmethod
    def concat(cls, parts: list[Batch]) -> Batch:
        return cls([item for part in parts for item in part.items])


class Timed:
    """A mixin of the same package, without roles."""

    def timed(self) -> float:
        self.times = [*getattr(self, "times", []), 0.0]
        return self.times[-1]


@final
@RayHelper.worker(group=["train", "rollout", "judge"])
class Tricky(Timed):
    limit = LIMIT
    made: ClassVar[list[int]] = []

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model: Any = None
        self.engine: Any = None
        self.step = 0
        self.lock = threading.Lock()  # each process has its own
        self._reset()
        self.build("policy")
        self.name, self.other = "a", [1]
        self.ready = self.warm("now")
        self.known = self.warm("again")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def _reset(self) -> None:
        self.counts: dict[str, int] = {}

    # State of one role, set and read there, also through helpers and properties

    @RayHelper.function(group="train")
    def build(self, name: str) -> None:
        self.model = {"name": name}
        self.optimizer = {"lr": self.config.learning_rate}
        self.count = 0

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimizer["lr"] = value

    @RayHelper.function(group="train", dispatch="slice", collect=total)
    def update(self, items: list[int]) -> int:
        self.count += 1
        self.counts["update"] = self.count
        self.learning_rate = 0.5 * self.learning_rate

        def loss(item: int) -> float:
            return item * self.learning_rate

        losses = [loss(item) for item in items if (scale := self.limit) > item and scale]
        self._note("update", len(losses))
        return len(losses)

    # A helper that two roles share: each has its own

    def _note(self, name: str, value: int) -> None:
        self.notes = getattr(self, "notes", {})
        self.notes[name] = value + cached(name)
        print(self.notes)

    # A value that may be missing, and code that knows it

    @RayHelper.function(group="rollout")
    def build_engine(self) -> None:
        self.engine = self.model if self.model is not None else {"own": True}
        if (model := self.model) is not None:
            self._note(model["name"], 1)

    @RayHelper.function(group="rollout", execute="first")
    def shares(self) -> bool:
        model = self.model
        return model is not None

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, items: list[int], options: dict[str, int]) -> tuple[list[int], list[int]]:
        options = dict(options)
        options["seed"] = 1
        kept = [item for item in items]  # noqa: C416
        kept.append(1)
        kept += [2]
        self._note("generate", len(kept))
        return kept, [options["seed"] for _ in kept]

    # Arguments that are changed and given back, or are the worker's own

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def judge(self, batch: Batch, *rest: Any, **named: Any) -> Batch:
        named["seen"] = rest
        batch = Batch(list(batch.items))
        batch.items.append(1)
        return batch

    @RayHelper.function(group="judge", collect="flatten")
    def label(self, row: dict[str, list[int]], scores: np.ndarray) -> dict[str, list[int]]:
        row["label"] = [1]
        total_score = 0.0
        total_score += float(scores.sum())
        scores = scores.copy()
        scores[0] = total_score
        return row

    @RayHelper.function(group="judge")
    def fill(self, row: dict[str, int], weight: torch.Tensor) -> None:
        for name in row:
            row[name] += 1
        print(row, weight.requires_grad_())

    # Construction

    @RayHelper.function(group="train")
    def warm(self, text: str) -> str:
        self.warmed = text
        return text

    @RayHelper.function(group="train")
    def told(self) -> None:
        print(self.warmed, self.ready)

    # Several workers, one of them, and their collectives

    @RayHelper.function(group="train")
    def reduce(self) -> None:
        RayHelper.init_process_group()
        value = torch.ones(1)
        dist.all_reduce(value)
        self.reduced = value
        print(os.environ["RANK"], os.environ.get("TOKENIZERS_PARALLELISM"))

    @RayHelper.function(group="train", execute="first")
    def reduced_value(self) -> float:
        if dist.is_initialized():
            dist.barrier()
        return self.reduced.item()

    @RayHelper.function(group="train", dispatch="slice")
    def echo(self, items: list[int]) -> Iterator[int]:
        yield from items

    @RayHelper.function(group="train")
    def maybe(self) -> None:
        if "rollout" in RayHelper.current().roles:
            self.generate([1], {})

    @staticmethod
    @RayHelper.function(group="train", execute="first")
    def double(value: int) -> int:
        return 2 * value

    @RayHelper.function(group="driver")
    def log(self, text: str) -> None:
        self.lines = [*getattr(self, "lines", []), text]
        self.step += 1

    # The driver

    def run(self, path: str) -> int:
        self.build_engine()
        learned = self.update([1, 2])
        generated, _ = self.generate([3], RayHelper.whole({"a": 1}))
        batch = self.judge(Batch(generated))
        _ = self.echo(batch.items)
        unused = self.echo([1])  # noqa: F841
        future = self.echo.defer([1])
        for part in self.echo.stream([1]):
            print(part)
        future.result()
        self.each(lambda: self.echo([1]))
        self.label({"a": [1]}, np.ones(1))
        self.update(items=list(range(3)))
        self.update(sorted({1, 2}))
        rows = iter([1, 2])
        rows = list(rows)
        self.update(rows)
        self.fill({}, torch.ones(1))
        self.fill({"scale": scaled(1)}, functools.partial(scaled, factor=3.0))  # type: ignore[arg-type]
        with open(path) as file:
            self.fill({"text": len(file.read())}, torch.ones(1))
        self.log("done")
        print(self.step, self.lines, self.timed(), os.environ.get("HOME"))
        self._finish()
        return learned + self.double(2)

    def each(self, call: Any) -> None:
        call()

    def _finish(self) -> None:
        self.told()
        self.reduce()
        self.reduced_value()
        self.maybe()


def described(anything: Any) -> str:
    return str(anything.kind)


@RayHelper.worker(group=["train", "rollout"])
@dataclass
class Handed:
    """The object is handed on, attributes are set by name, and code asks on which worker it is."""

    rate: float
    names: tuple[str, ...] = ("a",)

    def __post_init__(self) -> None:
        self.half = 0.5 * self.rate

    @property
    def kind(self) -> str:
        return self.model["kind"]

    @RayHelper.function(group="train")
    def build(self) -> None:
        self.model = {"kind": "policy"}
        print(described(self))
        parts: list[int] = []
        self.gather(parts)
        print(parts)

    @RayHelper.function(group="train")
    def gather(self, parts: list[int]) -> None:
        parts.append(1)

    @RayHelper.function(group="rollout")
    def receive(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        print(self.model)

    @RayHelper.function(group="train", execute="first")
    def open_log(self) -> None:
        self.log = ["opened"]

    @RayHelper.function(group="train")
    def write(self, text: str) -> None:
        if RayHelper.current().rank == 0:
            self.log.append(text)

    @RayHelper.function(group="train")
    async def waits(self) -> int:
        return 1

    @RayHelper.function(group="train")
    def size(self) -> int:
        return 1

    async def run(self) -> int:
        self.build()
        self.open_log()
        self.write("a")
        self.receive({"model": 1})
        self.rate *= 2
        await asyncio.gather(self.waits(), self.waits())
        size = self.size()
        return size[0] if isinstance(size, list) else size


def fitted(trainer: Any, length: int) -> int:
    trainer.length = length
    if trainer.judge is not None:
        length += int(trainer.judge)
    if getattr(trainer, "rank", 0) == 0:
        trainer.told = [*getattr(trainer, "told", []), length]
    return int(trainer.length)


def asked(trainer: Any) -> int:
    count = trainer.count()
    return count if isinstance(count, int) else sum(count)


@RayHelper.worker(group=["train", "rollout"])
class OtherNames:
    """Other names of the object, used as rightly as ``self``."""

    def __init__(self) -> None:
        me = self
        me.rows = [1]
        me.size = me.count()
        setattr(self, "judge", None)  # noqa: B010
        self.prepared = False
        fitted(me, 2)

    @RayHelper.function(group="train")
    def count(self) -> int:
        return len(self.rows)

    @RayHelper.function(group="train")
    def build(self) -> None:
        setattr(self, "model", {"a": 1})  # noqa: B010
        self.rank, self.engine, self.judge = 0, object(), 1
        build_again = self.rebuild
        build_again()
        print(getattr(self, "model"), self.size, fitted(self, 1))  # noqa: B009

    @RayHelper.function(group="train")
    def rebuild(self) -> None:
        other = self
        other.model = dict(other.model)
        other = object()  # type: ignore[assignment]
        other.model = 1

    @RayHelper.function(group="rollout", execute="first")
    def close(self) -> int:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()
        if hasattr(self, "model"):
            print(self.model)
        me = self
        if me.judge is not None:
            print(me.judge)
        return fitted(self, 3)

    def run(self) -> int:
        self.build()
        close = self.close
        return close() + asked(self) + fitted(self, 4)


@RayHelper.worker(group="train")
class Base:
    def __init__(self) -> None:
        self.extra = 0

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def update(self, items: list[int]) -> list[int]:
        self.last = items
        return items

    @RayHelper.function(group="train", execute="first")
    def size(self) -> int:
        return len(self.last)


class Derived(Base):
    """Overrides that are decorated again, or call what they override."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 1

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def update(self, items: list[int]) -> list[int]:
        self.extra_last = super().update(items)
        return [item + self.extra for item in self.extra_last]

    def size(self) -> int:  # type: ignore[override]
        return 1 + super().size()

    def run(self) -> list[int]:
        return self.update([1]) * self.size()


if __name__ == "__main__":
    RayHelper.initialize({"one": {"device": "CPU", "ranks": 1, "workers": ["train", "rollout", "judge"]}})
