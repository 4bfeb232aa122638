"""What is to be done once a module is there: no library is imported for it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any


def when_loaded(name: str, then: Callable[[Any], None]) -> None:
    """Calls ``then`` with a module: now, if it is loaded, otherwise as soon as it has been."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    finder = next((one for one in sys.meta_path if isinstance(one, _Waiting) and one.name == name), None)
    if finder is None:
        finder = _Waiting(name)
        sys.meta_path.insert(0, finder)
    finder.then.append(then)


class _Waiting(importlib.abc.MetaPathFinder):
    """Notices that a module is imported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.then: list[Callable[[Any], None]] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self.then
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for one in then:
                one(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
