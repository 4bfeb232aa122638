"""Checkpoint folders that are either whole or not there.

output_dir/checkpoint-40/        model, optimizer, schedule, rng_state_*.pth (backend), trainer_state.json (here)
    manifest.json                every file with its checksum, written last (manifest.py)
output_dir/checkpoint-60.tmp/    being written; of what a killed run left the next one names what is whole, and removes
    rank_3.writing               a worker that goes on writing while training does, until it has written all
    rank_3.failed                or why it could not
    trainer_state.json           all the rest is on the disk
output_dir/checkpoint-20.old/    being replaced; gets its name back if a kill came before the new one had it
output_dir/checkpoint-10.gone/   being removed
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from trainers.manifest import MANIFEST_FILE, damage, has_manifest, write_manifest

STATE_FILE = "trainer_state.json"
GROWN = "model_with_new_tokens"  # folder in output_dir: the model with rows for new_special_tokens
WRITING, FAILED = ".writing", ".failed"
STATE_TYPES: Mapping[tuple[str, ...], Any] = {  # of the entries that are there, beside step
    ("order", "settings", "trainer", "first_evaluation", "last_evaluation"): Mapping,
    ("num_tokens", "saved_at"): (int, float),
    ("save_count", "bad_steps"): int,
    ("num_epochs", "evaluated_step", "checkpoints_no_better"): (int, type(None)),
    ("best_metric", "best_seen", "best_seen_at_save"): (int, float, type(None)),
    ("best_model_checkpoint",): (str, type(None)),
}
_NAME = re.compile(r"checkpoint-\d+")


def begin(folder: Path) -> Path:
    """An empty folder to write into, which ``complete`` gives its name."""
    unfinished = unfinished_folder(folder)
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    return unfinished


def complete(folder: Path) -> None:
    """Gives what was written since ``begin`` the name ``folder``, in place of what had it.

    A checkpoint gets its manifest first. No worker may write there any more.
    """
    unfinished = unfinished_folder(folder)
    if (unfinished / STATE_FILE).is_file():
        write_manifest(unfinished)
    _flush(unfinished)
    old = folder.with_name(folder.name + ".old")
    _restore(old)
    if folder.exists():  # an earlier run's; moved aside first, so that one of the two is always whole
        folder.rename(old)
    unfinished.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path, error: BaseException | None = None) -> None:
    """Removes what was written since ``begin``. ``error``: why; it gets a note of the room that was left."""
    if isinstance(error, Exception):
        with contextlib.suppress(OSError):
            room = shutil.disk_usage(folder.parent).free / 2**20
            whole = checkpoints(folder.parent)
            kept = f"{whole[-1].name} is whole" if whole else "no checkpoint is there"
            error.add_note(f"while writing {folder}: its disk had {room:,.0f} MiB left; {kept}")
    shutil.rmtree(unfinished_folder(folder), ignore_errors=True)


def unfinished_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


class Writing:
    """The mark that a worker leaves in a folder while it writes there."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.mark = folder / f"rank_{rank}{WRITING}"

    def begin(self) -> None:
        self.mark.parent.mkdir(parents=True, exist_ok=True)
        self.mark.with_suffix(FAILED).unlink(missing_ok=True)
        self.mark.touch()

    def end(self) -> None:
        self.mark.unlink()

    def fail(self, error: BaseException) -> None:
        """Says why the folder will never be whole."""
        with contextlib.suppress(OSError):  # a full disk
            self.mark.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        self.mark.rename(self.mark.with_suffix(FAILED))


def is_written(folder: Path) -> bool:
    """Whether no worker goes on writing into the folder.

    Raises:
        RuntimeError: one of them could not.
    """
    failed = sorted(folder.rglob(f"rank_*{FAILED}"))
    if failed:
        told = failed[0].read_text(encoding="utf-8") or "it could not say why"
        raise RuntimeError(f"{folder} is not a checkpoint: {failed[0].stem} could not write its part ({told})")
    return next(folder.rglob(f"rank_*{WRITING}"), None) is None


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def checkpoints(output_dir: Path) -> list[Path]:
    """The whole checkpoints in a folder, in the order in which they were written; their files are not checked.

    ``save_count`` of their states is that order, whatever the clock said. It tells apart what an earlier, longer run
    left in the folder, and what a run wrote that was resumed from an older checkpoint. Checkpoints of versions that did
    not count are older than all others, and in the order of ``saved_at``.
    """
    return list(ages(output_dir))


