"""From a YAML file and a command line to a trainer's configuration, and from there to a run.

    python -m trainers.grpo --config x.yaml --learning_rate 1e-5 --use_ray true
    python -m trainers grpo --config x.yaml

jsonargparse does the parsing and the types; here unknown keys, other systems' spellings and the sections of roles are
dealt with, so that a typo is answered with the nearest key before anything starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from rayhelper import ConfigError, DeviceGroups, RayHelper, RayHelperError
from rayhelper.device_groups.keys import SIZE_KEYS
from rayhelper.text import Loader, parse_text

ConfigT = TypeVar("ConfigT")

TRAINERS = {
    "sft": ("trainers.sft:SFTTrainer", "trainers.sft_config:SFTConfig"),
    "pretrain": ("trainers.sft:SFTTrainer", "trainers.sft_config:PretrainConfig"),
    "grpo": ("trainers.grpo:GRPOTrainer", "trainers.grpo_config:GRPOConfig"),
}

# Other systems' names of the same thing.
ALIASES = {
    "lr": "learning_rate",
    "train_iters": "max_steps",
    "max_epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "model_name_or_path": "model",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "clip_grad": "max_grad_norm",
    "adam_eps": "adam_epsilon",
    "val_dataset": "eval_dataset",
    "eval_before_train": "val_before_train",
}

# Other systems' keys that have no counterpart, and what to write instead.
REFUSED = {
    "min_lr": "there is no floor of the learning rate; remove it, or set lr_scheduler_type: cosine_with_min_lr and "
    "lr_scheduler_kwargs: {min_lr: ...}",
    "bf16": "write dtype: bfloat16",
    "fp16": "write dtype: bfloat16; float16 is not offered",
    "rlhf_type": "the trainer is chosen by the command: python -m trainers.grpo",
    "save_strategy": "write save_steps, 0 to keep only the final model",
    "eval_strategy": "write eval_steps",
}

SHARED_PLACEMENT_KEYS = ("colocate_groups", "nproc_per_node", "nnodes")
COMMAND_LINE = "command line"
MAX_SAVED_ROWS = 1000  # YAML takes milliseconds a row
OPTION = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """Runs the trainer ``name``; exits with 2 and one line on a mistake in the configuration, with 130 on Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpx2", "datasets", "absl", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    trainer_name, config_name = TRAINERS[name]
    try:
        arguments = sys.argv[1:] if argv is None else argv
        _export_env(arguments)  # before torch is imported: libraries read OMP_NUM_THREADS, HF_HOME, ... then
        config = load_config(_imported(config_name), arguments, prog=f"python -m trainers.{name}")
        run(_imported(trainer_name), config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def run(trainer: Any, config: Any) -> dict[str, float]:
    """The trainer's last metrics: in this process, or with its roles on device groups if ``use_ray``."""
    if not config.use_ray:
        if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes, which would train as many models into one "
                "folder. Start one process, with --use_ray true and device_groups for several workers."
            )
        if config.device_groups is not None:
            logging.getLogger(__name__).info("device_groups is not used, because use_ray is false")
        _check_run(trainer, config, None)
        return dict(trainer(config).train())
    groups = placement(trainer, config)
    _check_run(trainer, config, groups)
    with RayHelper.session(groups, ray_address=config.ray_address):
        return dict(trainer(config).train())


def _check_run(trainer: Any, config: Any, groups: DeviceGroups | None) -> None:
    """Lets the trainer say what is wrong before anything starts, if it has anything to say."""
    if hasattr(trainer, "check"):
        trainer.check(config, groups)


