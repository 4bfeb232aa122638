"""The device groups of a configuration: which hardware hosts which roles.

    mapping, JSON or YAML  ->  form 1 (groups of ranks) or form 2 (one section a role)  ->  DeviceGroups

Both forms end in the same frozen structure, and every mistake ends in a ``ConfigError`` before any process starts:
``parse`` raises the first, ``read`` hands back all of them beside the groups that have none.
Which machine a rank runs on is ``plan.py``; how text becomes plain values is at the end of this file.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar, cast

from rayhelper.errors import ConfigError
from rayhelper.text import parse_text

P = ParamSpec("P")
T = TypeVar("T")
Device = Literal["GPU", "NPU", "CPU"]

DRIVER = "driver"  # reserved: the role of methods that only the driver runs
MAX_IN_FLIGHT = 64
MAX_RANKS = 1_000_000  # more than this is a slip of the keyboard
NODE_KEYS = ("nproc_per_node", "nnodes")
TOP_KEYS = (*NODE_KEYS, "colocate_groups")
SIZE_KEYS = {"gpus": "GPU", "npus": "NPU", "cpus": "CPU"}
RANK_KEYS = ("ranks", "device_mapping", "workers")
OPTION_KEYS = ("timeout_s", "restarts", "max_in_flight", "gpus_per_worker", "env")
SHARED_OPTIONS = {"timeout_s": None, "restarts": 0, "max_in_flight": MAX_IN_FLIGHT}  # and what they are if not set
GROUP_KEYS = ("device", *RANK_KEYS, *OPTION_KEYS)
PARALLEL_SIZES = (
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ("vllm_tensor_parallel_size",),
)


class Mistakes(list[ConfigError]):
    """The mistakes of a configuration, in the order in which they were found."""

    def attempt(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What ``step`` returns; None if it raised a ConfigError, which is kept here."""
        try:
            return step(*args, **kwargs)
        except ConfigError as error:
            self.append(error)
            return None

    def note(self, message: str) -> None:
        self.append(ConfigError(message))


@dataclass(frozen=True)
class DeviceGroup:
    """Named hardware: its workers are processes, each of which hosts all the group's roles."""

    name: str
    roles: tuple[str, ...]
    device: Device
    ranks: tuple[int, ...] | None  # rising global accelerator indices, num_workers * gpus_per_worker; None on CPU
    num_workers: int
    gpus_per_worker: int = 1  # accelerators of one worker, whatever their make; 0 on CPU
    timeout_s: float | None = None  # that a call may take
    restarts: int = 0  # how many workers that died are replaced, in all
    max_in_flight: int = MAX_IN_FLIGHT  # deferred calls whose workers have not answered; the next one waits
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
        groups, mistakes = (config, None) if isinstance(config, DeviceGroups) else cls.read(config)
        if mistakes:
            raise mistakes[0]
        for role in known_roles or ():
            if role != DRIVER:
                groups.group_of(role)
        return groups

    @classmethod
    def read(cls, config: Mapping[str, Any] | str) -> tuple[DeviceGroups, list[ConfigError]]:
        """The groups that could be read, and every mistake; ``parse`` raises the first of them.

        A group with a mistake of its own is left out of the groups. Its roles and ranks, where they can be read, still
        count where groups are compared.
        """
        mistakes = Mistakes()
        return mistakes.attempt(_read, config, mistakes) or cls(()), mistakes

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


def _read(config: Any, mistakes: Mistakes) -> DeviceGroups:
    config = _opened(config, mistakes)
    nproc_per_node, nnodes = (
        None
        if config.get(key) is None
        else mistakes.attempt(check_count, key, config[key], "Write how many there are, 1 or more.")
        for key in NODE_KEYS
    )
    if nproc_per_node is None and config.get("nproc_per_node") is not None:
        nnodes = None  # of nodes whose size is wrong
    sections = _sections(config, mistakes)
    settings: dict[str, Mapping[str, Any]] = {}
    if _is_role_form(config, sections):
        groups, faulty = _role_groups(sections, config.get("colocate_groups"), mistakes), frozenset[str]()
        settings = {name: _settings(section) for name, section in sections.items()}
    else:
        groups, faulty = _rank_groups(sections, mistakes)
    _check_each_role_once(groups, mistakes)
    groups = _with_ranks(groups, faulty, nproc_per_node, nnodes, mistakes)
    settings = {role: settings.get(role, {}) for group in groups for role in group.roles}
    return DeviceGroups(tuple(groups), nproc_per_node, nnodes, settings)


