"""What a process of golden runs does: the runs of one batch, one after another, through doors that users have too.

    python -m tests.golden.numbers.process JOBS.json [MODELS]

Under torchrun each of its processes comes here. A job is a trainer, the YAML file of its keys, and its output folder.
MODELS is a folder that the models are written to first.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import runpy
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.golden.numbers.cases import CLASSES, GROUPS
from tests.golden.numbers.models import save_models

Job = dict[str, Any]
FAILURE, DONE = "failure.txt", "done"  # what a job leaves in its folder
PLAIN_ARITHMETIC = {  # what every x86-64 processor does alike
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "PRESCOTT",
    "NPY_DISABLE_CPU_FEATURES": "AVX F16C FMA3 AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-FMA,-FMA4",
}


def main(file: Path, *models: Path) -> None:
    for folder in models:
        save_models(folder)
    jobs: list[Job] = json.loads(file.read_text())
    with cluster() if any(uses_ray(job) for job in jobs) else contextlib.nullcontext():
        for place, there in itertools.groupby(jobs, key=lambda job: job["place"]):
            with session(place):
                for job in there:
                    begun = time.monotonic()
                    told_failure(job)
                    print(f"{job['name']}: {time.monotonic() - begun:.1f} s", flush=True)


def uses_ray(job: Job) -> bool:
    return str(job["place"]).startswith("ray")


@contextlib.contextmanager
def session(place: str | None) -> Iterator[None]:
    """Inside, trainers find the workers of that place, if there is one."""
    if place is None:
        yield
        return
    from rayhelper import RayHelper

    runtime: Any = "ray" if place.startswith("ray") else "inprocess"
    groups = GROUPS[place]
    if runtime == "ray":
        env = {name: os.environ[name] for name in PLAIN_ARITHMETIC if name in os.environ}
        groups = {name: {**group, "env": env} for name, group in groups.items()}
    with RayHelper.session(groups, runtime=runtime):
        yield


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=256 * 1024 * 1024,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()


def told_failure(job: Job) -> None:
    """Runs a job. What goes wrong is kept in its folder, and the next one runs; processes of torchrun end with it."""
    try:
        run(job)
        (Path(job["folder"]) / DONE).touch()
    except Exception:
        (Path(job["folder"]) / FAILURE).write_text(traceback.format_exc())
        if "RANK" in os.environ:
            raise


def run(job: Job) -> None:
    """Runs a job; one that is to be resumed is taken up again at its first checkpoint, as if it had ended there."""
    door = by_command if job["place"] is None else by_class
    door(job, [])
    if job["resumes"]:
        folder = Path(job["folder"])
        if job["trainer"] == "sampling":
            door(job, ["--num_sampling_batches", "100", "--resume", "true"])
            return
        checkpoint = min(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder / "final")
        door(job, ["--resume_from_checkpoint", str(checkpoint)])


def by_command(job: Job, further: list[str]) -> None:
    """What ``python -m trainers.grpo --config x.yaml`` does, in this process."""
    name = job["trainer"]
    module, first = ("trainers", [name]) if name == "pretrain" else (f"trainers.{name}", [])
    with patch.object(sys, "argv", [module, *first, "--config", job["yaml"], *further]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{job['name']} ended with {end.code}") from end


def by_class(job: Job, further: list[str]) -> None:
    """What a user's script does: ``GRPOTrainer(config).train()``."""
    from trainers.cli import load_config

    module, trainer, config = CLASSES[job["trainer"]]
    argv = ["--config", job["yaml"], *further]
    named(module, f"{trainer}Trainer")(load_config(named(module, f"{config}Config"), argv)).train()


def named(module: str, name: str) -> Any:
    """The class of that name, in ``trainers.<module>`` or beside it."""
    for place in (f"trainers.{module}", f"trainers.{module}.config", f"trainers.{module}_config"):
        with contextlib.suppress(ModuleNotFoundError):
            found = getattr(importlib.import_module(place), name, None)
            if found is not None:
                return found
    raise ImportError(f"trainers.{module} has no {name}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
