"""A user's class with one planted difference at a time: what ``prove`` must find."""

from __future__ import annotations

import os
import random
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhelper import RayHelper

COUNTER = [0]
RATE = 0.5


@dataclass
class Config:
    planted: str = ""
    max_steps: int = 0
    output_dir: str = ""


@RayHelper.worker(group=["train", "judge"])
class Trainer:
    """Linear regression by hand: rows are scored by role judge and learned by role train."""

    shared = 1.0

    def __init__(self, config: Config) -> None:
        self.config = config
        self.planted = config.planted
        self.weight = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.seen = 0
        self.scale = 1.0
        self.noise = 0.0
        if self.planted == "unseeded in __init__":
            self.noise = random.SystemRandom().random()
        if self.planted == "the process in __init__":
            self.noise = float(os.getpid())

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def score(self, rows: Any, memory: Any = None) -> list[float]:
        scores = [float(row.sum()) * self.scale for row in rows]
        if self.planted == "mean of a shard":
            return [one - float(np.mean(scores)) for one in scores]
        if self.planted == "rank":
            return [one + RayHelper.current().rank for one in scores]
        if self.planted == "changed in place":
            memory.value.append(1)
        if self.planted == "time":
            return [one + random.SystemRandom().random() for one in scores]
        if self.planted == "default dtype":
            return [float(torch.tensor(one / 3)) for one in scores]
        if self.planted == "driver and role draw":
            return [one + random.random() for one in scores]
        if self.planted == "clock":
            return [one + time.time_ns() % 1e9 for one in scores]
        if self.planted == "uuid":
            return [one + uuid.uuid4().int % 997 for one in scores]
        if self.planted == "file":
            with (Path(self.config.output_dir).parent / "calls").open("a+") as calls:
                calls.write("x")
                return [one + calls.tell() for one in scores]
        if self.planted == "another worker's rows":
            return [one * len(scores) for one in scores]
        return scores

    @RayHelper.function(group="train", dispatch="slice", collect=sum)
    def gradient(self, rows: Any, targets: Any) -> Any:
        loss = ((torch.stack(list(rows)) @ self.weight - torch.stack(list(targets)) - self.noise) ** 2).sum()
        if self.planted == "cut gradient":
            return loss
        (grad,) = torch.autograd.grad(loss, [self.weight])
        return grad

    @RayHelper.function(group="train")
    def update(self, grad: Any) -> None:
        self.seen += 1
        if self.planted == "folder":
            os.chdir("/")
        rate = 0.01 if self.planted != "global" else 0.01 * RATE
        if self.planted == "state of the module":
            COUNTER[0] += 1
            rate *= COUNTER[0]
        if self.planted == "attribute of the class":
            rate *= self.shared
        if self.planted == "draws of the driver":
            rate *= 1 + float(torch.rand(()))
        with torch.no_grad():
            self.weight -= rate * grad

    @RayHelper.function(group="train", execute="first")
    def weights(self) -> Any:
        return self.weight.detach().clone()

    def train(self) -> Any:
        global RATE
        generator = torch.Generator().manual_seed(0)
        memory, started_in = Memory(), os.getcwd()
        for step in range(self.config.max_steps):
            rows = torch.rand(6, 4, dtype=torch.float64, generator=generator)
            if self.planted == "order of the driver":
                rows = rows[torch.from_numpy(np.random.default_rng().permutation(6))]
            if self.planted == "attribute set from outside":
                self.scale = 1.0 + step
            if self.planted == "global":
                RATE = 0.25 * (step + 1)
            if self.planted == "attribute of the class":
                Trainer.shared = 2.0 + step
            if self.planted == "default dtype":
                torch.set_default_dtype(torch.float64)
            if self.planted == "driver and role draw":
                random.random()
            if self.planted == "folder":
                rows = rows + len(os.getcwd())
            targets = torch.tensor(self.score(list(rows), RayHelper.whole(memory)), dtype=torch.float64)
            if self.planted == "changed in place":
                targets = targets * (1 + len(memory.value))
            grad = self.gradient(list(rows), list(targets))
            if self.planted == "draws of the driver":
                torch.rand(1)
            self.update(grad)
        os.chdir(started_in)  # where the workers of the next run start
        return self.weights()


class Memory:
    """A user's object that travels."""

    def __init__(self) -> None:
        self.value: list[int] = []