def ages(output_dir: Path) -> dict[Path, tuple[int, float, int]]:
    """The whole checkpoints in a folder, in that order, with what tells apart two that had the same name."""
    found = {path: age for path in _named(output_dir) if (age := _age(path)) is not None}
    return dict(sorted(found.items(), key=lambda item: item[1]))


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a run goes on from, and what there is to tell of it; None for a new run."""

    folder: Path | None
    notes: tuple[str, ...] = ()


def latest(output_dir: Path) -> Path | None:
    """The undamaged checkpoint that was written last, or None."""
    return newest(output_dir).folder


def newest(output_dir: Path, *, without_manifest: bool = False) -> Choice:
    """As ``latest``, with a line that says what was passed over and why.

    What a killed run left unfinished is put right first. ``without_manifest``: one that has no manifest may be taken.
    """
    _put_right(output_dir)
    whole = checkpoints(output_dir)
    passed_over = {path: _why_unread(path) for path in sorted(_named(output_dir)) if path not in whole}
    for folder in reversed(whole):
        told = _why_not(folder, without_manifest)
        if told is None:
            return Choice(folder, _notes(folder, passed_over))
        passed_over[folder] = told
    return Choice(None, _notes(None, passed_over))


def _notes(folder: Path | None, passed_over: Mapping[Path, str]) -> tuple[str, ...]:
    notes = []
    if passed_over:
        told = ", ".join(f"{path.name} ({why})" for path, why in passed_over.items())
        goes_on = "the run starts from step 0" if folder is None else f"the run continues from {folder.name}"
        notes.append(f"resume_from_checkpoint: skipped {told}; {goes_on}")
    return (*notes, *_unchecked(folder))


def _unchecked(folder: Path | None) -> tuple[str, ...]:
    if folder is None or has_manifest(folder):
        return ()
    return (f"resume_without_manifest: {folder.name} has no {MANIFEST_FILE}, and its files were not checked",)


def _why_not(folder: Path, without_manifest: bool) -> str | None:
    """Why a run cannot go on from a checkpoint, in words; None: it can."""
    if has_manifest(folder) or without_manifest:
        return damage(folder)
    return f"it has no {MANIFEST_FILE}, so its files cannot be checked; resume_without_manifest: true accepts it"


def rotate(output_dir: Path, save_total_limit: int | None, best: str | None = None) -> None:
    """Removes the oldest checkpoints beyond the limit, and what killed runs left unfinished.

    As in transformers the one named ``best`` counts and stays, and the newest stays beside it even if the limit is 1.
    """
    _put_right(output_dir)
    for unfinished in (*_left_over(output_dir, ".tmp"), *_left_over(output_dir, ".gone")):
        _remove(unfinished)
    if save_total_limit is not None:
        found = checkpoints(output_dir)
        others = [path for path in found[:-1] if path.name != best]
        for oldest in others[: max(0, len(found) - save_total_limit)]:
            # at no time half a checkpoint under its name
            shutil.rmtree(oldest.rename(oldest.with_name(oldest.name + ".gone")), ignore_errors=True)


def resolve_resume(value: str | bool | None, output_dir: Path, *, without_manifest: bool = False) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` means, or None to start anew.

    Raises:
        ConfigError: a folder that is no whole checkpoint, or a damaged one.
    """
    return chosen(value, output_dir, without_manifest=without_manifest).folder


