"""Where a call to a part runs: in its role's group when the driver makes it, here when a worker does that hosts it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.layouts import ROLES
from tests.rayhelper.parts.stories import Run, agreed, only, raised, runs, says, story


class Station:
    """What all the parts here have: a counter, and siblings whose counters they raise."""

    def __init__(self) -> None:
        self.count = 0
        self.siblings: dict[str, Any] = {}

    def add(self, by: int) -> int:
        self.count += by
        return self.count


@RayHelper.worker(group="train")
class Learner(Station):
    @RayHelper.function(group="train", collect=agreed)
    def increase(self, by: int = 1) -> int:
        return self.add(by)

    @RayHelper.function(group="train", execute="first")
    def ask(self, sibling: str) -> Any:
        return self.siblings[sibling].increase()


@RayHelper.worker(group="rollout")
class Sampler(Station):
    @RayHelper.function(group="rollout", collect=agreed)
    def increase(self, by: int = 1) -> int:
        return self.add(by)

    @RayHelper.function(group="rollout", execute="first")
    def ask(self, sibling: str) -> Any:
        return self.siblings[sibling].increase()


@RayHelper.worker(group="judge")
class Judge(Station):
    @RayHelper.function(group="judge", collect=agreed)
    def increase(self, by: int = 1) -> int:
        return self.add(by)

    @RayHelper.function(group="judge", execute="first")
    def ask(self, sibling: str) -> Any:
        return self.siblings[sibling].increase()

    @RayHelper.function(group="driver")
    def open(self) -> str:
        return "opened"

    @RayHelper.function(group="judge", execute="first")
    def open_on_worker(self) -> str:
        return self.open()


@RayHelper.worker(group=["train", "rollout", "judge"])
class Whole(Station):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"train": Learner(), "rollout": Sampler(), "judge": Judge()}
        for part in self.parts.values():
            part.siblings = self.parts

    @RayHelper.function(group="train", execute="first")
    def ask_as_train(self, role: str) -> Any:
        return self.parts[role].increase()  # type: ignore[attr-defined]

    @RayHelper.function(group="rollout", execute="first")
    def ask_as_rollout(self, role: str) -> Any:
        return self.parts[role].increase()  # type: ignore[attr-defined]

    @RayHelper.function(group="judge", execute="first")
    def ask_as_judge(self, role: str) -> Any:
        return self.parts[role].increase()  # type: ignore[attr-defined]

    @RayHelper.function(group="driver")
    def ask_as_driver(self, role: str) -> Any:
        return self.parts[role].increase()  # type: ignore[attr-defined]


@story
def called_by_the_driver() -> Any:
    whole = Whole()
    plain = [whole.parts[role].increase(k) for k, role in enumerate(ROLES, 1)]  # type: ignore[attr-defined]
    return plain, [whole.ask_as_driver(role) for role in ROLES], whole.parts["judge"].open()  # type: ignore[attr-defined]


def test_the_driver_calls_a_part_in_its_own_group(run: Run) -> None:
    assert run(called_by_the_driver) == [[1, 2, 3], [2, 3, 4], "opened"]


@story
def called_by_the_whole() -> Any:
    whole = Whole()
    return {f"{a} {b}": raised(getattr(whole, f"ask_as_{a}"), b) for a, b in permutations(ROLES, 2)}


def test_a_method_of_the_whole_calls_a_part_here_or_names_both_roles(run: Run) -> None:
    seen = run(called_by_the_whole)
    for caller, callee in permutations(ROLES, 2):
        check(run, caller, callee, seen[f"{caller} {callee}"])


@story
def called_by_a_sibling() -> Any:
    whole = Whole()
    parts: Any = whole.parts
    return {f"{a} {b}": raised(parts[a].ask, b) for a, b in permutations(ROLES, 2)}


def test_a_method_of_a_sibling_calls_a_part_here_or_names_both_roles(run: Run) -> None:
    seen = run(called_by_a_sibling)
    for caller, callee in permutations(ROLES, 2):
        check(run, caller, callee, seen[f"{caller} {callee}"])


def check(run: Run, caller: str, callee: str, seen: dict[str, Any]) -> None:
    """A call from one role to another ran where one worker hosts both: it gave the method's own value, no list."""
    if run.layout.together(caller, callee):
        assert isinstance(seen["returned"], int)
    else:
        assert says(seen, "RoleError", f"'{callee}'", caller, "rank 0", repr(run.layout.group(caller)))


@story
def own_role_by_the_whole_and_a_part() -> Any:
    whole = Whole()
    return [getattr(whole, f"ask_as_{role}")(role) for role in ROLES], [
        part.ask(role)
        for role, part in whole.parts.items()  # type: ignore[attr-defined]
    ]


def test_a_call_to_a_part_of_the_same_role_stays_on_the_worker(run: Run) -> None:
    assert run(own_role_by_the_whole_and_a_part) == [[1, 1, 1], [2, 2, 2]]


@story
def driver_called_by_a_worker() -> Any:
    whole = Whole()
    return raised(whole.parts["judge"].open_on_worker)  # type: ignore[attr-defined]