def _opened(config: Any, mistakes: Mistakes) -> Mapping[Any, Any]:
    """The mapping that holds the groups, out of text and out of a ``device_groups`` key around it."""
    whole = _mapping(config)
    if "device_groups" not in whole:
        return whole
    for name, value in whole.items():
        is_section = isinstance(value, Mapping) and any(key in value for key in (*SIZE_KEYS, *RANK_KEYS))
        if name != "device_groups" and (name in TOP_KEYS or is_section):
            mistakes.note(f"{_shown(name)} stands beside device_groups and would be ignored. Move it inside.")
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


def _sections(config: Mapping[Any, Any], mistakes: Mistakes) -> dict[str, Mapping[str, Any]]:
    """The groups of form 1 or the roles of form 2, by name."""
    written = {name: value for name, value in config.items() if name not in TOP_KEYS}
    if not written:
        raise ConfigError("device_groups has no group. Add one: {name: {device: GPU, ranks: 4, workers: [role]}}.")
    sections = {}
    for name, section in written.items():
        if not isinstance(name, str) or not name.strip():
            mistakes.note(f"the name of a group or role must be text, got {_shown(name)}. Put it in quotes.")
        elif not isinstance(section, Mapping):
            mistakes.note(
                f"{name!r} must be a mapping such as {{device: GPU, ranks: 4, workers: [role]}}, got {_shown(section)} "
                f"(known keys beside the groups: {', '.join(TOP_KEYS)})."
                f"{_nearest(name, TOP_KEYS, ' Did you mean {!r}?') or ' Remove it, or write it as a group.'}"
            )
        else:
            sections[name] = section
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


def _rank_groups(
    sections: Mapping[str, Mapping[str, Any]], mistakes: Mistakes
) -> tuple[list[DeviceGroup], frozenset[str]]:
    """The groups of form 1, and the names of those with a mistake, of which only what could be read is known."""
    groups, faulty = [], set()
    for name, section in sections.items():
        before = len(mistakes)
        groups.append(_rank_group(name, section, mistakes))
        if len(mistakes) > before:
            faulty.add(name)
    return groups, frozenset(faulty)


def _rank_group(name: str, section: Mapping[str, Any], mistakes: Mistakes) -> DeviceGroup:
    """A group of form 1; if it is written as a count, its ranks are still None. What is wrong is noted and left out."""
    where = f"group {name!r}"
    _check_keys(where, section, mistakes)
    device = mistakes.attempt(_device, where, section.get("device"))
    roles = mistakes.attempt(_roles, where, section.get("workers"))
    counted = mistakes.attempt(_counted_ranks, where, section)
    ranks, size = (None, counted) if isinstance(counted, int) else (counted, len(counted or ()))
    if device == "CPU" and ranks is not None:
        key = "device_mapping" if "device_mapping" in section else "ranks"
        mistakes.note(
            f"{key} of {where} must be a number of workers, because CPUs have no index; got {_shown(section[key])}. "
            f"Write `ranks: {len(ranks)}`."
        )
    options = _options(where, section, device, size, mistakes)
    indices = None if device in ("CPU", None) else ranks  # of an unknown device, nobody knows what they count
    return DeviceGroup(name, roles or (), device or "CPU", indices, **options)


def _counted_ranks(where: str, section: Mapping[str, Any]) -> int | tuple[int, ...]:
    """What the section writes as its ranks: a count, or rising indices."""
    if "ranks" in section and "device_mapping" in section:
        raise ConfigError(f"{where} has both ranks and device_mapping, two names of one thing. Remove device_mapping.")
    key = "device_mapping" if "device_mapping" in section else "ranks"
    if section.get(key) is None:
        raise ConfigError(f"{where} has no ranks. Add `ranks: 4`, `ranks: [0, 1]` or `ranks: list(range(0, 2))`.")
    return _ranks(f"{key} of {where}", section[key])


