"""Where workers live: the Ray cluster, its free resources, and one placement group a device group.

A bundle asks for the worker's accelerators and a sliver of a CPU, so that a machine with two cores can host sixteen
workers: CPUs order the workers over nodes, they never forbid them. Groups that share devices share the bundles.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rayhelper.device_groups import DeviceGroup, DeviceGroups
from rayhelper.device_groups.slots import NodeResources, Slot, assign, bundle
from rayhelper.errors import PlacementError
from rayhelper.runtimes.ray.patches import free_resources, ray_on_loopback

_RESERVE_S = 10.0  # for what was free a moment ago


def connect(address: str | None) -> bool:
    """Joins the cluster at ``address``, or starts one on this machine; True if it is ours to stop."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # says at every start that it is on
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address:
        ray.init(address=address, logging_level=logging.WARNING)
        return True
    with ray_on_loopback():
        ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    return True


def place(groups: DeviceGroups, *, wait_s: float) -> dict[str, tuple[Slot, ...]]:
    """A slot for every rank of every group, waiting up to ``wait_s`` for nodes to join or be freed.

    Raises:
        PlacementError: with what was asked and what each node has free.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return assign(groups, cluster_nodes())
        except PlacementError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.2)


def cluster_nodes() -> list[NodeResources]:
    """The live nodes with their free resources, this driver's own first, then by address."""
    free = free_resources()
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    return [
        NodeResources(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
            npus=int(free.get(node["NodeID"], {}).get("NPU", 0)),
            label=node["NodeManagerHostname"],
        )
        for node in nodes
    ]


def reserved_slots(groups: DeviceGroups, *, wait_s: float) -> dict[str, tuple[tuple[Slot, ...], PlacementGroup]]:
    """The slots of every group and the placement group that holds them, waiting up to ``wait_s`` for nodes.

    What is free may be taken between looking and reserving, or lie on a node that just died: then it is tried again.

    Raises:
        PlacementError: with what was asked and what each node has free.
    """
    deadline = time.monotonic() + wait_s
    try:
        while True:
            found = _reserved_once(groups, deadline)
            if found is not None:
                return found
    except PlacementError as error:
        if wait_s:
            error.add_note(f"waited {wait_s:g} s for the cluster to provide it")
        raise


def _reserved_once(groups: DeviceGroups, deadline: float) -> dict[str, tuple[tuple[Slot, ...], PlacementGroup]] | None:
    """The slots and placement groups; None if something came between and there is time to try again."""
    slots = place(groups, wait_s=max(0.0, deadline - time.monotonic()))
    reserved: dict[str, tuple[tuple[Slot, ...], PlacementGroup]] = {}
    try:
        for group in groups.groups:
            if group.shares_devices_with is None:
                num_groups = 1 + len(groups.neighbours(group))
                reserved[group.name] = slots[group.name], reserve(group, slots[group.name], num_groups)
        return {group.name: (slots[group.name], reserved[group.devices_of][1]) for group in groups.groups}
    except PlacementError:
        for _, held in reserved.values():
            remove_placement_group(held)
        if time.monotonic() >= deadline:
            place(groups, wait_s=0.0)  # raises with the table, if that is why
            raise
        return None


def reserve(group: DeviceGroup, slots: tuple[Slot, ...], num_groups: int = 1) -> PlacementGroup:
    """A placement group with one bundle a rank, each on the node of its slot, for so many groups that share devices.

    Raises:
        PlacementError: the cluster did not provide it within ten seconds.
    """
    asked = bundle(group, num_groups)
    reserved: Any = placement_group(
        [asked for _ in slots],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": slot.node_id} for slot in slots],
    )
    if not reserved.wait(_RESERVE_S):
        remove_placement_group(reserved)
        raise PlacementError(
            f"group {group.name!r} asked for {len(slots)} x {asked}, and the cluster did not provide it "
            f"within {_RESERVE_S:g} s: something else took the resources. Free: {ray.available_resources()}"
        )
    return reserved  # type: ignore[no-any-return]
