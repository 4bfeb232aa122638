"""A configuration as text: the YAML that ``--config`` reads back, and what ``--help`` tells of each key."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from rayhelper.text import Loader
from trainers.configuration.others.other_names import ALIASES
from trainers.configuration.reading.secrets import masked

COMMON = "trainers.configuration."  # the modules of keys that several trainers share
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


def print_help(config_type: Any, prog: str | None) -> NoReturn:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    keys = [field.name for field in dataclasses.fields(config_type)]
    other_names = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items() if name in keys)
    parser = jsonargparse.ArgumentParser(
        prog=prog, usage="%(prog)s --config FILE [--key VALUE ...]", epilog=f"Other names of keys: {other_names}"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the keys below")
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    own = {name for name in keys if not _is_common(config_type, name)}
    for title, others in (("keys of this trainer", set(keys) - own), ("keys of all trainers, or of several", own)):
        group = parser.add_argument_group(title)
        group.add_class_arguments(config_type, None, as_group=False, skip=others)
    print(re.sub(r", --\w+\+ \S+", "", parser.format_help()), end="")  # appending is not offered
    sys.exit(0)


def _is_common(config_type: type, name: str) -> bool:
    """Whether a key is one of the configurations that several trainers share, whatever its default is here."""
    first = next(kind for kind in reversed(config_type.__mro__) if name in vars(kind).get("__annotations__", {}))
    return first.__module__.startswith(COMMON)


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
