"""The mistakes of a configuration: kept as they are found, and told with what was written and what was meant."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rayhelper.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


class Mistakes(list[ConfigError]):
    """The mistakes of a configuration, in the order in which they were found."""

    def attempt(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What ``step`` returns; None if it raised a ConfigError, which is kept here."""
        try:
            return step(*args, **kwargs)
        except ConfigError as error:
            self.append(error)
            return None

    def note(self, message: str) -> None:
        self.append(ConfigError(message))


def check_count(what: str, value: Any, remedy: str, most: int | None = None) -> int:
    """The value, a positive whole number of at most ``most``. Raises ConfigError, ending in the remedy, for others."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} must be a positive whole number, got {shown(value)}. {remedy}")
    if most is not None and value > most:
        raise ConfigError(f"{what} is {shown(value)}, more than {most:,}. Request fewer.")
    return value


def shown(value: Any) -> str:
    """The value as an error message shows it: as Python writes it, cut to a readable length."""
    return _short.repr(value)
