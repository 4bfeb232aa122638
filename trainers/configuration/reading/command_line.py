"""From a YAML file and a command line to a configuration: every key typed, every mistake told at once.

    given keys        file, then command line, under our names        ``given_keys.py``, ``others/other_names.py``
    strategies        ROLL's, opened into the keys that they hold     ``others/strategies.py``
    whose defaults    TRL's, or ms-swift's                            ``../defaults.py``
    sections          to device groups and the keys that they mean    ``role_sections.py``
    translations      other systems' keys to ours                     ``others/translations.py``
    typed values      as the configuration's types ask for them       ``typed_values.py``

A key that is none of the configuration's after that is told with the nearest one, or with what to write instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rayhelper import ConfigError
from rayhelper.device_groups.keys import SECTION_KEYS, SIZE_KEYS
from rayhelper.text import nearest, parse_file, parse_text
from trainers.configuration.defaults import Holding, defaults_of, holding, told_of
from trainers.configuration.others.ms_swift import with_config
from trainers.configuration.others.ms_swift_meanings import mean_as_there
from trainers.configuration.others.other_names import (
    ALIASES,
    HINTS,
    NEUTRAL,
    REFUSED,
    TRANSLATED,
    is_neutral,
)
from trainers.configuration.others.strategies import open_strategies
from trainers.configuration.others.translations import translate
from trainers.configuration.reading.folders import rlhf_types
from trainers.configuration.reading.given_keys import COMMAND_LINE, GivenKeys, plain
from trainers.configuration.reading.help import print_help
from trainers.configuration.reading.remedies import why_not_here
from trainers.configuration.reading.role_sections import lift_sections, our_name
from trainers.configuration.reading.secrets import masked, unmasked
from trainers.configuration.reading.text import as_yaml, default_of
from trainers.configuration.reading.typed_values import admits_bool, bracketed, typed
from trainers.configuration.roles import WELL_KNOWN, Role
from trainers.configuration.values import is_there, types_of

ConfigT = TypeVar("ConfigT")
Options = list[tuple[list[str], list[str]]]
OPTION = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
logger = logging.getLogger(__name__)
# The configuration that was read last, with its keys that others said, and which. The header of its run shows them.
read_from: ContextVar[tuple[Any, Mapping[str, str], Mapping[str, str]]] = ContextVar(
    "read_from", default=(None, MappingProxyType({}), MappingProxyType({}))
)


def load_config(config_type: type[ConfigT], argv: Sequence[str], prog: str | None = None) -> ConfigT:
    """The configuration of ``read_config``, without the line for the log."""
    return read_config(config_type, argv, prog)[0]


def read_config(config_type: type[ConfigT], argv: Sequence[str], prog: str | None = None) -> tuple[ConfigT, str]:
    """The configuration that ``--config FILE`` and the other arguments say; the command line wins.

    ``config_type`` is any dataclass. ``--help [TOPIC]`` and ``--print_config`` print and exit. With it comes a line
    that tells whose defaults hold, and which those are.

    Raises:
        ConfigError: unknown keys, wrong types and missing keys, all of them at once; or a value without meaning.
    """
    if asked := {"--help", "-h"} & set(argv):
        after = argv[argv.index(asked.pop()) + 1 :]
        print_help(config_type, prog, after[0] if after and not after[0].startswith("-") else None)
    given, held, ours, defaults, values = _typed_keys(config_type, argv)
    missing = [name for name in ours if defaults[name] is dataclasses.MISSING and name not in given.values]
    if wants_print(argv):
        if not missing:
            config_type(**unmasked(differing(defaults, ours) | values))  # what would not run is not printed
        shown = {name: None if name in missing else value for name, value in (defaults | values).items()}
        print(as_yaml(masked(shown)), end="")
        sys.exit(0)
    config = config_type(**unmasked(differing(defaults, ours) | values))
    read_from.set((config, {key: given.origins[key] for key in given.origins if key in values}, given.chosen))
    if given.notes:
        told = {
            reason: [name for name in given.notes if given.notes[name] == reason] for reason in given.notes.values()
        }
        logger.info("not needed here: %s", "; ".join(f"{', '.join(told[reason])} ({reason})" for reason in told))
    return config, told_of(held, ours, defaults, given)


def wants_print(argv: Sequence[str]) -> bool:
    """Whether ``--print_config`` is asked for."""
    return any(argument.startswith("--print_config") for argument in argv)


def read_keys(config_type: type[ConfigT], argv: Sequence[str]) -> dict[str, Any]:
    """All keys that arguments and their file mean, defaults among them; whether they go together is not looked at.

    Raises:
        ConfigError: unknown keys, wrong types and missing keys, all of them at once.
    """
    *_, defaults, values = _typed_keys(config_type, argv)
    return defaults | values


def chosen_keys(config_type: type[ConfigT], argv: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """The keys that were ``auto`` and are decided before a run starts: what each stands for, and why.

    Raises:
        ConfigError: as ``read_keys``.
    """
    given, *_, values = _typed_keys(config_type, argv)
    return {key: (values[key], reason) for key, reason in given.chosen.items() if key in values}


def _typed_keys(
    config_type: type[ConfigT], argv: Sequence[str]
) -> tuple[GivenKeys, Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What is given, whose defaults hold, the class's own defaults, those that hold, and the values given."""
    fields = {field.name: field for field in dataclasses.fields(config_type) if field.init}  # type: ignore[arg-type]
    types = types_of(config_type)
    ours = {name: default_of(field) for name, field in fields.items()}
    given, foreign, held = _understood(argv, config_type, ours)
    defaults = defaults_of(held, config_type, ours, given)
    mistakes = [*given.mistakes, *_told(foreign, given)]
    values: dict[str, Any] = {}
    for name in [name for name in given.values if name in fields]:
        value, where = given.values[name], given.where[name]
        if value is True and where == COMMAND_LINE and name in given.bare and not admits_bool(types[name]):
            mistakes.append(f"{where}: --{name} has no value")
            continue
        try:
            values[name] = typed(name, types[name], value)
        except ConfigError as error:
            mistakes.append(f"{where}: {error}")
    missing = [name for name in fields if defaults[name] is dataclasses.MISSING and name not in given.values]
    if missing and not wants_print(argv):
        mistakes.append(f"{' and '.join(missing)} must be given, in the file or as --{missing[0]}")
    if mistakes:
        raise ConfigError(mistakes[0] if len(mistakes) == 1 else "\n  - ".join(["several mistakes", *mistakes]))
    return given, held, ours, defaults, values


