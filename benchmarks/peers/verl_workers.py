"""Contestant: verl's single controller.

DP_COMPUTE_PROTO cuts and joins. The dispatch over a device mesh, which verl's own workers use, took as long
(1.06 times, 64 MB over 4 workers): it puts the same parts, from several threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import remove_placement_group
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    collect_dp_compute_data_proto,
    dispatch_one_to_all,
    register,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.peers import work
from benchmarks.peers.work import Glance, Items

TO_ALL_AND_JOINED = {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_dp_compute_data_proto}


class VerlWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return work.process_id()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def broadcast(self, value: Any) -> Glance:
        return work.glance(value)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def plus_one(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"tensor": work.plus_one(data.batch["tensor"])})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def plus_one_each(self, data: DataProto) -> DataProto:
        return of_items(work.plus_one_each(list(data.non_tensor_batch["items"])))

    @register(dispatch_mode=TO_ALL_AND_JOINED, blocking=False)
    def ones(self, length: int) -> DataProto:
        return DataProto.from_dict({"tensor": work.ones(length)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def glance(self, data: DataProto) -> Glance:
        return work.glance(data.batch["tensor"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pair(self) -> tuple[int, str]:
        return 1, "one"

    @register(dispatch_mode=TO_ALL_AND_JOINED)
    def whole_numbers(self) -> DataProto:
        return DataProto.from_dict({"tensor": torch.arange(4)})


def of_items(items: Items) -> DataProto:
    """The items as a column of objects, the form for what has no common length."""
    column = np.empty(len(items), dtype=object)
    for position, item in enumerate(items):  # assigned at once, items of one length would become a matrix
        column[position] = item
    return DataProto.from_dict(non_tensors={"items": column})


class VerlWorkerGroup:
    name = "verl RayWorkerGroup"
    how = "ONE_TO_ALL for broadcasts, DP_COMPUTE_PROTO with DataProto otherwise; a DataProtoFuture for the hand-over"
    shares_workers = False
    copies = 17

    def start(self, num_workers: int) -> None:
        self.pool = RayResourcePool([num_workers], use_gpu=False, max_colocate_count=1)
        self.group = RayWorkerGroup(self.pool, RayClassWithInitArgs(ray.remote(VerlWorker)), device_name="cpu")
        self.process_ids()

    def stop(self) -> None:
        for worker in self.group.workers:  # verl has no call for it
            ray.kill(worker)
        for placement_group in self.pool.pgs:
            remove_placement_group(placement_group)

    def process_ids(self) -> list[int]:
        return self.group.process_id()

    def noop(self) -> object:
        return self.group.noop()

    def broadcast(self, value: Any) -> list[Glance]:
        return self.group.broadcast(value)

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.group.plus_one(DataProto.from_dict({"tensor": tensor})).batch["tensor"]

    def scatter_items(self, items: Items) -> Items:
        return list(self.group.plus_one_each(of_items(items)).non_tensor_batch["items"])

    def hand_over(self, length: int) -> list[Glance]:
        return self.group.glance(self.group.ones(length))

    def slice_a_tensor(self, tensor: torch.Tensor) -> Any:
        return self.group.plus_one(DataProto.from_dict({"tensor": tensor})).batch["tensor"]

    def flatten_whole_numbers(self) -> Any:
        return self.group.whole_numbers().batch["tensor"]

    def pair_from_each(self) -> Any:
        return self.group.pair()
