"""What the first word of ``rayhelper`` stands for: a trainer of a folder here, or anybody's, by its class.

    grpo                                                  trainers/grpo/config.py, and the trainer in trainer.py
    my_package.raft:RaftTrainer, path/to/raft.py:RaftTrainer    the class, and the type of its parameter ``config``

A trainer is a class with ``@RayHelper.worker``, ``__init__(self, config: ItsConfig)`` and ``train()``, which returns
the last metrics. ``ItsConfig`` is a dataclass that extends ``RunConfig`` or ``TrainConfig``. A static method
``check(config, groups)``, if there is one, is called before anything starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rayhelper import ConfigError
from rayhelper.named_class import class_named
from rayhelper.planning.refusals import OF_THIS_MACHINE, UNNAMED
from rayhelper.planning.role_kinds import configuration_of
from rayhelper.text import nearest
from trainers.configuration.others.translations import rlhf_problem
from trainers.configuration.reading.folders import configuration_named, configurations, rlhf_types, tasks
from trainers.configuration.reading.given_keys import plain
from trainers.configuration.roles import Role
from trainers.configuration.shared import RunConfig

RLHF = "rlhf"  # the command whose trainer the key rlhf_type chooses
EXTENDS = "a dataclass that extends TrainConfig (or RunConfig) of trainers.configuration.shared"
OF_TRL = {  # commands of TRL's that are settings of a trainer here
    "rloo": "TRL's RLOO, with its defaults, is grpo with --advantage_estimator rloo --loss_type grpo "
    "--importance_sampling_level sequence_product --beta 0.05 --num_generations 2",
}


@dataclass(frozen=True)
class Command:
    """A trainer that the command line was told to run."""

    config_type: type[RunConfig]
    named: type | None = None

    @property
    def trainer(self) -> Any:
        """The trainer's class. That of a folder here is imported now, with torch."""
        return self.named or trainer_of(self.config_type)


def commands() -> list[str]:
    """All names of trainers that lie here, and ``rlhf``."""
    return [*configurations(), RLHF]


def command_named(name: str, rlhf_type: Any = None, task_type: Any = None) -> Command:
    """What ``name`` stands for; ``rlhf_type`` chooses for the name ``rlhf``, ``task_type`` for ``sft``.

    Raises:
        ConfigError: there is no such trainer, or the class that is named is none.
    """
    if ":" in name:
        trainer = class_named(name)
        return Command(checked_configuration(trainer, name), trainer)
    if name == RLHF:
        known = rlhf_types()
        if rlhf_type is None:
            raise ConfigError(f"rlhf_type must be given, in the file or as --rlhf_type: one of {', '.join(known)}")
        if problem := rlhf_problem(rlhf_type, known):
            raise ConfigError(problem)
        return Command(known[rlhf_type])
    found = (None if task_type is None else tasks().get((name, task_type))) or configuration_named(name)
    if found is None and name in OF_TRL:
        raise ConfigError(f"there is no trainer {name!r}: {OF_TRL[name]}")
    if found is None:
        raise ConfigError(
            f"there is no trainer {name!r}{nearest(name, commands())}. Your own is named by its class: "
            "my_package.my_module:MyTrainer, or path/to/file.py:MyTrainer."
        )
    return Command(found)


def task_of(keys: Mapping[Any, Any]) -> str | None:
    """The ``task_type`` of a configuration's keys; as in ms-swift, ``num_labels`` says seq_cls."""
    said = plain(keys.get("task_type"))
    if said is None and plain(keys.get("num_labels")) is not None:
        return "seq_cls"
    return said if isinstance(said, str) else None


def roles_named(name: str, keys: Mapping[str, Any]) -> Mapping[str, Role] | None:
    """The roles of the trainer that the command ``name`` runs with such a file; None if there is no such command.

    What ``rayhelper plan --trainer NAME`` asks.
    """
    known = name == RLHF or configuration_named(name) is not None
    return command_named(name, keys.get("rlhf_type"), task_of(keys)).config_type.ROLES if known else None


def refusals(name: str | None, file: str, keys: Mapping[Any, Any]) -> list[str] | None:
    """The lines with which a trainer refuses a file: what ``rayhelper plan`` and ``check`` say too.

    ``name`` None: that of the file's ``rlhf_type``; without one, the trainer that refuses least, as any may be meant.
    None where the keys are no whole configuration: they name no model, or no data.
    """
    has_model = any(isinstance(keys.get(one), str) for one in ("model", "model_name_or_path"))
    if not has_model or not {"dataset", "dataset_name", "datasets"} & set(keys):
        return None
    kind = keys.get("rlhf_type")
    if name is None and kind is None:
        every = {kind: told for told, kind in reversed(configurations().items())}
        found = {told: _refusals(kind, file) for kind, told in every.items()}
        of_file = {told: [line for line in found[told] if not OF_THIS_MACHINE.search(line)] for told in found}
        told = min(found, key=lambda one: (sum(map(_is_of_a_key, of_file[one])), len(of_file[one])))
        least = [
            f"{UNNAMED}; {told} says: {line.rstrip('.')}. Or name yours: --trainer" if line in of_file[told] else line
            for line in found[told]
        ]
        return least if all(found.values()) else []
    try:
        config_type = command_named(name or RLHF, kind, task_of(keys)).config_type
    except ConfigError as error:
        return None if name is not None else [str(error)]
    return _refusals(config_type, file)


