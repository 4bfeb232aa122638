"""A run of a program under torchrun, in two processes that are started for it: ``python -m`` runs this in each.

this process      the program, pickled, and what main has set   -> a folder
two processes     the same run, each watching its own worker     -> what they saw, in the folder
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rayhelper.prove.comparing import Ended
from rayhelper.prove.watching import Seen
from rayhelper.runtimes.ray.modules.changes import changes_in
from rayhelper.runtimes.ray.modules.sources import user_modules
from rayhelper.values.packing import dumps
from rayhelper.worker.ambient import Ambient

NUM_PROCESSES = 2
_LIMIT_S = 3600.0  # of the whole run
_PROGRAM, _SEEN = "program", "seen-{}"


class CannotRunError(Exception):
    """Why the program cannot be run under torchrun."""


class UnderTorchrun:
    """Runs under torchrun begin where this process was when this was made."""

    def __init__(self) -> None:
        self.ambient = Ambient.here()
        self.changes, self.refused = b"", ""
        try:
            self.changes = dumps(changes_in(user_modules(), ()))
        except Exception as error:
            self.refused = f"values that main has set in its modules cannot be pickled: {error}"

    def run(self, program: Callable[[], Any], roles: Collection[str]) -> Ended:
        """What the run came to, with both workers. Raises CannotRunError."""
        if self.refused:
            raise CannotRunError(self.refused)
        try:
            pickled = dumps(program)
        except Exception as error:
            raise CannotRunError(
                f"the program cannot be pickled, and torchrun starts it in new processes ({error}). Write it as a "
                "function of a module"
            ) from error
        with tempfile.TemporaryDirectory(prefix="rayhelper-prove-") as folder:
            given = (sys.path, self.ambient, self.changes, pickled, tuple(roles))
            Path(folder, _PROGRAM).write_bytes(pickle.dumps(given))
            told = _launched(folder)
            seen = [_read(Path(folder, _SEEN.format(rank))) for rank in range(NUM_PROCESSES)]
        runs = [one for one in seen if one is not None]
        if len(runs) < NUM_PROCESSES:
            raise CannotRunError(f"torchrun ended early:\n{told[-2000:]}")
        return _merged(runs)


def _launched(folder: str) -> str:
    """What torchrun printed."""
    options = ["--standalone", "--nproc-per-node", str(NUM_PROCESSES), "--log-dir", folder]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", __name__, folder]
    path = os.pathsep.join(dict.fromkeys(part or os.getcwd() for part in sys.path))
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=_LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotRunError(f"the run under torchrun took longer than {_LIMIT_S:g} s") from error
            raise
    return told.decode(errors="replace")


def _read(path: Path) -> tuple[list[Seen], Exception | None, int | None] | None:
    return pickle.loads(path.read_bytes()) if path.is_file() else None


def _merged(runs: list[tuple[list[Seen], Exception | None, int | None]]) -> Ended:
    """One run of both workers: the driver is process 0."""
    first, *others = (seen for seen, _, _ in runs)
    for number, seen in enumerate(first):
        for other in others:
            if number < len(other):
                seen.workers = [*seen.workers, *other[number].workers]
        seen.num_workers = NUM_PROCESSES
    failed = next((run for run in runs if run[1] is not None), runs[0])
    return Ended(first, failed[1], failed[2])


def main(folder: str) -> None:
    """The run of one process: what it saw goes into the folder."""
    path, ambient, changes, pickled, roles = pickle.loads(Path(folder, _PROGRAM).read_bytes())
    sys.path[:] = path
    pickle.loads(changes).apply()
    ambient.apply()
    program = pickle.loads(pickled)
    from rayhelper.prove.runs import watched

    ambient.random.restore()
    ended = watched(program, [roles], NUM_PROCESSES, {"runtime": "torchrun"})
    error = ended.error
    try:
        pickle.dumps(error)
    except Exception:
        error = RuntimeError(ended.how)
    rank = os.environ["RANK"]
    written = Path(folder, f"{_SEEN.format(rank)}.part")
    written.write_bytes(pickle.dumps((ended.seen, error, ended.rank)))
    written.rename(Path(folder, _SEEN.format(rank)))


if __name__ == "__main__":
    main(sys.argv[1])
