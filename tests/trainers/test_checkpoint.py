"""Checkpoints are whole or not there, whatever kills the run."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from trainers import checkpoint, manifest
from trainers.checkpoint import (
    Choice,
    Writing,
    begin,
    checkpoint_folder,
    checkpoints,
    chosen,
    complete,
    latest,
    newest,
    read_state,
    resolve_resume,
    rotate,
    write_state,
)
from trainers.manifest import damage, write_manifest


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """The folder to write into, which becomes ``folder`` when the block ends well."""
    yield begin(folder)
    complete(folder)


def save(output_dir: Path, step: int, content: str = "weights") -> Path:
    with writing(checkpoint_folder(output_dir, step)) as folder:
        (folder / "model.bin").write_text(content)
        write_state(folder, {"step": step})
    return checkpoint_folder(output_dir, step)


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


class Killed(BaseException):
    """Stands for a signal: nothing of the library runs after it where it is raised by a patched call."""


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies at its ``number``-th rename, counted from 1, before that rename."""
    real, count = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == number:
            raise Killed
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_a_checkpoint_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    with writing(checkpoint_folder(tmp_path, 10)) as folder:
        (folder / "model.bin").write_text("weights")
        assert latest(tmp_path) is None
        write_state(folder, {"step": 10})
    assert names(tmp_path) == ["checkpoint-10"]
    assert latest(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("tidied", [False, True])
def test_a_kill_between_write_and_rename_loses_nothing(
    tidied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    with monkeypatch.context() as patch:
        kill_at_rename(patch, 1)
        with pytest.raises(Killed):
            save(tmp_path, 20)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20.tmp"]
    if tidied:
        rotate(tmp_path, None)
    assert latest(tmp_path) == tmp_path / "checkpoint-20"
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20"]


@pytest.mark.parametrize("then", ["all have written", "one has not", "one failed"])
def test_what_workers_wrote_behind_the_state_counts_once_all_have(then: str, tmp_path: Path) -> None:
    save(tmp_path, 10)
    folder = begin(checkpoint_folder(tmp_path, 20))
    marks = [Writing(folder / "critic", rank) for rank in range(2)]
    for mark in marks:
        mark.begin()
    write_state(folder, {"step": 20})
    assert latest(tmp_path) == tmp_path / "checkpoint-10"
    marks[0].end()
    if then == "one failed":
        marks[1].fail(OSError("the disk is full"))
    elif then == "all have written":
        marks[1].end()
    expected = ["checkpoint-10", *(["checkpoint-20"] if then == "all have written" else [])]
    assert latest(tmp_path) == tmp_path / expected[-1]
    rotate(tmp_path, None)
    assert names(tmp_path) == expected


@pytest.mark.parametrize("rename", [1, 2])
def test_a_kill_while_a_checkpoint_is_replaced_keeps_the_old_one(
    rename: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10, "old")
    with monkeypatch.context() as patch:
        kill_at_rename(patch, rename)
        with pytest.raises(Killed):
            save(tmp_path, 10, "new")
    found = latest(tmp_path)
    assert found is not None
    assert (found / "model.bin").read_text() == "old"
    save(tmp_path, 10, "new")
    assert (found / "model.bin").read_text() == "new"
    assert names(tmp_path) == ["checkpoint-10"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_process_that_dies_while_writing_leaves_the_checkpoint_before(existing: bool, tmp_path: Path) -> None:
    """Not an exception that somebody could catch: the process is gone, as after kill -9."""
    save(tmp_path, 10, "old")
    if existing:
        save(tmp_path, 20, "old")
    child = os.fork()
    if child == 0:
        with writing(checkpoint_folder(tmp_path, 20)) as folder:
            (folder / "model.bin").write_text("new")
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    found = resolve_resume("auto", tmp_path)
    assert found == checkpoint_folder(tmp_path, 20 if existing else 10)
    assert (found / "model.bin").read_text() == "old"
    save(tmp_path, 30)
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-30"]


def test_a_kill_at_any_moment_of_saving_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    """A process is killed before each thing that it does to the disk, until it is done with all of them."""
    for moment in itertools.count():
        output_dir = tmp_path / str(moment)
        save(output_dir, 10, "old")
        save(output_dir, 20, "old")
        child = os.fork()
        if child == 0:
            kill_before(moment)
            save(output_dir, 20, "new")
            save(output_dir, 30, "new")
            rotate(output_dir, 1, best="checkpoint-20")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = resolve_resume("auto", output_dir)
        assert found is not None, moment
        assert found.name in ("checkpoint-20", "checkpoint-30"), moment
        for path in checkpoints(output_dir):
            assert set(names(path)) == {"model.bin", "trainer_state.json", "manifest.json"}, moment
            assert damage(path) is None
            assert (path / "model.bin").read_text() in ("old", "new")
            assert read_state(path)["step"] == int(path.name.removeprefix("checkpoint-"))
        save(output_dir, 40)
        rotate(output_dir, 1)
        assert names(output_dir) == ["checkpoint-40"], moment
        if os.WIFEXITED(status):
            break
    assert moment > 20


def kill_before(moment: int) -> None:
    """This process kills itself before it does anything to the disk for the ``moment``-th time, counted from 0."""
    moments = itertools.count()

    def look(event: str, _: Any) -> None:
        if (
            event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
            and next(moments) == moment
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def test_rotating_after_a_killed_replacement_keeps_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / "checkpoint-10.old")
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-10"]


def test_the_final_model_survives_a_killed_replacement_too(tmp_path: Path) -> None:
    (tmp_path / "final.old").mkdir()
    (tmp_path / "final.tmp").mkdir()
    rotate(tmp_path, None)
    assert names(tmp_path) == ["final"]


@pytest.mark.parametrize("state", [None, "", '{"step": 3'])
def test_a_partial_folder_is_no_checkpoint(state: str | None, tmp_path: Path) -> None:
    save(tmp_path, 10)
    partial = tmp_path / "checkpoint-30"
    partial.mkdir()
    (partial / "model.bin").write_text("copied")
    if state is not None:
        (partial / "trainer_state.json").write_text(state)
    assert latest(tmp_path) == tmp_path / "checkpoint-10"


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        save(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-10", "checkpoint-100"]


def test_what_an_earlier_longer_run_left_is_older_than_a_new_runs_first_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 500)
    save(tmp_path, 10)
    assert latest(tmp_path) == tmp_path / "checkpoint-10"
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-10"]


@pytest.mark.parametrize("times", [[3000.0, 2000.0, 1000.0], [3000.0, 3000.0, 3000.0]], ids=["set back", "stopped"])
def test_a_clock_that_is_set_back_neither_destroys_nor_hides_checkpoints(
    times: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, now in zip((10, 20, 30), times, strict=True):
        monkeypatch.setattr(checkpoint.time, "time", lambda now=now: now)
        save(tmp_path, step)
        rotate(tmp_path, 1)
        assert names(tmp_path) == [f"checkpoint-{step}"]
        assert resolve_resume("auto", tmp_path) == tmp_path / f"checkpoint-{step}"


def test_a_run_resumed_from_an_older_checkpoint_writes_newer_ones_of_lower_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    monkeypatch.setattr(checkpoint.time, "time", lambda: 1.0)
    save(tmp_path, 15)
    assert latest(tmp_path) == tmp_path / "checkpoint-15"
    rotate(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-15", "checkpoint-30"]


def test_checkpoints_of_a_version_that_did_not_count_are_older(tmp_path: Path) -> None:
    for step, saved_at in ((10, 2.0), (20, 1.0)):
        folder = checkpoint_folder(tmp_path, step)
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"step": step, "saved_at": saved_at}))
    assert newest(tmp_path, without_manifest=True).folder == tmp_path / "checkpoint-10"
    save(tmp_path, 5)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-10", "checkpoint-5"]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a flipped bit": (flip_a_bit, "part/model.bin", "part/model.bin differs from the written file"),
    "a file cut off": (cut, "part/model.bin", "part/model.bin has 6 bytes, and was written with 7"),
    "a file taken away": (Path.unlink, "part/model.bin", "part/model.bin is not there"),
    "a state cut off": (cut, "trainer_state.json", "trainer_state.json cannot be read"),
    "a manifest cut off": (cut, "manifest.json", "manifest.json cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_refused_where_it_is_named(name: str, tmp_path: Path) -> None:
    harm, file, told = DAMAGES[name]
    save(tmp_path, 10)
    with writing(checkpoint_folder(tmp_path, 20)) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "model.bin").write_text("weights")
        write_state(folder, {"step": 20})
    assert newest(tmp_path) == Choice(tmp_path / "checkpoint-20")
    harm(tmp_path / "checkpoint-20" / file)
    choice = newest(tmp_path)
    assert choice.folder == tmp_path / "checkpoint-10"
    (note,) = choice.notes
    assert "skipped checkpoint-20" in note
    assert told in note
    assert "the run continues from checkpoint-10" in note
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: .*checkpoint-20.*") as refused:
        resolve_resume(str(tmp_path / "checkpoint-20"), tmp_path)
    assert "\n" not in str(refused.value)
    assert file in str(refused.value) or "worker had not written" in str(refused.value)


def test_where_no_checkpoint_is_left_whole_the_run_starts_anew_and_says_so(tmp_path: Path) -> None:
    flip_a_bit(save(tmp_path, 10) / "model.bin")
    choice = newest(tmp_path)
    assert choice.folder is None
    assert "starts from step 0" in choice.notes[0]


def test_a_checkpoint_that_lost_its_manifest_is_taken_only_where_a_key_says_so(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "manifest.json").unlink()
    choice = chosen("auto", tmp_path)
    assert choice.folder == tmp_path / "checkpoint-10"
    assert choice.notes == (
        "resume_from_checkpoint: skipped checkpoint-20 (it has no manifest.json, so its files cannot be checked; "
        "resume_without_manifest: true accepts it); the run continues from checkpoint-10",
    )
    named = str(tmp_path / "checkpoint-20")
    with pytest.raises(ConfigError, match=r"has no manifest.json, .* add resume_without_manifest: true"):
        chosen(named, tmp_path)
    for value in ("auto", named):
        choice = chosen(value, tmp_path, without_manifest=True)
        assert choice.folder == tmp_path / "checkpoint-20"
        told = "resume_without_manifest: checkpoint-20 has no manifest.json, and its files were not checked"
        assert choice.notes == (told,)


def test_what_does_not_change_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path: (read.append(path.name), real(path))[1])
    save(tmp_path, 10)
    read.clear()
    for _ in range(3):
        assert latest(tmp_path) == tmp_path / "checkpoint-10"
    assert sorted(read) == ["model.bin", "trainer_state.json"]


def test_rotating_keeps_the_newest_and_touches_nothing_else(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    for other in ("final", "checkpoint-best", "notes.old", "completions"):
        (tmp_path / other).mkdir()
    rotate(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-30", "checkpoint-40", "checkpoint-best", "completions", "final", "notes.old"]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(2, "20", ["20", "50"]), (1, "20", ["20", "50"]), (3, "20", ["20", "40", "50"]), (2, "50", ["40", "50"]),
     (2, "gone", ["40", "50"]), (1, None, ["50"]), (9, "20", ["10", "20", "30", "40", "50"])],
)  # fmt: skip
def test_the_best_checkpoint_counts_and_stays(limit: int, best: str | None, kept: list[str], tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    rotate(tmp_path, limit, best and f"checkpoint-{best}")
    assert names(tmp_path) == [f"checkpoint-{step}" for step in kept]


def test_a_kill_while_rotating_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            rotate(tmp_path, 1)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-20"]
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-20"]


def test_everything_is_on_disk_before_the_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("sync"), real_sync(descriptor))[1])
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, 10)
    # model.bin and its folder; these, trainer_state.json and manifest.json; the name; the folder that holds the name
    assert events == [*["sync"] * 2, *["sync"] * 4, "rename", "sync"]


