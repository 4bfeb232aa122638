"""A module that was edited while a session runs: workers run what the driver runs."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray import cloudpickle

from rayhelper import RayHelper, RoleError
from rayhelper.runtimes.ray.modules.sources import sources_of, unlike_modules
from rayhelper.values.packing import dumps
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


def test_a_module_is_parsed_once_until_its_file_changes(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text, *args: parsed.append(text) or parse(text, *args))
    path = Path(str(module.__file__))
    for _ in range(3):
        assert unlike_modules(sources_of([module.__name__])) == []
    assert len(parsed) == 1, "by the first construction alone"
    module.FACTOR = 5
    assert "was edited" in sources_of([module.__name__])[module.__name__], (
        "what the module holds is looked at each time"
    )
    write(path, 20, 30)
    importlib.reload(module)
    for _ in range(3):
        assert unlike_modules(sources_of([module.__name__])) == []
    assert [text.count("FACTOR = 20") for text in parsed] == [0, 1]


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


@RayHelper.worker(group="train")
class Paths:
    """Makes the modules of a folder importable on the worker, as those of a project are."""

    @RayHelper.function(group="train", execute="first")
    def add(self, folder: str) -> None:
        sys.dont_write_bytecode = True
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


HELPER = "FACTOR = {factor}\n\ndef times(x):\n    return x * {times}\n"
BETWEEN = "import {name}\n\ndef between():\n    return [{name}.FACTOR, {name}.times(1)]\n"
USER = """
from rayhelper import RayHelper
{imports}

@RayHelper.worker(group="train")
class User:
    @RayHelper.function(group="train", execute="first")
    def answer(self):
        {inside}
        return {value}
"""
IMPORTS = {  # by how the class reaches the helper: at the top, in the method, the value
    "module": ("import {name}", "pass", "[{name}.FACTOR, {name}.times(1)]"),
    "function": ("from {name} import FACTOR, times", "pass", "[FACTOR, times(1)]"),
    "transitive": ("import {name}_between", "pass", "{name}_between.between()"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Within a session, writes and imports a helper and a module with a class that uses it; gives both."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"helper_{abs(hash(request.node.name))}"

    def make(at_top: str, inside: str, value: str, *, extra: str = "") -> Any:
        written = {"imports": at_top.format(name=name), "inside": inside.format(name=name)}
        write_helper(tmp_path / f"{name}.py", 2, 3, extra)
        (tmp_path / f"{name}_between.py").write_text(BETWEEN.format(name=name))
        (tmp_path / f"{name}_user.py").write_text(USER.format(**written, value=value.format(name=name)))
        importlib.invalidate_caches()
        Paths().add(str(tmp_path))
        return importlib.import_module(name), importlib.import_module(f"{name}_user")

    yield make
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(name)]:
        cloudpickle_forgets(loaded)
        del sys.modules[loaded]


def cloudpickle_forgets(name: str) -> None:
    if name in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(sys.modules[name])


def write_helper(path: Path, factor: int, times: int, extra: str = "") -> None:
    path.write_text(HELPER.format(factor=factor, times=times) + extra)
    now = time.time() + 5
    os.utime(path, (now, now + times / 100))


def reload(*modules: ModuleType) -> None:
    importlib.invalidate_caches()
    for module in modules:
        importlib.reload(module)


@pytest.mark.parametrize("how", sorted(IMPORTS))
def test_helper_modules_that_were_reloaded_are_on_workers_what_they_are_on_the_driver(
    ray_session: RaySession, project: Any, how: str
) -> None:
    with ray_session(ONE):
        helper, user = project(*IMPORTS[how])
        path = Path(helper.__file__)
        instance = user.User()
        assert instance.answer() == [2, 3]  # the worker has imported the helper by now
        write_helper(path, 2, 30)
        assert instance.answer() == [2, 3]  # the driver has not reloaded it: an edit during a run harms nothing
        reload(helper, user)
        with pytest.raises(RoleError, match=rf"'{helper.__name__}\w*' \(.*\.py\) was edited and reloaded"):
            instance.answer()
        assert user.User().answer() == [2, 30]


LATE = ("", "import {name}", "[{name}.FACTOR, {name}.times(1)]")


def test_a_helper_that_a_method_imports_is_the_one_that_the_driver_had(ray_session: RaySession, project: Any) -> None:
    with ray_session(ONE):
        helper, user = project(*LATE)
        instance = user.User()
        write_helper(Path(helper.__file__), 2, 30)  # before the worker imports it
        assert instance.answer() == [2, 3]
        assert user.User.answer(instance) == [2, 3]


def test_one_that_workers_have_imported_before_it_was_reloaded_is_refused(
    ray_session: RaySession, project: Any
) -> None:
    with ray_session(ONE):
        helper, user = project(*LATE)
        instance = user.User()
        assert instance.answer() == [2, 3]
        write_helper(Path(helper.__file__), 2, 30)
        reload(helper)
        with pytest.raises(RoleError, match=rf"'{helper.__name__}' \(.*\.py\) was edited and reloaded"):
            instance.answer()
        with pytest.raises(
            RoleError, match=rf"imports '{helper.__name__}' when it runs.*Import '{helper.__name__}' at"
        ):
            user.User()


def test_a_reload_of_the_same_source_is_no_mistake(ray_session: RaySession, project: Any) -> None:
    with ray_session(ONE):
        helper, user = project(*IMPORTS["module"])
        instance = user.User()
        reload(helper)
        assert instance.answer() == [2, 3]


def test_a_helper_that_holds_what_cannot_travel_is_named(ray_session: RaySession, project: Any) -> None:
    lock = "import threading\n\nLOCK = threading.Lock()\n"
    with ray_session(ONE):
        helper, user = project(*IMPORTS["module"], extra=lock)
        assert user.User().answer() == [2, 3]
        write_helper(Path(helper.__file__), 2, 30, lock)
        reload(helper)
        with pytest.raises(
            RoleError, match=rf"'{helper.__name__}' \(.*\.py\).*cannot pickle.*importable on every node"
        ):
            user.User()


def test_a_cached_property_travels_by_value() -> None:
    """In Python 3.11 it holds a lock, which cannot be pickled."""

    class Table:
        @functools.cached_property
        def rows(self) -> list[int]:
            return [1, 2]

    class Same:
        rows = pickle.loads(dumps(vars(Table)["rows"]))

    table = Same()
    assert table.rows == [1, 2]
    assert table.rows is table.rows
