"""Form 1: groups of ranks that host roles.

    {judge_group: {device: CPU, ranks: 2, workers: [judge]}}

A group that writes a count has no ranks yet; ``assignment.py`` gives it some. One on the devices of another may write
nothing of them (``sharing.py``).
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayhelper.device_groups.group import DeviceGroup
from rayhelper.device_groups.keys import GROUP_KEYS, RANK_KEYS, SIZE_KEYS
from rayhelper.device_groups.mistakes import Mistakes, check_count, shown
from rayhelper.device_groups.section import MAX_RANKS, device_of, options_of, roles_of
from rayhelper.device_groups.sharing import host_of, hosts_first, shares, with_devices_of
from rayhelper.errors import ConfigError
from rayhelper.text import DID_YOU_MEAN, nearest

DEVICE_KEYS = (("device",), ("ranks", "device_mapping"), ("gpus_per_worker",))  # names of one thing together


def rank_groups(
    sections: Mapping[str, Mapping[str, Any]], mistakes: Mistakes
) -> tuple[list[DeviceGroup], frozenset[str]]:
    """The groups of form 1, and the names of those with a mistake, of which only what could be read is known."""
    groups: dict[str, DeviceGroup] = {}
    faulty = set()
    for name in hosts_first(sections):
        before, where, section = len(mistakes), f"group {name!r}", sections[name]
        _check_keys(where, section, mistakes)
        host = mistakes.attempt(host_of, where, name, sections) if shares(section) else None
        if host is not None:
            section = with_devices_of(sections[host], section, DEVICE_KEYS)
        if shares(section) and (host is None or host in faulty):  # nobody knows its devices
            roles = mistakes.attempt(roles_of, where, section.get("workers"))
            groups[name] = DeviceGroup(name, roles or (), "CPU", None, 0)
            faulty.add(name)
        else:
            groups[name] = replace(_rank_group(name, section, mistakes), shares_devices_with=host)
        if len(mistakes) > before:
            faulty.add(name)
    return [groups[name] for name in sections], frozenset(faulty)


def _rank_group(name: str, section: Mapping[str, Any], mistakes: Mistakes) -> DeviceGroup:
    """A group of form 1; if it is written as a count, its ranks are still None. What is wrong is noted and left out."""
    where = f"group {name!r}"
    device = mistakes.attempt(device_of, where, section.get("device"))
    roles = mistakes.attempt(roles_of, where, section.get("workers"))
    counted = mistakes.attempt(_counted_ranks, where, section)
    ranks, size = (None, counted) if isinstance(counted, int) else (counted, len(counted or ()))
    if device == "CPU" and ranks is not None:
        key = "device_mapping" if "device_mapping" in section else "ranks"
        mistakes.note(
            f"{key} of {where} must be a number of workers, because CPUs have no index; got {shown(section[key])}. "
            f"Write `ranks: {len(ranks)}`."
        )
    options = options_of(where, section, device, size, mistakes)
    indices = None if device in ("CPU", None) else ranks  # of an unknown device, nobody knows what they count
    return DeviceGroup(name, roles or (), device or "CPU", indices, **options)


def _check_keys(where: str, section: Mapping[Any, Any], mistakes: Mistakes) -> None:
    meant = GROUP_KEYS if any(key in section for key in RANK_KEYS) else (*GROUP_KEYS, *SIZE_KEYS)
    for key in section:
        if key not in GROUP_KEYS:
            mistakes.note(
                f"{where} has the unknown key {shown(key)} (known: {', '.join(GROUP_KEYS)})."
                f"{nearest(key, meant, DID_YOU_MEAN) or ' Remove it.'}"
            )


def _counted_ranks(where: str, section: Mapping[str, Any]) -> int | tuple[int, ...]:
    """What the section writes as its ranks: a count, or rising indices."""
    if "ranks" in section and "device_mapping" in section:
        raise ConfigError(f"{where} has both ranks and device_mapping, two names of one key. Remove device_mapping.")
    key = "device_mapping" if "device_mapping" in section else "ranks"
    if section.get(key) is None:
        raise ConfigError(f"{where} has no ranks. Add `ranks: 4`, `ranks: [0, 1]` or `ranks: list(range(0, 2))`.")
    return _ranks(f"{key} of {where}", section[key])


def _ranks(where: str, value: Any) -> int | tuple[int, ...]:
    """A count, or rising indices; text may hold either, or a range."""
    ranks = _ranks_of_text(where, value) if isinstance(value, str) else value
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        return check_count(where, ranks, "Write 1 or more, or remove the group.", MAX_RANKS)
    if not isinstance(ranks, (list, tuple, range)):
        raise ConfigError(
            f"{where} must be a count or indices, got {shown(value)}. Write 4, [0, 1] or list(range(0, 2))."
        )
    ranks = ranks[: MAX_RANKS + 1]  # the length of a larger range need not be a machine integer
    if not 0 < len(ranks) <= MAX_RANKS:
        held = "no index" if not ranks else f"more than {MAX_RANKS:,} indices"
        raise ConfigError(f"{where} holds {held}. Write the ranks that the group uses, or remove the group.")
    for rank in ranks:
        if type(rank) is not int or rank < 0:
            raise ConfigError(f"{where} holds {shown(rank)}. Indices are whole numbers from 0: write [0, 1].")
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
            f"{where} is {shown(text)}, which is not a form of ranks. Write 4, [0, 1], list(range(0, 2)) or "
            "list(range(0, 8, 2))."
        ) from None