def test_a_parts_method_of_the_driver_is_refused_on_a_worker(run: Run) -> None:
    seen = run(driver_called_by_a_worker)
    if run.is_off:
        assert seen == {"returned": "opened"}
    else:
        assert says(seen, "RoleError", "driver")


@RayHelper.worker(group="train")
class Policy:
    def __init__(self) -> None:
        self.made = ["init"]
        self.note("own init")

    @RayHelper.function(group="train", execute="first")
    def first_notes(self) -> list[str]:
        return list(self.made)

    @RayHelper.function(group="train", collect=agreed)
    def note(self, text: str) -> list[str]:
        self.made.append(text)
        return list(self.made)

    @RayHelper.function(group="train", collect=agreed)
    async def waits(self, text: str) -> None:
        self.made.append(text)

    @RayHelper.function(group="train", collect=agreed)
    def items(self, text: str) -> Iterator[str]:
        self.made.append(text)
        yield text


@RayHelper.worker(group="train")
class Inner:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.own = Policy()
        self.policy.note("sibling's init")
        self.own.note("whole's init")


@RayHelper.worker(group=["train", "rollout"])
class Busy:
    """Calls its parts in every way while it is constructed."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.said = self.policy.note("after")
        self.deferred = self.policy.note.defer("deferred").result()
        asyncio.run(self.policy.waits("async"))
        self.listed = list(self.policy.items("generator"))
        self.inner = Inner(self.policy)
        self.inner.own.note("whole's whole's init")
        self.set_up()
        self.quiet_set_up()
        self.loaded = self.load()

    @RayHelper.function(group="train", collect=agreed)
    def set_up(self) -> None:
        self.policy.note("by the whole's method")

    def quiet_set_up(self) -> None:
        self.policy.note("undecorated")

    @RayHelper.function(group="driver")
    def load(self) -> str:
        return "loaded"

    @RayHelper.function(group="train", collect=agreed)
    def seen_by_train(self) -> Any:
        return self.said, self.deferred, self.listed

    @RayHelper.function(group="rollout", collect=agreed)
    def seen_by_rollout(self) -> Any:
        return self.said, self.deferred, self.listed, self.policy.made


NOTES = ["init", "own init", "after", "deferred", "async", "generator", "sibling's init"]
NOTES += ["by the whole's method", "undecorated"]


@story
def called_while_constructing() -> Any:
    busy = Busy()
    return busy.policy.first_notes(), busy.inner.own.first_notes(), busy.loaded, busy.policy.note("later")


def test_calls_to_a_part_within_the_wholes_constructor_run_on_its_workers(run: Run) -> None:
    own = ["init", "own init", "whole's init", "whole's whole's init"]
    assert run(called_while_constructing) == [NOTES, own, "loaded", [*NOTES, "later"]]


@story
def values_while_constructing() -> Any:
    busy = Busy()
    return busy.seen_by_train(), busy.seen_by_rollout()


def test_calls_to_a_part_within_the_wholes_constructor_are_skipped_elsewhere(run: Run) -> None:
    there = [["init", "own init", "after"], ["init", "own init", "after", "deferred"], ["generator"]]
    elsewhere = [None, None, [], ["init"]]
    by_rollout = [*there, NOTES] if run.shares_state("train", "rollout") else elsewhere
    assert run(values_while_constructing) == [there, by_rollout]


@story
def values_on_the_driver_while_constructing() -> Any:
    busy = Busy()
    return busy.said, busy.deferred, busy.listed


@only(runs("off", "inprocess", "strict", "ray"))
def test_calls_to_a_part_within_the_wholes_constructor_are_skipped_on_the_driver(run: Run) -> None:
    """Under torchrun a process is driver and worker."""
    there = [["init", "own init", "after"], ["init", "own init", "after", "deferred"], ["generator"]]
    assert run(values_on_the_driver_while_constructing) == (there if run.is_off else [None, None, []])


@RayHelper.worker(group="train")
class Seen:
    """A part that notes who built it, and whether it was told a shard that is not its own."""

    def __init__(self) -> None:
        info = RayHelper.current()
        self.built_by = info.group, info.rank, info.world_size, info.shard.count


@RayHelper.worker(group=["train", "rollout"])
class Watching:
    def __init__(self) -> None:
        self.report()
        self.seen = Seen()

    @RayHelper.function(group="rollout")
    def report(self) -> None:
        RayHelper.shard(0, 1, leader=RayHelper.current().rank == 0)

    @RayHelper.function(group="train", execute="first")
    def by_train(self) -> Any:
        return self.seen.built_by

    @RayHelper.function(group="rollout", execute="first")
    def by_rollout(self) -> Any:
        return self.seen.built_by


@story
def who_builds_a_part() -> Any:
    watching = Watching()
    return watching.by_train(), watching.by_rollout()


def test_current_tells_a_parts_constructor_which_worker_builds_it_also_where_its_role_is_not(run: Run) -> None:
    by_train, by_rollout = run(who_builds_a_part)
    sizes = {role: run.layout.size(role) for role in ("train", "rollout")}
    assert by_train == [run.layout.group("train"), 0, sizes["train"], sizes["train"]]
    if run.layout.name != "overlapping":  # there the process of rank 0 is built once, as one of the learners
        assert by_rollout == [run.layout.group("rollout"), 0, sizes["rollout"], sizes["rollout"]]
