"""What goes wrong on a cluster: told at once, as what it is, and over soon."""

from __future__ import annotations

import _thread
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from rayhelper import (
    CallCancelledError,
    DeadlineError,
    DeviceGroups,
    DispatchError,
    RayHelper,
    RoleError,
    WorkerDiedError,
    WorkerError,
)
from rayhelper.roles.runtime import state
from rayhelper.runtimes.ray.calls_under_way import CallsUnderWay
from tests.conftest import without_runtime
from tests.rayhelper.test_calls import Trainer

if TYPE_CHECKING:
    import torch

WORKERS = 4
ONE = {"one": {"device": "CPU", "ranks": 1, "workers": ["train", "judge"]}}


@RayHelper.worker(group="work")
class Troubled:
    """Methods that fail, hang or die on some ranks."""

    def __init__(self, joined: bool = False) -> None:
        self.joined = joined
        self.calls = 0
        if joined:
            self.join()

    @RayHelper.function(group="work")
    def join(self) -> None:
        RayHelper.init_process_group("gloo", timeout_s=120)

    @RayHelper.function(group="work")
    def pid(self) -> int:
        return os.getpid()

    @RayHelper.function(group="work", dispatch="slice", collect="flatten")
    def squares(self, items: list[int]) -> list[int]:
        self.calls += 1
        return [item * item for item in items]

    @RayHelper.function(group="work")
    def fail_on(self, rank: int, then: str) -> str:
        """One rank fails; what the others do meanwhile."""
        import torch  # here, as half of the workers that are started do without

        if RayHelper.current().rank == rank:
            raise KeyError(f"rank {rank} cannot")
        if then == "sleep":
            time.sleep(60)
        elif then == "wait for it":
            torch.distributed.all_reduce(torch.ones(1))
        elif then == "spin":
            while True:
                pass
        return "done"

    @RayHelper.function(group="work")
    def fail_everywhere(self) -> None:
        raise ValueError("the same everywhere")

    @RayHelper.function(group="work")
    def reduced(self) -> float:
        import torch

        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return value.item()

    @RayHelper.function(group="work")
    def reduced_slowly(self, seconds: float) -> float:
        if RayHelper.current().rank == 0:
            time.sleep(seconds)
        return Troubled.reduced.function(self)  # type: ignore[no-any-return]

    @RayHelper.function(group="work")
    def one_sleeps_others_wait_for_it(self) -> None:
        import torch

        if RayHelper.current().rank == 0:
            threading.Event().wait(60)
        torch.distributed.all_reduce(torch.ones(1))

    @RayHelper.function(group="work")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @RayHelper.function(group="work", execute="first")
    def slow(self, value: Any, seconds: float = 0.2) -> Any:
        time.sleep(seconds)
        return value

    @RayHelper.function(group="work")
    def change(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    @RayHelper.function(group="work")
    def keep(self, tensor: torch.Tensor) -> None:
        self.kept = tensor

    @RayHelper.function(group="work")
    def change_kept(self) -> None:
        self.kept.add_(1)


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[None]:
    with RayHelper.session({"crew": {"device": "CPU", "ranks": WORKERS, "workers": ["work"]}, **ONE}):
        yield


@pytest.fixture(scope="module")
def troubled(group: None) -> Troubled:
    return Troubled(joined=True)


@pytest.fixture(scope="module")
def calls_trainer(group: None) -> Trainer:
    return Trainer()


@pytest.mark.parametrize("then", ["return", "sleep", "spin", "wait for it"])
def test_a_failure_is_told_while_others_still_run_and_the_group_goes_on(troubled: Troubled, then: str) -> None:
    assert troubled.reduced() == [float(WORKERS)] * WORKERS
    started = time.monotonic()
    with pytest.raises(KeyError, match="rank 2 cannot") as caught:
        troubled.fail_on(2, then)
    assert time.monotonic() - started < 30  # the others would take 60 or never end; benchmarks measure how soon
    note = "".join(caught.value.__notes__)
    for words in ("Troubled.fail_on", "'work'", "rank 2", "'crew'", "node 127.0.0.1"):
        assert words in note
    assert "in fail_on" in str(caught.value.__cause__)
    assert troubled.squares(list(range(8))) == [k * k for k in range(8)]
    assert troubled.reduced() == [float(WORKERS)] * WORKERS


def test_equal_failures_of_many_ranks_are_told_once(troubled: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhelper.runtimes.ray.waiting.SAME_S", 30.0)  # a busy machine may need more than 0.1 s
    with pytest.raises(ValueError, match="the same everywhere") as caught:
        troubled.fail_everywhere()
    note = "".join(caught.value.__notes__)
    assert note.count("ValueError") == 0
    assert "3 more ranks raised the same" in note


def test_a_deadline_shows_where_every_rank_is_even_inside_a_collective(troubled: Troubled) -> None:
    call = troubled.one_sleeps_others_wait_for_it.defer()
    with pytest.raises(DeadlineError) as caught:
        call.result(timeout_s=1.0)
    told = str(caught.value)
    assert "--- ranks 0\n" in told
    assert "threading.Event().wait(60)" in told
    assert "--- ranks 1-3\n" in told
    assert "torch.distributed.all_reduce(torch.ones(1))" in told
    assert call.cancel()
    assert troubled.reduced() == [float(WORKERS)] * WORKERS


def test_a_group_without_a_deadline_has_the_default_one(troubled: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhelper.runtimes.ray.waiting.CALL_S", 1.0)
    with pytest.raises(DeadlineError, match=r"did not finish within 1 s"):
        troubled.sleep(60)
    assert troubled.squares([1, 2]) == [1, 4]


def test_the_deadline_of_a_group_gives_the_call_up(ray_cluster: None) -> None:
    groups = {"crew": {"device": "CPU", "ranks": 2, "workers": ["work"], "timeout_s": 8}}
    with without_runtime(), RayHelper.session(groups):
        troubled = Troubled()
        with pytest.raises(DeadlineError, match=r"ranks 0-1.*timeout_s(?s:.*)time\.sleep\(seconds\)"):
            troubled.sleep(60)
        assert troubled.squares.defer([1, 2, 3]).result(timeout_s=60) == [1, 4, 9]


def test_a_cancelled_call_stops_and_one_that_waits_never_runs(troubled: Troubled) -> None:
    running, waiting = troubled.sleep.defer(60), troubled.squares.defer(list(range(8)))
    assert waiting.cancel()
    assert running.cancel()
    assert not running.cancel()
    for future in (running, waiting):
        with pytest.raises(CallCancelledError):
            future.result()
    assert troubled.squares([1, 2]) == [1, 4]


def test_giving_up_a_call_that_waits_leaves_the_running_one_and_its_collective_alone(troubled: Troubled) -> None:
    running, waiting = troubled.reduced_slowly.defer(2.0), troubled.squares.defer([1, 2, 3])
    assert waiting.cancel()
    assert running.result() == [float(WORKERS)] * WORKERS


def test_a_stream_gives_what_there_is_and_then_the_failure(troubled: Troubled) -> None:
    parts = troubled.fail_on.stream(2, "return")
    with pytest.raises(KeyError, match="rank 2 cannot"):
        assert set(parts) == {"done"}
    with pytest.raises(KeyError, match="rank 2 cannot"):
        list(troubled.fail_on.stream(2, "sleep"))


def test_a_finished_call_cannot_be_cancelled(troubled: Troubled) -> None:
    done = troubled.squares.defer([3])
    assert done.result() == [9]
    assert not done.cancel()
    assert done.result() == [9]


def test_calls_beyond_the_limit_wait_for_earlier_ones(ray_cluster: None) -> None:
    groups = {"crew": {"device": "CPU", "ranks": 1, "workers": ["work"], "max_in_flight": 2}}
    with without_runtime(), RayHelper.session(groups):
        troubled = Troubled()
        calls = [troubled.slow.defer(k) for k in range(5)]
        assert [call.done() for call in calls[:3]] == [True] * 3  # else the fifth would not have been accepted
        assert [call.result() for call in calls] == list(range(5))


@pytest.mark.parametrize(
    ("asked", "num_calls", "num_bytes", "accepted"),
    [
        (None, 63, 1 << 40, True),
        (None, 64, 64 << 20, False),
        (None, 64, (64 << 20) - 1, True),
        (None, 1023, 0, True),
        (None, 1024, 0, False),
        (64, 63, 1 << 40, True),
        (64, 64, 0, False),
        (2000, 1999, 1 << 40, True),
    ],
)
def test_a_group_accepts_calls_by_their_number_and_by_what_they_were_given(
    asked: int | None, num_calls: int, num_bytes: int, accepted: bool
) -> None:
    options = {} if asked is None else {"max_in_flight": asked}
    group = DeviceGroups.parse({"crew": {"device": "CPU", "ranks": 1, "workers": ["work"], **options}}).group_of("work")
    calls = CallsUnderWay(group, Mock(slots=[None]), None)
    calls.open, calls.open_bytes = dict.fromkeys(range(num_calls), Mock()), num_bytes
    assert calls.has_room() is accepted


def test_what_unfinished_calls_were_given_is_counted_until_they_end(ray_cluster: None) -> None:
    groups = {"crew": {"device": "CPU", "ranks": 1, "workers": ["work"]}}
    with without_runtime(), RayHelper.session(groups):
        import torch

        troubled, runtime = Troubled(), state.active
        assert runtime is not None
        calls = runtime.groups["crew"].calls  # type: ignore[attr-defined]
        calls_of_a_megabyte = [troubled.squares.defer([torch.ones(1 << 18)]) for _ in range(3)]
        assert calls.open_bytes >= 3 << 20
        for call in calls_of_a_megabyte:
            call.result()
        assert (len(calls.open), calls.open_bytes) == (0, 0)


def test_each_of_many_deferred_calls_keeps_its_own_value_or_failure(ray_cluster: None) -> None:
    groups = {"crew": {"device": "CPU", "ranks": 2, "workers": ["work"], "max_in_flight": 8}}
    with without_runtime(), RayHelper.session(groups):
        troubled = Troubled()
        values = [troubled.squares.defer([k, k]) for k in range(20)]
        failing = [troubled.fail_on.defer(1, f"call {k}") for k in range(9)]
        more = [troubled.squares.defer([k, k]) for k in range(20)]
        assert [call.result() for call in values + more] == [[k * k, k * k] for k in [*range(20), *range(20)]]
        for call in failing:
            with pytest.raises(KeyError, match="rank 1 cannot"):
                call.result()


def test_a_killed_worker_is_noticed_and_later_calls_name_it(ray_cluster: None) -> None:
    with without_runtime(), RayHelper.session({"crew": {"device": "CPU", "ranks": 2, "workers": ["work"]}}):
        troubled = Troubled()
        pids = troubled.pid()
        call = troubled.sleep.defer(60)
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match=r"rank 1 of group 'crew'.*Troubled\.sleep"):
            call.result()
        assert time.monotonic() - started < 30  # the call would take 60; benchmarks measure how soon
        with pytest.raises(WorkerDiedError, match=r"rank 1 of group 'crew'.*Troubled\.sleep"):
            troubled.squares([1])


def test_a_tensor_that_others_read_cannot_be_changed_in_silence(troubled: Troubled) -> None:
    import torch

    for size in (3, 300_000):
        with pytest.raises(DispatchError, match=r"Troubled\.change.*in place.*clone"):
            troubled.change(torch.ones(size))
    troubled.keep(torch.ones(300_000))
    with pytest.raises(DispatchError, match=r"Troubled\.change_kept.*in place"):
        troubled.change_kept()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("cancelled", "CancelledError: why"),
        ("interrupt", "KeyboardInterrupt: why"),
        ("exit", "SystemExit: why"),
    ],
)
def test_what_cannot_be_raised_as_itself_is_told_in_full(calls_trainer: Trainer, kind: str, name: str) -> None:
    with pytest.raises(WorkerError, match=name) as caught:
        calls_trainer.fail(kind)
    assert "rank 0" in str(caught.value)
    assert "in fail" in str(caught.value)
    assert calls_trainer.first(1) == 1


def test_ctrl_c_that_is_caught_gives_the_call_up(troubled: Troubled) -> None:
    threading.Timer(1.0, _thread.interrupt_main).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        troubled.sleep(60)
    assert troubled.squares([3]) == [9]
    assert time.monotonic() - started < 30


def test_a_forked_child_that_ends_leaves_the_workers_alone(troubled: Troubled) -> None:
    child = os.fork()
    if not child:
        state.active.teardown()  # type: ignore[union-attr]  # as it is called when Python ends
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert troubled.squares([3]) == [9]


def test_a_future_that_outlives_its_session_says_so(ray_cluster: None) -> None:
    with without_runtime():
        with RayHelper.session(ONE):
            late = Trainer().first.defer(1)
        with pytest.raises(RoleError, match="stopped"):
            late.result()


def test_a_trainer_arrives_at_its_workers_as_their_own_and_cannot_be_pickled_elsewhere(calls_trainer: Trainer) -> None:
    assert calls_trainer.every(calls_trainer) == [calls_trainer]
    with pytest.raises(RoleError, match="sent to another process"):
        pickle.dumps(calls_trainer)
