"""Checkpoint folders that are either whole or not there.

output_dir/checkpoint-40/        model, optimizer, schedule, rng_state_*.pth (backend), trainer_state.json (here)
output_dir/checkpoint-60.tmp/    being written; what a killed run leaves of it is removed by the next one
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayhelper import ConfigError

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` when the block ends; if the block raises, nothing is left."""
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _flush(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if folder.exists():  # an earlier run's; renamed first, so that one of the two is always whole
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old)
    else:
        unfinished.rename(folder)


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def checkpoints(output_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = {int(match[1]): path for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found) if (found[step] / STATE_FILE).is_file()]


def rotate(output_dir: Path, save_total_limit: int | None) -> None:
    """Removes the oldest checkpoints beyond the limit, and what killed runs left unfinished."""
    for unfinished in [*output_dir.glob("checkpoint-*.tmp"), *output_dir.glob("checkpoint-*.old")]:
        shutil.rmtree(unfinished, ignore_errors=True)
    if save_total_limit is not None:
        for oldest in checkpoints(output_dir)[:-save_total_limit]:
            shutil.rmtree(oldest)


def resolve_resume(value: str | bool | None, output_dir: Path) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` means, or None to start anew.

    Raises:
        ConfigError: a folder that is no whole checkpoint.
    """
    if value is None or value is False:
        return None
    if value is True or value == "auto":
        found = checkpoints(output_dir)
        return found[-1] if found else None
    folder = Path(value)
    if not (folder / STATE_FILE).is_file():
        known = ", ".join(str(path) for path in checkpoints(folder)) or "none there"
        raise ConfigError(
            f"resume_from_checkpoint: {value!r} is no checkpoint (it has no {STATE_FILE}); checkpoints: {known}"
        )
    return folder


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / STATE_FILE).write_text(json.dumps(dict(state), indent=2), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    return state


def _flush(folder: Path) -> None:
    """Makes what was written survive a power cut before the folder gets its name."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
