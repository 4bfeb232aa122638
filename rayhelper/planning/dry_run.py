"""A configuration on a cluster that exists only on paper: groups, ranks, nodes, roles, and what is wrong. Pure.

    file -> device groups + shared keys -> Plan of GroupPlans of RolePlans, with findings

Every mistake is found, not only the first; the rules themselves stand in ``device_groups/``, ``parallel_sizes.py``
and ``plan_roles.py``. Where workers lie is ``device_groups/slots.py``; what a person reads is ``plan_report.py``.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayhelper.device_groups import DeviceGroup, DeviceGroups
from rayhelper.device_groups.keys import PLACING_KEYS, TOP_KEYS
from rayhelper.device_groups.mistakes import check_count
from rayhelper.device_groups.slots import Demand, demands, workers_by_node
from rayhelper.errors import ConfigError, PlacementError
from rayhelper.planning.memory import GIB, RUNTIME_BYTES, peak_bytes
from rayhelper.planning.model_shape import SHAPE_REMEDY, ModelShape
from rayhelper.planning.plan_roles import (
    LEARNS,
    Findings,
    Place,
    PlannedRun,
    RolePlan,
    is_adapted,
    is_reference,
    plan_role,
    read_shape,
    scores_pairs,
)
from rayhelper.planning.refusals import chosen_engine, refusals
from rayhelper.planning.role_kinds import RoleKind, kind_of, roles_named
from rayhelper.ranks import runs
from rayhelper.text import parse_file, parse_text

UNREAD_KEYS = ("strategy_args", "strategy_name")  # of ROLL, which trainers read
DEFAULT_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class NodeShare:
    """Nodes on which a group has the same number of workers."""

    nodes: tuple[str, ...]  # in runs
    num_nodes: int
    num_workers: int  # on each


@dataclass(frozen=True)
class GroupPlan:
    """One device group on the cluster."""

    group: DeviceGroup
    ranks: tuple[str, ...]  # in runs: 0-3, 8-11
    shares: tuple[NodeShare, ...]  # empty on CPU: such workers go where CPUs are free
    roles: tuple[RolePlan, ...]
    num_groups: int  # that share its devices, itself included
    roles_beside: tuple[RolePlan, ...]  # of those other groups
    peak_bytes: int | None  # of one GPU, with what its roles move away; None: no role's memory is known
    awake_bytes: int | None  # the same if nothing were moved away
    guests: tuple[str, ...] = ()  # roles that no group names, and that live with a role of this one
    counted_guests: tuple[str, ...] = ()  # those of them whose memory is counted with that role's


@dataclass(frozen=True)
class Plan:
    """A configuration on a cluster."""

    config: str
    num_nodes: int
    gpus_per_node: int
    num_asked: int  # accelerators of the groups
    fits: bool  # whether the cluster has them, node by node
    gpu_bytes: int
    groups: tuple[GroupPlan, ...]
    findings: Findings
    is_partial: bool  # groups with a mistake of their own are left out
    ranks_per_node: int | None  # None: all ranks lie on one node

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


def make_plan(
    config: str,
    nodes: int | None,
    gpus_per_node: int | None,
    model: str | None,
    gpu_memory_gib: float,
    trainer: str | None = None,
) -> Plan:
    """The plan of a file. Raises ConfigError for a file, an argument or a trainer that cannot be read."""
    for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if value is not None:
            check_count(name, value, "Write 1 or more.")
    if not gpu_memory_gib > 0:
        raise ConfigError(f"--gpu_memory_gib must be positive, got {gpu_memory_gib}. Write e.g. 80.")
    findings = Findings()
    values = _read(config)
    declared = roles_named(trainer, values) if trainer else {}
    written, shared = split(values)
    shape, unknown = (
        read_shape(_given(model), "--model", "", findings)
        if model
        else read_shape(shared.get("model"), "model", "pass --model", findings)
    )
    groups, mistakes = DeviceGroups.read(written) if written or not shared else (DeviceGroups(()), [])
    findings.mistakes += mistakes
    refused, unsure = refusals(trainer, config, values)
    for line in refused:
        if not any(str(mistake) in line for mistake in findings.mistakes):
            findings.mistakes.note(line)
    findings.warnings += unsure
    if not groups.groups and not mistakes:
        findings.warnings.append(
            f"{config} has no device groups: a trainer then runs all its roles in one worker. Add device_groups, or a "
            "section such as train: {gpus: 4} for each role, to plan more."
        )
    sections = {"the top level": shared} | {f"section {role!r}": keys for role, keys in groups.role_settings.items()}
    for where, keys in sections.items():
        if unread := [key for key in UNREAD_KEYS if key in keys]:
            findings.warnings.append(
                f"{' and '.join(unread)} of {where} hold more than a plan reads, so the plan would have other sizes "
                "than the run. Write backend: megatron and the sizes as keys of their own."
            )
    if gpus_per_node is None:
        gpus_per_node = groups.nproc_per_node or DEFAULT_GPUS_PER_NODE
        if groups.nproc_per_node is None:
            findings.assume(f"{gpus_per_node} GPUs per node")
    nproc_per_node = groups.nproc_per_node or (None if groups.nnodes == 1 else gpus_per_node)
    layout = _layout(groups, nproc_per_node, findings)
    asked = demands(groups, layout)
    num_nodes = nodes or groups.nnodes or max(1, len(asked))
    if nodes is None and groups.nnodes is None:
        findings.assume(f"{num_nodes:,} {'node' if num_nodes == 1 else 'nodes'}, the fewest that hold the groups")
    fits = _check_fit(asked, num_nodes, gpus_per_node, findings)
    kinds = {role: kind_of(role, declared) for role in groups.roles}
    trained = [group.num_workers for group in groups.groups if any(kinds[role].does in LEARNS for role in group.roles)]
    gpu_bytes = int(gpu_memory_gib * GIB)
    num_trainers = max(trained, default=1)
    engine = "hf"
    if "auto" in (keys.get("rollout_engine") for keys in sections.values()):
        engine, reason = chosen_engine(trainer, config, values) or (engine, "its trainer cannot be asked")
        findings.assume(f"rollout_engine: {engine} (auto: {reason})")
    guests = {role: kind for role, kind in declared.items() if not {role, *kind.also} & {*groups.roles}}
    run = PlannedRun(shared, num_trainers, kinds, gpu_bytes, nproc_per_node, findings, shape, unknown, engine, guests)
    roles = {
        group.name: tuple(plan_role(Place(role, group, groups.role_settings[role], run)) for role in group.roles)
        for group in groups.groups
    }
    planned = tuple(
        _plan_group(group, layout.get(group.name, Counter()), groups.neighbours(group), roles, run)
        for group in groups.groups
    )
    planned = tuple(_with_guests(one, _guests(one.group, groups.roles, declared, shared), run) for one in planned)
    num_asked = sum(demand.total() for demand in asked.values())
    is_partial = bool(mistakes)
    return Plan(
        *(config, num_nodes, gpus_per_node, num_asked, fits, gpu_bytes, planned, findings, is_partial, nproc_per_node)
    )


def _read(config: str) -> Mapping[Any, Any]:
    """What the file holds. Raises ConfigError if it is none, or holds no mapping."""
    values = parse_file(config)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{config} must hold a mapping of keys to values, got {type(values).__name__}.")
    return values


def split(values: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, Any]]:
    """What a file says about device groups, and the keys that all roles share.

    Device groups stand under ``device_groups``, or are every section with sizes or ranks beside the shared keys.
    """
    shared = {name: value for name, value in values.items() if name != "device_groups"}
    if values.get("device_groups") is not None:
        beside = {name for name in shared if _is_placement(name, shared[name], ())}
        written = {name: value for name, value in values.items() if name in beside or name == "device_groups"}
        return written, {name: value for name, value in shared.items() if name not in beside}
    lists = values.get("colocate_groups")
    colocated = (
        [role for roles in lists if isinstance(roles, list) for role in roles] if isinstance(lists, list) else []
    )
    groups = {name: value for name, value in shared.items() if _is_placement(name, value, colocated)}
    return groups, {name: value for name, value in shared.items() if name not in groups}


def _is_placement(name: Any, value: Any, colocated: Sequence[Any]) -> bool:
    """Whether a key says where roles run; a section whose size is misspelt does too."""
    if name in TOP_KEYS or not isinstance(value, Mapping):
        return name in TOP_KEYS
    return name in colocated or any(difflib.get_close_matches(str(key), PLACING_KEYS, 1, 0.85) for key in value)


def _given(model: str) -> Any:
    """The path or mapping that --model says. Raises ConfigError if it holds no shape."""
    source = parse_text(model, "--model") if model.lstrip().startswith("{") else model
    if ModelShape.of(source, "--model") is None:
        raise ConfigError(f"--model: there is no folder or file {model!r}. {SHAPE_REMEDY}")
    return source


def _layout(groups: DeviceGroups, nproc_per_node: int | None, findings: Findings) -> dict[str, Counter[int]]:
    """The workers of every accelerator group by node; a group with a torn worker is left out, and noted."""
    layout = {}
    for group in groups.groups:
        if group.device != "CPU":
            try:
                layout[group.name] = workers_by_node(group, nproc_per_node)
            except PlacementError as error:
                findings.mistakes.note(str(error))
    return layout


def _check_fit(asked: Mapping[int, Demand], num_nodes: int, gpus_per_node: int, findings: Findings) -> bool:
    """Whether the cluster has what is asked; notes demands larger than a node, and more nodes than there are."""
    large = {k: demand.total() for k, demand in asked.items() if demand.total() > gpus_per_node}
    if large:
        k, size = next(iter(large.items()))
        others = f" (and {len(large) - 1} more nodes request too many)" if len(large) > 1 else ""
        findings.mistakes.note(
            f"node {k} of the configuration is asked for {size} accelerators, and a node has {gpus_per_node}{others}. "
            f"Set nproc_per_node to {gpus_per_node}"
            + (f" and nnodes to {-(-size // gpus_per_node)} or more" if len(asked) == 1 else "")
            + f", or plan for nodes with {max(large.values())}."
        )
    if len(asked) > num_nodes:
        used = sum(demand.total() for demand in asked.values())
        missing = len(asked) - num_nodes
        findings.mistakes.note(
            f"the groups are on {len(asked)} nodes ({used} accelerators), and the cluster has {num_nodes} nodes x "
            f"{gpus_per_node} = {num_nodes * gpus_per_node} accelerators. Add {missing} "
            f"{'node' if missing == 1 else 'nodes'}, or request "
            + (
                f"{used - num_nodes * gpus_per_node} accelerators fewer."
                if used > num_nodes * gpus_per_node
                else "ranks that fill fewer nodes."
            )
        )
    return not large and len(asked) <= num_nodes


def _plan_group(
    group: DeviceGroup,
    workers: Counter[int],
    neighbours: Sequence[DeviceGroup],
    roles: Mapping[str, tuple[RolePlan, ...]],
    run: PlannedRun,
) -> GroupPlan:
    own, beside = roles[group.name], [roles[other.name] for other in neighbours]
    processes = [[role.memory for role in process if role.memory is not None] for process in (own, *beside)]
    peak = awake = None
    if any(processes):
        runtime = RUNTIME_BYTES * len(processes)
        peak = runtime + peak_bytes(*processes)
        awake = runtime + peak_bytes(*([memory.awake for memory in process] for process in processes))
    if peak is not None and peak > run.gpu_bytes and group.shares_devices_with is None:
        counted = peak_bytes(*([memory.counted for memory in process] for process in processes))
        room = ", or offload idle roles (offload_model, offload_optimizer, sleep_level)"
        others = f", with {', '.join(repr(other.name) for other in neighbours)} on its devices," if neighbours else ""
        message = (
            f"group {group.name!r}{others} needs about {peak / GIB:.1f} GiB of a GPU of {run.gpu_bytes / GIB:g} GiB, "
            f"of which {counted / GIB:.1f} are counted and not estimated. Give it more workers, larger parallel sizes, "
            f"smaller micro-batches or gradient_checkpointing{room if len(own) > 1 or neighbours else ''}."
        )
        if counted > run.gpu_bytes:
            run.findings.mistakes.note(message)
        else:
            run.findings.warnings.append(message)
    return GroupPlan(
        group,
        runs(group.ranks or ()),
        _shares(workers),
        own,
        len(processes),
        tuple(role for process in beside for role in process),
        peak,
        awake,
    )


def _guests(
    group: DeviceGroup, placed: Collection[str], declared: Mapping[str, RoleKind], shared: Mapping[str, Any]
) -> tuple[str, ...]:
    """The declared roles that live with a role of the group; of those that may have no model, the ones that have."""
    return tuple(
        role
        for role, kind in declared.items()
        if role not in placed
        and kind.host in group.roles
        and (not getattr(kind, "is_optional", False) or any(shared.get(key) for key in kind.models))
    )


def _with_guests(planned: GroupPlan, guests: tuple[str, ...], run: PlannedRun) -> GroupPlan:
    """The group with these guests: a reference is counted with the role that it lives with, or needs no memory."""
    terms = {term.name for role in planned.roles if role.memory is not None for term in role.memory.terms}
    is_needless = is_adapted(run.shared) or run.shared.get("reference_free") is True
    is_counted = "reference" in terms or (bool(terms) and scores_pairs(run) and is_needless)
    counted = tuple(role for role in guests if is_counted and is_reference(run.guests.get(role)))
    return replace(planned, guests=guests, counted_guests=counted)


def _shares(workers: Counter[int]) -> tuple[NodeShare, ...]:
    """The nodes of a group by how many workers they have, in the order of the first."""
    nodes: dict[int, list[int]] = {}
    for k in sorted(workers):
        nodes.setdefault(workers[k], []).append(k)
    return tuple(NodeShare(runs(ks), len(ks), count) for count, ks in nodes.items())
