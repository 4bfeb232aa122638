"""A module that was edited while a session runs: workers run what the driver runs."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray import cloudpickle

from rayhelper import RayHelper
from rayhelper.runtimes.ray.modules import sources_of, unlike_modules
from tests.conftest import RaySession, without_runtime

ONE = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}
SOURCE = """
from rayhelper import RayHelper

FACTOR = {factor}

def times(x):
    return x * {times}

@RayHelper.worker(group="train")
class Edited:
    @RayHelper.function(group="train", execute="first")
    def answer(self):
        return [FACTOR, times(1)]
"""


def write(path: Path, factor: int, times: int) -> None:
    path.write_text(SOURCE.format(factor=factor, times=times))
    now = time.time() + 5  # later than any process began, and another time than the last one
    os.utime(path, (now, now + factor / 100))
    importlib.invalidate_caches()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"edited_{abs(hash(request.node.name))}"
    write(tmp_path / f"{name}.py", 2, 3)
    yield importlib.import_module(name)
    del sys.modules[name]


def test_an_edited_module_is_unlike_until_it_is_reloaded(module: ModuleType) -> None:
    name, path = module.__name__, Path(str(module.__file__))
    loaded = sources_of([name])
    assert unlike_modules(loaded) == []
    write(path, 2, 30)
    assert unlike_modules(loaded) == [name]
    assert sources_of([name]) != loaded
    importlib.reload(module)
    assert unlike_modules(sources_of([name])) == []
    write(path, 20, 30)  # of the literals alone
    assert unlike_modules(sources_of([name])) == []  # alike are two processes with the same file and the same memory
    assert "was edited" in sources_of([name])[name]


def test_a_module_that_cannot_be_imported_is_unlike() -> None:
    assert unlike_modules({"there_is_no_such_module": "x"}) == ["there_is_no_such_module"]


def test_workers_run_what_the_driver_runs_after_an_edit_and_after_a_reload(
    ray_session: RaySession, module: Any
) -> None:
    path = Path(str(module.__file__))
    with ray_session(ONE):
        assert module.Edited().answer() == [2, 3]
        write(path, 20, 30)
        assert module.Edited().answer() == [2, 3]  # the driver has not reloaded it
        importlib.reload(module)
        assert module.Edited().answer() == [20, 30]
        write(path, 21, 31)
        importlib.reload(module)
        assert module.Edited().answer() == [21, 31]


@RayHelper.worker(group="train")
class Importer:
    """Imports on the worker what the driver has imported."""

    @RayHelper.function(group="train", execute="first")
    def load(self, folder: str, name: str) -> Any:
        sys.dont_write_bytecode = True
        if folder not in sys.path:
            sys.path.insert(0, folder)
        importlib.invalidate_caches()
        return importlib.import_module(name).FACTOR


def test_workers_that_have_imported_it_before_it_was_edited_get_the_new_one(
    ray_session: RaySession, module: Any
) -> None:
    path = Path(str(module.__file__))
    with ray_session(ONE):
        assert Importer().load(str(path.parent), module.__name__) == 2
        assert module.Edited().answer() == [2, 3]
        write(path, 7, 8)
        importlib.reload(module)
        assert module.Edited().answer() == [7, 8]
        assert Importer().load(str(path.parent), module.__name__) == 2  # the worker's own import is what it was


def test_strict_leaves_a_class_as_it_is_that_goes_to_ray_by_value(module: Any) -> None:
    cloudpickle.register_pickle_by_value(module)
    try:
        init, answer = module.Edited.__init__, module.Edited.answer
        with without_runtime(), RayHelper.session(ONE, runtime="inprocess", strict=True):
            assert module.Edited().answer() == [2, 3]
        assert module.Edited.__init__ is init
        assert module.Edited.answer is answer
    finally:
        cloudpickle.unregister_pickle_by_value(module)
