"""All device groups of a run, read from a configuration in either form.

Both forms end in the same frozen structure, and every mistake ends in a ``ConfigError`` before any process starts:
``parse`` raises the first, ``read`` hands back all of them beside the groups that have none.
Which machine a rank runs on is ``slots.py``; how text becomes plain values is ``text.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayhelper.device_groups.assignment import with_ranks
from rayhelper.device_groups.group import DRIVER, DeviceGroup
from rayhelper.device_groups.keys import DRIVER_KEYS, NODE_KEYS, PLACING_KEYS, RANK_KEYS, SIZE_KEYS, TOP_KEYS
from rayhelper.device_groups.mistakes import Mistakes, check_count, shown
from rayhelper.device_groups.rank_form import rank_groups
from rayhelper.device_groups.role_form import role_groups, settings_of
from rayhelper.device_groups.section import timeout_of
from rayhelper.errors import ConfigError
from rayhelper.text import DID_YOU_MEAN, nearest, parse_text


@dataclass(frozen=True)
class DeviceGroups:
    """All groups of a run, in the order in which they were written."""

    groups: tuple[DeviceGroup, ...]
    nproc_per_node: int | None = None  # rank r lies on node r // nproc_per_node; None: as many as a node has
    nnodes: int | None = None
    role_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)  # every role has an entry
    driver_timeout_s: float | None = None  # that a call of a method of the role 'driver' may take; None: any

    @classmethod
    def parse(
        cls, config: Mapping[str, Any] | str | DeviceGroups, *, known_roles: Collection[str] | None = None
    ) -> DeviceGroups:
        """The groups of either form, given as a mapping or as JSON or YAML text.

        The value of a ``device_groups`` key is read. Keys beside it are ignored here.

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

        A group with a mistake is left out. Its roles and ranks still count in comparisons of groups, if they can be
        read.
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
        return all_roles(self.groups)

    def with_default_hosts(self, hosts: Mapping[str, str]) -> DeviceGroups:
        """The groups with default hosts: each unnamed role of ``hosts`` is added to the group of its host role.

        ``planning/role_kinds.py`` finds these roles of a class.
        """
        groups = self
        for role, host in hosts.items():
            if role not in groups.roles and host in groups.roles:
                home = groups.group_of(host)
                joined = replace(home, roles=(*home.roles, role))
                others = tuple(joined if group is home else group for group in groups.groups)
                groups = replace(groups, groups=others, role_settings={**groups.role_settings, role: {}})
        return groups

    def neighbours(self, group: DeviceGroup) -> tuple[DeviceGroup, ...]:
        """The other groups on the devices of this one."""
        return tuple(
            other for other in self.groups if other.name != group.name and other.devices_of == group.devices_of
        )

    def share_devices(self, role: str, other: str) -> bool:
        """Whether two roles are on the same devices, in one process or not. Raises ConfigError as ``group_of``."""
        return self.group_of(role).devices_of == self.group_of(other).devices_of

    @property
    def have_limits(self) -> bool:
        """Whether some ``timeout_s`` is set."""
        return self.driver_timeout_s is not None or any(group.timeout_s is not None for group in self.groups)

    def limit_of(self, role: str) -> tuple[float | None, str]:
        """``timeout_s`` of a role's calls in this process, if it is set, and the place that sets it, for messages."""
        if role == DRIVER:
            return self.driver_timeout_s, "timeout_s of the section 'driver' of device_groups"
        for group in self.groups:
            if role in group.roles:
                return group.timeout_s, f"timeout_s of group {group.name!r}"
        return None, ""

    def group_of(self, role: str) -> DeviceGroup:
        """The group that hosts the role. Raises ConfigError if none does."""
        for group in self.groups:
            if role in group.roles:
                return group
        raise ConfigError(
            f"role {shown(role)} is not in device_groups (defined: {', '.join(self.roles)}"
            f"{nearest(role, self.roles, '; nearest: {!r}')}). Add it to some group's workers."
        )


def all_roles(groups: Iterable[DeviceGroup]) -> tuple[str, ...]:
    """The roles of all the groups, in their order."""
    return tuple(role for group in groups for role in group.roles)


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
    driver_timeout_s = mistakes.attempt(_driver_timeout_s, config.get(DRIVER))
    sections = _sections({name: value for name, value in config.items() if name != DRIVER}, mistakes)
    settings: dict[str, Mapping[str, Any]] = {}
    if _is_role_form(config, sections):
        groups, faulty = role_groups(sections, config.get("colocate_groups"), mistakes), frozenset[str]()
        settings = {name: settings_of(section) for name, section in sections.items()}
    else:
        groups, faulty = rank_groups(sections, mistakes)
    _check_each_role_once(groups, mistakes)
    groups = with_ranks(groups, faulty, nproc_per_node, nnodes, mistakes)
    settings = {role: settings.get(role, {}) for group in groups for role in group.roles}
    return DeviceGroups(tuple(groups), nproc_per_node, nnodes, settings, driver_timeout_s)


def _driver_timeout_s(section: Any) -> float | None:
    """What the section of the driver says. Raises ConfigError."""
    if section is None:
        return None
    if not isinstance(section, Mapping) or (unknown := [key for key in section if key not in DRIVER_KEYS]):
        got = shown(unknown[0] if isinstance(section, Mapping) else section)
        raise ConfigError(
            f"section 'driver' of device_groups is the process that you start, and accepts {', '.join(DRIVER_KEYS)} "
            f"only, got {got}. Remove it there, or give the group or role another name."
        )
    return timeout_of("section 'driver'", section.get("timeout_s"))


def _opened(config: Any, mistakes: Mistakes) -> Mapping[Any, Any]:
    """The mapping that holds the groups, out of text and out of a ``device_groups`` key around it."""
    whole = _mapping(config)
    if "device_groups" not in whole:
        return whole
    for name, value in whole.items():
        is_section = isinstance(value, Mapping) and any(key in value for key in PLACING_KEYS)
        if name != "device_groups" and (name in TOP_KEYS or is_section):
            mistakes.note(f"{shown(name)} is beside device_groups and would be ignored. Move it inside.")
    return _mapping(whole["device_groups"])


def _mapping(config: Any) -> Mapping[Any, Any]:
    value = parse_text(config, "device_groups") if isinstance(config, str) else config
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        is_path = isinstance(config, str) and config.endswith((".yaml", ".yml", ".json"))
        hint = " Pass the contents of the file, not its name." if is_path else ""
        raise ConfigError(
            f"device_groups must be a mapping of names to sections, got {type(value).__name__} {shown(value)}. "
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
            mistakes.note(f"the name of a group or role must be text, got {shown(name)}. Put it in quotes.")
        elif not isinstance(section, Mapping):
            mistakes.note(
                f"{name!r} must be a mapping such as {{device: GPU, ranks: 4, workers: [role]}}, got {shown(section)}. "
                f"Known keys beside the groups: {', '.join(TOP_KEYS)}."
                f"{nearest(name, TOP_KEYS, DID_YOU_MEAN) or ' Remove it, or write it as a group.'}"
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
