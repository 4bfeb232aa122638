"""Which ranks every group has: those that it names, the lowest free ones where it asks for a number, or another's.

Ranks count accelerators; with ``nproc_per_node``, rank r lies on node r // nproc_per_node, and no worker lies on two.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rayhelper.device_groups.group import DeviceGroup
from rayhelper.device_groups.keys import SHARE_KEY
from rayhelper.device_groups.mistakes import Mistakes
from rayhelper.device_groups.sharing import shared_ranks
from rayhelper.errors import ConfigError


def with_ranks(
    groups: Sequence[DeviceGroup],
    faulty: Collection[str],
    nproc_per_node: int | None,
    nnodes: int | None,
    mistakes: Mistakes,
) -> list[DeviceGroup]:
    """The groups with the ranks of counts filled in: the lowest that are free, after all explicit ones are taken.

    ``faulty`` groups take their explicit ranks too, and are then left out.
    """
    if nproc_per_node is None and (nnodes or 1) > 1 and any(group.device != "CPU" for group in groups):
        mistakes.note(f"nnodes is {nnodes}, but nproc_per_node is missing. Add the accelerators of one node.")
    limit = nproc_per_node * nnodes if nproc_per_node and nnodes else None
    taken: dict[int, str] = {}
    sound = []
    for group in groups:
        before = len(mistakes)
        if group.shares_devices_with is None:
            _check_ranks(group, nproc_per_node, nnodes, taken, mistakes)
            taken |= dict.fromkeys(group.ranks or (), group.name)
        sound += [group] if len(mistakes) == before and group.name not in faulty else []
    placed: dict[str, DeviceGroup] = {}
    for group in sorted(sound, key=lambda group: group.shares_devices_with is not None):
        before, ranks = len(mistakes), group.ranks
        if group.shares_devices_with is not None:
            if group.shares_devices_with not in placed:  # it has a mistake of its own
                continue
            ranks = mistakes.attempt(shared_ranks, group, placed[group.shares_devices_with])
        elif group.device != "CPU" and ranks is None:
            ranks = mistakes.attempt(_lowest_free, group, taken, nproc_per_node, limit)
            taken |= dict.fromkeys(ranks or (), group.name)
        if len(mistakes) == before:
            placed[group.name] = replace(group, ranks=ranks)
    return [placed[group.name] for group in groups if group.name in placed]


def _check_ranks(
    group: DeviceGroup, nproc_per_node: int | None, nnodes: int | None, taken: Mapping[int, str], mistakes: Mistakes
) -> None:
    """Notes the group's explicit ranks that are taken, lie beyond the nodes, or tear a worker apart; one of a kind."""
    ranks, width = group.ranks or (), group.gpus_per_worker
    shared: dict[str, int] = {}
    for rank in ranks:
        if rank in taken:
            shared.setdefault(taken[rank], rank)
    for other, rank in shared.items():
        mistakes.note(
            f"rank {rank} is in two groups, {other!r} and {group.name!r}. Give them ranks that do not overlap, or "
            "host both roles in the workers of one group. For separate processes on the same devices write "
            f"`{SHARE_KEY}: {other}` in {group.name!r}."
        )
    if nproc_per_node is None:
        return
    if width > nproc_per_node:
        mistakes.note(
            f"gpus_per_worker {width} of group {group.name!r} is more than nproc_per_node {nproc_per_node}, and a "
            f"worker is on one node. Make it at most {nproc_per_node}."
        )
        return
    if ranks and nnodes is not None and ranks[-1] >= nproc_per_node * nnodes:
        mistakes.note(
            f"rank {ranks[-1]} of group {group.name!r} is beyond the nodes: nproc_per_node {nproc_per_node} x nnodes "
            f"{nnodes} gives ranks 0 to {nproc_per_node * nnodes - 1}. Make nnodes larger, or the ranks smaller."
        )
    for start in range(0, len(ranks), max(1, width)):
        worker = ranks[start : start + width]
        if worker and worker[0] // nproc_per_node != worker[-1] // nproc_per_node:
            mistakes.note(
                f"worker {start // width} of group {group.name!r} spans two nodes: gpus_per_worker {width} gives it "
                f"ranks {list(worker)}, and nproc_per_node is {nproc_per_node}. Choose ranks on one node."
            )
            return


def _lowest_free(
    group: DeviceGroup, taken: Collection[int], nproc_per_node: int | None, limit: int | None
) -> tuple[int, ...]:
    """The lowest free ranks that keep every worker on one node. Raises ConfigError if the nodes have too few."""
    found: list[int] = []
    worker: list[int] = []
    for rank in itertools.count() if limit is None else range(limit):
        if nproc_per_node and rank % nproc_per_node == 0:
            worker = []
        if rank not in taken:
            worker.append(rank)
        if len(worker) == group.gpus_per_worker:
            found += worker
            worker = []
        if len(found) == group.size:
            break
    if len(found) < group.size:
        raise ConfigError(
            f"group {group.name!r} asks for {group.size} {group.device}. Of the {limit} ranks of "
            f"nproc_per_node x nnodes {len(found)} are left for it. Make nnodes larger, or request fewer ranks."
        )
    return tuple(found)
