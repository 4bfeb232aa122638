"""What this process, and what it started, has left in the world: a ``Snapshot``, and what is new since another one.

    before = Snapshot.take()
    ...                               the tests of a module
    left_behind(before)               names of processes, ports, threads, files, variables, actors, groups

Temporary files are looked for in this process's own temporary folder (``own_temporary_folder``), so that test processes
that run at once do not blame each other.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import warm

Names = dict[Any, str]  # what identifies a thing, and what a message calls it
GRACE_S = 20.0  # for what was told to end and is ending
SHARED_MEMORY = Path("/dev/shm")
# one of each a process, started at first use and gone with it
HELPERS = (
    *("multiprocessing.resource_tracker", "multiprocess.resource_tracker", "multiprocessing.forkserver"),
    warm.RANKS,
)
TOOLS_FOLDERS = ("ray", "warm-", "pymp-", "torchinductor_")
# set by pytest, by Ray at its first remote call, by torch's compiler, and by what vLLM imports
NOT_OURS = (
    *("PYTEST_CURRENT_TEST", "RAY_CLIENT_MODE", "LD_LIBRARY_PATH", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("AITER_SITUV2_A4W4", "TILELANG_CLEANUP_TEMP_FILES", "TRITON_CACHE_AUTOTUNING"),
)


@dataclass(frozen=True)
class Snapshot:
    """What there is of each kind."""

    things: dict[str, Names]

    @classmethod
    def take(cls, only: str | None = None) -> Snapshot:
        """``only``: the kind that is looked at; None: all."""
        return cls({kind: look() if only in (None, kind) else {} for kind, look in KINDS.items()})

    def since(self, before: Snapshot) -> list[str]:
        """What is here and was not there before, by name."""
        new = []
        for kind, names in self.without(before).things.items():
            new += [f"{kind} {name}" for name in names.values()]
        set_now = {name for name, _ in self.things["environment variable"]}
        set_before = {name for name, _ in before.things["environment variable"]}
        return sorted(new) + [f"environment variable {name} was removed" for name in sorted(set_before - set_now)]

    def without(self, other: Snapshot) -> Snapshot:
        """What is here and not in ``other``."""
        return Snapshot(
            {
                kind: {thing: name for thing, name in names.items() if thing not in other.things[kind]}
                for kind, names in self.things.items()
            }
        )

    def joined(self, other: Snapshot) -> Snapshot:
        """What is in either."""
        return Snapshot({kind: names | other.things[kind] for kind, names in self.things.items()})


def left_behind(before: Snapshot, *allowed: Snapshot) -> list[str]:
    """What is new since ``before``, ``allowed`` left out, after as long as ending processes and threads may take."""
    known = before
    for snapshot in allowed:
        known = known.joined(snapshot)
    deadline = time.monotonic() + GRACE_S
    while new := Snapshot.take().since(known):
        if time.monotonic() > deadline:
            return new
        gc.collect()  # threads of a pool end with it
        time.sleep(0.05)
    return []


def _processes() -> Names:
    """The children of this process, and theirs. What Ray's own daemons start is looked at as actors instead."""
    here = psutil.Process()
    daemons: set[int] = set()
    found: Names = {}
    for process in _children(here):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.ppid() in daemons:
                daemons.add(process.pid)  # a worker, or what a worker started
            elif (_ray_is_on() and _is_ray_daemon(line)) or warm.SERVER in line:  # who asked for a fork leaves with it
                daemons.add(process.pid)
            elif process.status() != psutil.STATUS_ZOMBIE and not any(helper in line for helper in HELPERS):
                found[process.pid, process.create_time()] = f"{process.pid} ({line[:120]})"
    return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Parents before their children."""
    return sorted(process.children(recursive=True), key=lambda child: (_create_time(child), child.pid))


def _create_time(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:
        return 0.0


def _ray_is_on() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _is_ray_daemon(line: str) -> bool:
    return str(Path(str(sys.modules["ray"].__file__)).parent) + os.sep in line


def _ports() -> Names:
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return {(c.laddr.ip, c.laddr.port): f"{c.laddr.ip}:{c.laddr.port}" for c in listening}


def _threads() -> Names:
    """Those that keep the process from ending."""
    return {
        thread.ident: repr(thread.name)
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread() and thread.is_alive()
    }


def _variables() -> Names:
    return {
        (name, value): f"{name}={value}"
        for name, value in os.environ.items()
        if name not in NOT_OURS and not name.startswith("VLLM_")
    }


def _temporary_files() -> Names:
    """All but the folders in which Ray keeps its logs, multiprocessing its sockets and torch what it compiled."""
    folder = Path(tempfile.gettempdir())
    return {entry.name: str(entry) for entry in folder.iterdir() if not entry.name.startswith(TOOLS_FOLDERS)}


def _shared_memory() -> Names:
    """The files of shared memory that are this process's, by the number in their name or because it has them open."""
    entries = {entry.name: str(entry) for entry in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else {}
    if not entries:
        return {}
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    numbers = [str(process.pid) for process in mine]
    named = {
        name for name in entries if any(part in numbers for part in name.replace("-", "_").replace(".", "_").split("_"))
    }
    opened = "".join(_opened_by(process.pid) for process in mine) if len(named) < len(entries) else ""
    return {name: path for name, path in entries.items() if name in named or path in opened}


def _opened_by(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def _actors() -> Names:
    if not _ray_is_on():
        return {}
    from ray._private.state import actors

    return {
        number: f"{actor.get('ActorClassName') or actor.get('ClassName')} ({number})"
        for number, actor in actors().items()
        if actor["State"] != "DEAD"
    }


def _placement_groups() -> Names:
    if not _ray_is_on():
        return {}
    from ray.util import placement_group_table

    return {
        number: f"{number} ({group['state']})"
        for number, group in placement_group_table().items()
        if group["state"] != "REMOVED"
    }


def _process_groups() -> Names:
    distributed = sys.modules.get("torch.distributed")
    on = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return {"default": "of torch.distributed (the default one)"} if on else {}


def _runtimes() -> Names:
    runtime = sys.modules.get("rayhelper.roles.runtime")
    active = runtime.state.active if runtime else None
    return {} if active is None else {id(active): f"{type(active).__name__}: RayHelper is initialized"}


KINDS = {
    "process": _processes,
    "listening port": _ports,
    "thread": _threads,
    "environment variable": _variables,
    "file": _temporary_files,
    "shared memory": _shared_memory,
    "actor": _actors,
    "placement group": _placement_groups,
    "process group": _process_groups,
    "runtime": _runtimes,
}


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A temporary folder that this process and what it starts use alone; pytest's ``tmp_path`` stays where it was."""
    names = ("TMPDIR", "PYTEST_DEBUG_TEMPROOT")
    before = {name: os.environ.get(name) for name in names}
    shared = tempfile.gettempdir()
    multiprocessing.util.get_temp_dir()  # it is removed when the process ends, later than this folder
    folder = Path(tempfile.mkdtemp(prefix="own-"))  # short: Ray's sockets lie in it
    os.environ["TMPDIR"] = str(folder)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", shared)
    tempfile.tempdir = None
    try:
        yield folder
    finally:
        tempfile.tempdir = None
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
