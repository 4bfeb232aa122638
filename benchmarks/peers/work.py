"""What a worker does, the same for every contestant: cheap, so that the way there and back is what is measured."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import torch

Items = list[np.ndarray]  # one a sample: token ids, of different lengths
Glance = list[float]  # no tuple: ms-swift transposes those

STEP = 4096  # of a tensor, every 4096th element is looked at


def process_id() -> int:
    return os.getpid()


def glance(value: Any) -> Glance:
    """[length, a sum over some of the elements]: shows that the value has arrived, at the price of a few reads."""
    if isinstance(value, list):
        return [len(value), float(sum(int(item[0]) for item in value))]
    return [len(value), float(value[::STEP].double().sum())]


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def plus_one_each(items: Items) -> Items:
    return [item + 1 for item in items]


def ones(length: int) -> torch.Tensor:
    return torch.ones(length)


class Contestant(Protocol):
    """One way to call a method on every worker of a group, and to pass values there, back and on."""

    name: str
    how: str  # what was written to do it, for the report
    shares_workers: bool  # with the contestant before it
    copies: int  # of a tensor that is scattered and gathered: how many lie in the machine's memory at the worst moment

    def start(self, num_workers: int) -> None:
        """Returns when every worker is constructed."""

    def stop(self) -> None: ...

    def process_ids(self) -> list[int]: ...

    def noop(self) -> object: ...

    def broadcast(self, value: Any) -> list[Glance]:
        """Sends a tensor, or items, to every worker."""

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor + 1, each worker computing its part."""

    def scatter_items(self, items: Items) -> Items:
        """item + 1 for every item, each worker computing its share; in order."""

    def hand_over(self, length: int) -> list[Glance]:
        """Every worker makes ``length`` ones; what all have made is divided over the workers again."""
