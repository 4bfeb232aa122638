"""The decorators keep signatures, types and docstrings: mypy, pyright and ``inspect`` agree with the classes here."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.typing.user_class import Trainer

FOLDER = Path(__file__).parent
RIGHT = [FOLDER / "user_class.py", FOLDER / "user_parts.py"]
WRONG = [FOLDER / "wrong_uses.py", FOLDER / "wrong_parts.py"]
SHOWN = {  # what an editor shows of a method
    "update": "BoundRoleMethod[(batch: list[int], scale: float = 1), list[float]]",
    "judge": "BoundRoleMethod[(text: str), CoroutineType[Any, Any, bool]]",
    "count": "BoundRoleMethod[(stop: int), Iterator[int]]",
    "scaled": "BoundRoleMethod[(float, by: float = 2), float]",
    "name": "BoundRoleMethod[(suffix: str), str]",
    "loss": "float",
    "update.defer": "(batch: list[int], scale: float = 1) -> Future[list[float]]",
}
Problems = set[tuple[str, int]]


def mypy(*files: Path) -> tuple[Problems, str]:
    """Where mypy finds an error, and all it says."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]  # strict by pyproject.toml, as ``make check`` is
    said = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert said.returncode in (0, 1), said.stdout + said.stderr
    return {(Path(file).name, int(line)) for file, line in re.findall(r"^(.+?):(\d+): error:", said.stdout, re.M)}, (
        said.stdout
    )


def pyright(*files: Path) -> list[dict[str, Any]]:
    """What pyright says: each with its file, range, severity and message."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    said = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert said.returncode in (0, 1), said.stdout + said.stderr
    found: list[dict[str, Any]] = json.loads(said.stdout)["generalDiagnostics"]
    return found


def marked(*files: Path) -> Problems:
    """The lines of files that say that they are wrong."""
    lines = [(file.name, k, line) for file in files for k, line in enumerate(file.read_text().splitlines(), 1)]
    return {(name, k) for name, k, line in lines if line.endswith("  # error")}


def test_mypy_accepts_what_is_right_and_flags_what_is_wrong() -> None:
    found, said = mypy(*RIGHT, *WRONG)
    assert len(marked(*WRONG)) >= 50
    assert found == marked(*WRONG), said


def test_pyright_accepts_what_is_right_and_flags_what_is_wrong(tmp_path: Path) -> None:
    asking = tmp_path / "asking.py"
    asked = "".join(f"    reveal_type(trainer.{name})\n" for name in SHOWN)
    asking.write_text(f"from tests.typing.user_class import Trainer\n\n\ndef ask(trainer: Trainer) -> None:\n{asked}")
    said = pyright(*RIGHT, *WRONG, asking)
    errors = [each for each in said if each["severity"] == "error"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in errors}
    assert found == marked(*WRONG), errors
    shown = [each["message"] for each in said if each["severity"] == "information"]
    assert shown == [f'Type of "trainer.{name}" is "{kind}"' for name, kind in SHOWN.items()]


@pytest.mark.parametrize("of", [Trainer(0.1), Trainer], ids=["of an instance", "of the class"])
def test_a_method_shows_the_docstring_and_name_it_was_written_with(of: Any) -> None:
    assert inspect.getdoc(of.update) == "The batch, scaled."
    assert of.update.__name__ == "update"


def test_a_method_of_an_instance_shows_the_signature_it_was_written_with() -> None:
    trainer = Trainer(0.1)
    assert str(inspect.signature(trainer.update)) == "(batch: 'list[int]', scale: 'float' = 1.0) -> 'list[float]'"
    assert str(inspect.signature(trainer.shifted)) == "(value: 'int', by: 'int' = 1) -> 'int'"
    assert str(inspect.signature(trainer.name)) == "(suffix: 'str') -> 'str'"
    assert str(inspect.signature(Trainer)) == "(lr: 'float') -> 'None'"
    assert inspect.iscoroutinefunction(trainer.judge)
    assert inspect.isgeneratorfunction(trainer.count)
    assert inspect.isasyncgenfunction(trainer.tokens)
