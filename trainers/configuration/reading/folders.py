"""The trainers of this package: their names and configurations, as the ``config.py`` of each folder declares them.

    class RewardConfig(TrainConfig):
        NAMES: ClassVar = ("reward", "rm")     # on the command line; left out: the folder's
        RLHF_TYPE: ClassVar = "rm"             # ms-swift's name, if it has one
        TASK: ClassVar = ("sft", "seq_cls")    # the command of another trainer, and its task_types that mean this one

Nothing here lists them: a folder with a ``config.py`` is a trainer. Imports no torch.
"""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path

import trainers
from trainers.configuration.shared import RunConfig


def folders() -> list[str]:
    """The names of the folders that have a ``config.py``."""
    return sorted(file.parent.name for path in trainers.__path__ for file in Path(path).glob("*/config.py"))


def names_of(config_type: type[RunConfig]) -> tuple[str, ...]:
    """What the command line calls the trainer of a configuration of this package, its first name first."""
    names: tuple[str, ...] = vars(config_type).get("NAMES", (config_type.__module__.split(".")[-2],))
    return names


@functools.cache
def configurations() -> dict[str, type[RunConfig]]:
    """The configuration of every trainer, by each of its names."""
    found: dict[str, type[RunConfig]] = {}
    for folder in folders():
        found |= _of_folder(folder)
    return found


def configuration_named(name: str) -> type[RunConfig] | None:
    """The configuration of the trainer of that name, without a look into other folders if it is that of a folder."""
    own = _of_folder(name) if name in folders() else {}
    return own.get(name) or configurations().get(name)


def rlhf_types() -> dict[str, type[RunConfig]]:
    """The configurations whose trainers ms-swift has, by its ``rlhf_type``."""
    found = {vars(kind).get("RLHF_TYPE"): kind for kind in configurations().values()}
    return {name: kind for name, kind in found.items() if name is not None}


def tasks() -> dict[tuple[str, str], type[RunConfig]]:
    """The configurations whose trainers are tasks of another command, by it and each ``task_type`` of theirs."""
    found = [(vars(kind).get("TASK"), kind) for kind in configurations().values()]
    return {(task[0], name): kind for task, kind in found if task is not None for name in task[1:]}


def _of_folder(folder: str) -> dict[str, type[RunConfig]]:
    module = import_module(f"{trainers.__name__}.{folder}.config")
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return {name: kind for kind in classes if issubclass(kind, RunConfig) for name in names_of(kind)}
