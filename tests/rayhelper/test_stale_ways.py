"""Every way in which a role's method reads what the driver has set since, or calls what it has replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rayhelper import RayHelper, RoleError
from tests.conftest import session_of
from tests.rayhelper import stale_helper

GROUPS = {"g": {"device": "CPU", "ranks": 2, "workers": ["train"]}}
CHOSEN = {"rate": 1}
HERE = sys.modules[__name__]


def rate_of(it: Any) -> int:
    return int(it.rate)


def doubled(x: int) -> int:
    return 2 * x


class Held:
    value = 1


HELD = Held()


@RayHelper.worker(group="train")
class Reader:
    width = 1
    made = 0

    def __init__(self) -> None:
        self.rate = 1
        type(self).made += 1

    def _own(self) -> int:
        return 1

    @RayHelper.function(group="train")
    def by_getattr(self) -> Any:
        return getattr(self, "rate", 0)

    @RayHelper.function(group="train")
    def by_vars(self) -> Any:
        return vars(self)["rate"]

    @RayHelper.function(group="train")
    def by_dict(self) -> Any:
        return self.__dict__["rate"]

    @RayHelper.function(group="train")
    def by_helper(self) -> Any:
        return rate_of(self)

    @RayHelper.function(group="train")
    def by_method(self) -> int:
        return self._own()

    @RayHelper.function(group="train")
    def of_class(self) -> int:
        return self.width

    @RayHelper.function(group="train")
    def by_function(self) -> int:
        return doubled(1)

    @RayHelper.function(group="train")
    def by_function_elsewhere(self) -> float:
        return stale_helper.scaled(1.0)

    @RayHelper.function(group="train")
    def chosen(self) -> Any:
        return CHOSEN["rate"]

    @RayHelper.function(group="train")
    def held(self) -> Any:
        return HELD.value

    @RayHelper.function(group="train")
    def counted(self) -> int:
        type(self).made += 1
        return type(self).made > 0


@pytest.fixture(params=["inprocess", "ray"], autouse=True)
def _session(request: pytest.FixtureRequest) -> Iterator[None]:
    with session_of(request, GROUPS):
        yield


@pytest.mark.parametrize("way", ["by_getattr", "by_vars", "by_dict", "by_helper"])
def test_an_attribute_is_seen_however_it_is_read(way: str) -> None:
    reader = Reader()
    assert getattr(reader, way)() == [1, 1]
    reader.rate = 7
    with pytest.raises(RoleError, match=rf"Reader\.{way} .* reads self\.rate, which was set on the driver"):
        getattr(reader, way)()
    assert reader.by_method() == [1, 1], "which does not read it"


def test_a_method_that_an_attribute_hides_is_named() -> None:
    reader = Reader()
    assert reader.by_method() == [1, 1]
    reader._own = lambda: 43  # type: ignore[method-assign]
    with pytest.raises(RoleError, match=r"reads self\._own, which was set on the driver"):
        reader.by_method()


@pytest.mark.parametrize(
    ("way", "owner", "name", "value", "words"),
    [
        ("by_method", Reader, "_own", lambda self: 42, "self._own, which was set in class Reader"),
        ("of_class", Reader, "width", 4, "self.width, which was set in class Reader"),
        ("by_function", HERE, "doubled", lambda x: 99, "the global 'doubled'"),
        ("by_function_elsewhere", stale_helper, "scaled", lambda x: 99.0, "the global 'tests.rayhelper.stale_helper"),
        ("chosen", HERE, "CHOSEN", {"rate": 9}, "the global 'CHOSEN'"),
        ("held", HERE, "HELD", Held(), "the global 'HELD'"),
    ],
)
def test_what_was_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, way: str, owner: Any, name: str, value: Any, words: str
) -> None:
    reader = Reader()
    before = getattr(reader, way)()
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(RoleError) as caught:
        getattr(reader, way)()
    assert words in str(caught.value)
    monkeypatch.undo()
    assert getattr(reader, way)() == before


def test_what_is_equal_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a cell of a notebook is run again."""
    reader = Reader()
    monkeypatch.setattr(HERE, "CHOSEN", {"rate": 1})
    names: dict[str, Any] = {"__name__": __name__}
    exec("\n" * (doubled.__code__.co_firstlineno - 1) + "def doubled(x: int) -> int:\n    return 2 * x\n", names)
    monkeypatch.setattr(HERE, "doubled", names["doubled"])
    assert reader.chosen() == [1, 1]
    assert reader.by_function() == [2, 2]


def test_a_role_may_count_in_its_class() -> None:
    reader = Reader()
    assert reader.counted() == reader.counted() == [True, True]
