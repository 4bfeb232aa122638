"""Device groups on a cluster: the node, and the place on it, of every worker.

A rank of the configuration lies on a *logical* node, ``rank // nproc_per_node``. All groups share the logical nodes; a
cluster node is found for each of them that has the accelerators which all groups together ask for there. CPU workers
are spread over all nodes and never refused: a machine with two cores may host sixteen.
What a person reads of all this before anything runs is ``plan_report.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rayhelper.device_groups import DeviceGroup, DeviceGroups
from rayhelper.errors import PlacementError

Demand = Counter[str]  # accelerators by device, on one logical node
CPU_SLIVER = 0.001  # of a worker: CPUs order the workers over nodes, they never forbid them
_STEPS = 10_000  # in which Ray counts one of a resource

_TABLE_ROWS = 32


@dataclass(frozen=True)
class NodeResources:
    """A machine of the cluster and what it has free."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    npus: float
    label: str = ""  # what people call it; shown in errors

    def free(self, device: str) -> float:
        """How many accelerators of ``device`` ('GPU' or 'NPU') are free."""
        return self.gpus if device == "GPU" else self.npus


@dataclass(frozen=True)
class Slot:
    """The place of one worker."""

    group: str
    rank: int  # in the group
    local_rank: int  # among the group's workers on the node
    local_world_size: int
    node_rank: int  # among the nodes that the group uses
    node_id: str
    address: str
    gpus: int  # accelerators of the worker, of its group's device; 0 on CPU


def assign(groups: DeviceGroups, nodes: Sequence[NodeResources]) -> dict[str, tuple[Slot, ...]]:
    """A slot for every worker, by group, in the order of ranks; the ranks of a node are consecutive.

    Raises:
        PlacementError: with a table of what the groups ask and what each node has free.
    """
    if not nodes:
        raise PlacementError("the cluster has no live node. Start Ray on one, or leave out the cluster's address.")
    layout = {
        group.name: workers_by_node(group, nproc_per_node(groups, nodes))
        for group in groups.groups
        if group.device != "CPU"
    }
    places = _places(groups, layout, nodes)
    busy_cpus = [0] * len(nodes)
    slots = {}
    for group in groups.groups:
        if group.device == "CPU":
            counts = _spread(group.num_workers, nodes, busy_cpus)
            busy_cpus = [busy + count for busy, count in zip(busy_cpus, counts, strict=True)]
            slots[group.name] = _slots(group, list(zip(nodes, counts, strict=True)))
        else:
            slots[group.name] = _slots(group, [(places[k], count) for k, count in sorted(layout[group.name].items())])
    return slots


def bundle(group: DeviceGroup, num_groups: int = 1) -> dict[str, float]:
    """What is reserved on a node for one worker of the group, and one of each other group on its devices."""
    ask: dict[str, float] = {"CPU": num_groups * CPU_SLIVER}
    if group.device != "CPU":
        ask[group.device] = group.gpus_per_worker
    return ask


def resources(group: DeviceGroup, num_groups: int = 1) -> dict[str, float]:
    """What one worker takes of its bundle: of a device, an equal part, so that Ray gives all groups the same one."""
    ask = bundle(group)
    if num_groups > 1:
        ask[group.device] = math.floor(_STEPS / num_groups) / _STEPS
    return ask


def demands(groups: DeviceGroups, layout: Mapping[str, Counter[int]]) -> dict[int, Demand]:
    """What all groups together ask of each logical node that is used, from their workers by node."""
    found: dict[int, Demand] = {}
    for group in groups.groups:
        for k, count in layout.get(group.name, {}).items():
            if group.shares_devices_with is None:
                found.setdefault(k, Counter())[group.device] += count * group.gpus_per_worker
    return found


def _slots(group: DeviceGroup, workers: Sequence[tuple[NodeResources, int]]) -> tuple[Slot, ...]:
    """The slots of a group with so many workers on each node."""
    slots: list[Slot] = []
    for node_rank, (node, count) in enumerate((node, count) for node, count in workers if count):
        slots += [
            Slot(group.name, len(slots) + i, i, count, node_rank, node.node_id, node.address, group.gpus_per_worker)
            for i in range(count)
        ]
    return tuple(slots)


def nproc_per_node(groups: DeviceGroups, nodes: Sequence[NodeResources]) -> int | None:
    """The accelerators of a logical node; None: there is only one logical node.

    Where the configuration does not say, a node has as many as the largest of the cluster.
    """
    if groups.nproc_per_node is not None or groups.nnodes == 1:
        return groups.nproc_per_node
    devices = {group.device for group in groups.groups if group.device != "CPU"}
    return int(max((node.free(device) for device in devices for node in nodes), default=0)) or None


