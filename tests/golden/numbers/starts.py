"""Starts the processes that golden runs need, one start after another, and gathers what the runs give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.golden.numbers.cases import DATASETS, ONE_PROCESS, Case
from tests.golden.numbers.process import DONE, FAILURE, PLAIN_ARITHMETIC
from tests.golden.numbers.results import Result, result_of

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
}
TIMEOUT_S = 1800.0
MODULE = "tests.golden.numbers"


def results_of(cases: Sequence[Case], folder: Path) -> tuple[dict[str, Result], dict[str, str]]:
    """What each case gives, and by the names of those that failed, what went wrong. ``folder`` is empty or new."""
    (folder / "data").mkdir(parents=True)
    for name, rows in DATASETS.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = list(dict.fromkeys(case.start for case in cases))
    models = [str(folder / "models")]  # the first process writes them, if it is one
    if starts[0] != ONE_PROCESS:
        started([sys.executable, "-m", f"{MODULE}.models", *models], folder / "models.log", PLAIN_ARITHMETIC)
    results, failures = {}, {}
    for start in starts:
        there = [case for case in cases if case.start == start]
        ended = run_there(start, there, folder, *(models if start == starts[0] == ONE_PROCESS else ()))
        for case in there:
            run = folder / "runs" / case.name
            if (run / FAILURE).exists():
                failures[case.name] = "failed:\n" + (run / FAILURE).read_text()
            elif (run / DONE).exists() or (case.is_command and not ended):
                results[case.name] = result_of(run)
            else:
                failures[case.name] = f"its processes ended early:\n{ended}"
                ended = "as above"
    return results, failures


def run_there(start: str, cases: Sequence[Case], folder: Path, *models: str) -> str:
    """Runs cases in processes that are started once. Returns the end of what they wrote if these failed, else "".

    ``models``: the folder that the process writes the models to before it runs anything.
    """
    jobs = []
    for case in sorted(cases, key=lambda case: str(case.place)):
        output_dir = folder / "runs" / case.name
        output_dir.mkdir(parents=True)
        settings = case.settings(folder / "models", folder / "data", output_dir)
        if case.runtime == "ray-command":  # its workers have of this environment what the library names
            settings["env"] = PLAIN_ARITHMETIC
        (output_dir / "given.yaml").write_text(yaml.safe_dump(settings))
        about = {"name": case.name, "trainer": case.trainer, "place": case.place, "resumes": case.is_resumed}
        jobs.append({**about, "yaml": str(output_dir / "given.yaml"), "folder": str(output_dir)})
    file, log = folder / f"{start}.json", folder / f"{start}.log"
    file.write_text(json.dumps(jobs))
    command = [sys.executable, "-m"]
    if start.startswith("torchrun"):
        elastic = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "torchrun"), "-m"]
        command += ["torch.distributed.run", *elastic]
    is_command = cases[0].is_command
    command += cases[0].command(str(jobs[0]["yaml"])) if is_command else [f"{MODULE}.process", str(file), *models]
    begun = time.monotonic()
    told = started(command, log, {} if start.startswith("vllm") else PLAIN_ARITHMETIC)
    print(f"{start}: {len(cases)} cases in {time.monotonic() - begun:.0f} s", flush=True)
    return told


def started(command: list[str], log: Path, environment: dict[str, str]) -> str:
    """Runs a command to its end. Returns the end of what it wrote if it failed, else ""."""
    with log.open("w") as written:
        to_log: Any = {"stdout": written, "stderr": subprocess.STDOUT}
        env = os.environ | ENVIRONMENT | environment
        code = subprocess.run(command, env=env, cwd=ROOT, timeout=TIMEOUT_S, **to_log).returncode
    return f"{log.read_text()[-3000:]}\n(exit code {code})" if code else ""