def engine_of(name: str | None, file: str, keys: Mapping[Any, Any]) -> tuple[str, str] | None:
    """What ``rollout_engine: auto`` stands for, and why, where the roles of a file lie on its device groups, as on Ray.

    ``name`` None: the trainer of the file's ``rlhf_type``, or GRPO's. None for a file with mistakes.
    """
    from trainers.configuration.reading.command_line import chosen_keys

    kind = keys.get("rlhf_type")
    try:
        command = command_named(name or (RLHF if kind else "grpo"), kind, task_of(keys))
        found = chosen_keys(command.config_type, ["--config", file, "--use_ray", "true"])
    except ConfigError:
        return None
    return found.get("rollout_engine")


def parts_of_model(folder: str) -> Mapping[Any, Any] | None:
    """The parts of the vision model in a folder, as ``rayhelper plan`` counts them; None where it cannot be built."""
    from trainers.backends.fsdp.vision.parts import counted

    return counted(folder)


def _is_of_a_key(line: str) -> bool:
    """Whether a trainer refuses a key, and not only its value."""
    return "unknown key" in line or "is not supported" in line


def _refusals(config_type: type[RunConfig], file: str) -> list[str]:
    """Every mistake of a file, as its trainer's command line would tell them."""
    from trainers.configuration.reading.command_line import load_config

    try:
        load_config(config_type, ["--config", file])
    except ConfigError as error:
        lines = str(error).split("\n  - ")
        return lines[1:] if lines[0] == "several mistakes" else [str(error)]
    return []


def trainer_of(config_type: type[RunConfig]) -> type[Any]:
    """The class in ``trainer.py``, beside the ``config.py`` of a configuration, that takes it."""
    module = import_module(f"{config_type.__module__.rpartition('.')[0]}.trainer")
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    fitting = [kind for kind in classes if _is_trainer(kind) and issubclass(config_type, configuration_of(kind) or ())]
    if len(fitting) != 1:
        names = ", ".join(kind.__name__ for kind in fitting) or "none"
        raise ConfigError(
            f"{module.__name__} must have one class with @RayHelper.worker, train() and the parameter config: "
            f"{config_type.__name__}; it has {names}."
        )
    return fitting[0]


def _is_trainer(kind: type) -> bool:
    return hasattr(kind, "__rayhelper_roles__") and callable(getattr(kind, "train", None))


def checked_configuration(trainer: type, name: str) -> type[RunConfig]:
    """The class of the configuration that a trainer takes. Raises ConfigError for what is no trainer."""
    if not hasattr(trainer, "__rayhelper_roles__"):
        raise ConfigError(
            f"{name} has no roles. Write @RayHelper.worker(group=[...]) above the class, with the roles of its methods "
            "and parts."
        )
    if not callable(getattr(trainer, "train", None)):
        raise ConfigError(f"{name} has no method train(self), which trains and returns the last metrics. Add one.")
    config_type = configuration_of(trainer)
    if config_type is None:
        raise ConfigError(
            f"{name} does not name its keys. Write def __init__(self, config: MyConfig) -> None, with "
            f"{EXTENDS} that is known where the class is defined."
        )
    if not dataclasses.is_dataclass(config_type) or not issubclass(config_type, RunConfig):
        raise ConfigError(f"the config of {name} is a {config_type.__name__}, which must be {EXTENDS}.")
    hints = vars(config_type).get("__annotations__", {})
    keys = [key for key, hint in hints.items() if "ClassVar" not in str(hint)]
    if keys and "__dataclass_params__" not in vars(config_type):  # only a base of it is one
        raise ConfigError(
            f"{config_type.__name__} sets {', '.join(keys)}, which RayHelper would ignore. Write "
            "@dataclass(frozen=True, kw_only=True) above the class."
        )
    check_declared(config_type.ROLES, trainer)
    return config_type


def check_declared(declared: Mapping[str, Role], trainer: Any) -> None:
    """Raises ConfigError for a declared role whose name is misspelt: that of the role, or of the one it lives with."""
    roles = trainer.__rayhelper_roles__
    for name, role in declared.items():
        if role.host is not None and role.host not in declared:
            raise ConfigError(
                f"ROLES places role {name!r} with {role.host!r}, which it does not declare (declared: "
                f"{', '.join(declared)}){nearest(role.host, declared)}. Correct the host."
            )
    unused = [name for name in declared if name not in roles]
    for role in roles:
        if role not in declared and (near := nearest(role, unused, "{!r}")):
            raise ConfigError(
                f"{trainer.__name__} has role {role!r}, and ROLES of its configuration {near}. Write one name in both."
            )
