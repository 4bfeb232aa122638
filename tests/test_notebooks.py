"""The notebooks of examples/notebooks: their cells run from above to below, and print what the file shows."""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"


def run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """How many code cells ran, each with the output that stands under it; in a module of their own, as in Jupyter."""
    notebook: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]) == (4, {"name": "python"})
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        source, file = "".join(cell["source"]), f"<{name} {number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), module.__dict__)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert capsys.readouterr().out == shown, source
    return len(cells)


def test_the_notebook_of_ones_own_trainer_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("own_trainer.ipynb", tmp_path, monkeypatch, capsys) == 8


def test_the_notebook_from_in_process_to_ray_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ray_cluster: None
) -> None:
    assert run("in_process_to_ray.ipynb", tmp_path, monkeypatch, capsys) == 6
