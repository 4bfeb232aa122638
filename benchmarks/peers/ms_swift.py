"""Contestant: ms-swift's RayHelper, the interface that this library's decorators keep.

It needs help to take part at all. ``initialize`` does nothing on a cluster that is already running. A configuration of
CPU groups alone is refused, and a CPU group beside others raises KeyError when its workers are made: the workers here
hold invented GPUs. Classes must be decorated after Ray has started. Tensors are not cut by 'slice' (``slice_a_tensor``
shows what happens): callables cut and join them.

Every call walks the stack with ``inspect.stack``, which costs milliseconds for frames without a source file. Under
``python -m`` there are such frames; the benchmark is therefore run as a script, as ms-swift's own commands are.
"""

from __future__ import annotations

from typing import Any

import torch
from swift.ray_utils import RayHelper
from swift.ray_utils.resource_manager import ResourceManager

from benchmarks.peers import work
from benchmarks.peers.work import Glance, Items


def chunk_of(n: int, i: int, tensor: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor.chunk(n)[i].clone(),), {}  # of a view, pickle would send the whole tensor


def decorated_class() -> Any:
    """The trainer, decorated; with Ray running, or the decorator leaves it as it is."""

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

        @RayHelper.function(group="work", dispatch=chunk_of, collect=torch.cat)
        def plus_one(self, tensor: torch.Tensor) -> torch.Tensor:
            return work.plus_one(tensor)

        @RayHelper.function(group="work", dispatch="slice", collect="flatten")
        def plus_one_each(self, items: Items) -> Items:
            return work.plus_one_each(items)

        @RayHelper.function(group="work", collect=torch.cat)
        def ones(self, length: int) -> torch.Tensor:
            return work.ones(length)

        @RayHelper.function(group="work", dispatch=chunk_of)
        def glance(self, tensor: torch.Tensor) -> Glance:
            return work.glance(tensor)

        @RayHelper.function(group="work", dispatch="slice", collect="flatten")
        def plus_one_sliced(self, tensor: torch.Tensor) -> torch.Tensor:
            return work.plus_one(tensor)

        @RayHelper.function(group="work")
        def pair(self) -> tuple[int, str]:
            return 1, "one"

        @RayHelper.function(group="work", collect="flatten")
        def whole_numbers(self) -> torch.Tensor:
            return torch.arange(4)

    return Trainer


class SwiftRayHelper:
    name = "ms-swift RayHelper"
    how = "slice -> flatten for lists; for tensors a callable dispatch and torch.cat as collect"
    shares_workers = False
    copies = 8

    def start(self, num_workers: int) -> None:
        groups = {
            "nproc_per_node": num_workers,
            "all": {"device": "GPU", "ranks": num_workers, "workers": ["work"]},
        }
        RayHelper.device_groups = groups
        RayHelper.resource_manager = ResourceManager(groups)  # what initialize does after ray.init
        self.trainer = decorated_class()()
        self.process_ids()

    def stop(self) -> None:
        RayHelper.teardown()
        RayHelper.worker_instance.clear()
        RayHelper.worker_cls.clear()

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
        return self.trainer.glance(self.trainer.ones(length))

    def slice_a_tensor(self, tensor: torch.Tensor) -> Any:
        return self.trainer.plus_one_sliced(tensor)

    def flatten_whole_numbers(self) -> Any:
        return self.trainer.whole_numbers()

    def pair_from_each(self) -> Any:
        return self.trainer.pair()
