"""The decorators keep signatures and types: mypy agrees with every comment of ``user_class.py``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("user_class.py")


def test_mypy_accepts_what_is_right_and_flags_what_is_wrong() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent", str(SOURCE)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=SOURCE.parents[2]).stdout
    found = {(int(line), code) for line, code in re.findall(r":(\d+): error: .*\[([a-z-]+)\]", printed)}
    lines = SOURCE.read_text().splitlines()
    wanted = {(k, line.rpartition("# E: ")[2]) for k, line in enumerate(lines, 1) if "# E: " in line}
    assert len(wanted) == 7
    assert found == wanted, printed
