"""What the driver sets in modules of the project before it constructs an object holds on Ray's workers."""

from __future__ import annotations

import copy
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rayhelper import DispatchError
from rayhelper.runtimes.ray.modules.changes import changes_in
from tests.conftest import RaySession, without_runtime
from tests.rayhelper import changed_config, changed_user

ONE = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}
MODULES = [changed_config.__name__, changed_user.__name__]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets what a main script would, from its command line."""

    def set_all() -> None:
        monkeypatch.setattr(changed_config, "SCALE", 3)
        monkeypatch.setattr(changed_config, "LATE", "now")
        monkeypatch.setitem(changed_config.OPTIONS, "lr", 5)
        monkeypatch.setattr(changed_config, "NAMES", ["c"])
        monkeypatch.setattr(changed_config.Settings, "lr", 7)
        monkeypatch.setitem(vars(changed_config.settings), "lr", 8)
        monkeypatch.setattr(changed_config.config, "lr", 0.5)
        monkeypatch.setitem(changed_config.CALLED, "lr", 5)
        monkeypatch.setattr(changed_config, "ARGS", Namespace(lr=5, folder=Path("there")))
        monkeypatch.setattr(changed_config.CHOICE, "lr", 5)
        monkeypatch.setattr(changed_config.GIVEN, "lr", 5, raising=False)
        monkeypatch.setattr(changed_config.settings, "rate", 5)
        monkeypatch.setattr(changed_config.settings, "kept", 5)
        monkeypatch.setattr(changed_config.faster, "rate", 5)
        monkeypatch.setattr(changed_config.config, "names", ["added"])
        monkeypatch.setattr(changed_config.given, "lr", 0.5)
        monkeypatch.setattr(changed_config.Settings, "own", lambda self: 5)
        monkeypatch.setattr(changed_config.Settings, "of_class", classmethod(lambda cls: 5))
        monkeypatch.setattr(changed_config.Settings, "static", staticmethod(lambda: 5))
        monkeypatch.setattr(changed_config.Settings, "shown", property(lambda self: 5))
        monkeypatch.setattr(changed_user, "STEP", 2)
        monkeypatch.setattr(changed_user.User, "width", 4)
        monkeypatch.setattr(changed_user.User, "_own", lambda self: "patched")

    yield set_all
    monkeypatch.undo()


def seen() -> dict[str, Any]:
    return copy.deepcopy(changed_user.User().seen())


def test_what_was_set_before_the_construction_holds_on_workers(
    ray_session: RaySession, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_runtime():
        as_written = seen()
    with ray_session(ONE):
        assert seen() == as_written
        change()
        with without_runtime():
            changed = seen()
        assert changed["dict"] == {"lr": 5, "names": ["a"]}
        assert {name for name in changed if changed[name] == as_written[name]} == {"imported before", "mode"}
        assert seen() == changed
        monkeypatch.undo()
        assert seen() == as_written, "it was set back, and workers that were told follow"


def test_what_processes_have_of_their_own_is_left_alone(ray_session: RaySession) -> None:
    changed_config.counted()
    changed_config.registered("mine")
    changed_config.settings.cached()
    try:
        assert changes_in(MODULES, ()).values == {}
        with ray_session(ONE):
            *processes, count, registered = changed_user.User().process()
        assert len(processes) == 4
        assert len(set(processes)) == 1
        assert processes[0] != changed_config.PROCESS
        assert [count, registered] == [0, 0]
    finally:
        changed_config.settings.cache = None
        changed_config.COUNT = 0
        changed_config.REGISTRY.clear()


def test_an_object_that_has_changed_itself_is_its_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_config, "store", changed_config.Store())
    changed_config.store.load()
    assert changes_in(MODULES, ()).values == {}
    changed_config.store.set_size(3)
    assert changes_in(MODULES, ()).values == {(changed_config.__name__, "store", "size"): 3}


def test_a_frozen_object_is_changed_where_the_driver_has_changed_it() -> None:
    assert changes_in([changed_config.__name__], ()).values == {}, "``*found`` names no argument"
    object.__setattr__(changed_config.fixed, "rows", 6)
    changes = changes_in([changed_config.__name__], ())
    object.__setattr__(changed_config.fixed, "rows", 5)
    assert changes.values == {(changed_config.__name__, "fixed", "rows"): 6}
    changes.apply()
    assert changed_config.fixed.rows == 6
    object.__setattr__(changed_config.fixed, "rows", 5)


def test_of_modules_as_they_were_imported_nothing_is_told() -> None:
    """Also of large ones: the trainers'."""
    import trainers.grpo.trainer
    import trainers.sft.trainer  # noqa: F401

    known = [name for name in sys.modules if name.startswith("trainers.")]
    assert len(known) > 100
    assert changes_in(known, ()).values == {}


def test_an_object_in_the_place_of_a_literal_travels_or_is_refused_by_name(
    ray_session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_session(ONE):
        monkeypatch.setattr(changed_config, "LATE", Fraction(1, 3))
        assert Fraction(1, 3) in seen().values()
        monkeypatch.setattr(changed_config, "LATE", threading.Lock())
        with pytest.raises(
            DispatchError, match=r"methods of User read the global .*changed_config\.LATE, .* cannot be"
        ):
            changed_user.User()
