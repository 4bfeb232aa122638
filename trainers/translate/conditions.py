"""The commands of a shell script that sets variables under conditions, as bash itself finds them.

bash evaluates the script's own words alone. It is restricted: it changes no folder, writes no file and starts no
program, as none is on its path. Names that start training stand for a program that writes down its arguments.

What a program would have printed is marked, as in ``shell.py``. If it does not come back in the words of a command, a
condition may depend on it: then nothing is known.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trainers.translate.shell import MARK

BASH_MARK = "@UNKNOWN@"  # a variable of bash cannot hold MARK
GAP = "\x02"  # between the words of a program's call: bash would part the mark at a blank
STARTS = ("python", "python3", "torchrun", "uv", "accelerate")  # what starts a run
NOTE = "rayhelper-note"  # stands for every other program
IDLE = ("mkdir", "tee", "ray", "pip", "pip3", "sleep", "date")  # whose output decides nothing
STUB = """#!/bin/sh
name="${{0##*/}}"
[ "$name" = {note} ] && {{ name="$1"; shift; }}
printf '%s\\0' "${{0##*/}}" "$name" "$@" > '{calls}'/$$
IFS='{gap}'
printf '%s' "{mark}\\$($name{gap}$*){mark}"
"""
PREFACE = f'set -u\ncommand_not_found_handle() {{ {NOTE} "$@"; }}\n'  # what nobody sets is no empty text
OF_PROGRAMS = re.compile(
    r"(?m)(?:^|[;&|(]|\bthen|\belse|\bdo)\s*(?:if|elif|while|until)\s+(?!\[|\(\(|!\s*\[|test\s|true\b|false\b)"
)
SILENCED = re.compile(r"\s*(?:\d|&)?>>?\s*(?:/dev/null|&\d)")
FAILED = re.compile(r": restricted|readonly variable|syntax error|unbound variable|operand expected")
LIMIT_S = 10.0


def evaluated(text: str, environment: Mapping[str, str]) -> list[list[str]] | None:
    """The commands that start a run, each with its words; None: bash is not there, or it cannot know them."""
    bash = shutil.which("bash")
    if bash is None or OF_PROGRAMS.search(text):
        return None
    with tempfile.TemporaryDirectory() as folder:
        record, path = Path(folder) / "record", Path(folder) / "path"  # a file a call: those of a pipe run at once
        record.mkdir()
        path.mkdir()
        for name in (*STARTS, NOTE):
            (path / name).write_text(STUB.format(calls=record, mark=BASH_MARK, gap=GAP, note=NOTE))
            (path / name).chmod(0o700)
        known = {name: value for name, value in environment.items() if not name.startswith(("BASH", "PATH"))}
        try:
            done = subprocess.run(
                [bash, "--restricted", "--noprofile", "--norc", "-c", PREFACE + SILENCED.sub("", text), "bash"],
                env={**known, "PATH": str(path), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return None
        files = sorted(record.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        calls = [file.read_text(errors="replace").split("\0")[:-1] for file in files]
    if FAILED.search(done.stderr):
        return None
    started = [words for stub, *words in calls if stub != NOTE and "-c" not in words]
    for words in (words for stub, *words in calls if words not in started):
        asked = f"{BASH_MARK}$({GAP.join(words)}){BASH_MARK}"
        if words[0] not in IDLE and not any(asked in word for one in started for word in one):
            return None
    return [[word.replace(BASH_MARK, MARK).replace(GAP, " ") for word in words] for words in started]
