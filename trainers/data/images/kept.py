"""What was made of pictures, kept for the next time that they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

CACHE_BYTES = 2**30


class Kept(Generic[T]):
    """The values that were asked for last, of at most ``CACHE_BYTES`` together, and always the newest one."""

    def __init__(self, num_bytes: Callable[[T], int]) -> None:
        self.num_bytes = num_bytes
        self.values: OrderedDict[Hashable, T] = OrderedDict()
        self.total = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, which is made if it is not there."""
        if key in self.values:
            self.values.move_to_end(key)
            return self.values[key]
        made = self.values[key] = make()
        self.total += self.num_bytes(made)
        while self.total > CACHE_BYTES and len(self.values) > 1:
            _, gone = self.values.popitem(last=False)
            self.total -= self.num_bytes(gone)
        return made
