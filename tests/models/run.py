"""``python -m tests.models.run``: tries the matrix, prints it, and writes the record and docs/models.md.

python -m tests.models.run                        # every cell of every model; vLLM's take a minute each
python -m tests.models.run --no-vllm              # without vLLM: what the tests try too
python -m tests.models.run --models qwen2 llama   # only these; the others stay as recorded
python -m tests.models.run --parts away           # only vLLM apart, on Ray; or: fast, beside
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from benchmarks.tiny.architectures import ARCHITECTURES, FOR_VLLM, save
from rayhelper import RayHelper
from tests.models import table
from tests.models.cells import AWAY, BESIDE, GROUPS, away_cells, beside_cells, fast_cells

TIMEOUT_S = 600  # for the cells of one model in a process of their own
PARTS = {"beside": BESIDE, "away": AWAY}  # the cells of each part that has a process of its own


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--parts", nargs="+", choices=["fast", *PARTS], default=["fast", *PARTS])
    parser.add_argument(
        "--no-vllm", action="store_const", const=["fast"], dest="parts", help="the same as --parts fast"
    )
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        for found in tried(given.child, given.models):
            print(json.dumps(found), flush=True)
        return
    record = table.read()
    for part in given.parts:
        for name, found in fast(given.models) if part == "fast" else in_own_process(part, given.models):
            record[name] = record.get(name, {}) | found
            for cell, told in found.items():
                print(f"{name:20} {cell:18} {told}", flush=True)
            table.write(record)
    print(table.page(record))


def fast(names: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Models, each with what came out of its fast cells."""
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            yield name, fast_cells(name, save(name, Path(place) / "model"), Path(place))


def tried(part: str, names: list[str]) -> Iterator[dict[str, str]]:
    """For each model, what came out of the cells of a part with vLLM, in this process."""
    session = RayHelper.session(GROUPS) if part == "away" else contextlib.nullcontext()
    cells = away_cells if part == "away" else beside_cells
    with session:
        for name in names:
            with tempfile.TemporaryDirectory() as place:
                yield cells(name, save(name, Path(place) / "model", **FOR_VLLM.get(name, {})), Path(place))


def in_own_process(part: str, names: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """As ``fast``. Models share a process, until one ends it or takes too long: then that is what came out for it."""
    left = list(names)
    while left:
        command = [sys.executable, "-m", "tests.models.run", "--child", part, "--models", *left]
        with tempfile.TemporaryFile("w+") as log, started(command, log) as lines:
            for line in lines:
                yield left.pop(0), line
            if left:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["without a word"])[-1]
                yield left.pop(0), dict.fromkeys(PARTS[part], f"fails: the process ended: {last[:150]}")


@contextlib.contextmanager
def started(command: list[str], log: IO[str]) -> Iterator[Iterator[dict[str, str]]]:
    """Inside, the JSON objects that a process prints, until it ends or prints none for ``TIMEOUT_S``."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    assert process.stdout is not None
    timer: threading.Timer | None = None

    def end() -> None:
        print(f"no answer within {TIMEOUT_S} s", file=log, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def objects() -> Iterator[dict[str, str]]:
        nonlocal timer
        while True:
            timer = threading.Timer(TIMEOUT_S, end)
            timer.start()
            line = next((line for line in process.stdout if line.startswith("{")), None)
            timer.cancel()
            if line is None:
                return
            yield json.loads(line)

    try:
        yield objects()
    finally:
        if timer is not None:
            timer.cancel()
        end_of(process)


def end_of(process: subprocess.Popen[str]) -> None:
    """The process and its children are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
