"""``rayhelper examples`` lists the example configurations; ``rayhelper examples copy FOLDER`` copies them to a folder.

The examples are in the installed package, or beside it in a checkout. Paths in a configuration are relative to the
folder in which you start the run (``examples/grpo/addition.py``). In the copies these paths begin with FOLDER.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: rayhelper examples [list | copy FOLDER]"
NAME = "examples"
OWN = re.compile(r"(?<![\w/.-])examples/(?=\w)")  # a path that begins in the folder of the examples
WITH_PATHS = {".yaml", ".md", ".py"}


def examples() -> Path:
    """The folder of the examples.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / NAME, package.parent / NAME):
        if any(folder.glob("*/*.yaml")):
            return folder
    raise FileNotFoundError(f"there are no examples in {package}, nor beside it. Install rayhelper again.")


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 all is well, 2 the arguments have no meaning, or the folder is not free."""
    match list(arguments):
        case [] | ["list"]:
            folder = examples()
            print("\n".join(str(file.relative_to(folder)) for file in sorted(folder.glob("*/*.yaml"))))
            print("rayhelper examples copy FOLDER copies them, with all that they use.")
            return 0
        case ["copy"]:
            return _copied(Path(NAME))
        case ["copy", folder] if not folder.startswith("-"):
            return _copied(Path(folder))
        case ["-h" | "--help"]:
            print(f"{USAGE}\n{(__doc__ or '').replace('``', '')}", end="")
            return 0
    print(USAGE, file=sys.stderr)
    return 2


def _copied(folder: Path) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"error: {folder} already exists and is not empty. Name another folder.", file=sys.stderr)
        return 2
    shutil.copytree(
        examples(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "outputs", "run.sh")
    )
    for file in folder.rglob("*"):
        if file.suffix in WITH_PATHS:
            text = file.read_text(encoding="utf-8")
            file.write_text(OWN.sub(f"{folder.as_posix()}/", text), encoding="utf-8")
    print(f"The examples are in {folder}. The first one to run, three minutes without a GPU:")
    print(f"  rayhelper grpo --config {folder / 'grpo' / 'quickstart.yaml'}")
    return 0