def chosen(value: str | bool | None, output_dir: Path, *, without_manifest: bool = False) -> Choice:
    """As ``resolve_resume``, with what there is to tell of the choice."""
    if value is None or value is False:
        return Choice(None)
    if value is True or value == "auto":
        return newest(output_dir, without_manifest=without_manifest)
    folder = Path(value)
    if not _is_whole(folder):
        known = ", ".join(str(path) for path in checkpoints(folder)) or "none there"
        is_partial = bool(_saved(folder))
        lacks = "a worker had not written all of its files" if is_partial else _why_unread(folder)
        raise ConfigError(f"resume_from_checkpoint: {value!r} is not a checkpoint ({lacks}); checkpoints: {known}")
    if not has_manifest(folder) and not without_manifest:
        raise ConfigError(
            f"resume_from_checkpoint: {value!r} has no {MANIFEST_FILE}, so its files cannot be checked. Every "
            "checkpoint is written with one. To continue from it unchecked, add resume_without_manifest: true. To "
            f"begin a new run with its weights, write model: {value}"
        )
    if told := damage(folder):
        raise ConfigError(
            f"resume_from_checkpoint: {value!r} is damaged: {told}. Name another checkpoint, or 'auto' for the "
            f"newest complete one of output_dir. If you changed the file yourself, remove {MANIFEST_FILE} and add "
            "resume_without_manifest: true."
        )
    return Choice(folder, _unchecked(folder))


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes ``trainer_state.json``: ``state``, ``save_count``, and ``saved_at``, in seconds since 1970.

    ``save_count`` is one more than that of any checkpoint beside it, so that the newest is known without a clock.
    But for what workers go on writing, the file comes last: with it, and without their marks, a folder is whole.
    """
    _flush(folder)
    counts = [age[0] for path in folder.parent.glob("checkpoint-*") if path != folder and (age := _age(path))]
    text = json.dumps({**state, "save_count": 1 + max(counts, default=0), "saved_at": time.time()}, indent=2)
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """What ``write_state`` wrote. Raises ValueError for anything else, and OSError."""
    try:
        state: Any = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if mistake := _state_mistake(state):
        raise ValueError(mistake)
    return dict(state)


def _state_mistake(state: Any) -> str | None:
    """What in a state has another type than ``write_state`` and ``Run`` write; None: nothing."""
    if not isinstance(state, Mapping):
        return "it is not a mapping"
    if type(state.get("step")) is not int or state["step"] < 0:
        return f"step is {state.get('step')!r}"
    for names, kinds in STATE_TYPES.items():
        for name in names:
            if name in state and not (isinstance(state[name], kinds) and not isinstance(state[name], bool)):
                return f"{name} is {state[name]!r}"
    best = state.get("best_model_checkpoint")
    return f"best_model_checkpoint is {best!r}" if best is not None and not _NAME.fullmatch(best) else None


def _saved(folder: Path) -> dict[str, Any]:
    """The state in a folder; nothing if there is none, or a torn copy of one."""
    try:
        return read_state(folder)
    except (OSError, ValueError):
        return {}


def _age(folder: Path) -> tuple[int, float, int] | None:
    """Which checkpoints are older than this one, as a number to compare; None if it is not whole."""
    state = _saved(folder)
    if not state:
        return None
    count = state.get("save_count", 0)
    return count, 0.0 if count else state.get("saved_at", 0.0), state["step"]


def _why_unread(folder: Path) -> str:
    return f"{STATE_FILE} cannot be read" if (folder / STATE_FILE).is_file() else f"{STATE_FILE} is not there"


def _named(output_dir: Path) -> list[Path]:
    """The folders that have the name of a checkpoint."""
    return [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name)]


def _left_over(output_dir: Path, suffix: str) -> list[Path]:
    """What a killed run may have left of checkpoints and of the final model."""
    names = [path for path in output_dir.glob(f"checkpoint-*{suffix}") if _NAME.fullmatch(path.stem)]
    return [*names, *output_dir.glob(f"final{suffix}")]


def _put_right(output_dir: Path) -> None:
    """Gives folders that a killed run left whole their names."""
    for old in _left_over(output_dir, ".old"):
        _restore(old)
    for unfinished in _left_over(output_dir, ".tmp"):
        if unfinished.is_symlink():  # nobody here made it, and nothing is written where it leads
            continue
        folder = unfinished.with_suffix("")
        if _is_whole(unfinished) and not folder.exists():
            with contextlib.suppress(FileNotFoundError):  # another process of the run did it at the same time
                if not has_manifest(unfinished):
                    write_manifest(unfinished)
                unfinished.rename(folder)


def _is_whole(folder: Path) -> bool:
    try:
        read_state(folder)
        return is_written(folder)
    except (OSError, ValueError, RuntimeError):  # no state, or a torn one, or a worker that could not write
        return False


def _restore(old: Path) -> None:
    """Gives a folder that was being replaced its name back, or removes it if its replacement has the name."""
    folder = old.with_suffix("")
    if old.is_dir() and not folder.exists():
        with contextlib.suppress(FileNotFoundError):  # another process of the run did it at the same time
            old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a folder as far as it can be; of a link the link, and not where it leads."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Makes what was written survive a power cut before the folder gets its name."""
    for path in [*folder.rglob("*"), folder]:
        with contextlib.suppress(FileNotFoundError):  # the mark of a worker that has just written all
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
