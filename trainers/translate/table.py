"""Their keys, taken one after the other; ours, each with where it came from; and what is left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayhelper.text import nearest


@dataclass
class Theirs:
    """The keys of another system by their dotted names, and their values; ``defaults`` are the system's own."""

    system: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)  # by the name that is taken, the one that stands there

    def rename(self, names: Mapping[str, str]) -> None:
        """Takes keys whose names begin so under other names: those that an earlier release had."""
        renamed: dict[str, str] = {}
        for name in self.values:
            beginning = next((one for one in names if name == one or name.startswith(f"{one}.")), None)
            if beginning is not None:
                renamed[names[beginning] + name.removeprefix(beginning)] = name
        self.values = {**self.values, **{known: self.values[name] for known, name in renamed.items()}}
        self.written |= renamed
        self.taken |= set(renamed.values())

    def put(self, name: str, value: Any, written: str) -> None:
        """A key that follows from another one."""
        self.values = {**self.values, name: value}
        self.written[name] = written

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key as it was written; else the system's default; else ``default``."""
        self.taken.add(name)
        return self.values.get(name, self.defaults.get(name, default))

    def below(self, beginning: str) -> dict[str, Any]:
        """The keys that begin so, without their beginning."""
        found = {name: value for name, value in self.values.items() if name.startswith(beginning)}
        self.taken |= found.keys()
        return {name.removeprefix(beginning): value for name, value in found.items()}

    def left(self) -> list[str]:
        """The keys that nobody has taken, in the order they were written."""
        return [name for name in self.values if name not in self.taken]


@dataclass(frozen=True)
class Line:
    """One key of ours, and what stands in the comment behind it."""

    key: str
    value: Any
    comment: str


@dataclass
class Ours:
    """What is written: the trainer's name, lines, keys without an equivalent with the reason, and mistakes."""

    trainer: str = "grpo"
    lines: list[Line] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    said: set[str] = field(default_factory=set)  # keys of theirs that a line came from

    def say(self, key: str, value: Any, theirs: Theirs, *names: str, note: str = "") -> None:
        """``key: value``, which came from the keys ``names``: as they were written, or by default."""
        self.said |= set(names)
        written = [name for name in names if name in theirs]
        shown = [theirs.written.get(name, name) for name in names]
        told = f"from {' x '.join(shown)}" if written else f"{theirs.system}'s default of {' x '.join(names)}"
        told = told if names else note
        self.lines.append(Line(key, value, f"{told}; {note}" if note and names else told))

    def add(self, key: str, value: Any, comment: str) -> None:
        """``key: value`` with a comment of its own."""
        self.lines.append(Line(key, value, comment))

    def drop(self, theirs: Theirs, names: Iterable[str], reason: str) -> None:
        """Notes that keys, where they were written and no line came from them, have no equivalent."""
        for name in names:
            if name in theirs and name not in self.said:
                self.without[theirs.written.get(name, name)] = reason
            theirs.taken.add(name)

    def refuse(self, name: str, why: str) -> None:
        """Notes that a key cannot be translated with the value that it has."""
        self.mistakes.append(f"{name}: {why}")

    def divide_gradients(self, by: int, reason: str) -> None:
        """What AdamW and clipping are told where our loss is theirs divided by a constant: the steps are the same."""
        for place, line in enumerate(self.lines):
            if line.key == "max_grad_norm":
                self.lines[place] = Line(line.key, line.value / by, f"{line.comment}; {line.value} / {by}, as {reason}")
        self.lines.append(Line("adam_epsilon", 1e-8 / by, f"1e-8 / {by}, as {reason}"))

    def finish(self, theirs: Theirs, known: Iterable[str]) -> None:
        """Notes every key that is left: nobody here knows what it means."""
        known = list(known)
        for name in theirs.left():
            self.mistakes.append(f"unknown key {name}{nearest(name, known)}: it has no known meaning")
