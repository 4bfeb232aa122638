"""Values of environment variables that must not be written down, known by the names of their variables.

masked(values)        for config.yaml, --print_config and trackers: {"HF_TOKEN": "***"}
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
    return {name: MASK if is_secret(str(name)) and value != "" else value for name, value in env.items()}


def _unmasked(env: Mapping[str, Any]) -> dict[str, Any]:
    if lacking := [str(name) for name, value in env.items() if value == MASK and name not in os.environ]:
        raise ConfigError(
            f"env: {', '.join(lacking)} was masked as the file was written. Set it in the shell, or write its value."
        )
    return {name: os.environ[name] if value == MASK else value for name, value in env.items()}
