"""A trainer's folder gives its configuration and its class; the configuration has a second name, and needs no torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = sorted(file.parent for file in (Path(__file__).parents[2] / "trainers").glob("*/trainer.py"))
NO_TORCH = """
import importlib, sys
folder, first = (importlib.import_module(name) for name in ("trainers.{0}", "trainers.{0}_config"))
names = [name for name, value in vars(first).items() if isinstance(value, type) and value.__module__ == first.__name__]
assert names and first is importlib.import_module("trainers.{0}.config")
assert all(getattr(folder, name) is getattr(first, name) for name in names)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("name", [folder.name for folder in FOLDERS])
def test_a_configuration_is_the_same_by_each_of_its_names_and_needs_no_torch(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH.format(name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_gives_the_class_of_its_trainer(folder: Path) -> None:
    package = importlib.import_module(f"trainers.{folder.name}")
    module = importlib.import_module(f"trainers.{folder.name}.trainer")
    own = {name: one for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__}
    (name,) = [name for name in own if name.endswith("Trainer")]
    assert getattr(package, name) is getattr(module, name)


def test_a_name_that_is_nowhere_is_told() -> None:
    with pytest.raises(ImportError, match=r"cannot import name 'Trainer' from 'trainers\.sft'"):
        exec("from trainers.sft import Trainer")
    with pytest.raises(ModuleNotFoundError, match="nothing_config"):
        importlib.import_module("trainers.nothing_config")
