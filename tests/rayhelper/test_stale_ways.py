"""Every way in which a role's method reads what the driver has set since, or calls what it has replaced."""

from __future__ import annotations

import functools
import operator
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
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def own(self) -> int:
        return 1

    def of_global(self) -> int:
        return LIMIT

    def rate(self, it: Any) -> int:
        return int(it.rate)


class Replaced(Held):
    pass


LIMIT = 1
HELD = Held()


class Whole:
    def whole(self) -> Any:
        return self.rate  # type: ignore[attr-defined]


@RayHelper.worker(group="train")
class Reader(Whole):
    width = 1
    made = 0

    def __init__(self) -> None:
        self.rate = 1
        self.step = 0
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
    def by_keyword(self) -> Any:
        return rate_of(it=self)

    @RayHelper.function(group="train")
    def by_other_object(self) -> Any:
        return HELD.rate(self)

    @RayHelper.function(group="train")
    def by_other_name(self) -> Any:
        it = self
        return it.rate

    @RayHelper.function(group="train")
    def by_get(self) -> Any:
        return vars(self).get("rate")

    @RayHelper.function(group="train")
    def by_getattribute(self) -> Any:
        return self.__getattribute__("rate")

    def whole(self) -> Any:
        return 0

    @RayHelper.function(group="train")
    def by_super(self) -> Any:
        return super().whole()

    @RayHelper.function(group="train")
    def by_computed_name(self) -> Any:
        return next(getattr(self, name) for name in ("rate",))

    @RayHelper.function(group="train")
    def by_whole_dict(self) -> Any:
        return dict(vars(self))["rate"]

    @RayHelper.function(group="train")
    def by_what_is_elsewhere(self) -> Any:
        return operator.attrgetter("rate")(self)

    def train(self) -> None:
        self.step = 5

    @functools.cached_property
    def filled(self) -> list[int]:
        return [1]

    @RayHelper.function(group="train")
    def of_filled(self) -> int:
        return len(self.filled)

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
    def of_own_type(self) -> int:
        return type(self).width

    @RayHelper.function(group="train")
    def late(self) -> Any:
        return getattr(self, "added", 0)

    @RayHelper.function(group="train")
    def of_other_class(self) -> int:
        return Held.value

    @RayHelper.function(group="train")
    def made_of_class(self) -> int:
        return Held().own()

    @RayHelper.function(group="train")
    def global_of_class(self) -> int:
        return Held().of_global()

    @RayHelper.function(group="train")
    def counted(self) -> int:
        type(self).made += 1
        return type(self).made > 0


@pytest.fixture(params=["inprocess", "ray"], autouse=True)
def _session(request: pytest.FixtureRequest) -> Iterator[None]:
    with session_of(request, GROUPS):
        yield


WAYS = ["getattr", "vars", "dict", "helper", "keyword", "other_object", "other_name", "get", "getattribute", "super"]


@pytest.mark.parametrize("way", [f"by_{way}" for way in WAYS])
def test_an_attribute_is_seen_however_it_is_read(way: str) -> None:
    reader = Reader()
    assert getattr(reader, way)() == [1, 1]
    reader.rate = 7
    with pytest.raises(RoleError, match=rf"Reader\.{way} .* reads self\.rate, which was set on the driver"):
        getattr(reader, way)()
    assert reader.by_method() == [1, 1], "which does not read it"


@pytest.mark.parametrize("way", ["by_computed_name", "by_whole_dict", "by_what_is_elsewhere"])
def test_where_it_is_not_seen_what_is_read_whatever_was_set_from_outside_is_refused(way: str) -> None:
    reader = Reader()
    reader.train()  # which sets an attribute of the class's own
    assert reader.filled == [1]
    assert getattr(reader, way)() == [1, 1]
    reader.rate = 7
    with pytest.raises(
        RoleError, match=rf"Reader\.{way} .* may read self\.rate, .* passes self to other code, or computes"
    ):
        getattr(reader, way)()


def test_a_cached_property_is_filled_on_the_driver_too() -> None:
    reader = Reader()
    assert reader.filled == [1]
    assert reader.of_filled() == [1, 1]


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
        ("of_own_type", Reader, "width", 4, "self.width, which was set in class Reader"),
        ("late", Reader, "added", 4, "self.added, which was set in class Reader"),
        ("of_other_class", Held, "value", 4, "Held.value, which was set in class Held"),
        ("made_of_class", Held, "own", lambda self: 4, "Held.own, which was set in class Held"),
        ("made_of_class", HERE, "Held", Replaced, "the global 'Held'"),
        ("global_of_class", HERE, "LIMIT", 4, "the global 'LIMIT'"),
    ],
)
def test_what_was_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, way: str, owner: Any, name: str, value: Any, words: str
) -> None:
    reader = Reader()
    before = getattr(reader, way)()
    monkeypatch.setattr(owner, name, value, raising=False)
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
    again = type("Held", (), dict(vars(Held)))
    monkeypatch.setattr(HERE, "Held", again)
    assert reader.made_of_class() == [1, 1]
    assert reader.chosen() == [1, 1]
    assert reader.by_function() == [2, 2]


def test_a_role_may_count_in_its_class() -> None:
    reader = Reader()
    assert reader.counted() == reader.counted() == [True, True]
