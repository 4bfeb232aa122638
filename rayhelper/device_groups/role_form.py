"""Form 2: one section a role, colocated or on its own.

    {colocate_groups: [[train, rollout]], train: {gpus: 4}, rollout: {gpus: 4}}

Colocated roles become one group, named after all of them. A role may name another on whose devices it has processes of
its own (``sharing.py``). No group has ranks yet; ``assignment.py`` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rayhelper.device_groups.group import Device, DeviceGroup
from rayhelper.device_groups.keys import PARALLEL_SIZES, SECTION_KEYS, SHARE_KEY, SIZE_KEYS
from rayhelper.device_groups.mistakes import Mistakes, check_count, shown
from rayhelper.device_groups.section import MAX_RANKS, device_of, options_of, roles_of
from rayhelper.device_groups.sharing import host_of, hosts_first, shares, with_devices_of
from rayhelper.errors import ConfigError
from rayhelper.text import nearest

DEVICE_KEYS = (tuple(SIZE_KEYS), ("gpus_per_worker",))  # names of one thing together
SHARED_OPTIONS = {"timeout_s": None, "restarts": 0, "max_in_flight": None}  # and what they are if not set


def role_groups(sections: Mapping[str, Mapping[str, Any]], colocate: Any, mistakes: Mistakes) -> list[DeviceGroup]:
    """The groups of form 2, in the order of their first section, without ranks."""
    alone: dict[str, DeviceGroup | None] = {}
    for role in hosts_first(sections):
        alone[role] = _role_group(role, sections, alone, mistakes)
    before = len(mistakes)
    partners = mistakes.attempt(_colocated, colocate, sections, mistakes) or {}
    if len(mistakes) > before:
        return []  # nobody knows which of them share hardware
    names = dict.fromkeys(partners.get(role, (role,)) for role in sections)
    joined = [_joined([_on_groups(alone[role], partners, mistakes) for role in roles], mistakes) for roles in names]
    return [group for group in joined if group is not None]


def _role_group(
    role: str,
    sections: Mapping[str, Mapping[str, Any]],
    others: Mapping[str, DeviceGroup | None],
    mistakes: Mistakes,
) -> DeviceGroup | None:
    where, before, section, host = f"section {role!r}", len(mistakes), sections[role], None
    if "+" in role:
        mistakes.note(f"role {role!r} holds a '+', which joins the names of colocated roles. Rename it.")
    if shares(section):
        host = mistakes.attempt(host_of, where, role, sections)
        if host is None or others[host] is None:  # nobody knows its devices
            return None
        section = with_devices_of(sections[host], section, DEVICE_KEYS)
    roles = mistakes.attempt(roles_of, where, [role])
    key = mistakes.attempt(_size_key, where, section)
    if key is None:
        return None
    device = cast(Device, SIZE_KEYS[key])
    if section.get("device") is not None and mistakes.attempt(device_of, where, section["device"]) not in (
        None,
        device,
    ):
        mistakes.note(f"{where} has {key}, but device {shown(section['device'])}. Remove device.")
    size = mistakes.attempt(
        check_count, f"{key} of {where}", section[key], "Write 1 or more, or remove the section.", MAX_RANKS
    )
    check_parallel_sizes(where, section, f"{key}: {size}", size or 0, mistakes)
    options = options_of(where, section, device, size or 0, mistakes)
    if len(mistakes) > before or roles is None:
        return None
    return DeviceGroup(role, roles, device, None, **options, shares_devices_with=host)


def _on_groups(
    group: DeviceGroup | None, partners: Mapping[str, tuple[str, ...]], mistakes: Mistakes
) -> DeviceGroup | None:
    """The group of one role; what it shares devices with is a group and no role any more."""
    if group is None or group.shares_devices_with is None:
        return group
    host = group.shares_devices_with
    if host in partners.get(group.name, ()):
        mistakes.note(
            f"section {group.name!r} shares devices with {host!r}, with which it is colocated: one process has both "
            f"roles. Remove {SHARE_KEY}, or remove one from colocate_groups."
        )
        return None
    return replace(group, shares_devices_with="+".join(partners.get(host, (host,))))


def _size_key(where: str, section: Mapping[str, Any]) -> str:
    keys = [key for key in SIZE_KEYS if key in section]
    if len(keys) > 1:
        raise ConfigError(f"{where} has both {keys[0]} and {keys[1]}. Keep the one that the role runs on.")
    if not keys:
        slips = [key for key in section if nearest(key, SIZE_KEYS, "{!r}")]
        hint = f" (is {shown(slips[0])} a slip?)" if slips else ""
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
                f"Write a multiple of {product}, or make the parallel sizes smaller."
            )


def _colocated(colocate: Any, sections: Collection[str], mistakes: Mistakes) -> dict[str, tuple[str, ...]]:
    """The roles that share processes, for each role that shares them."""
    lists = [] if colocate is None else colocate
    if not isinstance(lists, (list, tuple)) or not all(isinstance(roles, (list, tuple)) for roles in lists):
        raise ConfigError(
            f"colocate_groups must be a list of lists of roles, got {shown(colocate)}. Write [[train, rollout]]."
        )
    partners: dict[str, tuple[str, ...]] = {}
    for roles in lists:
        partners |= mistakes.attempt(_partners, roles, sections, partners) or {}
    return partners


def _partners(roles: Sequence[Any], sections: Collection[str], taken: Collection[str]) -> dict[str, tuple[str, ...]]:
    """One list of colocated roles, for each of them."""
    if len(roles) < 2:
        raise ConfigError(f"colocate_groups holds {shown(roles)}, fewer than two roles. Add another or remove it.")
    for role in roles:
        if not isinstance(role, str) or role not in sections:
            raise ConfigError(
                f"colocate_groups names {shown(role)}, which has no section (sections: {', '.join(sections)}"
                f"{nearest(role, sections, '; nearest: {!r}')}). Add a section with `gpus`, or correct the name."
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
        if (first.device, first.size) != (member.device, member.size):
            mistakes.note(
                f"{pair} have different sizes: {first.size} {first.device} and {member.size} {member.device}. "
                "They share processes: give them the same number, or remove one from colocate_groups."
            )
        elif first.gpus_per_worker != member.gpus_per_worker:
            mistakes.note(
                f"{pair} have gpus_per_worker {first.gpus_per_worker} and {member.gpus_per_worker}. "
                "They share processes: give them the same gpus_per_worker, or remove one from colocate_groups."
            )
        elif first.shares_devices_with != member.shares_devices_with:
            mistakes.note(
                f"{pair} have {SHARE_KEY} {first.shares_devices_with} and {member.shares_devices_with}. They share "
                "processes: write the same in both sections, or remove one from colocate_groups."
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


def settings_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says to the role's trainer, as it was written."""
    return {key: value for key, value in section.items() if key not in SECTION_KEYS}