def test_the_state_is_read_back_and_says_when_it_was_saved(tmp_path: Path) -> None:
    state = {"step": 7, "num_tokens": 0.1 + 0.2, "first_evaluation": {"eval_loss": 1.5}}
    write_state(tmp_path, state)
    found = read_state(tmp_path)
    assert found.pop("saved_at") > 1.6e9
    assert found.pop("save_count") == 1
    assert found == state
    assert json.loads((tmp_path / "trainer_state.json").read_text())["step"] == 7


def test_resume_from_nothing_true_auto_or_a_folder(tmp_path: Path) -> None:
    assert resolve_resume(None, tmp_path) is None
    assert resolve_resume(False, tmp_path) is None
    assert resolve_resume("auto", tmp_path) is None
    first, second = save(tmp_path, 10), save(tmp_path, 20)
    assert resolve_resume(True, tmp_path) == second
    assert resolve_resume("auto", tmp_path) == second
    assert resolve_resume(str(first), tmp_path) == first
    assert resolve_resume(None, tmp_path) is None


def test_resuming_from_the_output_folder_names_the_checkpoints_in_it(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(ConfigError, match=r"not a checkpoint.*checkpoint-10"):
        resolve_resume(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"step": -1}, {"step": True}, {"step": 2.5}, {"order": []}, {"settings": 3}, {"trainer": []},
        {"num_tokens": "x"}, {"num_epochs": "x"}, {"bad_steps": "x"}, {"save_count": None}, {"first_evaluation": 3},
        {"best_metric": "x"}, {"checkpoints_no_better": "x"}, {"evaluated_step": []}, {"best_model_checkpoint": 3},
        {"best_model_checkpoint": "../elsewhere"}, {"best_model_checkpoint": "/elsewhere"},
    ],
)  # fmt: skip
def test_a_state_with_values_of_other_types_is_that_of_no_checkpoint(changed: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, 10)
    file = save(tmp_path, 20) / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    write_manifest(file.parent)
    choice = newest(tmp_path)
    assert choice.folder == tmp_path / "checkpoint-10"
    assert "skipped checkpoint-20 (trainer_state.json cannot be read)" in choice.notes[0]
    with pytest.raises(ConfigError, match=r"is not a checkpoint \(trainer_state.json cannot be read\)"):
        resolve_resume(str(file.parent), tmp_path)


