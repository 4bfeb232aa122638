"""``RayHelper.local()``: a piece of work with Ray off, beside whatever this process is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rayhelper import RayHelper, RoleError
from rayhelper.roles.runtime import state
from tests.conftest import RaySession, without_runtime

ONE = {"one": {"device": "CPU", "ranks": 1, "workers": ["train"]}}


@RayHelper.worker(group="train")
class Counter:
    @RayHelper.function(group="train")
    def count(self, value: int) -> int:
        return value + 1


@pytest.fixture
def session(ray_session: RaySession) -> Iterator[Any]:
    with ray_session(ONE):
        yield state.active


def test_local_says_that_ray_is_off_and_the_session_is_back_afterwards(session: Any) -> None:
    with RayHelper.local():
        assert RayHelper.current().group == "off"
        assert Counter().count(1) == 2
    assert RayHelper.current().group == "driver"
    assert Counter().count(1) == [2]


def test_the_session_is_back_after_an_error(session: Any) -> None:
    with pytest.raises(ZeroDivisionError), RayHelper.local():
        raise ZeroDivisionError
    assert state.active is session


def test_what_was_constructed_inside_is_refused_outside(session: Any) -> None:
    with RayHelper.local():
        inside = Counter()
    with pytest.raises(RoleError, match="has no workers"):
        inside.count(1)


def test_what_was_initialized_inside_is_stopped_and_the_session_outside_works_on(session: Any) -> None:
    outside = Counter()
    with RayHelper.local():
        RayHelper.initialize(ONE)
        assert Counter().count(1) == [2]
    assert state.active is session
    assert outside.count(2) == [3]


def test_local_changes_nothing_while_ray_is_off() -> None:
    with without_runtime():
        with RayHelper.local():
            assert Counter().count(1) == 2
        assert Counter().count(1) == 2


@RayHelper.worker(group="judge")
class Whole:
    """Whose ``__init__`` does some work with a class of a role that it does not name."""

    def __init__(self) -> None:
        with RayHelper.local():
            self.counted = Counter().count(1)


def test_what_is_constructed_inside_is_no_part_of_the_object_that_is_built() -> None:
    assert Whole().counted == 2
