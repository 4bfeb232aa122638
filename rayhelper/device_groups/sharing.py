"""Groups in processes of their own on the devices of another group: ``shares_devices_with``.

    {policy: {device: GPU, ranks: 2, workers: [train]}, engines: {shares_devices_with: policy, workers: [rollout]}}

Such a group may leave out what it would say of its devices. What it says must be what the other says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayhelper.device_groups.group import DeviceGroup
from rayhelper.device_groups.keys import SHARE_KEY
from rayhelper.device_groups.mistakes import shown
from rayhelper.errors import ConfigError
from rayhelper.text import nearest


def shares(section: Mapping[str, Any]) -> bool:
    """Whether the section is one of a group, or role, on the devices of another."""
    return section.get(SHARE_KEY) is not None


def hosts_first(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the sections, those with devices of their own before the others."""
    return sorted(sections, key=lambda name: shares(sections[name]))


def host_of(where: str, name: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The section whose devices this one shares. Raises ConfigError if there is none that has its own."""
    host = sections[name][SHARE_KEY]
    if not isinstance(host, str) or host not in sections:
        raise ConfigError(
            f"{where} has {SHARE_KEY} {shown(host)}, which does not exist (existing: {', '.join(sections)}"
            f"{nearest(host, sections, '; nearest: {!r}')}). Correct the name."
        )
    if host == name:
        raise ConfigError(f"{where} shares devices with itself. Name another, or remove {SHARE_KEY}.")
    if shares(sections[host]):
        raise ConfigError(
            f"{where} shares devices with {host!r}, which has no devices of its own: it shares the devices of "
            f"{shown(sections[host][SHARE_KEY])}. Name a group that has its own devices."
        )
    return host


def with_devices_of(
    host: Mapping[str, Any], section: Mapping[str, Any], device_keys: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The section, with the host's values of those ``device_keys`` that it leaves out; names of one thing together."""
    filled = dict(section)
    for names in device_keys:
        if all(section.get(name) is None for name in names):
            filled |= {name: host[name] for name in names if name in host}
    return filled


def shared_ranks(group: DeviceGroup, host: DeviceGroup) -> tuple[int, ...]:
    """The ranks of both. Raises ConfigError if the group says something else, or the devices cannot be shared."""
    pair = f"group {group.name!r} shares devices with {host.name!r}"
    asked, there = ((one.device, one.num_workers, one.gpus_per_worker) for one in (group, host))
    if asked != there:
        raise ConfigError(f"{pair}, but asks for {_text(group)} and not for {_text(host)}. Leave its size out.")
    if host.ranks is None:
        raise ConfigError(
            f"{pair}, which has CPUs, and CPUs are always shared. Write how many workers it has, and remove "
            f"{SHARE_KEY}."
        )
    if host.gpus_per_worker > 1:
        raise ConfigError(
            f"{pair}, whose workers have {host.gpus_per_worker} {host.device} each (gpus_per_worker), but Ray can "
            "divide only one device per worker. Leave gpus_per_worker out."
        )
    if group.ranks not in (None, host.ranks):
        raise ConfigError(
            f"{pair}, but has ranks {list(group.ranks or ())} and not {list(host.ranks)}. Leave its ranks out."
        )
    return host.ranks


def _text(group: DeviceGroup) -> str:
    each = f" ({group.gpus_per_worker} a worker)" if group.gpus_per_worker > 1 else ""
    return f"{group.size} {group.device}{each}"