def workers_by_node(group: DeviceGroup, nproc_per_node: int | None) -> Counter[int]:
    """How many workers of an accelerator group lie on each logical node. Raises PlacementError for one torn apart."""
    ranks, width = group.ranks, group.gpus_per_worker
    assert ranks is not None, "DeviceGroups gives every accelerator group its ranks"
    if nproc_per_node is None:
        return Counter({0: group.num_workers})
    workers: Counter[int] = Counter()
    for start in range(0, len(ranks), width):
        first, last = ranks[start], ranks[start + width - 1]
        if first // nproc_per_node != last // nproc_per_node:
            raise PlacementError(
                f"worker {start // width} of group {group.name!r} needs {width} {group.device} of one node. With "
                f"{nproc_per_node} per node, its ranks {first} to {last} are on two nodes. Set nproc_per_node in "
                f"device_groups to a multiple of {width}, or choose other ranks."
            )
        workers[first // nproc_per_node] += 1
    return workers


def _places(
    groups: DeviceGroups, layout: dict[str, Counter[int]], nodes: Sequence[NodeResources]
) -> dict[int, NodeResources]:
    """The cluster node of every logical node that is used. Raises PlacementError if there are too few."""
    asked_of = demands(groups, layout)
    places = _in_order(asked_of, nodes)
    if places is None:
        places = _largest_first(asked_of, nodes)
    for k in sorted(asked_of):
        if k not in places:
            asked = " and ".join(f"{count} {device}" for device, count in asked_of[k].items())
            raise PlacementError(
                f"the cluster cannot hold the device groups. No node is left with {asked} free, which node {k} of "
                "the "
                f"configuration needs.\n{_asked_table(groups, layout)}\n{_free_table(nodes)}\n"
                "Request fewer or change nproc_per_node, add nodes, or end other jobs."
            )
    return places


def _in_order(asked_of: dict[int, Demand], nodes: Sequence[NodeResources]) -> dict[int, NodeResources] | None:
    """Logical node k on the k-th cluster node that has enough; None if one is lacking or wanted twice."""
    places = {}
    fitting: dict[tuple[tuple[str, int], ...], list[NodeResources]] = {}
    for k, demand in asked_of.items():
        key = tuple(sorted(demand.items()))
        if key not in fitting:
            fitting[key] = [node for node in nodes if _fits(demand, node)]
        if k >= len(fitting[key]):
            return None
        places[k] = fitting[key][k]
    distinct = len({node.node_id for node in places.values()}) == len(places)
    return places if distinct else None


def _largest_first(asked_of: dict[int, Demand], nodes: Sequence[NodeResources]) -> dict[int, NodeResources]:
    """Logical nodes, the most demanding first, each on the first cluster node that has enough and is not taken.

    With one kind of accelerator this places all of them if that is possible at all: a node that has enough for a
    demand has enough for every smaller one.
    """
    taken: set[int] = set()
    fitting: dict[tuple[tuple[str, int], ...], Iterator[int]] = {}  # never looks twice at a node for the same demand
    places = {}
    for k in sorted(asked_of, key=lambda k: (-asked_of[k].total(), k)):
        key = tuple(sorted(asked_of[k].items()))
        if key not in fitting:
            fitting[key] = iter([index for index, node in enumerate(nodes) if _fits(asked_of[k], node)])
        index = next((index for index in fitting[key] if index not in taken), None)
        if index is not None:
            taken.add(index)
            places[k] = nodes[index]
    return places


def _fits(demand: Demand, node: NodeResources) -> bool:
    return all(count <= node.free(device) for device, count in demand.items())


def _spread(num_workers: int, nodes: Sequence[NodeResources], busy_cpus: Sequence[int]) -> list[int]:
    """How many CPU workers each node gets: one a free CPU (at least one CPU a node) in order, then evenly."""
    counts = []
    left = num_workers
    for node, busy in zip(nodes, busy_cpus, strict=True):
        counts.append(min(left, max(0, max(1, int(node.cpus)) - busy)))
        left -= counts[-1]
    each, extra = divmod(left, len(nodes))
    return [count + each + (i < extra) for i, count in enumerate(counts)]


def _asked_table(groups: DeviceGroups, layout: dict[str, Counter[int]]) -> str:
    rows = [("group", "device", "workers", "accelerators per node")]
    for group in groups.groups:
        on_nodes = [(k, count * group.gpus_per_worker) for k, count in sorted(layout.get(group.name, {}).items())]
        sizes = {size for _, size in on_nodes}
        if group.shares_devices_with is not None:
            per_node = f"the devices of {group.shares_devices_with}"
        elif len(sizes) == 1 and len(on_nodes) > 2:
            per_node = f"{sizes.pop()} on each of {len(on_nodes)} nodes"
        else:
            per_node = ", ".join(f"{size} on node {k}" for k, size in on_nodes[:8]) or "none"
        rows.append((group.name, group.device, str(group.num_workers), per_node))
    return "asked:\n" + _table(rows)


def _free_table(nodes: Sequence[NodeResources]) -> str:
    rows = [("node", "address", "GPU", "NPU", "CPU")]
    rows += [
        (node.label or node.node_id, node.address, f"{node.gpus:g}", f"{node.npus:g}", f"{node.cpus:g}")
        for node in nodes
    ]
    return "free:\n" + _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows in aligned columns, the first as the head; very long tables are cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    shown = rows[: _TABLE_ROWS + 1]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    if len(rows) > len(shown):
        lines.append(f"  ... and {len(rows) - len(shown)} more")
    return "\n".join(lines)
