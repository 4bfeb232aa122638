"""The whole's ``group=[...]`` names the roles of all its parts: otherwise its construction says which to add."""

from __future__ import annotations

from typing import Any

import pytest

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, raised, says, story


@RayHelper.worker(group="train")
class Policy:
    def __init__(self) -> None:
        self.opened = self.open()

    @RayHelper.function(group="train", execute="first")
    def step(self) -> int:
        return 1

    @RayHelper.function(group="driver")
    def open(self) -> str:
        return "opened"


@RayHelper.worker(group=["rollout", "judge"])
class Generator:
    @RayHelper.function(group="rollout", execute="first")
    def complete(self) -> int:
        return 2


@RayHelper.worker(group="train")
class Lacking:
    """Its generator has two roles that it does not declare."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.generator = Generator()


@RayHelper.worker(group=["train", "rollout"])
class LackingOne:
    def __init__(self) -> None:
        self.generator = Generator()


@RayHelper.worker(group=["train", "rollout"])
class Middle:
    """It declares too little for its part."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.generator = Generator()


@RayHelper.worker(group=["train", "rollout", "judge"])
class Outer:
    def __init__(self) -> None:
        self.middle = Middle()


@RayHelper.worker(group="train")
class Inner:
    """A whole part, of whose roles the outer one lacks one."""

    def __init__(self) -> None:
        self.policy = Policy()


@RayHelper.worker(group="rollout")
class OuterLacking:
    def __init__(self) -> None:
        self.inner = Inner()


class Careful(Lacking):
    """A subclass is named by its own name."""


@RayHelper.worker(group=["train", "rollout", "judge"])
class Complete:
    def __init__(self) -> None:
        self.policy = Policy()
        self.generator = Generator()


@story
def lacking_two_roles() -> Any:
    return raised(Lacking), raised(Careful)


def test_the_roles_that_a_whole_lacks_are_named_with_the_part_and_the_remedy(run: Run) -> None:
    one, sub = run(lacking_two_roles)
    assert says(one, "DecorationError", "'rollout'", "'judge'", "Lacking", "Generator", "@RayHelper.worker(group=[")
    assert says(sub, "DecorationError", "'rollout'", "'judge'", "Careful", "Generator")


@story
def lacking_one_role() -> Any:
    return raised(LackingOne)


def test_a_role_that_the_whole_has_is_not_asked_for(run: Run) -> None:
    seen = run(lacking_one_role)
    assert says(seen, "DecorationError", "'judge'", "LackingOne", "Generator")


@story
def lacking_further_in() -> Any:
    return raised(Outer), raised(OuterLacking)


def test_a_part_with_parts_is_a_whole_of_theirs(run: Run) -> None:
    middle, outer = run(lacking_further_in)
    assert says(middle, "DecorationError", "'judge'", "Middle", "Generator")
    assert says(outer, "DecorationError", "'train'", "OuterLacking")


@story
def after_one_that_was_refused() -> Any:
    refused = raised(Lacking)
    complete = Complete()
    return refused, complete.policy.step(), complete.generator.complete(), complete.policy.opened


def test_workers_go_on_after_a_whole_was_refused(run: Run) -> None:
    refused, *values = run(after_one_that_was_refused)
    assert says(refused, "DecorationError")
    assert values == [1, 2, "opened"]


@RayHelper.worker(group="train")
class Loader:
    """All its methods are the driver's."""

    @RayHelper.function(group="driver")
    def load(self) -> str:
        return "loaded"


@RayHelper.worker(group="train")
class WithLoader:
    def __init__(self) -> None:
        self.loader = Loader()
        self.loaded = self.loader.load()


@story
def a_part_of_the_driver() -> Any:
    whole = WithLoader()
    return whole.loaded, whole.loader.load()


def test_the_role_of_the_driver_needs_no_mention(run: Run) -> None:
    assert run(a_part_of_the_driver) == ["loaded", "loaded"]


class Undecorated:
    """No whole: a plain class whose attributes have workers of their own."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.generator = Generator()


@story
def an_undecorated_holder() -> Any:
    holder = Undecorated()
    return holder.policy.step(), holder.generator.complete()


def test_a_class_without_roles_declares_nothing(run: Run) -> None:
    assert run(an_undecorated_holder) == [1, 2]


def test_a_role_that_no_device_group_hosts_is_named_when_the_whole_is_built() -> None:
    groups = {"all": {"device": "CPU", "ranks": 1, "workers": ["train", "rollout"]}}
    with RayHelper.session(groups, runtime="inprocess"), pytest.raises(ValueError, match="judge"):
        Complete()
