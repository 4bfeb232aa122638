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
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rayhelper import ConfigError, DeviceGroups, RayHelper, RayHelperError
from rayhelper.text import parse_text

ConfigT = TypeVar("ConfigT")

TRAINERS = {
    "sft": ("trainers.sft", "SFTTrainer", "SFTConfig"),
    "pretrain": ("trainers.sft", "SFTTrainer", "PretrainConfig"),
    "grpo": ("trainers.grpo", "GRPOTrainer", "GRPOConfig"),
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

SIZE_KEYS = ("gpus", "cpus", "npus")  # what makes a mapping the section of a role
PLACEMENT_KEYS = (*SIZE_KEYS, "device", "timeout_s", "gpus_per_worker", "env")
SHARED_PLACEMENT_KEYS = ("colocate_groups", "nproc_per_node", "nnodes")


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """Runs the trainer ``name``; exits with 2 and one line on a mistake in the configuration, with 130 on Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpx2", "datasets", "absl", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    argv = list(sys.argv[1:] if argv is None else argv)
    module, trainer_name, config_name = TRAINERS[name]
    try:
        _export_env(argv)
        loaded = importlib.import_module(module)
        config = load_config(getattr(loaded, config_name), argv, prog=f"python -m trainers.{name}")
        run(getattr(loaded, trainer_name), config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def run(trainer: Any, config: Any) -> dict[str, float]:
    """The trainer's last metrics: in this process, or with its roles on device groups if ``use_ray``."""
    if not config.use_ray:
        if config.device_groups is not None:
            logging.getLogger(__name__).info("device_groups is not used, because use_ray is false")
        return dict(trainer(config).train())
    with RayHelper.session(placement(trainer, config), ray_address=config.ray_address):
        return dict(trainer(config).train())


def placement(trainer: Any, config: Any) -> DeviceGroups:
    """The device groups of a run: those of the configuration, or one worker for all roles.

    Raises:
        ConfigError: a mistake in them, or a role of the trainer that no group hosts.
    """
    roles = trainer.__rayhelper_roles__
    if config.device_groups is not None:
        return DeviceGroups.parse(config.device_groups, known_roles=roles)
    import torch

    return DeviceGroups.single(roles, "GPU" if torch.cuda.is_available() else "CPU", 1)


def load_config(config_type: type[ConfigT], argv: Sequence[str], prog: str | None = None) -> ConfigT:
    """The configuration that ``--config FILE`` and the other arguments say; the command line wins.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value without meaning. ``--help`` and ``--print_config`` exit.
    """
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    keys = [field.name for field in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    file, rest = _config_file(argv)
    given = _from_file(file, keys) if file else {}
    rest = _from_command_line(rest, keys, given)
    parser = jsonargparse.ArgumentParser(
        exit_on_error=False, prog=prog, usage="%(prog)s --config FILE [--key VALUE ...]"
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below")
    parser.add_class_arguments(config_type, None)
    try:
        parsed = parser.parse_args([*(["--config", json.dumps(given)] if given else []), *rest])
    except jsonargparse.ArgumentError as error:
        raise ConfigError(_readable(str(error))) from None
    values = {name: value for name, value in parsed.as_dict().items() if name in keys}
    return config_type(**values)


def save_config(config: Any, folder: Path) -> None:
    """Writes ``config.yaml``, which ``--config`` reads back to an equal configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean x?)' or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _config_file(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    rest: list[str] = []
    file = None
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config" or argument.startswith("--config="):
            if file is not None:
                raise ConfigError("--config is given twice; put the keys into one file")
            file = argument.partition("=")[2] or next(arguments, None)
            if file is None:
                raise ConfigError("--config needs the name of a YAML file")
        else:
            rest.append(argument)
    return file, rest


def _from_file(file: str, keys: list[str]) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"--config: there is no file {file!r}{nearest(path.name, beside)}")
    found = parse_text(path.read_text(encoding="utf-8"), file)
    found = {} if found is None else found
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file} must hold a mapping of keys to values, got {type(found).__name__}")
    found = dict(found)
    found.pop("env", None)  # exported before anything was imported
    found = _gathered(found)
    found = _renamed(found, file)
    _refuse_unknown(found, keys, file)
    return found


def _gathered(found: dict[str, Any]) -> dict[str, Any]:
    """Sections of roles, and what else places them, moved into ``device_groups``."""
    sections = {
        name: value
        for name, value in found.items()
        if isinstance(value, Mapping) and any(k in value for k in SIZE_KEYS)
    }
    groups = {**sections, **{name: found[name] for name in SHARED_PLACEMENT_KEYS if name in found}}
    if not groups:
        return found
    if "device_groups" in found:
        raise ConfigError(
            f"device_groups and {', '.join(groups)} both say where roles run; move everything into device_groups"
        )
    for role, section in sections.items():
        for key in section:
            if key not in PLACEMENT_KEYS:
                raise ConfigError(
                    f"section {role!r} has the key {key!r}{nearest(str(key), PLACEMENT_KEYS)}: a section says where "
                    f"its role runs ({', '.join(PLACEMENT_KEYS)}). Move other keys to the top level."
                )
    return {name: value for name, value in found.items() if name not in groups} | {"device_groups": groups}


def _renamed(found: dict[str, Any], where: str) -> dict[str, Any]:
    for alias in [name for name in found if name in ALIASES]:
        if ALIASES[alias] in found:
            raise ConfigError(f"{where}: {alias} and {ALIASES[alias]} are two names of one key; remove {alias}")
        found[ALIASES[alias]] = found.pop(alias)
    return found


def _refuse_unknown(names: Iterable[str], keys: list[str], where: str) -> None:
    unknown = [str(name) for name in names if name not in keys]
    if unknown:
        told = ", ".join(f"{name}{nearest(name, [*keys, *ALIASES])}" for name in unknown)
        raise ConfigError(f"{where}: unknown key{'s' if len(unknown) > 1 else ''}: {told}. --help lists all keys.")


def _from_command_line(arguments: list[str], keys: list[str], given: dict[str, Any]) -> list[str]:
    """The arguments under our names; sections of roles and keys given twice are refused."""
    renamed, names = [], []
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            plain = name.rstrip("+").replace("-", "_")
            plain = ALIASES.get(plain, plain)
            if plain not in ("help", "print_config"):
                names.append(plain.partition(".")[0])
                if plain in names[:-1] and not name.endswith("+"):
                    raise ConfigError(f"command line: {plain} is given twice")
            argument = f"--{plain}{'+' if name.endswith('+') else ''}{equals}{value}"
        renamed.append(argument)
    _refuse_unknown(names, keys, "command line")
    return renamed


def _readable(message: str) -> str:
    return " ".join(message.replace("Parser key", "key").split())


def _export_env(argv: Sequence[str]) -> None:
    """Exports the file's ``env:`` mapping, which wins over the shell's, before torch and others are imported."""
    file, _ = _config_file(argv)
    if file is None or not Path(file).is_file():
        return
    found = parse_text(Path(file).read_text(encoding="utf-8"), file)
    env = found.get("env") if isinstance(found, Mapping) else None
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise ConfigError(f"{file}: env must be a mapping of names to values, got {env!r}")
    os.environ.update({str(name): str(value) for name, value in env.items()})


__all__ = ["ALIASES", "TRAINERS", "RayHelperError", "load_config", "main", "placement", "run", "save_config"]
