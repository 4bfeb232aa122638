"""Values of a configuration that must not be written down: named as secrets are, or a password in a URL.

masked(values)        for config.yaml, --print_config and trackers: {"HF_TOKEN": "***", "PROXY": "http://me:***@host"}
unmasked(values)      of a file that was written so: the values of ``env`` come from the environment of the process

Secrets are looked for in ``env``, in what functions, engines and models get as arguments, and in addresses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rayhelper import ConfigError

MASK = "***"
_WORDS = re.compile(
    r"(KEY|TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|CREDENTIALS|AUTH|AUTHORIZATION|COOKIE)$",
    re.IGNORECASE,
)

_IN_URL = re.compile(r"(://[^/\s:@]*):([^/\s]+)@")  # user and password of a URL
_IN_QUERY = re.compile(  # a secret behind its name
    r"(://[^\s?#]*\?(?:[^\s#]*&)?(?:\w+_)?(?:key|token|secret|password|signature|sig)=)([^&\s#]+)", re.IGNORECASE
)
# Keys whose mappings hold arguments of functions, engines and models
_HAVE_ARGUMENTS = re.compile(r"(?!chat_template|columns).*_kwargs|environment|tools|reward_funcs|(prm|orm)_model")
_OF_TOKENIZERS = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop|\w*special)_token", re.IGNORECASE)  # no secrets


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
    """The keys of a configuration, secrets replaced by ``***``."""
    found = _with_env(values, _masked)
    for path, secret in _arguments(found):
        found[path[0]] = _replaced(found[path[0]], path[1:], secret)
    return found


def secrets_in(values: Mapping[str, Any]) -> list[str]:
    """The secrets among the arguments and addresses of a configuration's keys."""
    return [secret for _, secret in _arguments(values) if secret != MASK]


def unmasked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, each ``***`` in an ``env`` replaced by what this process has there.

    Raises:
        ConfigError: this process does not have one, or another key holds ``***`` in the place of a secret.
    """
    for path, secret in _arguments(values):
        if secret == MASK:
            raise ConfigError(
                f"{'.'.join(map(str, path))} was masked when the file was written. Write its value, or pass it as an "
                "environment variable that the code reads."
            )
    return _with_env(values, _unmasked)


def _arguments(values: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The path, and the text, of each secret in keys other than ``env``."""
    for name, value in values.items():
        if name in ("env", "device_groups"):
            continue
        if (isinstance(name, str) and _HAVE_ARGUMENTS.fullmatch(name)) or isinstance(value, str):
            yield from _secrets_of((name,), value)
        elif isinstance(value, (list, tuple)):  # of addresses; rows are data
            yield from (
                found for k, one in enumerate(value) if isinstance(one, str) for found in _secrets_of((name, k), one)
            )


def _secrets_of(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            is_named = isinstance(inner, str) and is_secret(str(name)) and not _OF_TOKENIZERS.fullmatch(str(name))
            if is_named and inner:
                yield (*path, name), inner
            else:
                yield from _secrets_of((*path, name), inner)
    elif isinstance(value, (list, tuple)):
        for k, inner in enumerate(value):
            yield from _secrets_of((*path, k), inner)
    elif isinstance(value, str):
        for found in (_IN_URL.search(value), _IN_QUERY.search(value)):
            if found:
                yield path, found[2]


def _replaced(value: Any, path: tuple[Any, ...], secret: str) -> Any:
    """The value with ``***`` for a secret in the text at ``path``."""
    if not path:
        return value.replace(secret, MASK)
    if isinstance(value, Mapping):
        return {name: _replaced(one, path[1:], secret) if name == path[0] else one for name, one in value.items()}
    return [_replaced(one, path[1:], secret) if k == path[0] else one for k, one in enumerate(value)]


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