def _check_keys(where: str, section: Mapping[Any, Any], mistakes: Mistakes) -> None:
    meant = GROUP_KEYS if any(key in section for key in RANK_KEYS) else (*GROUP_KEYS, *SIZE_KEYS)
    for key in section:
        if key not in GROUP_KEYS:
            mistakes.note(
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
        return check_count(where, ranks, "Ask for 1 or more, or remove the group.", MAX_RANKS)
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


def _role_groups(sections: Mapping[str, Mapping[str, Any]], colocate: Any, mistakes: Mistakes) -> list[DeviceGroup]:
    """The groups of form 2, in the order of their first section, without ranks."""
    alone = {role: _role_group(role, section, mistakes) for role, section in sections.items()}
    before = len(mistakes)
    partners = mistakes.attempt(_colocated, colocate, sections, mistakes) or {}
    if len(mistakes) > before:
        return []  # nobody knows which of them share hardware
    names = dict.fromkeys(partners.get(role, (role,)) for role in sections)
    joined = [_joined([alone[role] for role in roles], mistakes) for roles in names]
    return [group for group in joined if group is not None]


def _role_group(role: str, section: Mapping[str, Any], mistakes: Mistakes) -> DeviceGroup | None:
    where, before = f"section {role!r}", len(mistakes)
    if "+" in role:
        mistakes.note(f"role {role!r} holds a '+', which joins the names of colocated roles. Rename it.")
    roles = mistakes.attempt(_roles, where, [role])
    key = mistakes.attempt(_size_key, where, section)
    if key is None:
        return None
    device = cast(Device, SIZE_KEYS[key])
    if section.get("device") is not None and mistakes.attempt(_device, where, section["device"]) not in (None, device):
        mistakes.note(f"{where} has {key}, but device {_shown(section['device'])}. Remove device.")
    size = mistakes.attempt(
        check_count, f"{key} of {where}", section[key], "Ask for 1 or more, or remove the section.", MAX_RANKS
    )
    check_parallel_sizes(where, section, f"{key}: {size}", size or 0, mistakes)
    options = _options(where, section, device, size or 0, mistakes)
    if len(mistakes) > before or roles is None:
        return None
    return DeviceGroup(role, roles, device, None, **options)


def _size_key(where: str, section: Mapping[str, Any]) -> str:
    keys = [key for key in SIZE_KEYS if key in section]
    if len(keys) > 1:
        raise ConfigError(f"{where} has both {keys[0]} and {keys[1]}. Keep the one that the role runs on.")
    if not keys:
        slips = [key for key in section if _nearest(key, SIZE_KEYS, "{!r}")]
        hint = f" (is {_shown(slips[0])} a slip?)" if slips else ""
        raise ConfigError(f"{where} has no size{hint}. Add `gpus: 4`, `npus: 4`, or `cpus: 4` if it needs neither.")
    return keys[0]


def check_parallel_sizes(where: str, section: Mapping[str, Any], asked: str, size: int, mistakes: Mistakes) -> None:
    """Notes the parallel sizes of the section that are no numbers, or that do not divide ``size`` accelerators."""
    for keys in PARALLEL_SIZES:
        sizes = {
            key: mistakes.attempt(check_count, f"{key} of {where}", section[key], "Write 1 or more.")
            for key in keys
            if key in section
        }
        product = math.prod(value or 1 for value in sizes.values())
        if size % product:
            terms = " x ".join(f"{key} {value}" for key, value in sizes.items())
            mistakes.note(
                f"{terms}{f' = {product}' if len(sizes) > 1 else ''} of {where} does not divide its {asked}. "
                f"Ask for a multiple of {product}, or make the parallel sizes smaller."
            )


def _colocated(colocate: Any, sections: Collection[str], mistakes: Mistakes) -> dict[str, tuple[str, ...]]:
    """The roles that share processes, for each role that shares them."""
    lists = [] if colocate is None else colocate
    if not isinstance(lists, (list, tuple)) or not all(isinstance(roles, (list, tuple)) for roles in lists):
        raise ConfigError(
            f"colocate_groups must be a list of lists of roles, got {_shown(colocate)}. Write [[train, rollout]]."
        )
    partners: dict[str, tuple[str, ...]] = {}
    for roles in lists:
        partners |= mistakes.attempt(_partners, roles, sections, partners) or {}
    return partners


def _partners(roles: Sequence[Any], sections: Collection[str], taken: Collection[str]) -> dict[str, tuple[str, ...]]:
    """One list of colocated roles, for each of them."""
    if len(roles) < 2:
        raise ConfigError(f"colocate_groups holds {_shown(roles)}, fewer than two roles. Add another or remove it.")
    for role in roles:
        if not isinstance(role, str) or role not in sections:
            raise ConfigError(
                f"colocate_groups names {_shown(role)}, which has no section (sections: {', '.join(sections)}"
                f"{_nearest(role, sections, '; nearest: {!r}')}). Add a section with `gpus`, or correct the name."
            )
        if role in taken or roles.count(role) > 1:
            raise ConfigError(f"colocate_groups names role {role!r} twice. Name each role once.")
    return dict.fromkeys(roles, tuple(roles))


def _joined(members: Sequence[DeviceGroup | None], mistakes: Mistakes) -> DeviceGroup | None:
    """The group of colocated roles, which agree on their hardware and on every option that more than one sets."""
    first, before = members[0], len(mistakes)
    env: dict[str, str] = {}
    shared: dict[str, Any] = {}
    for member in members:
        if first is None or member is None:
            return None
        pair = f"colocated roles {first.name!r} and {member.name!r}"
        if (first.device, _size(first)) != (member.device, _size(member)):
            mistakes.note(
                f"{pair} have different sizes: {_size(first)} {first.device} and {_size(member)} {member.device}. "
                "They share processes: give them the same number, or take one out of colocate_groups."
            )
        elif first.gpus_per_worker != member.gpus_per_worker:
            mistakes.note(
                f"{pair} have gpus_per_worker {first.gpus_per_worker} and {member.gpus_per_worker}. "
                "They share processes: give them the same gpus_per_worker, or take one out of colocate_groups."
            )
        for key, unset in SHARED_OPTIONS.items():
            value = getattr(member, key)
            if value != unset and shared.setdefault(key, value) != value:
                mistakes.note(f"{pair} have different {key}, {shared[key]} and {value}. Set it in one section.")
        for name, value in member.env:
            if env.setdefault(name, value) != value:
                mistakes.note(f"{pair} have different values of env {name!r}. Set it in one section.")
    if len(mistakes) > before or first is None:
        return None
    roles = tuple(member.name for member in members if member is not None)
    return replace(first, name="+".join(roles), roles=roles, env=tuple(env.items()), **shared)


def _settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says to the role's trainer, as it was written."""
    return {key: value for key, value in section.items() if key not in (*SIZE_KEYS, "device", *OPTION_KEYS)}


# What both forms share


def _size(group: DeviceGroup) -> int:
    """How many accelerators, or workers on CPU, the group has."""
    return group.num_workers * max(1, group.gpus_per_worker)


def _options(
    where: str, section: Mapping[str, Any], device: Device | None, size: int, mistakes: Mistakes
) -> dict[str, Any]:
    """num_workers and the options of a group."""
    timeout_s = mistakes.attempt(_timeout_s, where, section.get("timeout_s"))
    width = mistakes.attempt(_gpus_per_worker, where, section.get("gpus_per_worker"), device, size) or 0
    env = mistakes.attempt(_env, where, section.get("env"))
    restarts = mistakes.attempt(_restarts, where, section.get("restarts")) or 0
    max_in_flight = mistakes.attempt(
        check_count, f"max_in_flight of {where}", section.get("max_in_flight", MAX_IN_FLIGHT), "Write 1 or more."
    )
    return {
        "num_workers": size // max(1, width),
        "gpus_per_worker": width,
        "timeout_s": timeout_s,
        "restarts": restarts,
        "max_in_flight": max_in_flight or MAX_IN_FLIGHT,
        "env": env or (),
    }


def _restarts(where: str, restarts: Any) -> int:
    if restarts is not None and (type(restarts) is not int or restarts < 0):
        raise ConfigError(
            f"restarts of {where} must be a whole number, got {_shown(restarts)}. Write how many workers that died may "
            "be replaced in all, or leave it out."
        )
    return restarts or 0


def _timeout_s(where: str, timeout_s: Any) -> float | None:
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s < 1e9):
        raise ConfigError(
            f"timeout_s of {where} must be a positive number of seconds, got {_shown(timeout_s)}. "
            "Write e.g. 600, or leave it out."
        )
    return None if timeout_s is None else float(timeout_s)


