"""What a call has changed that objects share: attributes of their class, default arguments, variables of its methods,
and globals of the user's project that these use.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from rayhelper.roles.methods import RoleMethod
from rayhelper.worker.changed.globals import functions_in, globals_of
from rayhelper.worker.changed.marks import PLAIN, differ, is_own, mark

_OTHERS = (type, FunctionType, ModuleType, property, staticmethod, classmethod, RoleMethod)


class Shared:
    """What the objects of one class share, of classes of the user's project."""

    def __init__(self, cls: type) -> None:
        self.classes = [base for base in cls.__mro__ if is_own(base.__module__)]
        self.functions = [found for base in self.classes for found in _functions_with_state(base)]
        functions = (one for base in self.classes for one in functions_in(base))
        self.globals = globals_of(functions, cls.__module__)

    def marks(self, *, in_full: bool) -> dict[str, Any]:
        """By their names in messages, what tells later whether they were changed.

        ``in_full`` False: of globals, which may be large, only whether they are other ones.
        """
        found = {f"the class attribute {name}": value for base in self.classes for name, value in _attributes(base)}
        for label, function in self.functions:
            found |= _state_of(label, function)
        marks = {label: value if type(value) in PLAIN else mark(value) for label, value in found.items()}
        for one in self.globals:
            value = one.value()
            marks[one.label] = value if type(value) in PLAIN else mark(value) if in_full else id(value)
        return marks


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names of those that are other ones now, or new."""
    return [label for label, value in now.items() if label not in before or differ(before[label], value)]


def _attributes(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(cls).items()):
        if name.startswith(("__", "_rayhelper", "_abc_")) or isinstance(value, _OTHERS) or hasattr(value, "__get__"):
            continue
        yield f"{cls.__name__}.{name}", value


def _functions_with_state(cls: type) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(cls).items():
        inner = value.function if isinstance(value, RoleMethod) else getattr(value, "__func__", value)
        function = inspect.unwrap(inner) if callable(inner) and not isinstance(inner, type) else None
        if isinstance(function, FunctionType) and is_own(function.__module__):
            label = f"{cls.__name__}.{name}"
            if _state_of(label, function):
                yield label, function


def _state_of(label: str, function: FunctionType) -> dict[str, Any]:
    """The defaults and variables of a function that may change."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    of_defaults = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
    found = {
        f"the default of argument {name!r} of {label}": value
        for name, value in of_defaults.items()
        if type(value) not in PLAIN and not isinstance(value, _OTHERS)
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if not isinstance(value, _OTHERS):
            found[f"the variable {name!r} of {label}"] = value
    return found