def differing(defaults: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that are not the class's own."""
    return {name: value for name, value in defaults.items() if name in ours and value is not ours[name]}


def given_keys(
    argv: Sequence[str], known: Iterable[str], roles: Mapping[str, Role] = MappingProxyType({})
) -> tuple[GivenKeys, dict[tuple[str, ...], str]]:
    """What file and command line say, under our names; and the paths of keys that the command line said.

    With no ``known`` keys every name is read as that of some trainer.
    """
    given = GivenKeys(list(known), roles)
    options = _options(argv, given)
    files = [values for path, values in options if path == ["config"]]
    if len(files) > 1:
        raise ConfigError("--config is given twice; put the keys into one file")
    if files:
        if len(files[0]) != 1:
            raise ConfigError(f"--config takes the name of one YAML file, got {' '.join(files[0]) or 'none'}")
        _add_file(files[0][0], given)
    spoken: dict[tuple[str, ...], str] = {}
    for (first, *inner), values in options:
        name = our_name(first, given.known)
        if name == "config":
            continue
        if (name, *inner) in spoken and (inner or given.values.get(name) != _raw(values, inner)):
            other = spoken[name, *inner]
            what = f"{first} is given twice" if other == first else f"{first} and {other} set the same value"
            given.mistakes.append(f"{COMMAND_LINE}: {what}; give one of them")
        spoken[name, *inner] = first
        given.values[name] = _put(given.values.get(name), inner, _raw(values, inner))
        given.where[name] = given.where.get(name, COMMAND_LINE) if inner else COMMAND_LINE
        given.written[name] = first
        given.bare |= {name} if not values else set()
    return given, spoken


def export_env(argv: Sequence[str]) -> None:
    """Exports ``env``, which wins over the shell's, before torch and others are imported."""
    env = bracketed(given_keys(argv, [])[0].values.get("env"))
    if not isinstance(env, Mapping):
        return
    for name, value in unmasked({"env": env})["env"].items():
        with contextlib.suppress(ValueError):  # what is wrong with it, load_config says
            os.environ[str(name)] = str(value)


def translated(argv: Sequence[str], config_type: type) -> tuple[GivenKeys, list[str]]:
    """What a file and a command line say in our keys, values as they were written; and every mistake in them."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config_type) if field.init}
    given, foreign, _ = _understood(argv, config_type, defaults)
    return given, [*given.mistakes, *_told(foreign, given)]


# What was written


def _options(argv: Sequence[str], given: GivenKeys) -> Options:
    """The options of a command line, as (key, ...) and their values; what stands there without one is a mistake."""
    options: Options = []
    file, rest = with_config(argv)
    for argument in [*file, *rest]:
        match = OPTION.fullmatch(argument)
        if match:
            path = [part.replace("-", "_") for part in match[1].split(".")]
            options.append((path, [] if match[2] is None else [match[2]]))
        elif re.match(r"--[A-Za-z_]", argument):
            given.mistakes.append(f"{COMMAND_LINE}: {argument!r} is not an option; write --key value")
        elif options:
            options[-1][1].append(argument)
        else:
            given.mistakes.append(f"{COMMAND_LINE}: {argument!r} belongs to no key; write --key {argument}")
    return [option for option in options if option[0] not in (["help"], ["print_config"])]


def _raw(values: list[str], inner: list[str]) -> Any:
    """What follows an option: nothing is true, several values are a list; inside a mapping, text is read as in YAML."""
    if len(values) != 1:
        return values or True
    try:
        return parse_text(values[0], "text") if inner else values[0]
    except ConfigError:
        return values[0]


def _put(old: Any, inner: list[str], value: Any) -> Any:
    """``value`` at the place ``inner`` of a mapping that keeps its other keys; without a place, the value itself."""
    if not inner:
        return value
    old = bracketed(old)
    old = dict(old) if isinstance(old, Mapping) else {}
    return {**old, inner[0]: _put(old.get(inner[0]), inner[1:], value)}


def _add_file(file: str, given: GivenKeys) -> None:
    """Adds the keys of a YAML file, under our names."""
    path = Path(file)
    if not is_there(path):
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"--config: there is no file {file!r}{nearest(path.name, beside)}")
    found = parse_file(file)
    if not isinstance(found, Mapping) and found is not None:
        raise ConfigError(f"{file} must hold a mapping of keys to values, got {type(found).__name__}")
    for written, value in (found or {}).items():
        name = our_name(str(written), given.known)
        if name in given.values:
            given.mistakes.append(
                f"{file}: {given.written[name]} and {written} are two names of one key; remove one of them"
            )
        given.values[name] = plugins_of(path, value) if name == "external_plugins" else value
        given.where[name] = file
        given.written[name] = str(written)


def plugins_of(file: Path, plugins: Any) -> Any:
    """The plugins that a file names; one that is not in the current folder, but beside the file, with its path."""
    if isinstance(plugins, list):
        return [plugins_of(file, plugin) for plugin in plugins]
    if not isinstance(plugins, str) or not plugins.endswith(".py") or Path(plugins).expanduser().exists():
        return plugins
    found = file.parent / plugins
    return str(found) if found.is_file() else plugins


# What it means


def _understood(
    argv: Sequence[str], config_type: type, ours: Mapping[str, Any]
) -> tuple[GivenKeys, list[tuple[str, str, Any]], Holding]:
    """The keys in our words; those that are none of the configuration's, as (where, key, value); whose defaults hold.

    ``ours`` are the defaults of the configuration's class.
    """
    given, spoken = given_keys(argv, ours, getattr(config_type, "ROLES", {}))
    held = holding(given)
    open_strategies(given)
    foreign = []
    for role, keys in lift_sections(given, spoken).items():
        foreign += [(f"{given.where[role]}, section {role}", key, value) for key, value in keys.items()]
    defaults = defaults_of(held, config_type, ours, given)
    if held.is_ms_swift:
        mean_as_there(given, config_type, defaults)
    translate(given, config_type, defaults, rlhf_types)
    foreign += [(given.where[name], name, value) for name, value in given.values.items() if name not in ours]
    return given, foreign, held


def _told(foreign: Iterable[tuple[str, str, Any]], given: GivenKeys) -> list[str]:
    """The mistakes among foreign keys, those of one place and one reason in one line; hints are noted in ``given``."""
    reasons: dict[tuple[str, str], list[str]] = {}
    mistakes = []
    for where, name, value in foreign:
        is_in_section = ", section " in where
        if is_neutral(name, plain(value)):
            continue
        if is_in_section and name in TRANSLATED:
            mistakes.append(f"{where}: {name} holds for all roles; move it to the top level")
        elif name in HINTS:
            given.notes[name] = HINTS[name]
        elif reason := why_not_here(name, given.known):
            reasons.setdefault((where, reason), []).append(name)
        else:
            mistakes.append(f"{where}: {_unknown(name, value, given, is_in_section)}")
    for (where, reason), names in reasons.items():
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        mistakes.append(f"{where}: {listed} {'is' if len(names) == 1 else 'are'} not supported: {reason}")
    return mistakes


def _unknown(name: str, value: Any, given: GivenKeys, is_in_section: bool) -> str:
    """What to tell of a key that nobody knows."""
    meant = ALIASES.get(name)
    if meant is not None:
        return f"{name} is another name of {meant}, which is not a key of this trainer; remove it"
    if name in WELL_KNOWN and not (isinstance(value, Mapping) and any(key in SIZE_KEYS for key in value)):
        told = f"{name} is the section of a role, and must hold one of {', '.join(SIZE_KEYS)}"
        return f"{told}: {name}: {{{next(iter(SIZE_KEYS))}: 1}}. Keys for all roles belong to the top level"
    names = [*given.known, *ALIASES, *(SECTION_KEYS if is_in_section else ())]
    near = nearest(name, names) or nearest(name, [*NEUTRAL, *HINTS, *REFUSED, *TRANSLATED])
    if isinstance(value, Mapping) and {"device_mapping", "strategy_args", "model_args"} & value.keys():
        sizes = ", ".join(SIZE_KEYS)
        return (
            f"{name} is a section of ROLL; here the section of a role sets its number of devices ({sizes}). "
            "rayhelper translate FILE --from roll writes such a file in RayHelper's keys"
        )
    if isinstance(value, Mapping):
        size = next((hint for key in value if (hint := nearest(str(key), SIZE_KEYS))), "")
        return f"unknown key {name}{near}; the section of a role needs {', '.join(SIZE_KEYS)}{size}"
    is_megatron = "megatron" in given.known and given.get("backend") == "megatron"
    field = _field(name) if is_megatron else ""
    return f"unknown key {name}{field or near}; --help all lists all keys"


def _field(name: str) -> str:
    """Where to write a field of megatron-core, or why it may not be set; nothing for what is none."""
    from trainers.backends.megatron.fields import is_field, why_not

    try:
        if not is_field(name):
            return ""
        reason = why_not(name)
    except ImportError:
        return ""
    return f"; fields of megatron-core belong into megatron: {{{name}: ...}}" if reason is None else f"; {reason}"
