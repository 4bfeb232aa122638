"""The device groups of a configuration: which hardware hosts which roles.

    mapping, JSON or YAML  ->  form 1 (groups of ranks) or form 2 (one section a role)  ->  DeviceGroups

Both forms end in the same frozen structure, and every mistake ends in a ``ConfigError`` before any process starts.
Which machine a rank runs on is ``plan.py``; how text becomes plain values is at the end of this file.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from rayhelper.errors import ConfigError
from rayhelper.text import parse_text

Device = Literal["GPU", "NPU", "CPU"]

DRIVER = "driver"  # reserved: the role of methods that only the driver runs
MAX_RANKS = 1_000_000  # more than this is a slip of the keyboard
NODE_KEYS = ("nproc_per_node", "nnodes")
TOP_KEYS = (*NODE_KEYS, "colocate_groups")
SIZE_KEYS = {"gpus": "GPU", "npus": "NPU", "cpus": "CPU"}
RANK_KEYS = ("ranks", "device_mapping", "workers")
OPTION_KEYS = ("timeout_s", "gpus_per_worker", "env")
GROUP_KEYS = ("device", *RANK_KEYS, *OPTION_KEYS)
PARALLEL_SIZES = (
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ("vllm_tensor_parallel_size",),
)


@dataclass(frozen=True)
class DeviceGroup:
    """Named hardware: its workers are processes, each of which hosts all the group's roles."""

    name: str
    roles: tuple[str, ...]
    device: Device
    ranks: tuple[int, ...] | None  # rising global accelerator indices, num_workers * gpus_per_worker; None on CPU
    num_workers: int
    gpus_per_worker: int = 1  # accelerators of one worker, whatever their make; 0 on CPU
    timeout_s: float | None = None
    env: tuple[tuple[str, str], ...] = ()  # pairs, as dict() takes them


