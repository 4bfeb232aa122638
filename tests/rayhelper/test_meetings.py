"""Where processes meet in a call that is awaited: in the order of the calls, whatever becomes of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rayhelper.runtimes.torchrun.meeting import Meeting


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_it_takes_place_though_the_loop_that_awaited_it_ends(threads: ThreadPoolExecutor) -> None:
    met, may_meet = list[str](), threading.Event()
    first = Meeting(None)
    second = Meeting(first)

    async def leave() -> None:
        second.begin(threads, lambda: met.append("second"))
        waiting = asyncio.create_task(second.over())
        await asyncio.sleep(0)
        assert not waiting.done()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        asyncio.run(leave())
    assert not second.done()  # the one before it has not begun
    first.begin(threads, lambda: (may_meet.wait(10), met.append("first")))
    assert not first.done()
    may_meet.set()
    second.wait()
    assert met == ["first", "second"]


def test_what_it_comes_to_is_told_to_all_who_ask(threads: ThreadPoolExecutor) -> None:
    def fail() -> None:
        raise ArithmeticError("no process answers")

    meeting = Meeting(None)

    async def ask() -> None:
        await asyncio.gather(meeting.over(), meeting.over())
        await Meeting.over(meeting)  # also afterwards

    meeting.begin(threads, fail)
    asyncio.run(ask())
    with pytest.raises(ArithmeticError, match="no process answers"):
        meeting.outcome.result(0)
    after = Meeting(meeting)
    after.begin(threads, lambda: "met")  # a failed one holds nobody up
    assert after.outcome.result(10) == "met"
