"""Contestant: this library."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers import work
from benchmarks.peers.work import Glance, Items
from rayhelper import RayHelper


@RayHelper.worker(group="work")
class Trainer:
    @RayHelper.function(group="work")
    def process_id(self) -> int:
        return work.process_id()

    @RayHelper.function(group="work")
    def noop(self) -> None:
        return None

    @RayHelper.function(group="work")
    def broadcast(self, value: Any) -> Glance:
        return work.glance(value)

    @RayHelper.function(group="work", dispatch="slice", collect="flatten")
    def plus_one(self, tensor: torch.Tensor) -> torch.Tensor:
        return work.plus_one(tensor)

    @RayHelper.function(group="work", dispatch="slice", collect="flatten")
    def plus_one_each(self, items: Items) -> Items:
        return work.plus_one_each(items)

    @RayHelper.function(group="work", collect="flatten")
    def ones(self, length: int) -> torch.Tensor:
        return work.ones(length)

    @RayHelper.function(group="work", dispatch="slice")
    def glance(self, tensor: torch.Tensor) -> Glance:
        return work.glance(tensor)

    @RayHelper.function(group="work")
    def pair(self) -> tuple[int, str]:
        return 1, "one"

    @RayHelper.function(group="work", collect="flatten")
    def whole_numbers(self) -> torch.Tensor:
        return torch.arange(4)


class Ours:
    name = "rayhelper"
    how = "slice -> flatten; a Future as argument for the hand-over"
    shares_workers = False
    copies = 5

    def start(self, num_workers: int) -> None:
        RayHelper.initialize({"all": {"device": "CPU", "ranks": num_workers, "workers": ["work"]}})
        self.trainer = Trainer()

    def stop(self) -> None:
        RayHelper.teardown()

    def process_ids(self) -> list[int]:
        return self.trainer.process_id()

    def noop(self) -> object:
        return self.trainer.noop()

    def broadcast(self, value: Any) -> list[Glance]:
        return self.trainer.broadcast(value)

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.trainer.plus_one(tensor)

    def scatter_items(self, items: Items) -> Items:
        return self.trainer.plus_one_each(items)

    def hand_over(self, length: int) -> list[Glance]:
        return self.trainer.glance(self.trainer.ones.defer(length))

    def slice_a_tensor(self, tensor: torch.Tensor) -> Any:
        return self.trainer.plus_one(tensor)

    def flatten_whole_numbers(self) -> Any:
        return self.trainer.whole_numbers()

    def pair_from_each(self) -> Any:
        return self.trainer.pair()
