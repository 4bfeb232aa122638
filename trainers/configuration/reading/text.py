"""A configuration as text: the YAML that ``--config`` reads back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rayhelper.text import Loader
from trainers.configuration.reading.secrets import masked

MAX_SAVED_ROWS = 1000  # YAML takes milliseconds a row


def save_config(config: Any, folder: Path) -> None:
    """Writes ``config.yaml``, which ``--config`` reads back to an equal configuration.

    Data and functions that were passed in Python, not by name, are written as a description; secrets in ``env`` as
    ``***``, which stands for what the shell has there as the file is read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    for name, value in values.items():
        if isinstance(value, list) and len(value) > MAX_SAVED_ROWS:
            values[name] = f"{len(value)} rows passed in Python, from {value[0]!r} on"
    unfinished = folder / "config.yaml.tmp"
    unfinished.write_text(as_yaml(masked(values)), encoding="utf-8")
    unfinished.replace(folder / "config.yaml")


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


class _Dumper(yaml.SafeDumper):
    """YAML of plain values; without references, as most people cannot read them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def describe(self, data: Any) -> yaml.Node:
        return self.represent_str(repr(data))


_Dumper.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers  # text that would be read as a number is quoted
_Dumper.add_multi_representer(Path, lambda dumper, path: dumper.represent_str(str(path)))
_Dumper.add_multi_representer(object, _Dumper.describe)


def as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