@dataclass(frozen=True)
class DeviceGroups:
    """All groups of a run, in the order in which they were written."""

    groups: tuple[DeviceGroup, ...]
    nproc_per_node: int | None = None  # rank r lies on node r // nproc_per_node; None: as many as a node has
    nnodes: int | None = None
    role_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)  # every role has an entry

    @classmethod
    def parse(
        cls, config: Mapping[str, Any] | str | DeviceGroups, *, known_roles: Collection[str] | None = None
    ) -> DeviceGroups:
        """The groups of either form, given as a mapping or as JSON or YAML text.

        A ``device_groups`` key is opened, and the keys beside it are left to whoever reads the rest of the file.

        Raises:
            ConfigError: a mistake in the configuration, or one of ``known_roles`` that no group hosts.
        """
        groups = config if isinstance(config, DeviceGroups) else _read(config)
        for role in known_roles or ():
            if role != DRIVER:
                groups.group_of(role)
        return groups

    @classmethod
    def single(cls, roles: Iterable[str], device: str, num_workers: int = 1) -> DeviceGroups:
        """One group ``default`` of ``num_workers`` workers that hosts all the roles."""
        return cls.parse({"default": {"device": device, "ranks": num_workers, "workers": list(roles)}})

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role, in the order of the groups."""
        return tuple(role for group in self.groups for role in group.roles)

    def group_of(self, role: str) -> DeviceGroup:
        """The group that hosts the role. Raises ConfigError if none does."""
        for group in self.groups:
            if role in group.roles:
                return group
        raise ConfigError(
            f"role {_shown(role)} is not in device_groups (defined: {', '.join(self.roles)}"
            f"{_nearest(role, self.roles, '; nearest: {!r}')}). Add it to some group's workers."
        )


def _read(config: Any) -> DeviceGroups:
    config = _opened(config)
    nproc_per_node, nnodes = (
        None if config.get(key) is None else _count(key, config[key], "Write how many there are, 1 or more.")
        for key in NODE_KEYS
    )
    sections = _sections(config)
    settings: dict[str, Mapping[str, Any]] = {}
    if _is_role_form(config, sections):
        groups = _role_groups(sections, config.get("colocate_groups"))
        settings = {name: _settings(section) for name, section in sections.items()}
    else:
        groups = [_rank_group(name, section) for name, section in sections.items()]
    _check_each_role_once(groups)
    groups = _with_ranks(groups, nproc_per_node, nnodes)
    settings = {role: settings.get(role, {}) for group in groups for role in group.roles}
    return DeviceGroups(tuple(groups), nproc_per_node, nnodes, settings)


def _opened(config: Any) -> Mapping[Any, Any]:
    """The mapping that holds the groups, out of text and out of a ``device_groups`` key around it."""
    whole = _mapping(config)
    if "device_groups" not in whole:
        return whole
    for name, value in whole.items():
        is_section = isinstance(value, Mapping) and any(key in value for key in (*SIZE_KEYS, *RANK_KEYS))
        if name != "device_groups" and (name in TOP_KEYS or is_section):
            raise ConfigError(f"{_shown(name)} stands beside device_groups and would be ignored. Move it inside.")
    return _mapping(whole["device_groups"])


def _mapping(config: Any) -> Mapping[Any, Any]:
    value = parse_text(config, "device_groups") if isinstance(config, str) else config
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        is_path = isinstance(config, str) and config.endswith((".yaml", ".yml", ".json"))
        hint = " Pass the contents of the file, not its name." if is_path else ""
        raise ConfigError(
            f"device_groups must be a mapping of names to sections, got {type(value).__name__} {_shown(value)}. "
            f"Write {{name: {{device: GPU, ranks: 4, workers: [role]}}}}.{hint}"
        )
    if not value:
        raise ConfigError(
            "device_groups is empty. Add a group for each role: {name: {device: GPU, ranks: 4, workers: [role]}}."
        )
    return value


def _sections(config: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
    """The groups of form 1 or the roles of form 2, by name."""
    sections = {name: value for name, value in config.items() if name not in TOP_KEYS}
    for name, section in sections.items():
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"the name of a group or role must be text, got {_shown(name)}. Put it in quotes.")
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{name!r} must be a mapping such as {{device: GPU, ranks: 4, workers: [role]}}, got {_shown(section)} "
                f"(known keys beside the groups: {', '.join(TOP_KEYS)})."
                f"{_nearest(name, TOP_KEYS, ' Did you mean {!r}?') or ' Remove it, or write it as a group.'}"
            )
    if not sections:
        raise ConfigError("device_groups has no group. Add one: {name: {device: GPU, ranks: 4, workers: [role]}}.")
    return sections


def _is_role_form(config: Mapping[Any, Any], sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """True for form 2: sections of roles with their sizes. Raises ConfigError if there are signs of both."""

    def signs(keys: Iterable[str]) -> list[str]:
        return [f"{key!r} of {name!r}" for name, section in sections.items() for key in keys if key in section]

    role_signs = signs(SIZE_KEYS) + (["'colocate_groups'"] if "colocate_groups" in config else [])
    rank_signs = signs(RANK_KEYS)
    if role_signs and rank_signs:
        raise ConfigError(
            f"two forms of device_groups are mixed: {role_signs[0]} belongs to sections of roles, {rank_signs[0]} to "
            "groups of ranks. Use `ranks` and `workers` in every group, or a section with `gpus` for every role."
        )
    return bool(role_signs)


# Form 1: groups of ranks that host roles


def _rank_group(name: str, section: Mapping[str, Any]) -> DeviceGroup:
    """A group of form 1; if it is written as a count, its ranks are still None."""
    where = f"group {name!r}"
    _check_keys(where, section)
    device = _device(where, section.get("device"))
    roles = _roles(where, section.get("workers"))
    if "ranks" in section and "device_mapping" in section:
        raise ConfigError(f"{where} has both ranks and device_mapping, two names of one thing. Remove device_mapping.")
    key = "device_mapping" if "device_mapping" in section else "ranks"
    if section.get(key) is None:
        raise ConfigError(f"{where} has no ranks. Add `ranks: 4`, `ranks: [0, 1]` or `ranks: list(range(0, 2))`.")
    ranks = _ranks(f"{key} of {where}", section[key])
    if isinstance(ranks, int):
        return DeviceGroup(name, roles, device, None, **_options(where, section, device, ranks))
    if device == "CPU":
        raise ConfigError(
            f"{key} of {where} must be a number of workers, because CPUs have no index; got {_shown(section[key])}. "
            f"Write `ranks: {len(ranks)}`."
        )
    return DeviceGroup(name, roles, device, ranks, **_options(where, section, device, len(ranks)))


def _check_keys(where: str, section: Mapping[Any, Any]) -> None:
    meant = GROUP_KEYS if any(key in section for key in RANK_KEYS) else (*GROUP_KEYS, *SIZE_KEYS)
    for key in section:
        if key not in GROUP_KEYS:
            raise ConfigError(
                f"{where} has the unknown key {_shown(key)} (known: {', '.join(GROUP_KEYS)})."
                f"{_nearest(key, meant, ' Did you mean {!r}?') or ' Remove it.'}"
            )


def _device(where: str, device: Any) -> Device:
    known = tuple(SIZE_KEYS.values())
    if isinstance(device, str) and device.upper() in known:
        return cast(Device, device.upper())
    if device is None:
        raise ConfigError(f"{where} has no device. Add one of: {', '.join(known)}.")
    raise ConfigError(f"{where} has the unknown device {_shown(device)}. Write one of: {', '.join(known)}.")


def _roles(where: str, workers: Any) -> tuple[str, ...]:
    if workers is None:
        raise ConfigError(f"{where} has no workers. Add the roles that it hosts: `workers: [role]`.")
    roles = [workers] if isinstance(workers, str) else workers
    if not isinstance(roles, (list, tuple)) or not all(isinstance(role, str) and role.strip() for role in roles):
        raise ConfigError(f"workers of {where} must be names of roles, got {_shown(workers)}. Write `workers: [role]`.")
    if not roles:
        raise ConfigError(f"workers of {where} is empty. Name the roles that it hosts, or remove the group.")
    for role in roles:
        if role == DRIVER:
            raise ConfigError(f"{where} hosts the role 'driver', which always is the driver itself. Remove it there.")
        if roles.count(role) > 1:
            raise ConfigError(f"workers of {where} names role {role!r} twice. Remove one of them.")
    return tuple(roles)


def _ranks(where: str, value: Any) -> int | tuple[int, ...]:
    """A count, or rising indices; text may hold either, or a range."""
    ranks = _ranks_of_text(where, value) if isinstance(value, str) else value
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        return _count(where, ranks, "Ask for 1 or more, or remove the group.", MAX_RANKS)
    if not isinstance(ranks, (list, tuple, range)):
        raise ConfigError(
            f"{where} must be a count or indices, got {_shown(value)}. Write 4, [0, 1] or list(range(0, 2))."
        )
    ranks = ranks[: MAX_RANKS + 1]  # the length of a larger range need not be a machine integer
    if not 0 < len(ranks) <= MAX_RANKS:
        held = "no index" if not ranks else f"more than {MAX_RANKS:,} indices"
        raise ConfigError(f"{where} holds {held}. Write those that the group uses, or remove the group.")
    for rank in ranks:
        if type(rank) is not int or rank < 0:
            raise ConfigError(f"{where} holds {_shown(rank)}. Indices are whole numbers from 0 on: write [0, 1].")
    rising = sorted(ranks)
    for one, other in itertools.pairwise(rising):
        if one == other:
            raise ConfigError(f"{where} holds {one} twice. Write each index once.")
    return tuple(rising)


def _ranks_of_text(where: str, text: str) -> Any:
    """The value of `4`, `[0, 1]`, `range(0, 2)` or `list(range(0, 8, 2))`; nothing is ever evaluated."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "list"
            and len(node.args) == 1
            and not node.keywords
        ):
            node = node.args[0]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and not node.keywords:
            return range(*(ast.literal_eval(argument) for argument in node.args))
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ConfigError(
            f"{where} is {_shown(text)}, which is no form of ranks. Write 4, [0, 1], list(range(0, 2)) or "
            "list(range(0, 8, 2))."
        ) from None


