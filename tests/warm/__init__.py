"""Pythons that begin warm: a process that has imported what most need, and forks.

``python()`` is a program that starts as ``python script`` and ``python -m module`` do, but for imports: half of what
the suite's processes cost. Like another start of Python, a fork has its own seeds, variables, folder, streams and
signals, and the parent that started the program. It has the hash seed of all its kind and knows torch from the start;
tests of either start Pythons of their own.

One server is enough for a whole run of the suite, however many processes run tests: those processes are forks too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SERVER, RANKS = "tests.warm.server", "tests.warm.ranks"
SHARED = "RAYHELPER_TESTS_WARM"  # the folder of the server that all processes of a run share
_CLIENT = Path(__file__).with_name("client.py")


class _Warm:
    """The process that forks, and the programs that ask it to; all lie in ``folder`` until it is closed."""

    def __init__(self) -> None:
        self.temporary = tempfile.TemporaryDirectory(prefix="warm-")
        self.folder = Path(self.temporary.name)
        address = self.folder / "socket"
        for name, kinds in (("python", ("-m",)), ("tester", ("-m", "-c"))):
            # -I -S: what only waits needs no packages
            line = f"ADDRESS, KINDS = {str(address)!r}, {kinds!r}"
            (self.folder / name).write_text(f"#!{sys.executable} -IS\n{line}\n{_CLIENT.read_text()}")
            (self.folder / name).chmod(0o755)
        command = [sys.executable, "-m", SERVER, str(address), str(self.folder / "python")]
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has one
        self.server = _ready(command, env)
        self.ranks: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a global that main has set, as ``prove`` sees it: of no use to another process

    def start_ranks(self) -> None:
        if self.ranks is None:
            command = [str(self.folder / "python"), "-m", RANKS, str(self.folder / "ranks")]
            self.ranks = _ready(command, dict(os.environ))

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.communicate(timeout=30)  # they end with their input
        self.server.communicate(timeout=30)  # and forks with it
        self.temporary.cleanup()


def _ready(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


_started: list[_Warm] = []


def python() -> str:
    """The path of the program, which works until ``close``."""
    return str(_folder() / "python")


def share() -> str:
    """Starts the server for all processes that this one will start: the path of the program that runs their tests."""
    os.environ[SHARED] = str(_own().folder)
    _own().start_ranks()
    return str(_own().folder / "tester")


def ranks() -> str:
    """The address of the server that ``multiprocessing`` forks ranks from."""
    if SHARED not in os.environ:
        _own().start_ranks()
    return str(_folder() / "ranks")


def close() -> None:
    """Ends what this process started."""
    if _started and os.environ.get(SHARED) == str(_started[0].folder):
        del os.environ[SHARED]
    while _started:
        _started.pop().close()


def _folder() -> Path:
    return Path(os.environ[SHARED]) if SHARED in os.environ else _own().folder


def _own() -> _Warm:
    if not _started:
        _started.append(_Warm())
    return _started[0]
