"""Values of environment variables that must not be written down: named as secrets are, or a password in a URL.

masked(values)        for config.yaml, --print_config and trackers: {"HF_TOKEN": "***", "PROXY": "http://me:***@host"}
unmasked(values)      of a file that was written so: the values come from the environment of the process
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from rayhelper import ConfigError

MASK = "***"
_WORDS = re.compile(
    r"(KEY|TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|CREDENTIALS|AUTH|COOKIE)$", re.IGNORECASE
)

_IN_URL = re.compile(r"(://[^/\s:@]*):([^/\s]+)@")  # user and password of a URL


def secret_in(name: str, value: Any) -> str:
    """What of a variable's value must not be written down; empty: nothing."""
    if is_secret(name):
        return str(value)
    found = _IN_URL.search(str(value))
    return found[2] if found else ""


def is_secret(name: str) -> bool:
    """Whether a word of the name, between underscores, ends as those of secrets do: HF_TOKEN, AWS_SECRET_ACCESS_KEY.

    TOKENIZERS_PARALLELISM is none, and PWD, the working directory, neither.
    """
    return name.upper() not in ("PWD", "OLDPWD") and any(_WORDS.search(word) for word in re.split(r"[_\W]", name))


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, secrets replaced by ``***`` in ``env`` and in the ``env`` of device groups."""
    return _with_env(values, _masked)


def unmasked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, each ``***`` in an ``env`` replaced by what this process has there.

    Raises:
        ConfigError: this process does not have one.
    """
    return _with_env(values, _unmasked)


def _with_env(values: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    changed = dict(values)
    for name in ("env", "device_groups"):
        value = changed.get(name)
        if isinstance(value, Mapping):
            changed[name] = change(value) if name == "env" else _with_env_of_groups(value, change)
    return changed


def _with_env_of_groups(
    groups: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    return {name: _with_env(group, change) if isinstance(group, Mapping) else group for name, group in groups.items()}


def _masked(env: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _written(str(name), value) for name, value in env.items()}


def _written(name: str, value: Any) -> Any:
    if is_secret(name):
        return MASK if value != "" else value
    return _IN_URL.sub(rf"\1:{MASK}@", value) if isinstance(value, str) else value


def _is_masked(value: Any) -> bool:
    return value == MASK or (isinstance(value, str) and f":{MASK}@" in value)


def _unmasked(env: Mapping[str, Any]) -> dict[str, Any]:
    if lacking := [str(name) for name, value in env.items() if _is_masked(value) and name not in os.environ]:
        raise ConfigError(
            f"env: {', '.join(lacking)} was masked when the file was written. Set it in the shell, or write its value."
        )
    return {name: os.environ[name] if _is_masked(value) else value for name, value in env.items()}
