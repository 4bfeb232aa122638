"""What goes wrong while calls of asynchronous methods are in flight together on Ray's workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from rayhelper import DeadlineError, RayHelper
from tests.conftest import RaySession

GROUPS = {"crew": {"device": "CPU", "ranks": 2, "workers": ["crew"], "timeout_s": 20, "restarts": 4}}


@RayHelper.worker(group="crew")
class Crew:
    def __init__(self) -> None:
        self.order: list[str] = []
        self.open = False

    @RayHelper.function(group="crew")
    def pid(self) -> int:
        return os.getpid()

    @RayHelper.function(group="crew")
    def let_go(self) -> None:
        self.open = True

    @RayHelper.function(group="crew")
    async def wait(self, name: str) -> str:
        self.order.append(f"{name} begins")
        while not self.open:
            await asyncio.sleep(0.002)
        self.order.append(f"{name} ends")
        return name

    @RayHelper.function(group="crew")
    async def fail_on_first(self) -> None:
        if RayHelper.current().rank == 0:
            raise KeyError("rank 0")
        await asyncio.sleep(1e6)

    @RayHelper.function(group="crew")
    async def block(self) -> None:
        time.sleep(1e6)

    @RayHelper.function(group="crew")
    async def add_all(self, name: str, pause_s: float) -> float:
        import torch
        import torch.distributed as dist

        self.order.append(name)
        await asyncio.sleep(pause_s * (1 + RayHelper.current().rank))
        total = torch.tensor([len(name)])
        dist.all_reduce(total)
        return float(total)

    @RayHelper.function(group="crew")
    def join(self) -> None:
        RayHelper.init_process_group()

    @RayHelper.function(group="crew")
    async def note(self, name: str) -> None:
        self.order.append(name)
        await asyncio.sleep(0)

    @RayHelper.function(group="crew")
    def seen(self) -> list[str]:
        return self.order


def test_a_worker_that_dies_begins_its_calls_anew(ray_session: RaySession) -> None:
    with ray_session(GROUPS):
        crew = Crew()
        pid = crew.pid()[1]

        async def together() -> Any:
            calls = [asyncio.create_task(crew.wait(name)) for name in "ab"]
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            while pid in crew.pid():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(crew.let_go)
            return await asyncio.gather(*calls)

        assert asyncio.run(together()) == [["a", "a"], ["b", "b"]]


def test_calls_that_begin_while_others_are_collected_run_once_on_every_rank(ray_session: RaySession) -> None:
    async def begin_all(crew: Crew) -> None:
        for k in range(60):
            await asyncio.gather(crew.note(f"first {k}"), crew.note(f"second {k}"), crew.note(f"third {k}"))

    with ray_session(GROUPS):
        crew = Crew()
        asyncio.run(begin_all(crew))
        names = [f"{which} {k}" for k in range(60) for which in ("first", "second", "third")]
        assert [sorted(seen) for seen in crew.seen()] == [sorted(names)] * 2


def test_a_rank_that_fails_stops_the_others_of_its_call_alone(ray_session: RaySession) -> None:
    with ray_session(GROUPS):
        crew = Crew()

        async def together() -> Any:
            waiting = asyncio.create_task(crew.wait("a"))
            with pytest.raises(KeyError, match="rank 0") as raised:
                await crew.fail_on_first()
            crew.let_go()
            return await waiting, raised.value.__notes__

        value, notes = asyncio.run(together())
    assert value == ["a", "a"]
    assert "rank 0 of group 'crew'" in notes[0]


@pytest.mark.parametrize("how", ["wait", "block"])
def test_one_that_is_late_is_given_up_with_the_stacks(ray_session: RaySession, how: str) -> None:
    with ray_session({"crew": {**GROUPS["crew"], "timeout_s": 1.5}}):
        crew = Crew()
        with pytest.raises(DeadlineError, match=r"(?s)within 1.5 s; still running on ranks 0-1\..*thread MainThread"):
            asyncio.run(crew.wait("a") if how == "wait" else crew.block())
        assert len(crew.seen()) == 2  # the group stays usable


def test_collectives_of_calls_in_flight_keep_their_order_on_all_ranks(ray_session: RaySession) -> None:
    with ray_session({"crew": {"device": "CPU", "ranks": 2, "workers": ["crew"], "timeout_s": 30}}):
        crew = Crew()
        crew.join()

        async def together() -> Any:
            calls = [crew.add_all("first", 0.02), crew.add_all("2nd", 0.0)]
            return await asyncio.gather(*calls)

        assert asyncio.run(together()) == [[10.0, 10.0], [6.0, 6.0]]
        assert crew.seen() == [["first", "2nd"]] * 2
