"""What is translated: a command, a script or a YAML file; which system's it is, and the keys that it gives."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rayhelper import ConfigError
from rayhelper.text import Loader, nearest, parse_text
from trainers.translate.conditions import evaluated
from trainers.translate.shell import commands, unknown_in

SYSTEMS = ("verl", "siirl", "roll", "trl", "ms-swift")
ENTRIES = {  # of a command: which word says whose it is
    "verl": re.compile(r"verl\.[\w.]+|.*/?verl/trainer/main_ppo\.py"),
    "siirl": re.compile(r"siirl\.[\w.]+|.*/?siirl/main_dag\.py"),
    "trl": re.compile(r"(.*/)?trl|trl\.scripts\.\w+|.*trl/scripts/\w+\.py"),
    "ms-swift": re.compile(r"(.*/)?(swift|megatron)|swift\.cli\.\w+"),
}
NAMES = ("trainer.experiment_name", "trainer.project_name")  # free text, which decides no number
FOLDERS = ("trainer.default_local_dir", "trainer.default_hdfs_dir")
SECTIONS = {"actor_rollout_ref": "verl", "actor_train": "roll", "actor_infer": "roll"}
OF_VERL = ("actor_rollout_ref", "data", "algorithm", "trainer")
OF_ROLL = ("actor_train", "actor_infer", "sft_train", "student", "student_train", "pretrain", "rollout_batch_size")
OWN = {"verl": OF_VERL, "siirl": OF_VERL, "roll": OF_ROLL}  # keys of which a configuration has one
OF_SWIFT = ("rlhf_type", "tuner_type", "train_type", "val_dataset", "micro_batch_size", "split_dataset_ratio")
OF_TRL = ("dataset_name", "datasets", "model_name_or_path", "dataset_train_split", "use_peft")


class _AsTheyRead(Loader):
    """YAML of another system, which reads 1_000 as a number: hydra and OmegaConf do."""


_AsTheyRead.add_constructor("tag:yaml.org,2002:int", yaml.SafeLoader.construct_yaml_int)  # type: ignore[type-var]
_AsTheyRead.add_constructor("tag:yaml.org,2002:float", yaml.SafeLoader.construct_yaml_float)  # type: ignore[type-var]


class UnsetError(ConfigError):
    """A command has values that are known only while its script runs."""


@dataclass
class Source:
    """The keys of what is translated, by their dotted names, or its words where the system's are flat ones."""

    name: str
    system: str
    keys: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    file: Path | None = None
    entry: str = ""  # the module that a command starts, without its packages
    left_out: dict[str, str] = field(default_factory=dict)  # parts of names that are known only while the script runs


def read(arguments: Sequence[str], system: str | None) -> Source:
    """The source that ``FILE`` or ``-- COMMAND`` names. Raises ConfigError for what cannot be read without guessing."""
    if system is not None and system not in SYSTEMS:
        raise ConfigError(f"--from must be one of {', '.join(SYSTEMS)}, got {system!r}{nearest(system, SYSTEMS)}")
    if arguments and arguments[0] == "--":
        found = commands("\n".join([_quoted(arguments[1:])]), os.environ)
        return _of_command(found, "a command", system)
    if len(arguments) != 1:
        raise ConfigError("translate takes one FILE, or -- and a COMMAND")
    path = Path(arguments[0])
    if not path.is_file():
        raise ConfigError(f"there is no file {arguments[0]!r}")
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml", ".json"):
        return _of_yaml(path, text, system)
    try:
        return _of_command(commands(text, os.environ), str(path), system)
    except UnsetError:
        ran = evaluated(text, os.environ)
        if not ran:
            raise
        return _of_command(ran, str(path), system)