# Form 2: one section a role, colocated or on its own


def _role_groups(sections: Mapping[str, Mapping[str, Any]], colocate: Any) -> list[DeviceGroup]:
    """The groups of form 2, in the order of their first section, without ranks."""
    alone = {role: _role_group(role, section) for role, section in sections.items()}
    partners = _colocated(colocate, alone)
    names = dict.fromkeys(partners.get(role, (role,)) for role in alone)
    return [_joined([alone[role] for role in roles]) for roles in names]


def _role_group(role: str, section: Mapping[str, Any]) -> DeviceGroup:
    where = f"section {role!r}"
    if "+" in role:
        raise ConfigError(f"role {role!r} holds a '+', which joins the names of colocated roles. Rename it.")
    roles = _roles(where, [role])
    keys = [key for key in SIZE_KEYS if key in section]
    if len(keys) > 1:
        raise ConfigError(f"{where} has both {keys[0]} and {keys[1]}. Keep the one that the role runs on.")
    if not keys:
        slips = [key for key in section if _nearest(key, SIZE_KEYS, "{!r}")]
        hint = f" (is {_shown(slips[0])} a slip?)" if slips else ""
        raise ConfigError(f"{where} has no size{hint}. Add `gpus: 4`, `npus: 4`, or `cpus: 4` if it needs neither.")
    if "restarts" in section:
        raise ConfigError(f"{where} has the unknown key 'restarts' (known: {', '.join(OPTION_KEYS)}). Remove it.")
    device = cast(Device, SIZE_KEYS[keys[0]])
    if section.get("device") is not None and _device(where, section["device"]) != device:
        raise ConfigError(f"{where} has {keys[0]}, but device {_shown(section['device'])}. Remove device.")
    size = _count(f"{keys[0]} of {where}", section[keys[0]], "Ask for 1 or more, or remove the section.", MAX_RANKS)
    _check_parallel_sizes(where, section, f"{keys[0]}: {size}", size)
    return DeviceGroup(role, roles, device, None, **_options(where, section, device, size))