@pytest.mark.parametrize("name", ["trainer_state.json", "manifest.json"])
def test_files_nested_without_end_are_damaged_ones(name: str, tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / name).write_text("[" * 100_000)
    assert newest(tmp_path).folder == tmp_path / "checkpoint-10"


def test_a_file_that_the_disk_does_not_give_is_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    read = hashlib.file_digest

    def fails(file: Any, *arguments: Any) -> Any:
        if file.name == str(folder / "trainer_state.json"):
            raise OSError(errno.EIO, "Input/output error")
        return read(file, *arguments)

    monkeypatch.setattr(hashlib, "file_digest", fails)
    choice = newest(tmp_path)
    assert choice.folder == tmp_path / "checkpoint-10"
    assert "skipped checkpoint-20 (trainer_state.json cannot be read)" in choice.notes[0]


def test_a_manifest_with_a_size_beyond_numbers_is_a_damaged_one(tmp_path: Path) -> None:
    file = save(tmp_path, 10) / "manifest.json"
    file.write_text(file.read_text().replace('"files": {', '"files": {"x": [1e999, "x"], '))
    assert damage(file.parent) == "manifest.json cannot be read"


@pytest.mark.parametrize("listed", [{}, {"../model.bin": [7, "x"]}, {"/etc/passwd": [7, "x"]}])
def test_a_manifest_of_nothing_or_of_files_outside_is_a_damaged_one(listed: dict[str, Any], tmp_path: Path) -> None:
    (save(tmp_path, 10) / "manifest.json").write_text(json.dumps({"algorithm": "blake2b", "files": listed}))
    told = damage(tmp_path / "checkpoint-10")
    assert told is not None
    assert "lists no file" in told or "outside of the folder" in told


