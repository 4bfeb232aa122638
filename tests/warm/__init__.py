"""Pythons that begin warm: a process that has imported what most need, and forks.

``python()`` is a program that starts as ``python script`` and ``python -m module`` do, but for imports: half of what
the suite's processes cost. Like another start of Python, a fork has its own seeds, variables, folder, streams and
signals, and the parent that started the program. It has the hash seed of all its kind and knows torch from the start;
tests of either start Pythons of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SERVER = "tests.warm.server"
_CLIENT = Path(__file__).with_name("client.py")


class _Warm:
    """The process that forks, and the program that asks it to; both lie in ``folder`` until it is closed."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        address = Path(self.folder.name) / "socket"
        self.program = Path(self.folder.name) / "python"
        # -I -S: what only waits needs no packages
        self.program.write_text(f"#!{sys.executable} -IS\nADDRESS = {str(address)!r}\n{_CLIENT.read_text()}")
        self.program.chmod(0o755)
        command = [sys.executable, "-m", SERVER, str(address), str(self.program)]
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has one
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == b"ready\n"

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a global that main has set, as ``prove`` sees it: of no use to another process

    def close(self) -> None:
        self.server.communicate(timeout=30)  # it ends with its input, and its forks with it
        self.folder.cleanup()


_started: list[_Warm] = []


def python() -> str:
    """The path of the program, which works until ``close``."""
    if not _started:
        _started.append(_Warm())
    return str(_started[0].program)


def close() -> None:
    """Ends what ``python`` started."""
    while _started:
        _started.pop().close()
