"""Trainers, a folder each, which gives the classes of its ``config.py`` and its ``trainer.py``.

    from trainers.sft import SFTConfig, SFTTrainer
    from trainers.sft_config import SFTConfig      # the same class: another name of trainers/sft/config.py

A configuration is imported without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

SUFFIX = "_config"


def from_folder(package: str, modules: Sequence[str] = ("config", "trainer")) -> Callable[[str], Any]:
    """The ``__getattr__`` of a folder: what its first module has, or else the next one; imported when asked for."""

    def found(name: str) -> Any:
        if not name.startswith("__") and find_spec(f"{package}.{name}") is None:
            for module in (import_module(f"{package}.{one}") for one in modules):
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return found


class ConfigNames(MetaPathFinder, Loader):
    """Finds ``trainers.<name>_config``: the module ``trainers.<name>.config``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        is_one = parent == __name__ and name.endswith(SUFFIX) and find_spec(fullname.removesuffix(SUFFIX)) is not None
        return spec_from_loader(fullname, self) if is_one else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"{module.__name__.removesuffix(SUFFIX)}.config")


if not any(isinstance(finder, ConfigNames) for finder in sys.meta_path):
    sys.meta_path.insert(0, ConfigNames())
