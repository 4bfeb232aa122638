"""Wholes and parts that are written in unusual ways: with dataclasses, coroutines, threads, errors that are caught."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rayhelper import RayHelper
from tests.conftest import without_runtime
from tests.rayhelper.parts.stories import (
    Open,
    Run,
    agreed,
    only,
    raised,
    runs,
    says,
    story,
    story_not_under_torchrun,
    story_that_opens,
)


@RayHelper.worker(group="train")
class Policy:
    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    @RayHelper.function(group="train", collect=agreed)
    def step(self) -> int:
        self.steps += 1
        return self.steps


@RayHelper.worker(group="rollout")
@dataclass
class Scorer:
    """Not hashable, and equal to others of the same scale."""

    scale: int
    calls: int = 0

    @RayHelper.function(group="rollout", collect=agreed)
    def score(self, item: int) -> int:
        self.calls += 1
        return self.scale * item + self.calls


@RayHelper.worker(group="train")
@dataclass(frozen=True)
class Frozen:
    name: str

    @RayHelper.function(group="train", collect=agreed)
    def read(self) -> str:
        return self.name


@RayHelper.worker(group=["train", "rollout"])
@dataclass
class Written:
    """A whole whose fields are parts."""

    start: int
    policy: Policy = field(init=False)
    scorers: list[Scorer] = field(default_factory=lambda: [Scorer(10), Scorer(10)])

    def __post_init__(self) -> None:
        self.policy = Policy(self.start)
        self.frozen = Frozen("frozen")

    @RayHelper.function(group="rollout", collect=agreed)
    def is_first(self, scorer: Any) -> bool:
        return scorer is self.scorers[0]


@story
def dataclasses() -> Any:
    written = Written(5)
    first, second = written.scorers
    scores = first.score(1), first.score(1), second.score(1)
    is_first = written.is_first(first), written.is_first(second)
    return written.policy.step(), scores, written.frozen.read(), is_first


def test_wholes_and_parts_may_be_dataclasses(run: Run) -> None:
    assert run(dataclasses) == [6, [11, 12, 11], "frozen", [True, False]]


@RayHelper.worker(group="train")
class Asynchronous:
    """Builds parts in coroutines."""

    def __init__(self) -> None:
        asyncio.run(self.prepare())

    async def prepare(self) -> None:
        self.policy = Policy(1)
        await asyncio.sleep(0)
        self.gathered = list(await asyncio.gather(self.built(10), self.built(20)))

    async def built(self, start: int) -> Policy:
        await asyncio.sleep(0)
        return Policy(start)

    @RayHelper.function(group="train", collect=agreed)
    def all_steps(self) -> list[int]:
        return [self.policy.steps, *(policy.steps for policy in self.gathered)]


@story
def built_in_coroutines() -> Any:
    whole = Asynchronous()
    whole.policy.step()
    whole.gathered[1].step()
    return whole.all_steps()


def test_parts_may_be_built_in_coroutines(run: Run) -> None:
    assert run(built_in_coroutines) == [2, 10, 21]


@RayHelper.worker(group="train")
class Broken:
    def __init__(self) -> None:
        self.inner = Policy(100)
        raise ValueError("broken everywhere")


@RayHelper.worker(group="train")
class Forgiving:
    """Goes on without a part that cannot be built."""

    def __init__(self) -> None:
        self.policy = Policy(1)
        try:
            self.broken: Any = Broken()
        except ValueError:
            self.broken = None
        self.other = Policy(2)

    @RayHelper.function(group="train", collect=agreed)
    def all_steps(self) -> list[Any]:
        return [self.policy.steps, self.broken, self.other.steps]


@story
def a_failure_that_is_caught() -> Any:
    whole = Forgiving()
    whole.other.step()
    whole.policy.step()
    return whole.all_steps(), whole.other.step()


def test_a_whole_may_go_on_without_a_part_that_cannot_be_built_anywhere(run: Run) -> None:
    assert run(a_failure_that_is_caught) == [[2, None, 3], 4]


@RayHelper.worker(group="train")
class WithLocal:
    """Keeps an object that belongs to its process alone."""

    def __init__(self) -> None:
        self.policy = Policy(1)
        with RayHelper.local():
            self.alone = Policy(50)
        self.other = Policy(2)

    @RayHelper.function(group="train", collect=agreed)
    def all_steps(self) -> list[int]:
        with RayHelper.local():
            self.alone.step()
        return [self.policy.steps, self.alone.steps, self.other.steps]


@story_not_under_torchrun
def built_locally() -> Any:
    whole = WithLocal()
    whole.other.step()
    first = whole.all_steps(), whole.all_steps()
    with RayHelper.local():
        return *first, whole.alone.step()


@only(runs("inprocess", "strict", "ray"))
def test_what_is_built_inside_local_is_no_part(run: Run) -> None:
    assert run(built_locally) == [[1, 51, 3], [1, 52, 3], 51]


@RayHelper.worker(group="train")
class Asking:
    """A part that asks the driver while it is built; it may fail before, on one worker."""

    def __init__(self, failing: bool) -> None:
        info = RayHelper.current()
        if failing and info.group != "driver" and info.rank == info.world_size - 1:
            raise ValueError("too early to ask")
        self.drawn = self.draw(21)

    @RayHelper.function(group="driver", execute="first")
    def draw(self, number: int) -> int:
        return 2 * number


@RayHelper.worker(group="train")
class AskingWhole:
    def __init__(self, failing: bool = False) -> None:
        self.before = Policy(1)
        self.asking = Asking(failing)
        self.policy = Policy(5)


@story
def asking_the_driver() -> Any:
    asking = AskingWhole()
    failed = raised(AskingWhole, failing=True)
    return asking.asking.drawn, asking.asking.draw(3), failed, asking.policy.step(), AskingWhole().policy.step()


def test_a_part_may_ask_the_driver_while_it_is_built(run: Run) -> None:
    drawn, again, failed, *steps = run(asking_the_driver)
    assert (drawn, again) == (42, 6)
    assert says(failed, "ValueError", "too early to ask")
    assert steps == [6, 6]


@RayHelper.worker(group=["train", "rollout"])
class Builder:
    """Builds a whole of its own on a worker, after construction."""

    def __init__(self) -> None:
        self.policy = Policy(100)

    @RayHelper.function(group="train", collect=agreed)
    def build_and_use(self) -> Any:
        written = Written(3)
        return written.policy.step(), written.policy.step(), self.policy.step(), written.frozen.read()

    @RayHelper.function(group="train", collect=agreed)
    def build_and_score(self) -> int:
        written = Written(3)
        return written.scorers[0].score(1)

    @RayHelper.function(group="train", execute="first")
    def build_and_return(self) -> Any:
        return Policy(3)


@story
def built_by_a_worker_later() -> Any:
    builder = Builder()
    return builder.build_and_use(), builder.policy.step(), raised(builder.build_and_score)


def test_a_whole_that_a_workers_method_builds_has_parts_on_that_worker_alone(run: Run) -> None:
    used, step, scored = run(built_by_a_worker_later)
    assert (used, step) == ([4, 5, 101, "frozen"], 102)
    if run.layout.together("train", "rollout"):
        assert scored == {"returned": 11}
    else:
        assert says(scored, "RoleError", "'rollout'", "Written.scorers[0].score")


@story
def returned_though_it_is_the_workers_alone() -> Any:
    builder = Builder()
    return raised(builder.build_and_return), builder.policy.step()


@only(runs("inprocess", "strict", "ray"))
def test_an_object_that_one_worker_alone_has_does_not_leave_it(run: Run) -> None:
    refused, step = run(returned_though_it_is_the_workers_alone)
    assert refused.get("raised") in ("RoleError", "WorkerError"), refused
    assert all("sent to another process" in text for text in refused["text"])
    assert step == 101


@RayHelper.worker(group="train")
class Two:
    def __init__(self) -> None:
        self.one, self.two = Policy(0), Policy(100)


@story_not_under_torchrun
def called_by_threads() -> Any:
    two = Two()
    with ThreadPoolExecutor(4) as pool:
        wholes = list(pool.map(lambda start: Written(start).policy.step(), [10, 20, 30]))
        steps = list(pool.map(lambda k: (two.one, two.two)[k % 2].step(), range(20)))
    return wholes, sorted(steps[::2]), sorted(steps[1::2])


@only(runs("off", "ray"))
def test_threads_of_the_driver_build_wholes_and_call_parts(run: Run) -> None:
    assert run(called_by_threads) == [[11, 21, 31], list(range(1, 11)), list(range(101, 111))]


@story
def built_before_initialize() -> Any:
    with without_runtime():
        early = Two()
    late = Two()
    return raised(early.one.step), late.one.step()


@only(runs("inprocess", "strict", "torchrun", "ray"))
def test_a_part_of_a_whole_that_was_built_before_initialize_says_so(run: Run) -> None:
    refused, step = run(built_before_initialize)
    assert says(refused, "RoleError", "before RayHelper.initialize", "step")
    assert step == 1


@story_that_opens("pair")
def used_after_the_session(session: Open) -> Any:
    with session():
        two = Two()
        two.one.step()
    return raised(two.one.step)


@only(runs("inprocess", "strict", "torchrun", layouts=("pair",)))
def test_a_part_outside_its_session_says_so(run: Run) -> None:
    assert says(run(used_after_the_session), "RoleError", "Two.one.step", "teardown")