def _quoted(words: Sequence[str]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def _of_command(found: list[list[str]], name: str, system: str | None) -> Source:
    for words in found:
        for place, word in enumerate(words):
            whose = next((one for one, entry in ENTRIES.items() if entry.fullmatch(word)), None)
            is_named = system in (None, whose) and place < len(words) - 1
            if whose is None or not is_named or words[0] in ("pip", "pip3", "cd", "echo", "git", "rm", "mkdir"):
                continue
            rest = words[place + 1 :]
            if whose in ("trl", "ms-swift"):
                started = [word.rpartition(".")[2].removesuffix(".py")] if "." in word else []
                rest = [*(one.rpartition("/")[2] for one in started), *rest]
                return Source(name, whose, words=_checked(rest, name))
            if any(re.match(r"[+~]*[\w./@-]+=", one) for one in rest):
                rest, left_out = _named(rest)
                keys, entry = _overrides(_checked(rest, name)), word.rpartition(".")[2]
                return Source(name, whose, keys=keys, entry=entry, left_out=left_out)
    known = f"of {system} " if system else ""
    raise ConfigError(f"{name} has no command {known}that is known ({', '.join(SYSTEMS)})")


def _named(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words with names and folders of the run that are known; what is left out of them, by their keys.

    A date or an argument of the script in a name decides no number of the run.
    """
    kept, left_out = [], {}
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        unknown = unknown_in(value)
        if unknown and key in (*NAMES, *FOLDERS):
            left_out[key] = f"{', '.join(unknown)} is known only while the script runs, and left out of the name"
            value = re.sub("[-_./]*\0[^\0]*\0", "", value).strip("-_./")
            if key in FOLDERS or not value:
                continue
            word = f"{key}={value}"
        kept.append(word)
    return kept, left_out


def _checked(words: list[str], name: str) -> list[str]:
    """The words. Raises ConfigError naming the variables that nothing sets, and what is no variable."""
    told = [f"{_readable(word)}: {', '.join(unknown)}" for word in words if (unknown := unknown_in(word))]
    if told:
        names = {one.split(",")[0] for word in words for one in unknown_in(word)}
        is_set = all(name.isidentifier() for name in names)
        advice = (
            "Set it in the environment of this command"
            if is_set
            else "Set variables in the environment of this command. In a copy, replace each $(command) by its value"
        )
        found = "\n  - ".join(told)
        raise UnsetError(f"{name} uses values that are known only while it runs. {advice}:\n  - {found}")
    return words


def _readable(word: str) -> str:
    return re.sub("\0([^\0]*)\0", lambda match: f"<{match[1].split(',')[0]}>", word)


def _overrides(words: list[str]) -> dict[str, Any]:
    """Hydra's ``key=value``, ``+key=value`` and ``++key=value``; options of its own keep their dashes."""
    keys: dict[str, Any] = {}
    options = iter(words)
    for word in options:
        match = re.fullmatch(r"(\+{0,2}|--)([\w./@-]+)=(.*)", word, re.DOTALL)
        if match is None and word in ("--config-name", "--config-path", "-cn", "-cp"):
            keys[{"-cn": "--config-name", "-cp": "--config-path"}.get(word, word)] = next(options, None)
        elif match is None:
            if word.startswith("~") or word.strip():
                raise ConfigError(f"{word!r} is not key=value, and has no known meaning")
        else:
            name = match[2] if match[1] != "--" else f"--{match[2]}"
            keys[name] = _value(match[3])
    opened: dict[str, Any] = {}
    for name, value in keys.items():
        opened |= _flattened(value, name) if isinstance(value, Mapping) and value else {name: value}
    return opened


def _value(text: str) -> Any:
    """A value as hydra reads it: YAML, in which 1e-6 and 1_000 are numbers."""
    try:
        if re.fullmatch(r"[-+]?[1-9]\d*(_\d+)+(\.\d+)?", text.strip()):
            text = text.replace("_", "")
        return parse_text(text, "text") if text.strip() else None
    except ConfigError:
        return text


def _of_yaml(path: Path, text: str, system: str | None) -> Source:
    try:
        found = yaml.load(text, Loader=_AsTheyRead)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Correct the text there") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    whose = system or next((one for section, one in SECTIONS.items() if section in found), None)
    if whose is None:
        whose = "ms-swift" if set(OF_SWIFT) & found.keys() else "trl" if set(OF_TRL) & found.keys() else None
    if whose is None:
        raise ConfigError(
            f"{path}: no key shows which system the file is of. Write --from, one of {', '.join(SYSTEMS)}"
        )
    if whose in ("trl", "ms-swift"):
        return Source(str(path), whose, file=path)
    if not set(OWN[whose]) & found.keys():
        raise ConfigError(f"{path} is no configuration of {whose}: it has none of {', '.join(OWN[whose])}")
    keys = _flattened(found)
    return Source(str(path), whose, keys={name: _filled(value, keys, name) for name, value in keys.items()})


def _flattened(found: Mapping[str, Any], beginning: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in found.items():
        full = f"{beginning}.{name}" if beginning else str(name)
        flat |= _flattened(value, full) if isinstance(value, Mapping) and value else {full: value}
    return flat


def _filled(value: Any, keys: Mapping[str, Any], name: str) -> Any:
    """A value with ``${other.key}`` filled in. A whole section that is meant stays as it is written."""
    if isinstance(value, list):
        return [_filled(one, keys, name) for one in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
    if whole and whole[1] in keys:
        return _filled(keys[whole[1]], keys, name)

    def one(match: re.Match[str]) -> str:
        return str(_filled(keys[match[1]], keys, name)) if match[1] in keys else match[0]

    return re.sub(r"\$\{([\w.]+)\}", one, value)
