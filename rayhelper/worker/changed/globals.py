"""The globals of the user's project that functions refer to, and those that these call: what a role may change.

From their code, not from their source: a class that came by value has none on another node.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from rayhelper.roles.methods import RoleMethod
from rayhelper.worker.changed.marks import is_own, may_keep_copies

_MOST_FUNCTIONS = 2000
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL")
_CACHED: Any = type(functools.lru_cache(len))
_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType, RoleMethod, _CACHED)


class Global:
    """One name in a namespace."""

    def __init__(self, namespace: dict[str, Any], name: str, home: str) -> None:
        """``home``: the module of the class; others are named."""
        module = str(namespace.get("__name__"))
        self.namespace, self.name = namespace, name
        self.label = f"the global {name if module == home else f'{module}.{name}'}"

    def value(self) -> Any:
        return self.namespace.get(self.name)


def globals_of(functions: Iterable[FunctionType], home: str) -> list[Global]:
    """Those that hold data. Of a class all methods count, of a module the names that the code has."""
    found: dict[tuple[int, str], Global] = {}
    waiting, seen = list(functions), set[FunctionType]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for namespace, name in _names_of(function):
            value = namespace[name]
            waiting += functions_in(value)
            if not isinstance(value, _CODE) and not may_keep_copies(name):
                found[id(namespace), name] = Global(namespace, name, home)
    return list(found.values())


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The user's functions that a value is, under whatever decorators, or that a class has."""
    if isinstance(value, type):
        if is_own(value.__module__):
            for entry in vars(value).values():
                if not isinstance(entry, type):
                    yield from functions_in(entry)
        return
    if isinstance(value, RoleMethod):
        value = value.function
    elif isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    elif isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    function = inspect.unwrap(value) if isinstance(value, (FunctionType, _CACHED)) else None
    if isinstance(function, FunctionType) and is_own(function.__module__):
        yield function


def _names_of(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """The globals to which a function refers, and names of the user's modules to which it refers."""
    namespace = function.__globals__
    for code in _codes_in(function.__code__):
        names = {one.argval for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS}
        for name in names & namespace.keys():
            value = namespace[name]
            yield namespace, name
            if isinstance(value, ModuleType) and is_own(value.__name__):
                yield from ((vars(value), of_module) for of_module in set(code.co_names) & vars(value).keys())


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_in(one)