def _check_parallel_sizes(where: str, section: Mapping[str, Any], asked: str, size: int) -> None:
    for keys in PARALLEL_SIZES:
        sizes = {key: _count(f"{key} of {where}", section[key], "Write 1 or more.") for key in keys if key in section}
        product = math.prod(sizes.values())
        if size % product:
            terms = " x ".join(f"{key} {value}" for key, value in sizes.items())
            raise ConfigError(
                f"{terms}{f' = {product}' if len(sizes) > 1 else ''} of {where} does not divide its {asked}. "
                f"Ask for a multiple of {product}, or make the parallel sizes smaller."
            )


def _colocated(colocate: Any, alone: Mapping[str, DeviceGroup]) -> dict[str, tuple[str, ...]]:
    """The roles that share processes, for each role that shares them."""
    lists = [] if colocate is None else colocate
    if not isinstance(lists, (list, tuple)) or not all(isinstance(roles, (list, tuple)) for roles in lists):
        raise ConfigError(
            f"colocate_groups must be a list of lists of roles, got {_shown(colocate)}. Write [[train, rollout]]."
        )
    partners: dict[str, tuple[str, ...]] = {}
    for roles in lists:
        if len(roles) < 2:
            raise ConfigError(f"colocate_groups holds {_shown(roles)}, fewer than two roles. Add another or remove it.")
        for role in roles:
            if not isinstance(role, str) or role not in alone:
                raise ConfigError(
                    f"colocate_groups names {_shown(role)}, which has no section (sections: {', '.join(alone)}"
                    f"{_nearest(role, alone, '; nearest: {!r}')}). Add a section with `gpus`, or correct the name."
                )
            if role in partners or roles.count(role) > 1:
                raise ConfigError(f"colocate_groups names role {role!r} twice. Name each role once.")
        partners |= dict.fromkeys(roles, tuple(roles))
    return partners


