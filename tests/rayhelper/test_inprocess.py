"""Simulated workers: a debugger's view of dispatch and collect, and what ``strict`` says before a cluster would."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError, DispatchError, RayHelper, RoleError, WorkerError
from rayhelper.runtimes.inprocess import OwnRandom
from rayhelper.worker import patches, random_streams

GROUPS = {
    "actors": {"device": "GPU", "ranks": 4, "workers": ["train"]},
    "judges": {"device": "CPU", "ranks": 1, "workers": ["judge"]},
}


@RayHelper.worker(group=["train", "judge"])
class Simulated:
    def __init__(self, pairs: bool = False) -> None:
        self.calls: list[int] = []
        if pairs and RayHelper.current().group == "actors":
            rank = RayHelper.current().rank
            RayHelper.shard(rank // 2, 2, leader=rank % 2 == 1)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def seen(self, items: list[int]) -> list[tuple[int, int]]:
        self.calls.append(len(items))
        return [(RayHelper.current().rank, item) for item in items]

    @RayHelper.function(group="train")
    def history(self) -> list[int]:
        return self.calls

    @RayHelper.function(group="train", dispatch="slice")
    def fails(self, items: list[int]) -> None:
        if 3 in items:
            raise ValueError("three")

    @RayHelper.function(group="train")
    def appends(self, items: list[int]) -> None:
        items.append(1)

    @RayHelper.function(group="train")
    def keeps(self, items: list[int]) -> int:
        return len(sorted(items))

    @RayHelper.function(group="train")
    def writes(self, array: Any) -> None:
        array[0] = 1

    @RayHelper.function(group="train")
    def returns_lock(self) -> Any:
        return threading.Lock()

    @RayHelper.function(group="train")
    def joins(self) -> None:
        RayHelper.init_process_group("gloo")

    @RayHelper.function(group="judge")
    def joins_alone(self) -> int:
        RayHelper.init_process_group("gloo")
        size = torch.distributed.get_world_size()
        torch.distributed.destroy_process_group()
        return size


@pytest.fixture
def loose() -> Iterator[None]:
    with RayHelper.session(GROUPS, runtime="inprocess"):
        yield


@pytest.fixture
def strict() -> Iterator[None]:
    with RayHelper.session(GROUPS, runtime="inprocess", strict=True):
        yield


def test_every_worker_has_an_instance_and_a_rank_of_its_own(loose: None) -> None:
    simulated = Simulated()
    assert simulated.seen([10, 11, 12, 13, 14]) == [(0, 10), (0, 11), (1, 12), (2, 13), (3, 14)]
    assert simulated.history() == [[2], [1], [1], [1]]
    with pytest.raises(AttributeError, match="differs from the workers"):  # the driver's own instance has made none
        _ = simulated.calls


def test_workers_of_one_shard_get_one_slice_and_its_leader_answers(loose: None) -> None:
    assert Simulated(pairs=True).seen([1, 2, 3]) == [(1, 1), (1, 2), (3, 3)]


def test_the_traceback_of_a_workers_exception_is_unbroken(loose: None) -> None:
    simulated = Simulated()
    with pytest.raises(ValueError, match="three") as caught:
        simulated.fails([1, 2, 3, 4])
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[0] == "test_the_traceback_of_a_workers_exception_is_unbroken"
    assert names[-1] == "fails"
    assert caught.value.__cause__ is None
    assert "rank 2 of group 'actors'" in "".join(caught.value.__notes__)


def test_collectives_between_simulated_workers_are_refused_and_alone_they_work(loose: None) -> None:
    simulated = Simulated()
    with pytest.raises(RoleError, match=r"4 workers.*torchrun"):
        simulated.joins()
    assert simulated.joins_alone() == [1]


def test_without_strict_arguments_are_the_callers_own(loose: None) -> None:
    items: list[int] = []
    Simulated().appends(items)
    assert items == [1, 1, 1, 1]


def test_strict_names_the_argument_that_a_worker_changed(strict: None) -> None:
    simulated = Simulated()
    assert simulated.keeps([3, 1, 2]) == [3, 3, 3, 3]
    items: list[int] = []
    with pytest.raises(DispatchError, match=r"Simulated\.appends.*rank 0.*positional argument 1"):
        simulated.appends(items)
    assert items == []
    with pytest.raises(DispatchError, match=r"argument 'items'"):
        simulated.appends(items=items)


@pytest.mark.parametrize("size", [3, 100_000])
def test_strict_arrays_are_read_only_and_tensors_are_watched(strict: None, size: int) -> None:
    simulated = Simulated()
    with pytest.raises(ValueError, match="read-only"):
        simulated.writes(np.zeros(size))
    tensor = torch.zeros(size)
    with pytest.raises(DispatchError, match="changed"):
        simulated.writes(tensor)
    assert not tensor.any()


def test_strict_values_that_cannot_travel_are_refused_both_ways(strict: None) -> None:
    simulated = Simulated()
    with pytest.raises(DispatchError, match="cannot be sent"):
        simulated.keeps(threading.Lock())  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="could not be sent back"):
        simulated.returns_lock()
    with pytest.raises(DispatchError, match=r"Simulated\(\.\.\.\)"):
        Simulated(threading.Lock())  # type: ignore[arg-type]


def test_options_that_belong_to_another_runtime_are_refused() -> None:
    with pytest.raises(ConfigError, match="strict"):
        RayHelper.initialize(GROUPS, runtime="ray", strict=True)
    with pytest.raises(ConfigError, match="ray_address"):
        RayHelper.initialize(GROUPS, runtime="inprocess", ray_address="auto")
    with pytest.raises(ConfigError, match="'inprocess'"):
        RayHelper.initialize(GROUPS, runtime="local")  # type: ignore[arg-type]


def test_a_group_of_one_is_left_at_the_end_of_its_process() -> None:
    script = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('there at the end:', dist.is_initialized()))\n"
        "from rayhelper import RayHelper\n"
        "RayHelper.init_process_group('gloo')\n"
        "print('there:', dist.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["there: True", "there at the end: False"], done.stderr


@RayHelper.worker(group="judge")
class Drawing:
    @RayHelper.function(group="judge", execute="first")
    def draw(self) -> float:
        return float(torch.rand(()))


def interrupted(call: Callable[[], Any], number: int) -> bool:
    """Makes a call, and interrupts it at so many lines of the exchange of generators; False: it has fewer lines."""
    files = (random_streams.__file__, patches.__file__)
    num_lines = 0

    def at_line(_: Any, event: str, __: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        if num_lines == number:
            raise KeyboardInterrupt
        return at_line

    def called(frame: Any, *_: Any) -> Any:
        is_exchange = frame.f_code.co_filename in files or isinstance(frame.f_locals.get("self"), OwnRandom)
        return at_line if is_exchange else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_seeds_are_noticed_behind_a_call_that_was_interrupted_anywhere_as_generators_were_exchanged() -> None:
    """What the driver does to its generators was not looked at in that moment, and is looked at again."""
    torch.manual_seed(0)
    expected = float(torch.rand(()))
    with RayHelper.session({"judges": GROUPS["judges"]}, runtime="inprocess"):
        drawing = Drawing()
        for number in itertools.count(1):
            torch.manual_seed(0)
            was_interrupted = interrupted(drawing.draw, number)
            torch.manual_seed(0)
            assert drawing.draw() == expected, f"line {number}"
            if not was_interrupted:
                break
    assert number > 100
