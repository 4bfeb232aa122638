"""Runs of this user on this machine, and where their ranks are: ``rayhelper stacks``.

A driver opens a door on loopback, and leaves the door's address and key in a file that its user alone can read. Whoever
reads it asks the driver, which asks its workers: while the driver waits for a call, and while workers hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rayhelper.authenticated.own_files import (
    is_alive,
    own_folder,
    process_space,
    read_own,
    remove_own,
    write_own,
)
from rayhelper.errors import ConfigError
from rayhelper.roles.runtime import state
from rayhelper.worker.side_door import Door, ask
from rayhelper.worker.side_door import stacks as own_stacks

_ANSWER_S = 15.0  # for a driver that asks all its workers
_log = logging.getLogger(__name__)


class Announced:
    """A run, until it is closed. ``where_all_are``, ``answers``: what it answers."""

    def __init__(
        self, where_all_are: Callable[[], str], answers: Mapping[str, Callable[[Any], Any]] | None = None
    ) -> None:
        key = secrets.token_bytes(32)
        self.file: Path | None = None
        self.door = Door("127.0.0.1", key, {"where all are": lambda _: where_all_are(), **(answers or {})})
        told = {"door": self.door.address, "key": key.hex(), "since": time.time(), "command": sys.argv[:6]}
        name = f"run-{os.getpid()}.{process_space()}-{secrets.token_hex(4)}.json"
        try:
            self.file = write_own(name, json.dumps(told).encode())
        except (ConfigError, OSError) as error:
            _log.info("rayhelper stacks will not find this run: %s", error)

    def close(self) -> None:
        if self.file is not None:
            remove_own([self.file])
        self.door.close()


def where_all_are() -> str:
    """The stacks of all ranks of the run of this process, as text; of this process if it is no driver of others."""
    told = getattr(state.process, "where_all_are", None)
    return f"process {os.getpid()}\n{own_stacks()}" if told is None else str(told())


def running() -> dict[int, dict[str, Any]]:
    """By process: what the file of its newest run says, of this user on this machine. Files of runs that are gone are
    removed.

    Raises ConfigError if the folder is not this user's alone.
    """
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(own_folder().glob("run-*.json")):
        process, _, space = path.name.removeprefix("run-").partition("-")[0].partition(".")
        if not process.isdigit() or space != str(process_space()):
            continue
        if not is_alive(int(process)):
            remove_own([path])
            continue
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(read_own(path))
            if said["since"] >= found.get(int(process), said)["since"]:
                found[int(process)] = said
    return found


def stacks(process: int | None) -> int:
    """Prints where the ranks of a run are: 0; 1 if it does not answer, 2 if there is no such run, or several."""
    try:
        runs = running()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if process is None and len(runs) == 1:
        process = next(iter(runs))
    if process is None or process not in runs:
        which = f"no run of process {process}" if process is not None else f"{len(runs) or 'no'} runs"
        print(f"error: {which} of this user on this machine{'' if not runs else '. Name one of these processes:'}")
        for number, run in runs.items():
            since_s = time.time() - float(run["since"])
            print(f"  {number}   for {since_s:.0f} s   {' '.join(map(str, run['command']))}")
        return 2
    run = runs[process]
    host, port = run["door"]
    said = ask({0: (host, port)}, bytes.fromhex(run["key"]), "where all are", None, _ANSWER_S)
    print(said.get(0, f"process {process} does not answer: native code holds its interpreter"))
    return 0 if said else 1