def _joined(members: Sequence[DeviceGroup]) -> DeviceGroup:
    """The group of colocated roles, which agree on their hardware and on every option that more than one sets."""
    first = members[0]
    env: dict[str, str] = {}
    timeout_s = None
    for member in members:
        pair = f"colocated roles {first.name!r} and {member.name!r}"
        if (first.device, _size(first)) != (member.device, _size(member)):
            raise ConfigError(
                f"{pair} have different sizes: {_size(first)} {first.device} and {_size(member)} {member.device}. "
                "They share processes: give them the same number, or take one out of colocate_groups."
            )
        if first.gpus_per_worker != member.gpus_per_worker:
            raise ConfigError(
                f"{pair} have gpus_per_worker {first.gpus_per_worker} and {member.gpus_per_worker}. "
                "They share processes: give them the same gpus_per_worker, or take one out of colocate_groups."
            )
        if None not in (timeout_s, member.timeout_s) and timeout_s != member.timeout_s:
            raise ConfigError(
                f"{pair} have different timeout_s, {timeout_s} and {member.timeout_s}. Set it in one section."
            )
        timeout_s = member.timeout_s if timeout_s is None else timeout_s
        for name, value in member.env:
            if env.setdefault(name, value) != value:
                raise ConfigError(f"{pair} have different values of env {name!r}. Set it in one section.")
    roles = tuple(member.name for member in members)
    return replace(first, name="+".join(roles), roles=roles, timeout_s=timeout_s, env=tuple(env.items()))


def _settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says to the role's trainer, as it was written."""
    return {key: value for key, value in section.items() if key not in (*SIZE_KEYS, "device", *OPTION_KEYS)}


# What both forms share


def _size(group: DeviceGroup) -> int:
    """How many accelerators, or workers on CPU, the group has."""
    return group.num_workers * max(1, group.gpus_per_worker)


def _options(where: str, section: Mapping[str, Any], device: Device, size: int) -> dict[str, Any]:
    """num_workers, gpus_per_worker, timeout_s and env of a group."""
    timeout_s, gpus_per_worker = section.get("timeout_s"), section.get("gpus_per_worker")
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s < 1e9):
        raise ConfigError(
            f"timeout_s of {where} must be a positive number of seconds, got {_shown(timeout_s)}. "
            "Write e.g. 600, or leave it out."
        )
    if gpus_per_worker is not None:
        if device == "CPU":
            raise ConfigError(f"{where} has gpus_per_worker, but its device is CPU. Remove it, or use device: GPU.")
        gpus_per_worker = _count(f"gpus_per_worker of {where}", gpus_per_worker, "Write 1 or more.")
        if size % gpus_per_worker:
            raise ConfigError(
                f"gpus_per_worker {gpus_per_worker} of {where} does not divide its {size} {device}. "
                f"Ask for a multiple of {gpus_per_worker}, or make gpus_per_worker smaller."
            )
    width = 0 if device == "CPU" else gpus_per_worker or 1
    return {
        "num_workers": size // max(1, width),
        "gpus_per_worker": width,
        "timeout_s": None if timeout_s is None else float(timeout_s),
        "env": _env(where, section.get("env")),
    }


def _env(where: str, env: Any) -> tuple[tuple[str, str], ...]:
    if env is None:
        return ()
    if not isinstance(env, Mapping):
        raise ConfigError(f"env of {where} must be a mapping, got {_shown(env)}. Write {{NAME: value}}.")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigError(f"env of {where} has the name {_shown(name)}. Write the name of a variable in quotes.")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"env {name!r} of {where} must be text, got {_shown(value)}. Put the value in quotes.")
    return tuple((name, str(value)) for name, value in env.items())


