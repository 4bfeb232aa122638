"""One value of a configuration, as its key's type asks for it. jsonargparse does the types."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Hashable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rayhelper import ConfigError
from rayhelper.text import nearest, parse_text
from trainers.configuration.reading.given_keys import NUMBER
from trainers.configuration.values import expected, is_there

MAX_SHOWN = 300  # characters of a value in a message


def typed(name: str, hint: Any, value: Any) -> Any:
    """The value as the type asks for it; where that is a list, text is its items between spaces, one value one item.

    Raises:
        ConfigError: it is something else; says what was expected.
    """
    from jsonargparse import ArgumentError

    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members}
    if list in kinds and not {str, Any} & kinds and isinstance(value, (str, int, float, Mapping)):
        value = bracketed(value)
        if isinstance(value, str) and not is_there(value):  # names of files may hold spaces
            value = value.split() or [value]
        value = value if value is None or isinstance(value, list) else [value]
    if dict in kinds and isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_text(value, name)
    for member in members:
        if member is Any or Any in get_args(member):  # jsonargparse would turn texts inside, such as "10", into numbers
            value = bracketed(value)
            if member is Any or isinstance(value, get_origin(member)):
                return list(map(bracketed, value)) if isinstance(value, list) else value
    legal = [str(option) for member in members if get_origin(member) is Literal for option in get_args(member)]
    try:
        if value is None and NoneType not in kinds:
            if dict in kinds:  # a key with nothing below it
                return {}
            raise TypeError
        if not _in_digits(value, kinds) and value not in legal:
            raise TypeError
        if isinstance(value, bool) and kinds <= {Literal, NoneType} and str(value) not in legal:
            raise TypeError  # true is 1 to Python
        return _parser_of(hint, str(hint)).parse_object({"value": value}, defaults=False).value
    except (ArgumentError, TypeError, OverflowError):  # a whole number that no float holds
        quoted = isinstance(value, (str, list, Mapping))
        got = repr(value) if quoted else json.dumps(value, default=str)
        got = got if len(got) <= MAX_SHOWN else f"{got[: MAX_SHOWN - 3]}..."
        hint_of_quotes = " Put it in quotes." if str in kinds and not quoted else ""
        raise ConfigError(
            f"{name} must be {expected(hint)}, got {got}{nearest(str(value), legal)}.{hint_of_quotes}"
        ) from None


@functools.lru_cache(maxsize=256)
def _parser_of(hint: Hashable, written: str) -> Any:
    """A parser of one key of this type. Building it takes longer than parsing.

    ``written``: tells ``int | float`` from ``float | int``, which are equal, but are tried in this order.
    """
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def _in_digits(value: Any, kinds: set[Any]) -> bool:
    """Whether text that must say a number does so in ASCII digits: not as 1_000 or 0x10, which Python reads too."""
    if {str, Any} & kinds or not ({int, float} & kinds or list in kinds):
        return True
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    words = {"true", "false", "null", "none"} if {bool, NoneType} & kinds else set()
    if list in kinds:
        return not any(_is_number_to_python(text) and not NUMBER.fullmatch(text) for text in texts)
    return all(NUMBER.fullmatch(text) or text.lower() in words for text in texts)


def _is_number_to_python(text: str) -> bool:
    for kind in (float, lambda digits: int(digits, 0)):
        with contextlib.suppress(ValueError):
            kind(text)
            return True
    return False


def admits_bool(hint: Any) -> bool:
    return hint is bool or bool in get_args(hint)


def bracketed(value: Any) -> Any:
    """What JSON or YAML in brackets says, and null; other text, such as the name of a file, is left as it is."""
    if not isinstance(value, str) or not (value.lstrip().startswith(("[", "{")) or value == "null"):
        return value
    try:
        return parse_text(value, "text")
    except ConfigError:
        return value
