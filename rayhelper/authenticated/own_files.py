"""Files that this user alone can read, for keys: of mode 0600, in a folder of mode 0700.

Not in TMPDIR, which may be another one for each process.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayhelper.errors import ConfigError


def own_folder() -> Path:
    """The folder, made if it is not there. Raises ConfigError if it cannot be made, or is not this user's alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime if runtime and os.access(runtime, os.W_OK) else "/tmp") / f"rayhelper-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder} ({error}).") from None
    _check(folder, folder.lstat(), stat.S_ISDIR)
    return folder


def write_own(name: str, content: bytes) -> Path:
    """A new file of the folder. Raises ConfigError, or FileExistsError."""
    for _ in range(100):
        path = own_folder() / name
        with contextlib.suppress(FileNotFoundError):  # another run has just removed the empty folder
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)
            return path
    raise ConfigError(f"cannot write {path}.")


def read_own(path: Path) -> bytes:
    """What the file holds. Raises ConfigError if it is not this user's alone, or OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        _check(path, os.fstat(file.fileno()), stat.S_ISREG)
        return file.read()


def remove_own(files: Iterable[Path]) -> None:
    """Removes the files, and their folder if it is empty then: others of this user may be in it."""
    removed = list(files)
    for path in removed:
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in {path.parent for path in removed}:
        with contextlib.suppress(OSError):
            folder.rmdir()


def process_space() -> int:
    """What tells apart the tables of processes, of which each container has its own."""
    return os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: the number was given away again
        pass
    return True


def _check(path: Path, seen: os.stat_result, is_kind: Any) -> None:
    if not is_kind(seen.st_mode) or seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        raise ConfigError(
            f"{path} belongs to another user, or others may read it, so no key of a run can be there. Remove it."
        )
