"""Contestants: actors as one writes them by hand, without thought and with."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.peers import work
from benchmarks.peers.work import Glance, Items


class Actor:
    """What both write: a plain class."""

    process_id = staticmethod(work.process_id)
    glance = staticmethod(work.glance)
    plus_one = staticmethod(work.plus_one)
    plus_one_each = staticmethod(work.plus_one_each)
    ones = staticmethod(work.ones)

    def noop(self) -> None:
        return None

    # As above, for a tensor that travels as an array, which Ray hands over without a copy.

    def glance_array(self, array: np.ndarray) -> Glance:
        return work.glance(torch.from_numpy(array))

    def plus_one_array(self, array: np.ndarray) -> np.ndarray:
        return work.plus_one(torch.from_numpy(array)).numpy()

    def ones_array(self, length: int) -> np.ndarray:
        return work.ones(length).numpy()


class Naive:
    """``ray.get([actor.f.remote(x) for actor in actors])``, everything by value."""

    name = "by hand, naive"
    how = "ray.get([a.f.remote(x) for a in actors]); arguments by value; lists cut and joined in Python"
    shares_workers = False
    copies = 8

    def start(self, num_workers: int) -> None:
        self.actors = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(num_workers)]
        self.process_ids()

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def process_ids(self) -> list[int]:
        return ray.get([actor.process_id.remote() for actor in self.actors])

    def noop(self) -> object:
        return ray.get([actor.noop.remote() for actor in self.actors])

    def broadcast(self, value: Any) -> list[Glance]:
        return ray.get([actor.glance.remote(value) for actor in self.actors])

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = zip(self.actors, parts_of(tensor, len(self.actors)), strict=True)
        return torch.cat(ray.get([actor.plus_one.remote(part) for actor, part in parts]))

    def scatter_items(self, items: Items) -> Items:
        slices = zip(self.actors, cut(items, len(self.actors)), strict=True)
        return list(chain.from_iterable(ray.get([actor.plus_one_each.remote(some) for actor, some in slices])))

    def hand_over(self, length: int) -> list[Glance]:
        made = torch.cat(ray.get([actor.ones.remote(length) for actor in self.actors]))
        parts = zip(self.actors, parts_of(made, len(self.actors)), strict=True)
        return ray.get([actor.glance.remote(part) for actor, part in parts])


class Careful(Naive):
    """The same actors, called by somebody who knows Ray's object store."""

    name = "by hand, careful"
    how = "ray.put once for what all get; tensors travel as arrays; references passed on from actor to actor"
    shares_workers = True
    copies = 5

    def __init__(self, naive: Naive) -> None:
        self.naive = naive

    @property
    def actors(self) -> list[Any]:
        return self.naive.actors

    def start(self, num_workers: int) -> None:
        """The actors are the naive contestant's."""

    def stop(self) -> None:
        """As they are its to stop."""

    def broadcast(self, value: Any) -> list[Glance]:
        if isinstance(value, torch.Tensor):
            shared = ray.put(value.numpy())
            return ray.get([actor.glance_array.remote(shared) for actor in self.actors])
        shared = ray.put(value)
        return ray.get([actor.glance.remote(shared) for actor in self.actors])

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = zip(self.actors, np.split(tensor.numpy(), len(self.actors)), strict=True)
        return torch.from_numpy(np.concatenate(ray.get([actor.plus_one_array.remote(part) for actor, part in parts])))

    def hand_over(self, length: int) -> list[Glance]:
        made = [actor.ones_array.remote(length) for actor in self.actors]
        return ray.get([actor.glance_array.remote(part) for actor, part in zip(self.actors, made, strict=True)])


def parts_of(tensor: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The tensor in equal parts, each with memory of its own: of a view, pickle would send the whole tensor."""
    return [part.clone() for part in tensor.chunk(num_parts)]


def cut(items: list[Any], num_slices: int) -> list[list[Any]]:
    """``num_slices`` contiguous slices whose sizes differ by at most one."""
    size, longer = divmod(len(items), num_slices)
    ends = [size * k + min(k, longer) for k in range(num_slices + 1)]
    return [items[start:stop] for start, stop in pairwise(ends)]
