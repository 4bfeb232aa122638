"""Which slice each rank of a group gets, from the data-parallel coordinates that its workers report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayhelper.errors import ShardError
from rayhelper.roles.runtime import Shard


@dataclass(frozen=True)
class Layout:
    """How a call lies over the ranks of a group."""

    shard_of: tuple[int, ...]  # the slice of each rank that is called
    leaders: tuple[int, ...]  # the rank whose value counts, for each slice
    num_shards: int

    @classmethod
    def apart(cls, size: int) -> Layout:
        """Every rank its own slice."""
        return cls(tuple(range(size)), tuple(range(size)), size)


Reports = Mapping[tuple[str, str], Shard]  # by address and role

FIRST = Layout((0,), (0,), 1)  # of a call that worker 0 alone makes


class ShardTable:
    """What the workers of a group reported, by the object's address and role."""

    def __init__(self, size: int, group: str) -> None:
        self.size = size
        self.group = group
        self.reported: dict[tuple[str, str], dict[int, Shard]] = {}
        self.layouts: dict[tuple[str, str], Layout] = {}
        self.apart = Layout.apart(size)

    def note(self, rank: int, shards: Reports) -> None:
        """Remembers the shards that a rank reported."""
        for key, shard in shards.items():
            self.reported.setdefault(key, {})[rank] = shard
            self.layouts.pop(key, None)

    def layout(self, address: str, role: str) -> Layout:
        """How a call of an object's role lies over the ranks. Raises ShardError."""
        key = (address, role)
        known = self.layouts.get(key)
        if known is None:
            reported = self.reported.get(key)
            if not reported:
                return self.apart
            known = self.layouts[key] = check_shards(reported, self.size, f"role {role!r} on group {self.group!r}")
        return known

    def drop(self, address: str) -> None:
        """Forgets an object and its parts."""
        for table in (self.reported, self.layouts):
            for key in [key for key in table if is_within(key[0], address)]:
                del table[key]


def is_within(address: str, whole: str) -> bool:
    """Whether an address is that of a whole or of one of its parts."""
    return address == whole or address.startswith(f"{whole}.")


def check_shards(known: Mapping[int, Shard], size: int, where: str) -> Layout:
    """The layout of a group of ``size`` ranks.

    Raises:
        ShardError: not every rank reported, the counts differ, an index is missing, or a shard has not one leader.
    """
    silent = [rank for rank in range(size) if rank not in known]
    if silent:
        raise ShardError(
            f"{where}: ranks {sorted(known)} reported a shard and ranks {silent} did not; either every rank must "
            "report one, or none"
        )
    counts = {shard.count for shard in known.values()}
    if len(counts) > 1:
        raise ShardError(f"{where}: the ranks reported different numbers of shards: {sorted(counts)}")
    count = counts.pop()
    leaders: dict[int, list[int]] = {index: [] for index in range(count)}
    for rank in range(size):
        if known[rank].leader:
            leaders[known[rank].index].append(rank)
    wrong = {index: ranks for index, ranks in leaders.items() if len(ranks) != 1}
    if wrong:
        raise ShardError(
            f"{where}: each of the {count} shards needs one leader, but leaders are (shard: ranks) {wrong}"
        )
    shard_of = tuple(known[rank].index for rank in range(size))
    return Layout(shard_of, tuple(leaders[index][0] for index in range(count)), count)
