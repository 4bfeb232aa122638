"""The keys of a configuration as its source describes them: the text under each field, and the comment above a group.

    keys_of(GRPOConfig)["learning_rate"]      Key(name, group="Optimization", text="...", is_shared=True, ...)

Read from the source, so that no library is imported for it: ``--help`` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from trainers.configuration.values import types_of

SHARED = "trainers.configuration."  # the modules of keys that several trainers share
OWN = "Keys"  # of a group without a comment


@dataclass(frozen=True)
class Key:
    """A key. ``default`` is ``dataclasses.MISSING`` where it must be given."""

    name: str
    group: str
    text: str
    type: str
    default: Any
    is_shared: bool


def keys_of(config_type: type) -> dict[str, Key]:
    """Every key by its name, in the order of the fields."""
    told: dict[str, str] = {}
    groups: dict[str, str] = {}
    shared: dict[str, bool] = {}
    for kind in reversed(config_type.__mro__[:-1]):
        for name, (group, text) in _described(kind).items():
            groups.setdefault(name, group)  # where it was first: a class that changes a default does not move it
            told[name] = text or told.get(name, "")
            shared.setdefault(name, kind.__module__.startswith(SHARED))
    types = types_of(config_type)
    found = {}
    for field in dataclasses.fields(config_type):
        name = field.name
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        group, is_shared = groups.get(name, OWN), shared.get(name, False)
        found[name] = Key(name, group, told.get(name, ""), type_text(types[name]), default, is_shared)
    return found


def type_text(hint: Any) -> str:
    """A type in words: ``int or null``."""
    members = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(type_text, members))
    if get_origin(hint) is Literal:
        return "|".join(map(str, members))
    if get_origin(hint) is list:
        return "list" if members[0] is Any else f"list of {type_text(members[0])}"
    if get_origin(hint) is dict or hint is dict:
        return "mapping"
    words = {bool: "true|false", int: "int", float: "float", str: "text", NoneType: "null", Any: "anything"}
    return words.get(hint) or str(getattr(hint, "__name__", hint))


def _described(kind: type) -> dict[str, tuple[str, str]]:
    """Of the fields that a class itself defines, the group and the text; nothing where its source is not there."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
        (definition,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    if not isinstance(definition, ast.ClassDef):
        return {}
    lines = source.splitlines()
    found: dict[str, tuple[str, str]] = {}
    group, end = OWN, definition.lineno
    last: str | None = None
    for node in definition.body:
        between = [line.strip() for line in lines[end : node.lineno - 1]]
        group = next((line[2:] for line in between if line.startswith("# ")), group)
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
            found[last] = (group, "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last is not None:
            found[last] = (found[last][0], " ".join(str(node.value.value).split()))
            last = None
        else:
            last = None
    return found
