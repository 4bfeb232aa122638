"""How the data-parallel coordinates that workers report fit together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rayhelper.errors import ShardError
from rayhelper.runtime import Shard


def check_shards(known: Mapping[int, Shard], size: int, where: str) -> tuple[list[int], tuple[int, ...], int]:
    """(slice index of each rank, leaders in order of their slices, number of slices) from what the ranks reported.

    Raises:
        ShardError: not every rank reported, the counts differ, an index is missing, or a shard has not one leader.
    """
    silent = [rank for rank in range(size) if rank not in known]
    if silent:
        raise ShardError(
            f"{where}: ranks {sorted(known)} reported a shard and ranks {silent} did not; all must, or none"
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
    return [known[rank].index for rank in range(size)], tuple(leaders[index][0] for index in range(count)), count