def placement(trainer: Any, config: Any) -> DeviceGroups:
    """The device groups of a run: those of the configuration, or one worker for all roles.

    ``timeout_s`` and ``env`` of the configuration hold for every group that does not say otherwise.

    Raises:
        ConfigError: a mistake in them, a role of the trainer that no group hosts, or a group that nobody would use.
    """
    roles = trainer.__rayhelper_roles__
    if config.device_groups is not None:
        groups = DeviceGroups.parse(config.device_groups, known_roles=roles)
        idle = [role for role in groups.roles if role not in roles]
        if idle and not config.external_plugins:  # classes of plugins may have roles too
            raise ConfigError(
                f"device_groups hosts {', '.join(map(repr, idle))}, but {trainer.__name__} has only the roles "
                f"{', '.join(roles)}{nearest(idle[0], roles)}. The devices would stand idle: remove it."
            )
    else:
        import torch

        groups = DeviceGroups.single(roles, "GPU" if torch.cuda.is_available() else "CPU", 1)
    shared = {name: str(value) for name, value in config.env.items()}
    completed = [
        dataclasses.replace(
            group,
            timeout_s=config.timeout_s if group.timeout_s is None else group.timeout_s,
            env=tuple((shared | dict(group.env)).items()),
        )
        for group in groups.groups
    ]
    return dataclasses.replace(groups, groups=tuple(completed))


def load_config(config_type: type[ConfigT], argv: Sequence[str], prog: str | None = None) -> ConfigT:
    """The configuration that ``--config FILE`` and the other arguments say; the command line wins.

    ``config_type`` is any dataclass. ``--help`` and ``--print_config`` print and exit.

    Raises:
        ConfigError: unknown keys, wrong types and missing keys, all of them at once; or a value without meaning.
    """
    if {"--help", "-h"} & set(argv):
        _print_help(config_type, prog)
    fields = {field.name: field for field in dataclasses.fields(config_type) if field.init}  # type: ignore[arg-type]
    types = get_type_hints(config_type)
    given, mistakes = _given(argv, list(fields))
    values: dict[str, Any] = {}
    for name, (value, where) in given.items():
        if name not in fields:
            mistakes.append(f"{where}: {_unknown(name, value, list(fields))}")
            continue
        if value is True and where == COMMAND_LINE and not _admits_bool(types[name]):
            mistakes.append(f"{where}: --{name} has no value")
            continue
        try:
            values[name] = _typed(name, types[name], value)
        except ConfigError as error:
            mistakes.append(f"{where}: {error}")
    defaults = {name: _default(field) for name, field in fields.items()}
    missing = [name for name in fields if defaults[name] is dataclasses.MISSING and name not in given]
    wants_print = any(argument.startswith("--print_config") for argument in argv)
    if missing and not wants_print:
        mistakes.append(f"{' and '.join(missing)} must be given, in the file or as --{missing[0]}")
    if mistakes:
        raise ConfigError(mistakes[0] if len(mistakes) == 1 else "\n  - ".join(["several mistakes", *mistakes]))
    if wants_print:
        print(_yaml({name: None if name in missing else value for name, value in (defaults | values).items()}), end="")
        sys.exit(0)
    return config_type(**values)


