"""The cluster that all contestants share, and what a reader must know about the machine."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import subprocess
from typing import Any

import psutil

# ms-swift reserves three quarters of a node's CPUs, verl one a worker, and ms-swift cannot do without accelerators.
# Both are invented, so that the contestants fit beside each other. They are only counted; no process is bound to any.
INVENTED_CPUS = 128
INVENTED_GPUS = 64

MEASURED = ("rayhelper", "ray", "torch", "numpy", "ms-swift", "verl", "tensordict", "transformers")


def start(object_store_mb: int) -> None:
    """Starts a quiet cluster of this machine, on loopback."""
    # or Ray starts a process for every invented CPU
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    import ray

    from rayhelper.runtimes.ray.patches import ray_on_loopback

    with ray_on_loopback():
        ray.init(
            address="local",
            num_cpus=INVENTED_CPUS,
            num_gpus=INVENTED_GPUS,
            include_dashboard=False,
            object_store_memory=object_store_mb << 20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )


def stop() -> None:
    import ray

    ray.shutdown()


def free_gb() -> float:
    """GB that processes could still use."""
    return psutil.virtual_memory().available / 1e9


def facts() -> dict[str, Any]:
    """Commit, hardware and versions."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "rayhelper") else ""),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in MEASURED},
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
