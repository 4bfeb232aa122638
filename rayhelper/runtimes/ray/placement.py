"""Where workers live: the Ray cluster, its free resources, and one placement group for groups that share devices.

    reserved(groups)      a Reservation by group: the slots of its ranks and the bundles that hold them
    reservation.move()    after a node was lost: all of it reserved anew, on nodes that live

A bundle asks for the worker's accelerators and a sliver of a CPU, so that a machine with two cores can host sixteen
workers: CPUs order the workers over nodes, they never forbid them. Groups that share devices share the bundles.
A bundle is bound to the node of its slot: when that is lost, the group is placed anew as a whole, so that its ranks lie
node by node again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rayhelper.device_groups import DeviceGroup, DeviceGroups
from rayhelper.device_groups.slots import NodeResources, Slot, assign, bundle, nproc_per_node
from rayhelper.errors import PlacementError
from rayhelper.runtimes.ray.patches import free_resources, ray_on_loopback

_PROBE_S = 5.0  # for the first answer of a cluster
# Ray speaks gRPC, that is HTTP/2 (RFC 9113, section 3.4): a client greets with these octets and an empty SETTINGS
# frame, a server with a SETTINGS frame: length (3 bytes), type (1), flags (1), stream (4)
_SETTINGS = b"\x04"
_FRAME_HEAD_BYTES = 9
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5
_RESERVE_S = 10.0  # for what was free a moment ago


def connect(address: str | None) -> bool:
    """Joins the cluster at ``address``, or starts one on this machine; True if it is ours to stop.

    Raises:
        PlacementError: nobody listens at the address, or Ray cannot join a cluster there.
    """
    if ray.is_initialized():
        return False
    if address:
        probe(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # says at every start that it is on
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address:
        try:
            with ray_on_loopback() if _listens_on_loopback_alone(address) else nullcontext():
                ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RayError) as error:  # a cluster with another token, or a web server or a proxy
            raise _not_joined(address, error) from None
        return True
    with ray_on_loopback():
        ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    return True


def _listens_on_loopback_alone(address: str) -> bool:
    """Whether nobody answers where Ray would look instead: it takes the machine's outward address for 127.0.0.1."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    try:
        probe(f"{ray.util.get_node_ip_address()}:{port}")
    except PlacementError:
        return True
    return False


def probe(address: str) -> None:
    """Raises PlacementError if no cluster answers at ``host:port`` within five seconds: Ray would try for minutes.

    ``ray://host:port`` is probed alike. An address without a port, as ``auto`` is, Ray finds or refuses by itself.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit() or not host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as connection:
            connection.sendall(_GREETING)
            greeted = _first_frame(connection, time.monotonic() + _PROBE_S)
        if os.environ.get("RAY_USE_TLS", "0") == "0" and greeted[3:4] != _SETTINGS:
            raise ConnectionError("the program at this address does not use Ray's protocol")
    except (OSError, OverflowError) as error:
        raise _nobody(address, error) from None


def _nobody(address: str, error: Exception) -> PlacementError:
    return PlacementError(
        f"no Ray cluster answers at ray_address {address!r} ({error}). Start one there with `ray start --head`, "
        "or correct ray_address (or RAY_ADDRESS). Without it, a cluster starts on this machine."
    )


def _not_joined(address: str, error: Exception) -> PlacementError:
    mode = os.environ.get("RAY_AUTH_MODE")
    told = f"RAY_AUTH_MODE is {mode!r}" if mode else "RAY_AUTH_MODE is not set"
    return PlacementError(
        f"cannot join a Ray cluster at ray_address {address!r} ({str(error).partition('. ')[0]}). If the cluster uses "
        f"token authentication, set RAY_AUTH_MODE=token and give its token in RAY_AUTH_TOKEN or ~/.ray/auth_token "
        f"({told}). If no cluster runs there, start one with `ray start --head`, or correct ray_address "
        "(or RAY_ADDRESS)."
    )


def _first_frame(connection: socket.socket, end: float) -> bytes:
    """The head of the first frame of HTTP/2 that arrives, or what came of it. Raises OSError: nothing came in time."""
    received = b""
    while len(received) < _FRAME_HEAD_BYTES:
        connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            data = connection.recv(_FRAME_HEAD_BYTES - len(received))
        except TimeoutError:
            raise TimeoutError(f"it accepts connections and sends nothing for {_PROBE_S:g} s") from None
        except ConnectionResetError:
            break
        if not data:
            break
        received += data
    return received


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


class NodeLostError(PlacementError):
    """A node that a group was placed on is gone."""


class Reservation:
    """What groups that share devices hold of the cluster. ``groups``: they, with the run's ``nproc_per_node``."""

    def __init__(self, groups: DeviceGroups, slots: dict[str, tuple[Slot, ...]], bundles: PlacementGroup) -> None:
        self.groups = groups
        self.slots = slots  # by group
        self.bundles = bundles  # by rank
        self.num_moves = 0

    def lost_nodes(self) -> list[str]:
        """The addresses of nodes that are gone."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        slots = [slot for slots in self.slots.values() for slot in slots]
        return list(dict.fromkeys(slot.address for slot in slots if slot.node_id not in alive))

    def move(self, wait_s: float) -> None:
        """Frees all of it, what runs there ends, and reserves it anew within ``wait_s``. Raises PlacementError."""
        self.free()
        anew = reserved(self.groups, wait_s=wait_s)[self.groups.groups[0].name]
        self.slots, self.bundles = anew.slots, anew.bundles
        self.num_moves += 1

    def free(self) -> None:
        remove_placement_group(self.bundles)


def reserved(groups: DeviceGroups, *, wait_s: float) -> dict[str, Reservation]:
    """What every group has of the cluster, waiting up to ``wait_s`` for nodes; groups that share devices, together.

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


def _reserved_once(groups: DeviceGroups, deadline: float) -> dict[str, Reservation] | None:
    """The reservations by group; None if something came between and there is time to try again."""
    slots = place(groups, wait_s=max(0.0, deadline - time.monotonic()))
    same_size = replace(groups, nproc_per_node=nproc_per_node(groups, cluster_nodes()))
    found: dict[str, Reservation] = {}  # by the group that brings the devices
    try:
        for group in groups.groups:
            if group.shares_devices_with is None:
                together = tuple(other for other in groups.groups if other.devices_of == group.name)
                held = reserve(group, slots[group.name], len(together))
                own_slots = {other.name: slots[other.name] for other in together}
                found[group.name] = Reservation(replace(same_size, groups=together), own_slots, held)
        return {group.name: found[group.devices_of] for group in groups.groups}
    except PlacementError:
        for reservation in found.values():
            reservation.free()
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
            f"group {group.name!r} asked for {len(slots)} x {asked}, but the cluster did not provide it within "
            f"{_RESERVE_S:g} s. Another program took the resources. Free: {ray.available_resources()}"
        )
    return reserved  # type: ignore[no-any-return]
