"""The keys of a run as they were given: in a file or on the command line, under our names or others'.

``command_line.py`` fills it, ``role_sections.py`` and ``others/translations.py`` say in our keys what others mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayhelper import ConfigError
from rayhelper.text import parse_text
from trainers.configuration.roles import Role

COMMAND_LINE = "command line"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


@dataclass
class GivenKeys:
    """Keys and their values, where each was written and under which name; and the mistakes and notes on the way.

    ``known`` are the keys of the run's configuration, ``roles`` those of its trainer. The command line wins over the
    file.
    """

    known: Collection[str]
    roles: Mapping[str, Role] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)  # the name as it was written
    bare: set[str] = field(default_factory=set)  # options without a value
    mistakes: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # keys that are not needed, and what is done instead
    origins: dict[str, str] = field(default_factory=dict)  # of our keys: which other ones said them
    chosen: dict[str, str] = field(default_factory=dict)  # keys that were auto, and why they have their value

    def foreign(self, name: str) -> bool:
        """Whether the key was given and is none of the configuration's."""
        return name in self.values and name not in self.known

    def take(self, name: str) -> Any:
        """The value of a foreign key, which is removed; text that says a number or true is that."""
        return plain(self.values.pop(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; text that says a number or true is that."""
        return plain(self.values.get(name, default))

    def put(self, name: str, value: Any, said_by: str) -> None:
        """Sets a key to what the key ``said_by`` means by it, unless the command line says otherwise.

        Notes a mistake if file or command line say both keys, and different things.
        """
        if name in self.values and self.where[name] == self.where[said_by]:
            if self.get(name) != value:
                self.mistakes.append(
                    f"{self.where[name]}: {said_by} means {name}: {value}, but {self.written.get(name, name)} is "
                    f"{self.values[name]}; remove one of them"
                )
            return
        if name not in self.values or self.where[said_by] == COMMAND_LINE:
            self.values[name] = value
            self.where[name] = self.where[said_by]
            self.origins[name] = self.written.get(said_by, said_by)

    def put_inner(self, name: str, key: str, value: Any, said_by: str) -> None:
        """The same for one key of a mapping."""
        whole = self.get(name)
        whole = {} if whole is None else whole
        if not isinstance(whole, Mapping):
            return  # whoever reads its type says that it is none
        if key in whole and whole[key] != value and self.where[name] == self.where[said_by]:
            self.mistakes.append(
                f"{self.where[name]}: {said_by} means {name}: {{{key}: {value}}}, but {key} there is {whole[key]}; "
                "remove one of them"
            )
        elif key not in whole or self.where[said_by] == COMMAND_LINE:
            self.values[name] = {**whole, key: value}
            self.where.setdefault(name, self.where[said_by])
            before = f"{self.origins[name]}, " if name in self.origins else ""
            self.origins[name] = before + self.written.get(said_by, said_by)

    def refuse(self, name: str, why: str) -> None:
        """Notes that the key cannot have the value that it has."""
        self.mistakes.append(f"{self.where[name]}: {why}")


def plain(value: Any) -> Any:
    """What text says, if that is a number, true, false, null, a list or a mapping; other values as they are."""
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    if not NUMBER.fullmatch(value) and not value.lstrip().startswith(("[", "{")):
        return value  # no, on and off too, which are no truth values outside YAML
    try:
        return parse_text(value, "text")
    except ConfigError:
        return value
