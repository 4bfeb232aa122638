"""Text that people write: JSON or YAML to values, and the name that a misspelt one may mean. Pure.

Reading is strict: a key written twice is a mistake, 1e-6 is a number, and numbers are written in plain decimal digits.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from rayhelper.errors import ConfigError

DID_YOU_MEAN = " Did you mean {!r}?"  # as a sentence of its own


class _Rules(SafeConstructor, Resolver):
    """YAML in which a key may be written once, 1e-6 is a number, and 0x10, 1_000, 010 and 1:30 are mistakes.

    YAML 1.1 reads the last four as 16, 1000, 8 and 90; YAML 1.2, JSON and a command line read them otherwise.
    """

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # type: ignore[misc]
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is written twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node

    def decimal(self, node: Any) -> Any:
        """The number of a scalar. Raises MarkedYAMLError unless it is written in plain decimal digits."""
        is_whole = node.tag.endswith(":int")
        value = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        if not (_WHOLE if is_whole else _REAL).fullmatch(node.value):
            told = f"{node.value} is not a number in decimal digits"
            problem = f"{told}. Write {value}, or put it in quotes if it is text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


class Loader(_Rules, yaml.SafeLoader):
    """Whose mistakes show the line in which they are."""


class _QuickLoader(_Rules, Composer, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same with PyYAML's parser in C, where it was built with one: five times as fast, and shows no lines.

    Nodes are composed in Python: in C a text of many brackets would overflow the stack.
    """

    def __init__(self, text: str) -> None:
        super(Composer, self).__init__(text)
        Composer.__init__(self)


_WHOLE = re.compile(r"[-+]?(0|[1-9]\d*)", re.ASCII)
_REAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII)
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
for _loader in (Loader, _QuickLoader):
    for _kind in ("int", "float"):
        _loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _loader.decimal)  # type: ignore[type-var]
    _loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """The value of YAML text, by the rules of ``Loader``. Raises yaml.YAMLError, or what PyYAML raises of bad tags."""
    try:
        return yaml.load(text, Loader=_QuickLoader)
    except (yaml.YAMLError, UnicodeError):
        return yaml.load(text, Loader=Loader)  # says it again with the line


def parse_text(text: str, name: str) -> Any:
    """The value of JSON or YAML text. Raises ConfigError with ``name`` and the position of the mistake."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        problem = f"JSON: {error}"
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # malformed tags and dates make PyYAML raise more than YAMLError
        if not re.match(r'\s*\{\s*"', text):
            problem = f"YAML: {' '.join(str(error).split())}"
    raise ConfigError(f"{name} is not valid {problem}. Correct the text there.")


def parse_file(file: str) -> Any:
    """The value of a JSON or YAML file. Raises ConfigError for one that cannot be read or holds a mistake."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(f"--config: {file!r} cannot be read: {reason}. Give a YAML or JSON file.") from None
    return parse_text(text, file)


def is_unicode(text: str) -> bool:
    """Whether a text has no half surrogate pair, which no file and no process takes."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def nearest(name: Any, known: Iterable[str], message: str = " (did you mean {}?)") -> str:
    """The message with the known name most like ``name`` in it; '' if none is like it."""
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return message.format(matches[0]) if matches else ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text. Raises ConfigError if a key is written twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"key {name!r} is written twice. Remove one of them.")
        found[name] = value
    return found
