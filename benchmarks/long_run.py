"""What does a long run gather, and what does a killed run leave? Memory, descriptors, threads, shared memory, files.

    python -m benchmarks.long_run --steps 2000 --use_ray false [--trainer sft]   # one process
    python -m benchmarks.long_run --steps 2000 --use_ray true                    # a learner and a worker that generates
    python -m benchmarks.long_run --kill 100                                     # on Ray; the driver is killed then

A tiny model is trained by the command that users type, with a checkpoint every 50 steps and two kept. While it trains,
this process reads /proc. A row of the table is the smallest of what was seen in the tenth of a run around its step:
what comes and goes in a step is left out. "ours" are the driver, its workers and their children; "Ray" are its daemons.

The exit code is 1 if anything grows by more than ``BOUNDS`` from the first row to the last, or if ten seconds after
``--kill`` a process is left, a file in /dev/shm or a listening socket. Ray keeps its logs on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.origin import origin
from benchmarks.tiny.text import save_tiny

MIB = 2**20
POLL_S = 0.5
GONE_AFTER_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
DAEMONS = ("/gcs_server", "/raylet/raylet", "dashboard", "runtime_env", "log_monitor", "monitor.py")
ROLES = {
    "sft": {"learner": (2, ["default"])},
    "grpo": {"learner": (1, ["train", "reference", "teacher", "reward"]), "engine": (1, ["rollout"])},
}


@dataclass(frozen=True)
class Usage:
    """What a run holds at one moment."""

    ours_mib: float  # memory of no other process, summed
    largest_mib: float  # of one of these processes
    ours_descriptors: int
    ours_threads: int
    ours_processes: int
    ray_mib: float
    ray_descriptors: int
    ray_threads: int
    shared_files: int
    shared_mib: float
    output_kib: float  # the run's folder without metrics.jsonl, which has a line per step
    logs_kib: float  # Ray's folder of this run


# How much more the last row may have than the first one. Ray's control store keeps a record of its own of every worker
# and of events, and writes it to its logs.
BOUNDS = {
    "ours_mib": 32.0,
    "largest_mib": 24.0,
    "ours_descriptors": 4,
    "ours_threads": 4,
    "ours_processes": 0,
    "ray_mib": 64.0,
    "ray_descriptors": 8,
    "ray_threads": 8,
    "shared_files": 0,
    "shared_mib": 1.0,
    "output_kib": 64.0,
    "logs_kib": 1024.0,
}


def config_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The keys of the run."""
    config: dict[str, Any] = {
        "model": save_tiny(folder / "model"),
        "output_dir": str(folder / "run"),
        "dtype": "float32",
        "max_steps": options.steps,
        "save_steps": 50,
        "save_total_limit": 2,
        "logging_steps": 100,
        "report_to": ["none"],
        "use_ray": options.use_ray,
    }
    if options.use_ray:
        config["device_groups"] = {
            name: {"device": "CPU", "ranks": ranks, "workers": roles}
            for name, (ranks, roles) in ROLES[options.trainer].items()
        }
    rows: list[dict[str, str]]
    if options.trainer == "sft":
        rows = [{"text": f"{k} is the number after {k - 1}"} for k in range(64)]
        config |= {"per_device_train_batch_size": 2, "global_batch_size": 4}
    else:
        rows = [{"prompt": f"{k} is"} for k in range(64)]
        config |= {
            "per_device_train_batch_size": 4,
            "global_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 4,
            "reward_funcs": ["tests.e2e.runs.evenness"],
        }
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config | {"dataset": str(folder / "rows.jsonl")}


