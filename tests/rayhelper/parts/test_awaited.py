"""Calls of asynchronous methods that are awaited together are in flight together, in every runtime."""

from __future__ import annotations

import asyncio
from typing import Any

from rayhelper import RayHelper
from tests.rayhelper.parts.stories import Run, agreed, only, runs, story, story_not_under_torchrun


def fewest(counts: list[int]) -> int:
    return min(counts)


@RayHelper.worker(group="train")
class Meeting:
    """Every call waits for others of the same object: none returns if they are made one after the other."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.changed = asyncio.Condition()
        self.cancelled = 0

    async def arrive(self, name: str) -> None:
        async with self.changed:
            self.seen.append(name)
            self.changed.notify_all()

    async def until(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.seen) >= count)

    @RayHelper.function(group="train", collect=agreed)
    async def meet(self, name: str, count: int) -> list[str]:
        await self.arrive(name)
        await self.until(count)
        return self.seen[:count]

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    async def meet_each(self, names: list[str]) -> Any:
        await self.arrive("one of three")
        await self.until(3)
        for name in names:
            yield name

    @RayHelper.function(group="train", collect=agreed)
    def note(self, name: str) -> list[str]:
        self.seen.append(name)
        return list(self.seen)

    @RayHelper.function(group="train", collect=agreed)
    async def until_noted(self, name: str) -> str:
        while name not in self.seen:
            await asyncio.sleep(0.001)
        return name

    @RayHelper.function(group="train", collect=agreed)
    async def fail_after(self, count: int) -> None:
        await self.until(count)
        raise KeyError("met and failed")

    @RayHelper.function(group="train", collect=agreed)
    async def forever(self) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            self.cancelled += 1

    @RayHelper.function(group="train", collect=fewest)
    def times_cancelled(self) -> int:
        return self.cancelled

    @RayHelper.function(group="train")
    async def ranks_of_tasks(self, count: int) -> list[int]:
        await self.arrive("a task")

        async def rank() -> int:
            await self.until(count)
            return RayHelper.current().rank

        return list(await asyncio.gather(rank(), asyncio.create_task(rank())))


@story
def three_meet() -> Any:
    meeting = Meeting()

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(meeting.meet(name, 3) for name in "abc")))

    return asyncio.run(together())


def test_three_calls_of_one_object_wait_for_each_other(run: Run) -> None:
    assert run(three_meet) == 3 * [["a", "b", "c"]]


@story
def three_generators_meet() -> Any:
    meeting = Meeting()

    async def drained(items: Any) -> list[str]:
        return [item async for item in items]

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(drained(meeting.meet_each([name, name.upper()])) for name in "abc")))

    return asyncio.run(together())


def test_asynchronous_generators_wait_for_each_other(run: Run) -> None:
    assert run(three_generators_meet) == [["a", "A"], ["b", "B"], ["c", "C"]]


@story
def an_ordinary_call_between() -> Any:
    meeting = Meeting()

    async def noting() -> list[str]:
        await asyncio.sleep(0)
        return meeting.note("b")

    async def together() -> list[Any]:
        return list(await asyncio.gather(meeting.meet("a", 1), meeting.until_noted("b"), noting()))

    return asyncio.run(together())


def test_an_ordinary_call_is_made_while_others_are_suspended_and_after_they_began(run: Run) -> None:
    assert run(an_ordinary_call_between) == [["a"], "b", ["a", "b"]]


@story
def one_fails() -> Any:
    meeting = Meeting()

    async def together() -> Any:
        failing = asyncio.create_task(meeting.fail_after(1))
        met = await meeting.meet("a", 1)
        try:
            await failing
        except KeyError as error:
            return met, str(error)

    return asyncio.run(together())


def test_what_one_of_them_raises_is_its_own(run: Run) -> None:
    assert run(one_fails) == [["a"], "'met and failed'"]


@story_not_under_torchrun
def one_is_cancelled() -> Any:
    meeting = Meeting()

    async def together() -> Any:
        waiting = asyncio.create_task(meeting.forever())
        await asyncio.sleep(0)  # it begins
        await meeting.meet("a", 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        while not meeting.times_cancelled():
            await asyncio.sleep(0.001)
        return waiting.cancelled()

    return asyncio.run(together())


@only(runs("off", "inprocess", "strict", "ray"))
def test_a_task_that_is_cancelled_cancels_the_coroutine_on_the_workers(run: Run) -> None:
    assert run(one_is_cancelled) is True


@story
def tasks_of_a_role() -> Any:
    meeting = Meeting()

    async def together() -> Any:
        return [await meeting.ranks_of_tasks(1), *await asyncio.gather(*(meeting.ranks_of_tasks(3) for _ in "ab"))]

    return asyncio.run(together())


def test_tasks_that_a_coroutine_begins_know_their_worker(run: Run) -> None:
    ranks = run.of_shards([[rank, rank] for rank in range(run.layout.size("train"))])
    assert run(tasks_of_a_role) == 3 * [ranks]


@story
def a_deferred_one_meets_none() -> Any:
    meeting = Meeting()
    values = [meeting.meet.defer(name, 1).result() for name in "ab"]
    return [*values, asyncio.run(meeting.meet("c", 3))]


def test_deferred_calls_of_asynchronous_methods_are_made_in_order(run: Run) -> None:
    assert run(a_deferred_one_meets_none) == [["a"], ["a"], ["a", "b", "c"]]
