"""Workers that die where the device group has ``restarts``: replaced, and nothing lost or done twice."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayhelper import DeadlineError, RayHelper, WorkerDiedError
from rayhelper.roles.runtime import Shard, WorkerInfo, state
from rayhelper.runtimes.ray.calls_under_way import Sent, unfinished
from rayhelper.runtimes.ray.recovery import Recovery
from tests.conftest import without_runtime


@RayHelper.worker(group=["score", "train", "judge"])
class Mortal:
    def __init__(self, scale: int = 1) -> None:
        self.scale = scale

    @RayHelper.function(group="score", dispatch="slice", collect="flatten")
    def scaled(self, items: list[int], die_once: str = "") -> list[int]:
        marker = Path(die_once)
        if die_once and RayHelper.current().rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [item * self.scale for item in items]

    @RayHelper.function(group="score")
    def total(self, items: list[int]) -> int:
        return sum(items)

    @RayHelper.function(group="score")
    def pid(self) -> int:
        return os.getpid()

    @RayHelper.function(group="score", dispatch="slice", collect="flatten")
    def ranked(self, items: list[int]) -> list[tuple[int, int]]:
        RayHelper.shard(1 - RayHelper.current().rank, 2)
        return [(item, RayHelper.current().rank) for item in items]

    @RayHelper.function(group="train", collect="flatten")
    def summed(self, die_once: str = "") -> list[float]:
        RayHelper.init_process_group("gloo", timeout_s=60)
        marker = Path(die_once)
        if die_once and RayHelper.current().rank == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        import torch  # here, as most of the workers that are started do without

        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return [value.item()]

    @RayHelper.function(group="train", collect="flatten")
    def torn(self, die_once: str, go_on: str) -> list[float]:
        """Rank 0 dies the first time, rank 1 fails then, but not before a file is there."""
        import torch

        RayHelper.init_process_group("gloo", timeout_s=60)
        rank, marker = RayHelper.current().rank, Path(die_once)
        torch.distributed.barrier()
        if rank == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while rank == 1 and not Path(go_on).exists():
            time.sleep(0.01)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return [value.item()]

    @RayHelper.function(group="train", collect="flatten")
    def late(self, die_once: str) -> list[float]:
        """Rank 0 waits for rank 1 in a process group, which dies before it joins the first time."""
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        marker = Path(die_once)
        if RayHelper.current().rank == 1 and not marker.exists():
            time.sleep(1.0)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        RayHelper.init_process_group("gloo", timeout_s=60)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return [value.item()]

    @RayHelper.function(group="train", collect="flatten")
    def noted(self, notes: str, together: bool) -> list[int]:
        """Every rank notes that it ran, rank 1 dies at its first run, after the others have answered."""
        rank, path = RayHelper.current().rank, Path(notes)
        if together:
            import torch

            RayHelper.init_process_group("gloo", timeout_s=60)
            torch.distributed.barrier()
        with path.open("a") as file:
            file.write(f"{rank}\n")
        if rank == 1 and path.read_text().count("1") == 1:
            while "answered" not in path.read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return [rank]

    @RayHelper.function(group="score", dispatch="slice", collect="flatten")
    def hanging(self, items: list[int], hang_once: str, stopped: bool = False) -> list[int]:
        """Rank 1 does not answer the first time."""
        marker = Path(hang_once)
        if RayHelper.current().rank == 1 and not marker.exists():
            marker.touch()
            if stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                try:
                    time.sleep(3600)
                except BaseException:  # will not be stopped
                    continue
        return [item * self.scale for item in items]

    @RayHelper.function(group="score")
    def patient(self, go_on: str) -> None:
        while RayHelper.current().rank == 1 and not Path(go_on).exists():
            time.sleep(0.01)

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def judged(self, items: list[int]) -> list[int]:
        return [item + 1 for item in items]


@RayHelper.worker(group=["score", "train", "judge"])
class Reluctant:
    """Its constructor does on one worker, of a group that may have restarts, what a file tells it to."""

    def __init__(self, orders: str) -> None:
        if RayHelper.current().group in ("driver", "judges"):
            return
        order, mine = "", Path(f"{orders}-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # of workers that start together one gets it
            order = Path(orders).rename(mine).read_text()
            mine.unlink()
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "raise":
            raise ValueError("no weights here")

    @RayHelper.function(group="score", dispatch="slice", collect="flatten")
    def doubled(self, items: list[int], kill: str = "") -> list[int]:
        path = Path(kill)
        if kill and RayHelper.current().rank == 0 and path.exists():
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [2 * item for item in items]


def groups(restarts: int) -> dict[str, object]:
    return {
        "scorers": {"device": "CPU", "ranks": 2, "workers": ["score"], "restarts": restarts},
        "trainers": {"device": "CPU", "ranks": 2, "workers": ["train"], "restarts": restarts},
        "judges": {"device": "CPU", "ranks": 1, "workers": ["judge"]},
    }


@pytest.fixture(scope="module")
def mortal(ray_cluster: None) -> Iterator[Mortal]:
    with RayHelper.session(groups(restarts=50)):
        yield Mortal(scale=10)


def test_a_worker_that_dies_in_a_call_is_replaced_and_its_slice_runs_again(mortal: Mortal, tmp_path: Path) -> None:
    assert mortal.scaled([1, 2, 3], str(tmp_path / "died")) == [10, 20, 30]
    assert (tmp_path / "died").exists()
    assert mortal.scaled([4, 5]) == [40, 50]


def test_a_worker_that_dies_between_calls_is_replaced_by_the_next(mortal: Mortal) -> None:
    pids = mortal.pid()
    os.kill(pids[0], signal.SIGKILL)
    assert mortal.scaled([1, 2, 3]) == [10, 20, 30]
    assert mortal.pid()[1] == pids[1]
    assert mortal.pid()[0] != pids[0]


def test_what_the_driver_changes_after_it_deferred_a_call_is_not_sent_again(mortal: Mortal, tmp_path: Path) -> None:
    first = mortal.scaled.defer([1, 2, 3], str(tmp_path / "died"))
    items = [1, 2, 3]
    second = mortal.total.defer(items)
    items.append(100)
    assert first.result() == [10, 20, 30]
    assert second.result() == [6, 6]


def test_the_call_in_which_a_worker_died_is_named_though_a_later_one_noticed(
    mortal: Mortal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = mortal.scaled.defer([1, 2, 3], str(tmp_path / "died"))
    mortal.pid()
    assert "died during Mortal.scaled" in caplog.text
    assert scaled.result() == [10, 20, 30]


def test_workers_that_share_a_process_group_are_replaced_together(mortal: Mortal, tmp_path: Path) -> None:
    assert mortal.summed() == [2.0, 2.0]
    assert mortal.summed(str(tmp_path / "died")) == [2.0, 2.0]
    assert mortal.summed() == [2.0, 2.0]


def noted_by(mortal: Mortal, notes: Path, together: bool) -> list[str]:
    mortal.summed()
    notes.touch()
    call = mortal.noted.defer(str(notes), together)
    next(call.as_parts())
    with notes.open("a") as file:
        file.write("answered\n")
    assert call.result() == [0, 1]
    return sorted(notes.read_text().split())


def test_what_was_answered_without_a_collective_does_not_run_again(mortal: Mortal, tmp_path: Path) -> None:
    assert noted_by(mortal, tmp_path / "notes", together=False) == ["0", "1", "1", "answered"]


def test_what_was_answered_with_a_collective_runs_again_with_a_warning(
    mortal: Mortal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert noted_by(mortal, tmp_path / "notes", together=True) == ["0", "0", "1", "1", "answered"]
    assert "Mortal.noted (role 'train') on group 'trainers': ranks 0 had answered, and run it again" in caplog.text


def test_a_call_that_all_have_answered_does_not_run_again(mortal: Mortal, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("1 answered\n")
    mortal.summed()
    call = mortal.noted.defer(str(notes), True)
    list(call.as_parts())
    assert mortal.summed(str(tmp_path / "died")) == [2.0, 2.0]
    assert call.result() == [0, 1]
    assert sorted(notes.read_text().split()) == ["0", "1", "1", "answered"]


def test_a_failure_that_comes_while_a_peer_is_replaced_is_not_the_calls(
    mortal: Mortal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, decide = tmp_path / "go on", Recovery._answered_again

    def decided(self: Recovery, done: Mapping[Sent, set[int]]) -> dict[Sent, set[int]]:
        again = decide(self, done)
        go_on.touch()
        for call in done:
            assert not unfinished(call.refs, 60)
        return again

    monkeypatch.setattr(Recovery, "_answered_again", decided)
    assert mortal.torn(str(tmp_path / "died"), str(go_on)) == [2.0, 2.0]
    assert go_on.exists()


def test_a_worker_that_is_replaced_joins_those_that_wait_for_it(mortal: Mortal, tmp_path: Path) -> None:
    assert mortal.late(str(tmp_path / "died")) == [2.0, 2.0]


def test_a_call_without_an_answer_is_told_again_and_again_with_its_stack(
    mortal: Mortal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, told = tmp_path / "go on", []

    class Until(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            if len(told) == 2:
                go_on.touch()

    monkeypatch.setenv("RAYHELPER_WARN_S", "0.5")
    handler, log = Until(), logging.getLogger("rayhelper.watch.watchdog")
    log.addHandler(handler)
    try:
        assert mortal.patient(str(go_on)) == [None, None]
    finally:
        log.removeHandler(handler)
    for line in told[:2]:
        assert line.startswith("Mortal.patient (role 'score') on group 'scorers' (roles score): no answer for ")
        assert "from ranks 1. Where they are:" in line
        assert "in patient" in line


@pytest.fixture(scope="module")
def hasty(mortal: Mortal) -> Iterator[Mortal]:
    alone = {"device": "CPU", "ranks": 2, "workers": ["score", "train", "judge"], "restarts": 2, "timeout_s": 5}
    with without_runtime():
        RayHelper.initialize({"all": alone})
        runtime, hasty = state.active, Mortal(scale=10)
    yield hasty
    assert runtime is not None
    runtime.teardown()


@pytest.mark.parametrize("stopped", [False, True], ids=["deaf", "stopped"])
def test_a_worker_that_hangs_is_replaced_as_one_that_died(
    hasty: Mortal, tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    pids = hasty.pid()
    assert hasty.hanging([1, 2, 3], str(tmp_path / "hung"), stopped) == [10, 20, 30]
    assert hasty.pid()[0] == pids[0]
    assert not psutil.pid_exists(pids[1])
    assert "rank 1 of group 'all'" in caplog.text
    assert (
        "did not finish Mortal.hanging (role 'score') within 5 s; it is constructed again, 1 calls run again"
        in caplog.text
    )
    assert stopped or "time.sleep(3600)" in caplog.text


def test_a_worker_that_hangs_when_no_restarts_are_left_is_a_deadline_error(hasty: Mortal, tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"still running on ranks 1\. The call was given up"):
        hasty.hanging([1, 2, 3], str(tmp_path / "hung"))


def test_a_collective_that_fails_as_a_peer_died_is_told_as_the_death_of_the_peer(
    mortal: Mortal, tmp_path: Path
) -> None:
    alone = {"device": "CPU", "ranks": 2, "workers": ["score", "train", "judge"]}
    with without_runtime(), RayHelper.session({"all": alone}):
        mortal = Mortal(scale=10)
        mortal.summed()
        with pytest.raises(WorkerDiedError, match=r"rank 0 of group 'all'.*died before or during Mortal\.summed"):
            mortal.summed(str(tmp_path / "died"))


def test_a_future_that_was_handed_on_survives_the_death_of_its_maker(mortal: Mortal, tmp_path: Path) -> None:
    made = mortal.scaled.defer([1, 2, 3, 4], str(tmp_path / "died"))
    assert mortal.judged(made) == [11, 21, 31, 41]
    assert made.result() == [10, 20, 30, 40]


def test_shards_that_were_reported_hold_for_the_replacement(mortal: Mortal) -> None:
    crossed = Mortal()
    crossed.ranked([1, 2])
    assert crossed.ranked([1, 2]) == [(1, 1), (2, 0)]
    os.kill(crossed.pid()[1], signal.SIGKILL)
    crossed.ranked([1, 2])
    assert crossed.ranked([1, 2]) == [(1, 1), (2, 0)]


def test_a_replacement_that_dies_at_once_is_replaced_as_well(mortal: Mortal, tmp_path: Path) -> None:
    orders, kill = tmp_path / "orders", tmp_path / "kill"
    reluctant = Reluctant(str(orders))
    orders.write_text("die")
    kill.touch()
    assert reluctant.doubled([1, 2, 3], str(kill)) == [2, 4, 6]
    assert not orders.exists()
    assert reluctant.doubled([4, 5]) == [8, 10]


def test_all_workers_of_a_group_may_die_at_once(mortal: Mortal) -> None:
    for pid in mortal.pid():
        os.kill(pid, signal.SIGKILL)
    in_flight = [mortal.scaled.defer([call, call + 1]) for call in range(3)]
    assert [future.result() for future in in_flight] == [[0, 10], [10, 20], [20, 30]]


@RayHelper.worker(group="score")
class Heavy:
    """Leaves a word wherever it is built."""

    def __init__(self, words: str) -> None:
        with Path(words).open("a") as file:
            file.write(f"{RayHelper.current().group}\n")

    @RayHelper.function(group="score", execute="first")
    def here(self) -> bool:
        return True


def test_what_the_driver_has_no_more_is_not_built_again(mortal: Mortal, tmp_path: Path) -> None:
    freed, kept = tmp_path / "freed", tmp_path / "kept"
    heavies = [Heavy(str(freed)), Heavy(str(kept))]
    before = [path.read_text().split().count("scorers") for path in (freed, kept)]
    del heavies[0]
    gc.collect()
    os.kill(mortal.pid()[0], signal.SIGKILL)
    assert mortal.scaled([1, 2, 3]) == [10, 20, 30]
    after = [path.read_text().split().count("scorers") for path in (freed, kept)]
    assert before == [2, 2]
    assert after == [2, 3]
    assert heavies[0].here()


def test_a_constructor_that_fails_on_a_replacement_ends_the_group(ray_cluster: None, tmp_path: Path) -> None:
    orders, kill = tmp_path / "orders", tmp_path / "kill"
    alone = {"device": "CPU", "ranks": 2, "workers": ["score", "train", "judge"], "restarts": 5}
    with without_runtime(), RayHelper.session({"all": alone}):
        reluctant = Reluctant(str(orders))
        orders.write_text("raise")
        kill.touch()
        with pytest.raises(WorkerDiedError, match=r"could not be constructed again: no weights here") as caught:
            reluctant.doubled([1, 2], str(kill))
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(WorkerDiedError, match="no weights here"):
            reluctant.doubled([1, 2])


def test_a_worker_that_dies_in_its_constructor_is_replaced(mortal: Mortal, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    orders.write_text("die")
    assert Reluctant(str(orders)).doubled([1, 2, 3]) == [2, 4, 6]


def test_a_group_that_died_in_a_constructor_says_so_to_the_next(ray_cluster: None, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    alone = {"device": "CPU", "ranks": 2, "workers": ["score", "train", "judge"]}
    with without_runtime(), RayHelper.session({"all": alone}):
        orders.write_text("die")
        with pytest.raises(WorkerDiedError, match=r"group 'all'.*died before or during __init__.*restarts: N"):
            Reluctant(str(orders))
        with pytest.raises(WorkerDiedError, match=r"group 'all'.*died before or during __init__"):
            Reluctant(str(orders))


def test_when_the_restarts_are_used_up_the_error_says_so(ray_cluster: None) -> None:
    alone = {"device": "CPU", "ranks": 1, "workers": ["score", "train", "judge"], "restarts": 1}
    with without_runtime(), RayHelper.session({"all": alone}):
        mortal = Mortal(scale=10)
        os.kill(mortal.pid()[0], signal.SIGKILL)
        assert mortal.scaled([1]) == [10]
        os.kill(mortal.pid()[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rank 0 of group 'all'.*all 1 restarts were used"):
            mortal.scaled([1])


def test_chaos_nothing_is_lost_doubled_or_left_behind(ray_cluster: None) -> None:
    """A hundred calls, some in flight together; five times a worker is killed, anywhere in them."""
    rng = random.Random(7)
    killed: list[psutil.Process] = []
    hosts: set[psutil.Process] = set()
    others = set(workers())
    together = {"device": "CPU", "ranks": 3, "workers": ["score", "train", "judge"], "restarts": 1000}
    with without_runtime(), RayHelper.session({"all": together}):
        mortal = Mortal(scale=3)
        in_flight = []
        for call in range(100):
            items = list(range(call, call + call % 7))
            in_flight.append((items, mortal.scaled.defer(items)))
            if call % 20 == 9:
                time.sleep(rng.uniform(0.0, 0.01))
                hosts |= set(workers()) - others
                killed.append(rng.choice([process for process in workers() if process not in others]))
                killed[-1].kill()
            while len(in_flight) > 5 or (in_flight and call == 99):
                asked, future = in_flight.pop(0)
                assert future.result() == [3 * item for item in asked]
        hosts |= set(workers()) - others
    assert len(set(killed)) == 5
    _, left = psutil.wait_procs(hosts, timeout=60)
    assert not left
    assert not [process for process in killed if process.is_running() and process.status() != "zombie"]


def workers() -> list[psutil.Process]:
    """The processes that host groups on this process's cluster."""
    from ray._private.state import actors

    found = []
    for actor in actors().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(actor["Pid"]) if actor["State"] == "ALIVE" else None
            if process and process.status() != "zombie" and "ray::Host" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_members_that_join_again_find_nothing_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's members write where they listen; the address of the group before would connect them to what is left."""
    import torch.distributed as dist

    from rayhelper.worker import process_group

    store, seen = dist.HashStore(), []  # type: ignore[attr-defined]

    def joined(backend: str, store: Any, rank: int, **settings: Any) -> None:
        seen.append(store.check(["where"]))
        store.set("where", "here")

    monkeypatch.setattr(dist, "init_process_group", joined)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    info = WorkerInfo(("train",), "cpus", 0, 2, 0, 2, 0, Shard(0, 2))
    for _ in range(3):
        process_group.join_process_group(info, "gloo", 1.0, store)
    assert seen == [False] * 3

    def failed(backend: str, store: Any, **settings: Any) -> None:
        joined(backend, store, 0)
        raise RuntimeError("a member died")

    monkeypatch.setattr(dist, "init_process_group", failed)  # the others still wait at that place
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a member died"):
            process_group.join_process_group(info, "gloo", 1.0, store)
    assert seen[3:] == [False, True]