@contextlib.contextmanager
def started(options: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, the run; whatever is left of it afterwards is killed."""
    (folder / "keys.yaml").write_text(yaml.safe_dump(config_of(options, folder)))
    environment = os.environ | {"TMPDIR": str(folder / "t"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    (folder / "t").mkdir()
    command = [sys.executable, "-m", f"trainers.{options.trainer}", "--config", str(folder / "keys.yaml")]
    with (folder / "console.log").open("wb") as console:
        to_console: dict[str, Any] = {"stdout": console, "stderr": subprocess.STDOUT}
        driver = subprocess.Popen(command, env=environment, start_new_session=True, **to_console)
    seen: set[psutil.Process] = set()
    try:
        seen.add(psutil.Process(driver.pid))
        yield driver
    finally:
        for process in [*processes_of(driver.pid, folder), *seen]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        driver.wait()


def processes_of(driver: int, folder: Path) -> list[psutil.Process]:
    """The driver, all that it started, and what has the run's folder in its environment though its parent is gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.pid == driver or process.environ().get("TMPDIR") == str(folder / "t")
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def usage_of(driver: int, folder: Path) -> Usage:
    ours, ray = [], []
    for process in processes_of(driver, folder):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            seen = (process.memory_full_info().uss / MIB, process.num_fds(), process.num_threads())
            (ray if any(name in line for name in DAEMONS) else ours).append(seen)
    shared = [entry.stat().st_size for entry in of_run(driver, folder)]
    return Usage(
        ours_mib=sum(memory for memory, _, _ in ours),
        largest_mib=max((memory for memory, _, _ in ours), default=0.0),
        ours_descriptors=sum(descriptors for _, descriptors, _ in ours),
        ours_threads=sum(threads for _, _, threads in ours),
        ours_processes=len(ours),
        ray_mib=sum(memory for memory, _, _ in ray),
        ray_descriptors=sum(descriptors for _, descriptors, _ in ray),
        ray_threads=sum(threads for _, _, threads in ray),
        shared_files=len(shared),
        shared_mib=sum(shared) / MIB,
        output_kib=size_of(folder / "run", without="metrics.jsonl"),
        logs_kib=size_of(folder / "t" / "ray"),
    )


def of_run(driver: int, folder: Path) -> list[Path]:
    """The files of shared memory that processes of the run have open, or that were not there before it."""
    entries = {entry for entry in SHARED_MEMORY.iterdir() if entry.name not in BEFORE}
    return sorted(entry for entry in entries if entry.is_file())


BEFORE: set[str] = set()  # names in /dev/shm


def size_of(folder: Path, without: str = "") -> float:
    """KiB of all files below."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and path.name != without:
                total += path.stat().st_size
    return total / 1024


def steps_done(folder: Path) -> int:
    lines = folder / "run" / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def watched(options: argparse.Namespace, folder: Path) -> dict[int, Usage]:
    """By the step, what the run held around it."""
    seen: list[tuple[int, Usage]] = []
    with started(options, folder) as driver:
        while driver.poll() is None:
            time.sleep(POLL_S)
            step = steps_done(folder)
            with contextlib.suppress(psutil.Error):
                seen.append((step, usage_of(driver.pid, folder)))
    if driver.returncode or steps_done(folder) < options.steps:
        raise SystemExit(f"the run ended with {driver.returncode}:\n{(folder / 'console.log').read_text()[-3000:]}")
    around = options.steps // 20
    rows = {}
    for step in sorted({options.steps // 10, options.steps // 2, options.steps - around}):
        near = [usage for at, usage in seen if abs(at - step) <= around and at < options.steps]
        if not near:
            raise SystemExit(f"nothing was seen around step {step}: take more steps")
        rows[step] = smallest(near)
    return rows


def smallest(seen: list[Usage]) -> Usage:
    return Usage(**{one.name: min(getattr(usage, one.name) for usage in seen) for one in fields(Usage)})


def grown(rows: dict[int, Usage]) -> list[str]:
    """What grew by more than its bound, in words."""
    first, last = rows[min(rows)], rows[max(rows)]
    return [
        f"{name} grew from {getattr(first, name):.1f} to {getattr(last, name):.1f}; at most {bound:g} more is expected"
        for name, bound in BOUNDS.items()
        if getattr(last, name) - getattr(first, name) > bound
    ]


def killed(options: argparse.Namespace, folder: Path) -> list[str]:
    """What is left of a run ten seconds after kill -9 of its driver, in words."""
    with started(options, folder) as driver:
        while steps_done(folder) < options.kill:
            if driver.poll() is not None:
                raise SystemExit((folder / "console.log").read_text()[-3000:])
            time.sleep(POLL_S)
        before = processes_of(driver.pid, folder)
        held = usage_of(driver.pid, folder)
        ports = listening(before)
        print(f"at the kill: {len(before)} processes, {len(ports)} ports, {held.shared_files} files in /dev/shm")
        os.kill(driver.pid, signal.SIGKILL)
        begun = time.monotonic()
        while left := [process for process in processes_of(driver.pid, folder) if process.pid != driver.pid]:
            if time.monotonic() - begun > GONE_AFTER_S:
                break
            time.sleep(0.1)
        print(f"processes were gone after {time.monotonic() - begun:.1f} s")
        time.sleep(max(0.0, GONE_AFTER_S - (time.monotonic() - begun)))
        told = [
            f"process {process.pid}: {' '.join(process.cmdline())[:120]}" for process in left if process.is_running()
        ]
        told += [f"file {path}" for path in of_run(driver.pid, folder)]
        told += [f"port {port}" for port in ports & listening(psutil.process_iter())]
    print(f"files that stay: {size_of(folder / 't'):.0f} KiB in the temporary folder (logs of Ray)")
    return told


def listening(processes: Any) -> set[tuple[str, int]]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {tuple(one.laddr) for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    return found


def table(rows: dict[int, Usage]) -> str:
    """As Markdown."""
    steps = sorted(rows)
    lines = [["", *(f"step {step}" for step in steps), "may grow by"]]
    for one in fields(Usage):
        values = [getattr(rows[step], one.name) for step in steps]
        written = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
        lines.append([one.name, *written, f"{BOUNDS[one.name]:g}"])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--trainer", choices=list(ROLES), default="grpo")
    parser.add_argument("--use_ray", choices=["true", "false"], default="false")
    parser.add_argument("--kill", type=int, help="kill the driver after this step instead, on Ray")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.use_ray = options.use_ray == "true" or options.kill is not None
    BEFORE.update(entry.name for entry in SHARED_MEMORY.iterdir())
    with tempfile.TemporaryDirectory(prefix="l", ignore_cleanup_errors=True) as place:
        if options.kill is not None:
            wrong = killed(options, Path(place))
        else:
            begun = time.monotonic()
            rows = watched(options, Path(place))
            took_s = time.monotonic() - begun
            print(f"{options.trainer}, use_ray {options.use_ray}: {options.steps} steps in {took_s:.0f} s")
            print(table(rows))
            wrong = grown(rows)
            if options.json:
                found = {str(step): usage.__dict__ for step, usage in rows.items()}
                options.json.write_text(json.dumps({**origin(), "rows": found}, indent=2))
    print("\n".join(wrong) or "nothing is left" if options.kill is not None else "\n".join(wrong) or "nothing grows")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