def _gpus_per_worker(where: str, gpus_per_worker: Any, device: Device | None, size: int) -> int:
    if gpus_per_worker is None:
        return 0 if device == "CPU" else 1
    if device == "CPU":
        raise ConfigError(f"{where} has gpus_per_worker, but its device is CPU. Remove it, or use device: GPU.")
    width = check_count(f"gpus_per_worker of {where}", gpus_per_worker, "Write 1 or more.")
    if size % width:
        raise ConfigError(
            f"gpus_per_worker {width} of {where} does not divide its {size} {device or 'ranks'}. "
            f"Ask for a multiple of {width}, or make gpus_per_worker smaller."
        )
    return width


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


def _check_each_role_once(groups: Sequence[DeviceGroup], mistakes: Mistakes) -> None:
    hosts: dict[str, str] = {}
    for group in groups:
        for role in group.roles:
            if role in hosts:
                mistakes.note(
                    f"role {role!r} is in two groups, {hosts[role]!r} and {group.name!r}. "
                    "Remove it from the workers of one."
                )
            hosts[role] = group.name


def _with_ranks(
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
        _check_ranks(group, nproc_per_node, nnodes, taken, mistakes)
        taken |= dict.fromkeys(group.ranks or (), group.name)
        sound += [group] if len(mistakes) == before and group.name not in faulty else []
    placed = []
    for group in sound:
        if group.device != "CPU" and group.ranks is None:
            ranks = mistakes.attempt(_lowest_free, group, taken, nproc_per_node, limit)
            if ranks is None:
                continue
            group = replace(group, ranks=ranks)
            taken |= dict.fromkeys(ranks, group.name)
        placed.append(group)
    return placed


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
            f"rank {rank} is in two groups, {other!r} and {group.name!r}. Give them ranks that do not "
            "overlap, or host the roles of both in one group's workers."
        )
    if nproc_per_node is None:
        return
    if width > nproc_per_node:
        mistakes.note(
            f"gpus_per_worker {width} of group {group.name!r} is more than nproc_per_node {nproc_per_node}, and a "
            f"worker lies on one node. Make it at most {nproc_per_node}."
        )
        return
    if ranks and nnodes is not None and ranks[-1] >= nproc_per_node * nnodes:
        mistakes.note(
            f"rank {ranks[-1]} of group {group.name!r} lies beyond the nodes: nproc_per_node {nproc_per_node} x nnodes "
            f"{nnodes} gives ranks 0 to {nproc_per_node * nnodes - 1}. Make nnodes larger, or the ranks smaller."
        )
    for start in range(0, len(ranks), max(1, width)):
        worker = ranks[start : start + width]
        if worker and worker[0] // nproc_per_node != worker[-1] // nproc_per_node:
            mistakes.note(
                f"worker {start // width} of group {group.name!r} spans two nodes: gpus_per_worker {width} gives it "
                f"ranks {list(worker)}, and nproc_per_node is {nproc_per_node}. Choose ranks that lie on one node."
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
        if len(found) == _size(group):
            break
    if len(found) < _size(group):
        raise ConfigError(
            f"group {group.name!r} asks for {_size(group)} {group.device}, but of the {limit} ranks of "
            f"nproc_per_node x nnodes {len(found)} are left for it. Make nnodes larger, or ask for fewer."
        )
    return tuple(found)


def check_count(what: str, value: Any, remedy: str, most: int | None = None) -> int:
    """The value, a positive whole number of at most ``most``. Raises ConfigError, ending in the remedy, for others."""
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
