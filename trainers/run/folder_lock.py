"""One run per ``output_dir``: the file ``run.lock``, which names the process that writes there.

    with held(output_dir) as lock:       # ConfigError if another run has the folder
        lock.check()                     # RuntimeError if another run has taken the folder over since

A lock holds while its process lives. On this machine that is known from the process table; of another machine (or
another container) only the heartbeat is known: a thread touches the file every ``HEARTBEAT_S``. The age of a heartbeat
is told by the clock of the file system alone. The lock of a process that is gone is taken over.

A process that has the folder may enter again: the outermost block removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rayhelper import ConfigError

LOCK_FILE = "run.lock"
HEARTBEAT_S = 10.0
GONE_AFTER_S = 180.0  # without a heartbeat
LOOK_S = 2.0  # between two looks at the heartbeat of another machine's process
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The process that has a folder."""

    host: str
    pid: int
    started: str  # when the process started, in clock ticks since the machine did; pids are used again
    machine: str  # the boot and the table of processes that ``pid`` and ``started`` belong to
    began: float  # when it took the folder, on the monotonic clock of its machine
    since: str  # the same for people
    token: str

    @classmethod
    def here(cls) -> Owner:
        pid, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), pid, _started(pid), _machine(), time.monotonic(), now, secrets.token_hex(8))

    @property
    def is_this_process(self) -> bool:
        pid = os.getpid()
        return (self.machine, self.pid, self.started) == (_machine(), pid, _started(pid))

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, in this machine's table of processes."""
        return self.machine == _machine()

    def is_alive(self, silent_s: float) -> bool:
        """``silent_s``: the age of its last heartbeat."""
        if self.is_here:
            return _started(self.pid) == self.started
        return silent_s < GONE_AFTER_S


@dataclass(frozen=True)
class FolderLock:
    """A folder that this process has."""

    folder: Path
    owner: Owner

    @property
    def elapsed_s(self) -> float:
        """Seconds since the process took the folder: checks, the start of workers and loading included."""
        return time.monotonic() - self.owner.began

    def check(self) -> None:
        """Raises RuntimeError if another run has taken the folder over, which a pause of minutes lets it do."""
        owner = _owner(self.folder)
        if owner is not None and owner.token != self.owner.token:
            raise RuntimeError(
                f"{self.folder} was taken over by process {owner.pid} on {owner.host} ({owner.since}). This run had "
                f"not updated its lock for {GONE_AFTER_S:g} s. This run ends, so that two runs do not write there."
            )


@contextlib.contextmanager
def held(folder: Path) -> Iterator[FolderLock]:
    """Inside, no other run writes into the folder. It is made if it is not there, and goes again if it stays empty.

    Of the processes of torchrun the first has it for all; the others neither look nor write.

    Raises:
        ConfigError: another run has it, or nothing can be written there.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("RANK", "0")) > 0:
        yield FolderLock(folder, Owner.here())
        return
    is_made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner, is_new = _taken(folder)
    except OSError as error:
        why = f"{error.strerror or error} ({error.filename or folder})"
        raise ConfigError(f"output_dir: nothing can be written into {str(folder)!r}: {why}. Name another.") from None
    lock = FolderLock(folder, owner)
    if not is_new:
        yield lock
        return
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(lock, ended), name="rayhelper-lock", daemon=True)
    heart.start()
    try:
        yield lock
    finally:
        ended.set()
        heart.join()
        current = _owner(folder)
        if current is not None and current.token == owner.token:
            (folder / LOCK_FILE).unlink(missing_ok=True)
        if is_made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


def _taken(folder: Path) -> tuple[Owner, bool]:
    """The owner, who is this process, and whether it was not before. Raises ConfigError, OSError.

    An owner elsewhere that was heard of lately may be gone all the same, as a job that was moved to another node is: it
    has the folder if it is heard of again before ``GONE_AFTER_S`` is over.
    """
    file, heard = folder / LOCK_FILE, 0.0
    while True:
        with _one_at_a_time(folder):
            owner = _owner(folder)
            if owner is None or (not owner.is_this_process and not owner.is_alive(_silent_s(file))):
                return _written(file), True
            if owner.is_this_process:
                return owner, False
            beat = file.stat().st_mtime
            if owner.is_here or beat != heard > 0:
                raise ConfigError(
                    f"output_dir: {str(folder)!r} is in use by another run: process {owner.pid} on {owner.host}, since "
                    f"{owner.since}, last seen {_silent_s(file):.0f} s ago. Name another output_dir, or end that run "
                    f"(if it has already ended, remove {file})."
                )
        if not heard:
            logger.info("waiting for a heartbeat of process %d on %s, which has %s", owner.pid, owner.host, folder)
        heard = beat
        time.sleep(LOOK_S)


def _written(file: Path) -> Owner:
    """This process, as the new owner of a folder."""
    owner = Owner.here()
    unfinished = file.with_name(f"{LOCK_FILE}.{owner.token}")
    try:
        unfinished.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        unfinished.replace(file)
    except OSError:  # of a full disk too
        unfinished.unlink(missing_ok=True)
        raise
    return owner


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Of the processes of one machine, one looks and takes at a time; file systems that cannot do that do without."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _beat(lock: FolderLock, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError, RuntimeError):  # removed, or taken over: ``check`` says so
            lock.check()
            os.utime(lock.folder / LOCK_FILE)


def _owner(folder: Path) -> Owner | None:
    """Who has the folder; None: nobody, or what the file says is torn."""
    try:
        return Owner(**json.loads((folder / LOCK_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _silent_s(file: Path) -> float:
    """Seconds since the file was touched, by the clock of its file system."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{LOCK_FILE}.") as now:
        return max(0.0, os.stat(now.name).st_mtime - file.stat().st_mtime)


def _started(pid: int) -> str:
    """When a process started; empty if there is none."""
    if not Path("/proc/self").exists():  # no Linux: whether it lives is all that is known
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return "alive"
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return "" if state in "ZX" else fields[18]


def _machine() -> str:
    """What a pid means something in: a boot of a machine, and a table of processes (containers have their own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
