"""Where a figure comes from."""

from __future__ import annotations

import os
import platform
import subprocess


def origin() -> dict[str, str]:
    """The commit and the machine, as a benchmark's JSON names them."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"commit": commit, "machine": machine}
