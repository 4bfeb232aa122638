"""The parts of a benchmark, each in a process of its own: what one leaves on a GPU is nothing to the next.

    options = arguments(parser, ["ours", "trl"])                     # --parts, --limit_s, --json
    found = run_parts("benchmarks.gpu.sft", options, PARTS, save)

A part is named by its function, and may say which options are others for it alone: ``--parts ours ours:micro=8``. It
is given the options and a folder that all parts share, and answers with what JSON holds. After each part all that was
found so far is written, so that nothing is lost to one that takes too long; a part that failed is ``{"failed": why}``
and what it had measured so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import so_far
from benchmarks.gpu.steps import our_steps
from benchmarks.origin import origin

Part = Callable[[argparse.Namespace, Path], Any]


def arguments(parser: argparse.ArgumentParser, parts: list[str], *, limit_s: float = 120) -> argparse.Namespace:
    """The options of a benchmark, those of its parts among them."""
    parser.add_argument("--parts", nargs="+", default=parts, metavar="PART[:option=value,...]")
    parser.add_argument("--limit_s", type=float, default=limit_s, help="seconds that one part may take")
    parser.add_argument("--json", help="file to write; default: in the folder OUT, if that is set")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # part, folder: a process of its own
    return parser.parse_args()


def run_parts(
    module: str,
    options: argparse.Namespace,
    parts: Mapping[str, Part],
    save: Callable[[Path], dict[str, Any]],
    *,
    file: str | None = None,
) -> dict[str, Any]:
    """What ``save`` says of the shared folder that it fills, and what each part found, by its name.

    ``module`` is the benchmark, which calls this in every process. ``file``: the name of the JSON file in ``OUT``, if
    not the benchmark's. Ends the process if this is one of a part.

    Raises:
        SystemExit: a part of that name is not there.
    """
    if options.one:
        name, folder = options.one
        _write(Path(folder) / "answer.json", parts[name.partition(":")[0]](_own(options, name), Path(folder)))
        raise SystemExit
    for name in options.parts:
        if name.partition(":")[0] not in parts:
            sys.exit(f"there is no part {name!r}; parts are {', '.join(parts)}")
        _own(options, name)
    target = options.json
    if target is None and "OUT" in os.environ:
        target = Path(os.environ["OUT"]) / f"{file or module.rpartition('.')[2]}.json"
    with tempfile.TemporaryDirectory() as folder:
        found = save(Path(folder))
        for name in options.parts:
            found[name] = _run(module, name, Path(folder), options.limit_s)
            print(f"{name}: {json.dumps(found[name])}", flush=True)
            if target is not None:
                _write(Path(target), {**origin(), "options": vars(options), **found})
    return found


def _run(module: str, name: str, folder: Path, limit_s: float) -> Any:
    answer, measured = folder / "answer.json", folder / "so_far.json"
    answer.unlink(missing_ok=True)
    measured.unlink(missing_ok=True)
    shutil.rmtree(folder / "ours", ignore_errors=True)
    since = time.perf_counter()
    command = [sys.executable, "-m", module, *sys.argv[1:], "--one", name, str(folder)]
    code = run_limited(command, limit_s, env=os.environ | {so_far.VARIABLE: str(measured)})
    taken = time.perf_counter() - since
    if not answer.exists():
        steps = our_steps(folder / "ours", 0)
        return {"failed": code, "part_seconds": taken, "steps": steps, "so_far": so_far.noted(measured)}
    return {**json.loads(answer.read_text()), "part_seconds": taken}


def run_limited(command: list[str], limit_s: float, **settings: Any) -> int | str:
    """The exit code of a command, or words if it took too long; nothing that it started is left."""
    with subprocess.Popen(command, start_new_session=True, **settings) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"took more than {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started: engines have processes of their own


def _own(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options as the part of that name has them."""
    own = argparse.Namespace(**vars(options))
    for given in filter(None, name.partition(":")[2].split(",")):
        key, _, value = given.partition("=")
        if not hasattr(own, key):
            sys.exit(f"{name}: there is no option {key!r}")
        try:
            setattr(own, key, json.loads(value))
        except json.JSONDecodeError:
            setattr(own, key, value)
    return own


def _write(file: Path, found: Any) -> None:
    file.write_text(json.dumps(found, indent=1))
