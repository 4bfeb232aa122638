"""``rayhelper.trainers``: the package ``trainers`` under a name that no folder of yours can take.

    from rayhelper.trainers.grpo import GRPOConfig, GRPOTrainer     # the same classes as of trainers.grpo
    python -m rayhelper.trainers grpo --config x.yaml               # from a folder that has its own trainers.py, too

Both names give the same module objects: there is no second copy. The package is the one beside ``rayhelper``, whatever
else of the name Python would find first. A folder ``trainers`` of yours stays importable below it: ``trainers.mine`` is
looked for in ``sys.path`` where the package has no module ``mine``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAME = __name__.rpartition(".")[2]
FOLDER = Path(__file__).resolve().parents[2] / NAME


def _package() -> ModuleType:
    """The package, loaded from its own folder.

    Raises:
        ImportError: the process has imported another module of its name.
    """
    found = sys.modules.get(NAME)
    if found is None:
        spec = importlib.util.spec_from_file_location(
            NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        if spec is None or spec.loader is None or not (FOLDER / "__init__.py").is_file():
            raise ImportError(f"there is no package {NAME} in {FOLDER.parent}. Install rayhelper again.")
        found = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = found
        try:
            spec.loader.exec_module(found)
        except BaseException:
            del sys.modules[NAME]
            raise
    if str(FOLDER) not in (str(Path(folder).resolve()) for folder in getattr(found, "__path__", ())):
        where = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), "an unknown file")
        raise ImportError(
            f"this process has imported your module {NAME} ({where}) before {__name__}. Import {__name__} first. Then "
            f"{NAME} is RayHelper's package, and a module mine in your folder {NAME} is still {NAME}.mine."
        )
    return found


class SameModules(MetaPathFinder, Loader):
    """Finds ``rayhelper.trainers.x``: the module ``trainers.x``; and ``python -m`` finds its program."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        found = importlib.util.find_spec(_real(fullname))
        if found is None:
            return None
        if fullname.endswith(".__main__") and found.origin is not None:
            return importlib.util.spec_from_file_location(fullname, found.origin)  # run, never imported
        spec = ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations += found.submodule_search_locations or []
        return spec

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_real(module.__name__))


class OthersOfTheName(MetaPathFinder):
    """Finds ``trainers.mine`` in a folder ``trainers`` of ``sys.path``, where nothing else has found it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[0] != NAME:
            return None
        folders = [Path(folder or ".") / NAME for folder in sys.path]
        return PathFinder.find_spec(fullname, [str(folder) for folder in folders if folder.is_dir()])


def _real(name: str) -> str:
    return NAME + name.removeprefix(__name__)


_package()
sys.meta_path.insert(0, SameModules())
sys.meta_path.append(OthersOfTheName())
sys.modules[__name__] = sys.modules[NAME]