def save_config(config: Any, folder: Path) -> None:
    """Writes ``config.yaml``, which ``--config`` reads back to an equal configuration.

    Data and functions that were passed in Python, not by name, are written as a description.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    for name, value in values.items():
        if isinstance(value, list) and len(value) > MAX_SAVED_ROWS:
            values[name] = f"{len(value)} rows passed in Python, from {value[0]!r} on"
    unfinished = folder / "config.yaml.tmp"
    unfinished.write_text(_yaml(values), encoding="utf-8")
    unfinished.replace(folder / "config.yaml")


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean x?)' or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# What was written where


def _given(argv: Sequence[str], known: Sequence[str]) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Every key with its value and the place where it was written, under our names; and the mistakes on the way."""
    options, mistakes = _options(argv)
    files = [values for path, values in options if path == ["config"]]
    if len(files) > 1:
        raise ConfigError("--config is given twice; put the keys into one file")
    found: dict[str, Any] = {}
    where: dict[str, str] = {}
    if files:
        if len(files[0]) != 1:
            raise ConfigError(f"--config takes the name of one YAML file, got {' '.join(files[0]) or 'none'}")
        found = _renamed(_read(files[0][0]), files[0][0], known, mistakes)
        where = dict.fromkeys(found, files[0][0])
    spoken: dict[tuple[str, ...], str] = {}
    for (first, *inner), values in options:
        name = first if first in known else ALIASES.get(first, first)
        if name == "config":
            continue
        if (name, *inner) in spoken:
            mistakes.append(f"{COMMAND_LINE}: {first} and {spoken[name, *inner]} say the same thing; give one of them")
        spoken[name, *inner] = first
        if name == "device_groups":
            found = {key: value for key, value in found.items() if not _is_placement(key, value)}
        found[name] = _put(found.get(name), inner, _raw(values, inner))
        where.setdefault(name, COMMAND_LINE)
        where[name] = where[name] if inner else COMMAND_LINE
    found = _gathered(found, known, where)
    return {name: (value, where[name]) for name, value in found.items()}, mistakes


def _options(argv: Sequence[str]) -> tuple[list[tuple[list[str], list[str]]], list[str]]:
    """The options of a command line, as (key, ...) and their values; and what stands there without an option."""
    options: list[tuple[list[str], list[str]]] = []
    mistakes = []
    for argument in argv:
        match = OPTION.fullmatch(argument)
        if match:
            path = [part.replace("-", "_") for part in match[1].split(".")]
            options.append((path, [] if match[2] is None else [match[2]]))
        elif re.match(r"--[A-Za-z_]", argument):
            mistakes.append(f"{COMMAND_LINE}: {argument!r} is no option; write --key value")
        elif options:
            options[-1][1].append(argument)
        else:
            mistakes.append(f"{COMMAND_LINE}: {argument!r} belongs to no key; write --key {argument}")
    return [option for option in options if option[0] not in (["help"], ["print_config"])], mistakes


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
    old = dict(old) if isinstance(old, Mapping) else {}
    return {**old, inner[0]: _put(old.get(inner[0]), inner[1:], value)}


def _read(file: str) -> dict[Any, Any]:
    path = Path(file)
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"--config: there is no file {file!r}{nearest(path.name, beside)}")
    found = parse_text(path.read_text(encoding="utf-8"), file)
    if not isinstance(found, Mapping) and found is not None:
        raise ConfigError(f"{file} must hold a mapping of keys to values, got {type(found).__name__}")
    return dict(found or {})


def _renamed(found: dict[Any, Any], where: str, known: Sequence[str], mistakes: list[str]) -> dict[str, Any]:
    """The keys under our names."""
    renamed: dict[str, Any] = {}
    first: dict[str, str] = {}
    for written, value in found.items():
        name = written if written in known else ALIASES.get(written, str(written))
        if name in renamed:
            mistakes.append(f"{where}: {first[name]} and {written} are two names of one key; remove one of them")
        renamed[name] = value
        first[name] = written
    return renamed


def _is_placement(name: str, value: Any) -> bool:
    """Whether a key beside ``device_groups`` says where roles run: the section of a role, or what sections share."""
    return name in SHARED_PLACEMENT_KEYS or (isinstance(value, Mapping) and any(key in value for key in SIZE_KEYS))


def _gathered(found: dict[str, Any], known: Sequence[str], where: dict[str, str]) -> dict[str, Any]:
    """The keys, with sections of roles and what else places them moved into ``device_groups``."""
    groups = {name: value for name, value in found.items() if name not in known and _is_placement(name, value)}
    if not groups or "device_groups" not in known:
        return found
    if "device_groups" in found:
        raise ConfigError(
            f"device_groups and {', '.join(groups)} both say where roles run; move everything into device_groups"
        )
    where["device_groups"] = where[next(iter(groups))]
    return {name: value for name, value in found.items() if name not in groups} | {"device_groups": groups}


