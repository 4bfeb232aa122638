"""What a section says in either form: its device, its roles, and the options of its workers.

``where`` names the section in messages: ``group 'judge'``, ``section 'train'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rayhelper.device_groups.group import DRIVER, OWN, Device
from rayhelper.device_groups.keys import SIZE_KEYS
from rayhelper.device_groups.mistakes import Mistakes, check_count, shown
from rayhelper.errors import ConfigError

MAX_RANKS = 1_000_000  # more than this is a slip of the keyboard


def device_of(where: str, device: Any) -> Device:
    """The device, written in any case. Raises ConfigError if it is missing or unknown."""
    known = tuple(SIZE_KEYS.values())
    if isinstance(device, str) and device.upper() in known:
        return cast(Device, device.upper())
    if device is None:
        raise ConfigError(f"{where} has no device. Add one of: {', '.join(known)}.")
    raise ConfigError(f"{where} has the unknown device {shown(device)}. Write one of: {', '.join(known)}.")


def roles_of(where: str, workers: Any) -> tuple[str, ...]:
    """The roles, written as a list or as one name. Raises ConfigError for none, the reserved one, or one twice."""
    if workers is None:
        raise ConfigError(f"{where} has no workers. Add the roles that it hosts: `workers: [role]`.")
    roles = [workers] if isinstance(workers, str) else workers
    if not isinstance(roles, (list, tuple)) or not all(isinstance(role, str) and role.strip() for role in roles):
        raise ConfigError(f"workers of {where} must be names of roles, got {shown(workers)}. Write `workers: [role]`.")
    if not roles:
        raise ConfigError(f"workers of {where} is empty. Name the roles that it hosts, or remove the group.")
    for role in roles:
        if role == DRIVER:
            raise ConfigError(f"{where} hosts the role 'driver', which always is the driver itself. Remove it there.")
        if role == OWN:
            raise ConfigError(
                f"{where} hosts the role 'own', which is a placeholder for the role of the class that inherits a "
                "method. Name that role."
            )
        if roles.count(role) > 1:
            raise ConfigError(f"workers of {where} names role {role!r} twice. Remove one of them.")
    return tuple(roles)


def options_of(
    where: str, section: Mapping[str, Any], device: Device | None, size: int, mistakes: Mistakes
) -> dict[str, Any]:
    """num_workers and the options of a group."""
    timeout_s = mistakes.attempt(timeout_of, where, section.get("timeout_s"))
    width = mistakes.attempt(_gpus_per_worker, where, section.get("gpus_per_worker"), device, size) or 0
    env = mistakes.attempt(_env, where, section.get("env"))
    restarts = mistakes.attempt(_restarts, where, section.get("restarts")) or 0
    max_in_flight = section.get("max_in_flight")
    if "max_in_flight" in section:
        mistakes.attempt(check_count, f"max_in_flight of {where}", max_in_flight, "Write 1 or more.")
    return {
        "num_workers": size // max(1, width),
        "gpus_per_worker": width,
        "timeout_s": timeout_s,
        "restarts": restarts,
        "max_in_flight": max_in_flight,
        "env": env or (),
    }


def _restarts(where: str, restarts: Any) -> int:
    if restarts is not None and (type(restarts) is not int or restarts < 0):
        raise ConfigError(
            f"restarts of {where} must be a whole number, got {shown(restarts)}. Write how many workers that died may "
            "be replaced in all, or leave it out."
        )
    return restarts or 0


def timeout_of(where: str, timeout_s: Any) -> float | None:
    """Seconds that a call may take, if they are set. Raises ConfigError."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s < 1e9):
        raise ConfigError(
            f"timeout_s of {where} must be a positive number of seconds, got {shown(timeout_s)}. "
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
            f"Write a multiple of {width}, or make gpus_per_worker smaller."
        )
    return width


def _env(where: str, env: Any) -> tuple[tuple[str, str], ...]:
    if env is None:
        return ()
    if not isinstance(env, Mapping):
        raise ConfigError(f"env of {where} must be a mapping, got {shown(env)}. Write {{NAME: value}}.")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigError(f"env of {where} has the name {shown(name)}. Write the name of a variable in quotes.")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"env {name!r} of {where} must be text, got {shown(value)}. Put the value in quotes.")
        if "\0" in f"{name}{value}":
            raise ConfigError(f"env {name!r} of {where} holds a character of code 0, which no variable may hold.")
    return tuple((name, str(value)) for name, value in env.items())
