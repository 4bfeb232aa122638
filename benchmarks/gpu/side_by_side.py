"""Runs benchmarks beside one another, each on GPUs of its own: a host of several is held no longer than need be.

    python -m benchmarks.gpu.side_by_side FILE [--seconds 570]

A line of FILE is a job: how many GPUs, seconds it may take, a name, a command. Jobs begin in the order of the file, as
soon as their GPUs are free. When a job ends, what it printed goes to ``$OUT/logs.txt``, its JSON files and how it ended
to ``$OUT/found.json``. ``--seconds`` ends all that is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

THREADS = "12"  # of a job: the cores of a host are for all of its GPUs


@dataclass
class Job:
    num_gpus: int
    limit_s: float
    name: str
    command: str
    gpus: list[str] = field(default_factory=list)
    began: float = 0.0
    process: Any = None


def jobs_of(text: str) -> list[Job]:
    lines = [line.split(maxsplit=3) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [Job(int(gpus), float(limit), name, command) for gpus, limit, name, command in lines]


def visible() -> list[str]:
    """The GPUs that jobs may have. (Not asked of torch: a process that has seen a GPU keeps some of its memory.)"""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return [str(k) for k in range(listed.count("GPU "))]


def begin(job: Job, folder: Path) -> None:
    own = folder / job.name
    own.mkdir(parents=True)
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(job.gpus),
        "OMP_NUM_THREADS": THREADS,
        "PYTHONUNBUFFERED": "1",
        "OUT": str(own),
        "RAY_TMPDIR": str(own),
    }
    job.began = time.monotonic()
    with (own / "log").open("w") as log:
        job.process = subprocess.Popen(
            job.command, shell=True, env=os.environ | env, stdout=log, stderr=log, start_new_session=True
        )
    print(f"{job.name}: begins on {job.gpus}", flush=True)


def end(job: Job) -> None:
    """Whatever it started ends with it: parts of benchmarks are in process groups of their own."""
    started = psutil.Process(job.process.pid).children(recursive=True)
    for process in [job.process, *started]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(exist_ok=True)
    folder = Path("/tmp") / f"sbs{os.getpid()}"
    waiting, running, free = jobs_of(options.file.read_text()), list[Job](), visible()
    if too_many := [job.name for job in waiting if job.num_gpus > len(free)]:
        sys.exit(f"{len(free)} GPUs are there, too few for {', '.join(too_many)}")
    found: dict[str, Any] = {}
    began = time.monotonic()
    while waiting or running:
        late = time.monotonic() - began > options.seconds
        while waiting and len(free) >= waiting[0].num_gpus and not late:
            job = waiting.pop(0)
            job.gpus, free = free[: job.num_gpus], free[job.num_gpus :]
            begin(job, folder)
            running.append(job)
        if late:
            waiting.clear()
        for job in list(running):
            seconds = time.monotonic() - job.began
            if job.process.poll() is None and not late and seconds < job.limit_s:
                continue
            stopped = job.process.poll() is None
            if stopped:
                end(job)
            running.remove(job)
            free += job.gpus
            ended = "stopped" if stopped else job.process.returncode
            print(f"{job.name}: {ended} after {seconds:.0f} s", flush=True)
            with (out / "logs.txt").open("a") as logs:
                log = (folder / job.name / "log").read_text(errors="replace")
                logs.write(f"===== {job.name}: {job.command}\n{log}\n")
            results = {file.stem: json.loads(file.read_text()) for file in (folder / job.name).glob("*.json")}
            found[job.name] = {"command": job.command, "ended": ended, "seconds": seconds, **results}
            (out / "found.json").write_text(json.dumps(found, indent=1))
        time.sleep(0.5)


if __name__ == "__main__":
    main()
