"""One run per output_dir."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from rayhelper import ConfigError
from rayhelper.worker.side_door import stacks
from tests.golden.tiny import save_tiny
from trainers import cli
from trainers.run import folder_lock
from trainers.run.folder_lock import LOCK_FILE, Owner, held
from trainers.run.stopping import ends_with_parent

OTHER = "somewhere else"


def left(folder: Path, silent_s: float = 0.0, **changes: Any) -> Owner:
    """The lock of another process."""
    folder.mkdir(exist_ok=True)
    owner = dataclasses.replace(Owner.here(), **changes)
    (folder / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(owner)))
    then = time.time() - silent_s
    os.utime(folder / LOCK_FILE, (then, then))
    return owner


def test_a_folder_is_held_inside_and_left_as_it_was(tmp_path: Path) -> None:
    with held(tmp_path / "run") as lock:
        assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
        with held(tmp_path / "run") as inner:  # the same process
            assert inner.owner == lock.owner
        assert (tmp_path / "run" / LOCK_FILE).exists()
        lock.check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["here, however long silent", "elsewhere, heard of again"])
def test_the_second_run_is_refused_by_a_line_that_names_the_first(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where.startswith("here"):
        parent = os.getppid()
        owner = left(tmp_path, 1e6, pid=parent, started=folder_lock._started(parent), host="node7")
    else:
        owner = left(tmp_path, 100.0, machine=OTHER, host="node7")
        monkeypatch.setattr(folder_lock.time, "sleep", lambda _: os.utime(tmp_path / LOCK_FILE))
    with (
        pytest.raises(ConfigError, match=rf"in use by another run: process {owner.pid} on node7") as told,
        held(tmp_path),
    ):
        pass
    assert "\n" not in str(told.value)
    assert os.listdir(tmp_path) == [LOCK_FILE]


@pytest.mark.parametrize(
    ("changes", "silent_s"),
    [({"pid": 2**22 + 1}, 0.0), ({"started": "1"}, 0.0), ({"machine": OTHER}, 200.0)],
    ids=["no such process", "its pid was given to another", "elsewhere, long silent"],
)
def test_the_lock_of_a_process_that_is_gone_is_taken_over(
    changes: dict[str, Any], silent_s: float, tmp_path: Path
) -> None:
    left(tmp_path, silent_s, **changes)
    with held(tmp_path) as lock:
        assert lock.owner.is_this_process
    assert os.listdir(tmp_path) == []


def test_a_run_that_was_moved_to_another_machine_waits_until_its_old_lock_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(tmp_path, 100.0, machine=OTHER)
    waits: list[float] = []

    def pass_time(wait_s: float) -> None:
        waits.append(wait_s)
        monkeypatch.setattr(folder_lock, "GONE_AFTER_S", 180.0 - 40 * len(waits))

    monkeypatch.setattr(folder_lock.time, "sleep", pass_time)
    with held(tmp_path) as lock:
        assert lock.owner.is_this_process
    assert len(waits) == 2


def test_the_first_process_of_torchrun_has_the_folder_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others check their configuration at the same time, and read checkpoints in a folder that is held."""
    left(tmp_path, pid=os.getppid(), started=folder_lock._started(os.getppid()))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("RANK", "1")
    with held(tmp_path):
        assert os.listdir(tmp_path) == [LOCK_FILE]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="in use by another run"), held(tmp_path):
        pass


def test_a_run_whose_folder_was_taken_over_stops_writing_and_leaves_the_lock(tmp_path: Path) -> None:
    with held(tmp_path) as lock:
        left(tmp_path, machine=OTHER, token="other")
        with pytest.raises(RuntimeError, match="was taken over by process"):
            lock.check()
    assert (tmp_path / LOCK_FILE).exists()


def test_threads_of_a_run_and_of_its_bars_are_left_out_of_stacks(tmp_path: Path) -> None:
    with ends_with_parent(), held(tmp_path), tqdm(total=2, file=io.StringIO()):
        assert len(threading.enumerate()) >= 4  # the three and this
        assert [line for line in stacks().splitlines() if line.startswith("thread") and "MainThread" not in line] == []


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "HEARTBEAT_S", 0.01)
    with held(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
        deadline = time.monotonic() + 20
        while (tmp_path / LOCK_FILE).stat().st_mtime == 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("a file"), lambda path: path.symlink_to("/proc/1")])
def test_a_folder_where_nothing_can_be_written_is_named(spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    spoil(tmp_path / "place")
    with (
        pytest.raises(ConfigError, match=r"output_dir: nothing can be written into .*place/run"),
        held(tmp_path / "place" / "run"),
    ):
        pass


def test_a_second_command_ends_with_one_line_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "a bee"}\n')
    run = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-c", f"""
from pathlib import Path
from trainers.run.folder_lock import held
with held(Path({str(run)!r})):
    print("held", flush=True)
    input()
"""],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    arguments = ["--model", model, "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(run)]
    with pytest.raises(SystemExit) as ended:
        cli.main("sft", arguments)
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "output_dir" in line]
    assert re.search(rf"in use by another run: process {first.pid} on ", line)
    assert os.listdir(run) == [LOCK_FILE]
    first.kill()
    first.communicate()
    with held(run):
        pass


def test_a_full_disk_leaves_no_half_lock(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(ConfigError, match="nothing can be written into"), held(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
