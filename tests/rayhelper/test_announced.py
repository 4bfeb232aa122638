"""``rayhelper stacks`` asks a run where its ranks are, from another process, while it hangs."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rayhelper import RayHelper
from rayhelper.__main__ import main
from rayhelper.runtimes.announced import Announced, running
from rayhelper.watch import places
from rayhelper.worker.side_door import stacks
from tests.conftest import RaySession


@RayHelper.worker(group="slow")
class Slow:
    @RayHelper.function(group="slow")
    def hang(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of keys, which no other run uses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"rayhelper-{os.getuid()}"


def told(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "rayhelper", "stacks", *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_run_is_announced_until_it_ends(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announced = Announced(lambda: "here they are")
    try:
        (file,) = own.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert list(running()) == [os.getpid()]
        assert told() == (0, "here they are\n")
        assert told("1")[0] == 2
    finally:
        announced.close()
    assert not own.exists()
    assert main(["stacks"]) == 2
    assert "no runs of this user" in capsys.readouterr().out


def test_a_file_of_a_run_that_is_gone_is_removed(own: Path) -> None:
    announced = Announced(lambda: "")
    try:
        (file,) = own.iterdir()
        gone = file.with_name(file.name.replace(str(os.getpid()), "4194999"))
        gone.write_text("{}")
        assert list(running()) == [os.getpid()]
        assert not gone.exists()
    finally:
        announced.close()


def test_of_several_runs_of_a_process_the_newest_answers(own: Path) -> None:
    runs = [Announced(lambda number=number: f"run {number}") for number in range(6)]  # type: ignore[misc]
    try:
        assert told() == (0, "run 5\n")
    finally:
        for run in runs:
            run.close()


def test_helper_threads_of_ray_are_left_out_of_stacks() -> None:
    ended = threading.Event()
    names = ["ray_listen_error_messages", "ray_print_logs", "my_own_loader"]
    threads = [threading.Thread(target=ended.wait, name=name) for name in names]
    for thread in threads:
        thread.start()
    said = stacks()
    ended.set()
    for thread in threads:
        thread.join()
    assert [name for name in names if f"thread {name}," in said] == ["my_own_loader"]


def test_a_hanging_call_is_seen_from_outside(ray_session: RaySession) -> None:
    with ray_session({"crew": {"device": "CPU", "ranks": 2, "workers": ["slow"]}}):
        call = Slow().hang.defer(30)
        try:
            deadline = time.monotonic() + 25
            while "time.sleep(seconds)" not in (said := told(str(os.getpid()))[1]).partition("--- ranks 0-1\n")[2]:
                assert time.monotonic() < deadline, said  # a worker may not have begun
        finally:
            call.cancel()
    assert "group 'crew'\n--- ranks 0-1\n" in said
    assert f"driver, process {os.getpid()}\n" in said


def test_stacks_are_read_and_let_go_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12, one that met a frame of a running thread cleared values in use, or crashed."""
    seen: list[bool] = []
    real = places._place
    monkeypatch.setattr(places, "_place", lambda frame: (seen.append(gc.isenabled()), real(frame))[1])
    assert gc.isenabled()
    found = places.stacks()
    assert {type(one) for stack in found.values() for one in stack} == {places.Place}
    here = sys._getframe().f_code
    ((stack, title),) = places.calls_on_stacks(
        {here: lambda variables: f"{variables['seen'] is seen} {gc.isenabled()}"}
    )
    collects = sys.version_info >= (3, 12)
    assert {type(one) for one in stack} == {places.Place}
    assert title == f"True {collects}"
    assert set(seen) == {collects}
    assert gc.isenabled()