def _check_each_role_once(groups: Sequence[DeviceGroup]) -> None:
    hosts: dict[str, str] = {}
    for group in groups:
        for role in group.roles:
            if role in hosts:
                raise ConfigError(
                    f"role {role!r} is in two groups, {hosts[role]!r} and {group.name!r}. "
                    "Remove it from the workers of one."
                )
            hosts[role] = group.name


def _with_ranks(groups: Sequence[DeviceGroup], nproc_per_node: int | None, nnodes: int | None) -> list[DeviceGroup]:
    """The groups with the ranks of counts filled in: the lowest that are free, after all explicit ones are taken."""
    if nproc_per_node is None and (nnodes or 1) > 1 and any(group.device != "CPU" for group in groups):
        raise ConfigError(f"nnodes is {nnodes}, but nproc_per_node is missing. Add the accelerators of one node.")
    limit = nproc_per_node * nnodes if nproc_per_node and nnodes else None
    taken: dict[int, str] = {}
    for group in groups:
        _check_ranks(group, nproc_per_node, nnodes, taken)
        taken |= dict.fromkeys(group.ranks or (), group.name)
    placed = []
    for group in groups:
        if group.device != "CPU" and group.ranks is None:
            group = replace(group, ranks=_lowest_free(group, taken, nproc_per_node, limit))
            taken |= dict.fromkeys(group.ranks or (), group.name)
        placed.append(group)
    return placed


def _check_ranks(group: DeviceGroup, nproc_per_node: int | None, nnodes: int | None, taken: Mapping[int, str]) -> None:
    """Raises ConfigError if the group's explicit ranks are taken, lie beyond the nodes, or tear a worker apart."""
    ranks, width = group.ranks or (), group.gpus_per_worker
    for rank in ranks:
        if rank in taken:
            raise ConfigError(
                f"rank {rank} is in two groups, {taken[rank]!r} and {group.name!r}. Give them ranks that do not "
                "overlap, or host the roles of both in one group's workers."
            )
    if nproc_per_node is None:
        return
    if width > nproc_per_node:
        raise ConfigError(
            f"gpus_per_worker {width} of group {group.name!r} is more than nproc_per_node {nproc_per_node}, and a "
            f"worker lies on one node. Make it at most {nproc_per_node}."
        )
    if ranks and nnodes is not None and ranks[-1] >= nproc_per_node * nnodes:
        raise ConfigError(
            f"rank {ranks[-1]} of group {group.name!r} lies beyond the nodes: nproc_per_node {nproc_per_node} x nnodes "
            f"{nnodes} gives ranks 0 to {nproc_per_node * nnodes - 1}. Make nnodes larger, or the ranks smaller."
        )
    for start in range(0, len(ranks), max(1, width)):
        worker = ranks[start : start + width]
        if worker and worker[0] // nproc_per_node != worker[-1] // nproc_per_node:
            raise ConfigError(
                f"worker {start // width} of group {group.name!r} spans two nodes: gpus_per_worker {width} gives it "
                f"ranks {list(worker)}, and nproc_per_node is {nproc_per_node}. Choose ranks that lie on one node."
            )


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
        if len(found) == _size(group):
            break
    if len(found) < _size(group):
        raise ConfigError(
            f"group {group.name!r} asks for {_size(group)} {group.device}, but of the {limit} ranks of "
            f"nproc_per_node x nnodes {len(found)} are left for it. Make nnodes larger, or ask for fewer."
        )
    return tuple(found)


def _count(what: str, value: Any, remedy: str, most: int | None = None) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} must be a positive whole number, got {_shown(value)}. {remedy}")
    if most is not None and value > most:
        raise ConfigError(f"{what} is {_shown(value)}, more than {most:,}. Ask for fewer.")
    return value


def _nearest(name: Any, known: Iterable[str], message: str) -> str:
    """The message about the known name nearest to ``name``, or nothing."""
    matches = difflib.get_close_matches(str(name), known, n=1)
    return message.format(matches[0]) if matches else ""


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def _shown(value: Any) -> str:
    """The value as an error message shows it: as Python writes it, cut to a readable length."""
    return _short.repr(value)


# Text