def _unknown(name: str, value: Any, known: list[str]) -> str:
    if name in REFUSED:
        return f"{name} is not supported: {REFUSED[name]}"
    message = f"unknown key {name}{nearest(name, [*known, *ALIASES])}"
    if isinstance(value, Mapping):
        near = next((hint for key in value if (hint := nearest(str(key), SIZE_KEYS))), "")
        return f"{message}; the section of a role needs {', '.join(SIZE_KEYS)}{near}"
    return f"{message}; --help lists all keys"


# Types


def _typed(name: str, hint: Any, value: Any) -> Any:
    """The value as the type asks for it; a single value where a list is asked for is a list of one.

    Raises:
        ConfigError: it is something else; says what was expected.
    """
    import jsonargparse

    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members}
    if list in kinds and not {str, Any} & kinds and isinstance(value, (str, int, float, Mapping)):
        value = _bracketed(value)
        value = value if value is None or isinstance(value, list) else [value]
    if dict in kinds and isinstance(value, str) and value.startswith("{"):
        value = parse_text(value, name)
    for member in members:
        if member is Any or Any in get_args(member):  # jsonargparse would turn texts inside, such as "10", into numbers
            value = _bracketed(value)
            if member is Any or isinstance(value, get_origin(member)):
                return list(map(_bracketed, value)) if isinstance(value, list) else value
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        if value is None and NoneType not in kinds:
            raise TypeError
        return parser.parse_object({"value": value}, defaults=False).value
    except (jsonargparse.ArgumentError, TypeError):
        legal = [str(option) for member in members if get_origin(member) is Literal for option in get_args(member)]
        quoted = isinstance(value, (str, list, Mapping))
        got = repr(value) if quoted else json.dumps(value, default=str)
        hint_of_quotes = " Put it in quotes." if str in kinds and not quoted else ""
        raise ConfigError(
            f"{name} must be {_expected(hint)}, got {got}{nearest(str(value), legal)}.{hint_of_quotes}"
        ) from None


def _admits_bool(hint: Any) -> bool:
    return hint is bool or bool in get_args(hint)


def _bracketed(value: Any) -> Any:
    """What JSON or YAML in brackets says, and null; other text, such as the name of a file, is left as it is."""
    if not isinstance(value, str) or not (value.startswith(("[", "{")) or value == "null"):
        return value
    try:
        return parse_text(value, "text")
    except ConfigError:
        return value


def _expected(hint: Any) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_expected(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (list, tuple):
        return f"a list (each item {_expected(get_args(hint)[0])})"
    if get_origin(hint) is dict:
        return f"a mapping (each value {_expected(get_args(hint)[1])})"
    return words.get(hint, "anything" if hint is Any else str(hint))


# Text


def _print_help(config_type: Any, prog: str | None) -> NoReturn:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    keys = [field.name for field in dataclasses.fields(config_type)]
    other_names = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items() if name in keys)
    parser = jsonargparse.ArgumentParser(
        prog=prog, usage="%(prog)s --config FILE [--key VALUE ...]", epilog=f"Other names of keys: {other_names}"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the keys below")
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    parser.add_class_arguments(config_type, None)
    print(re.sub(r", --\w+\+ \S+", "", parser.format_help()), end="")  # appending is not offered
    sys.exit(0)


def _default(field: dataclasses.Field[Any]) -> Any:
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


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _export_env(argv: Sequence[str]) -> None:
    """Exports ``env``, which wins over the shell's, before torch and others are imported."""
    given, _ = _given(argv, [])
    env = given["env"][0] if "env" in given else None
    if isinstance(env, Mapping):  # whatever else is wrong with it, load_config says
        os.environ.update({str(name): str(value) for name, value in env.items()})


__all__ = ["ALIASES", "TRAINERS", "RayHelperError", "load_config", "main", "placement", "run", "save_config"]
