"""What a trainer says of a configuration before it starts: a plan and a check say the same lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rayhelper.planning.model_shape import Part
from rayhelper.planning.role_kinds import GROUP

UNNAMED = "no trainer of the package takes the file"  # which may be one's own trainer's
OF_THIS_MACHINE = re.compile(r"there is no (file|folder)|is not installed|no such file", re.IGNORECASE)


def refusals(trainer: str | None, config: str, values: Mapping[Any, Any]) -> tuple[list[str], list[str]]:
    """The lines with which the trainer of a file refuses it; and those of which one cannot be sure.

    These may be true of this machine alone, or nothing says which trainer the file is for.

    An installed package that has trainers (an entry point of the group ``rayhelper.trainers``) may have a function
    ``refusals(trainer, file, values)`` beside that point: the lines, none where the trainer takes the file, and None
    for what is no configuration of its trainers. ``trainer`` None: the file says it, or any of them may take it.
    """
    found: list[str] = _said_by_packages("refusals", trainer, config, values) or []
    unsure = [line for line in found if line.startswith(UNNAMED)]
    here = [line for line in found if OF_THIS_MACHINE.search(line) and line not in unsure]
    sure = [line for line in found if line not in (*unsure, *here)]
    return sure, [*(f"on this machine the trainer would not start: {line}" for line in here), *unsure]


def chosen_engine(trainer: str | None, config: str, values: Mapping[Any, Any]) -> tuple[str, str] | None:
    """The engine that a file's trainer takes for ``rollout_engine: auto`` (``hf``, ``vllm``), and why; None: not known.

    The package of ``refusals`` says it, by a function ``engine_of(trainer, file, values)``.
    """
    found: tuple[str, str] | None = _said_by_packages("engine_of", trainer, config, values)
    return found


def counted_parts(folder: str) -> Mapping[str, Part] | None:
    """The parts of the vision model in a folder (``vit``, ``aligner``, ``llm``); None: nobody here can count them.

    The package of ``refusals`` says it, by a function ``parts_of_model(folder)``, without reading weights.
    """
    found = _said_by_packages("parts_of_model", folder)
    return None if found is None else {name: Part(*part) for name, part in found.items()}


def _said_by_packages(function: str, *given: Any) -> Any:
    """What the first package with trainers returns that has such a function and knows an answer; None: none does."""
    for point in entry_points(group=GROUP):
        ask: Callable[..., Any] | None = getattr(import_module(point.module), function, None)
        if ask is not None and (found := ask(*given)) is not None:
            return found
    return None
