"""Commands that installed packages add to ``rayhelper``: a trainer, say, which this package knows nothing of.

Such a package has an entry point of the group ``rayhelper.commands``, a module with two functions, or three:

    run(words) -> int | None          the exit code of the command ``words[0]``; None: it is not one of this package
    help_lines() -> dict[str, str]    the commands ("sft", or "reward, rm" for two names), each with a line of help
    as_file(words) -> (trainer, text)   the configuration of a command, which is planned; None: it has none
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

GROUP = "rayhelper.commands"


def run(words: Sequence[str]) -> int | None:
    """The exit code of the command ``words[0]``; None if no installed package has it."""
    for program in _programs():
        code: int | None = program.run(words)
        if code is not None:
            return code
    return None


def as_file(words: Sequence[str]) -> tuple[str, str] | None:
    """The trainer and the configuration's text of the command ``words``; None if no installed package knows it."""
    for program in _programs():
        ask = getattr(program, "as_file", None)
        found: tuple[str, str] | None = None if ask is None else ask(words)
        if found is not None:
            return found
    return None


def help_lines() -> dict[str, str]:
    """The commands of all installed packages, each with a line of help."""
    return {name: line for program in _programs() for name, line in program.help_lines().items()}


def _programs() -> list[Any]:
    return [point.load() for point in entry_points(group=GROUP)]
