"""The key of a torchrun run: what its processes know and nobody else does.

torchrun's own store has no password, so the key never goes through it. ``RAYHELPER_KEY`` in the environment is the
secret of all nodes. Without it the processes of one node share a file that this user alone can read: one of them writes
it, the others find its name in the store, and it is removed once all have read it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayhelper.authenticated.own_files import is_alive, own_folder, process_space, read_own, remove_own, write_own
from rayhelper.authenticated.sealing import TAG_BYTES, code
from rayhelper.errors import ConfigError

VARIABLE = "RAYHELPER_KEY"
_MIN_LENGTH = 16  # of the variable's value
_SECRET_BYTES = 32
_NAME = re.compile(r"(\d+)\.(\d+)-([0-9a-f]{32})")  # process, its space of process ids, what is of no meaning


class RunKey:
    """What a process of the run knows.

    store: that of this exchange; it gets the name of the file, which is no secret.
    """

    def __init__(self, store: Any) -> None:
        """Raises ConfigError: the variable is too short, or the file cannot be used."""
        self.node = node_of_run()
        self._file: Path | None = None
        self.files: list[Path] = []  # of ``file_for``
        self.first_process = os.getpid()  # of the run; its files are another run's to remove when it has ended
        given = os.environ.get(VARIABLE, "")
        if given and len(given) < _MIN_LENGTH:
            raise ConfigError(f"{VARIABLE} has {len(given)} characters; give it at least {_MIN_LENGTH} random ones.")
        self.is_shared = bool(given) or not has_several_nodes()  # whether all processes of the run have it
        self.secret = code((given.encode() or self._of_node(store)), b"run", _run_id().encode())

    def forget_file(self) -> None:
        """To be called when all have read it."""
        if self._file is not None:
            remove_own([self._file])
            self._file = None

    def close(self) -> None:
        """Removes the files of the run."""
        remove_own(self.files)

    def file_for(self, name: str) -> Path | None:
        """A path in the user's own folder that all processes know; None on several nodes."""
        if not is_one_node():
            return None
        path = own_folder() / _name(self.first_process, code(self.secret, b"file", name.encode()).hex()[:32])
        self.files.append(path)
        return path

    def _of_node(self, store: Any) -> bytes:
        """The secret of this node's processes, which the first of them draws."""
        if store.add(f"key of node {self.node}", 1) == 1:
            name = _name(os.getpid(), secrets.token_hex(16))
            secret = secrets.token_bytes(_SECRET_BYTES)
            with _with_remedy():
                remove_own(_left_over(own_folder()))
                self._file = write_own(name, secret)
            store.set(f"file of node {self.node}", name)
            return secret
        return _read(bytes(store.get(f"file of node {self.node}")).decode("ascii", "replace"))


def has_several_nodes() -> bool:
    """Whether torchrun's environment says so; it is no question for the store, to which strangers can write."""
    size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", size) != size


def is_one_node() -> bool:
    """Whether torchrun's environment says so; a launcher that says neither leaves it open."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")


def node_of_run() -> str:
    """The number of this node."""
    return os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0"))


def _run_id() -> str:
    return " ".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))


@contextlib.contextmanager
def _with_remedy() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} Or set {VARIABLE} to a secret.") from None


def _name(process: int, text: str) -> str:
    return f"{process}.{process_space()}-{text}"


def _left_over(folder: Path) -> list[Path]:
    """The files of runs that were killed."""
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    own = [(path, int(name[1])) for path, name in found if name and int(name[2]) == process_space()]
    return [path for path, process in own if not is_alive(process)]


def _read(name: str) -> bytes:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the run's store names {name[:80]!r} as the file of its key. Another program writes to the store."
        )
    try:
        with _with_remedy():
            path = own_folder() / name
            secret = read_own(path)
    except OSError as error:
        raise ConfigError(
            f"cannot read the run's key ({error}). Processes of one node must have the same user and /tmp; otherwise "
            f"set {VARIABLE} to the same secret for all."
        ) from None
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(f"{path} holds no key: another program writes to the run's store.")
    return secret


class Codes:
    """Codes of what processes send each other in collectives, where the other end is not known.

    secret: the run's; None: not all processes have one, and nothing can be checked.
    nonces: what every process has drawn for this exchange: what was recorded in another is worth nothing here.
    """

    def __init__(self, secret: bytes | None, nonces: list[bytes]) -> None:
        self._key = None if secret is None else code(secret, b"gatherings", *nonces)

    def made(self, rank: int, number: int, body: Any) -> bytes:
        """The code (32 bytes) of what ``rank`` sends in this gathering."""
        if self._key is None:
            return bytes(TAG_BYTES)
        return code(self._key, rank.to_bytes(8, "big"), number.to_bytes(8, "big"), body)

    def fits(self, found: bytes, rank: int, number: int, body: Any) -> bool:
        """Whether the code is that of this process, gathering and body."""
        return hmac.compare_digest(found, self.made(rank, number, body))