def test_nothing_is_written_or_removed_where_a_link_leads(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    save(outside, 20)
    (outside / "checkpoint-20" / "manifest.json").unlink()
    run.mkdir()
    for name in ("checkpoint-20.tmp", "checkpoint-30.gone", "checkpoint-40.old", "final.tmp"):
        (run / name).symlink_to(outside / "checkpoint-20")
    newest(run)
    rotate(run, 1)
    save(run, 20)
    with writing(run / "final") as folder:
        (folder / "model.bin").write_text("weights")
    assert names(outside / "checkpoint-20") == ["model.bin", "trainer_state.json"]
    assert (run / "final" / "model.bin").is_file()
    assert not any(path.name.endswith((".tmp", ".gone")) for path in run.iterdir())


def test_an_error_while_writing_says_how_much_room_there_was_and_what_is_left(tmp_path: Path) -> None:
    save(tmp_path, 10)
    begin(tmp_path / "checkpoint-20")
    error = OSError("no space left")
    checkpoint.discard(tmp_path / "checkpoint-20", error)
    (note,) = error.__notes__
    assert re.fullmatch(r"while writing .*checkpoint-20: its disk had [\d,]+ MiB left; checkpoint-10 is whole", note)
    assert names(tmp_path) == ["checkpoint-10"]
