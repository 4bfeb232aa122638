"""Which lines of logging the console shows, which a process's file has, and that nothing stays behind."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayhelper import logs


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a handler on the root logger writes to stderr; logging and variables are as before in the end."""
    root, written = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=written, stdout=None))
    handler, level, variables = logging.StreamHandler(written), root.level, environment()
    library = logging.getLogger("vllm")  # another test may have imported vLLM, which configures it
    configured = library.level, library.propagate
    library.setLevel(logging.NOTSET)
    library.propagate = True
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield written
    finally:
        library.setLevel(configured[0])
        library.propagate = configured[1]
        root.removeHandler(handler)
        assert (root.level, handler.filters) == (logging.INFO, [])
        root.setLevel(level)
        assert environment() == variables


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def speak() -> None:
    for name in ("mine", "vllm.part"):
        for level in ("debug", "info", "warning"):
            getattr(logging.getLogger(name), level)("%s %s", name, level)


ALL = [f"{name} {level}" for name in ("mine", "vllm.part") for level in ("debug", "info", "warning")]
SHOWN = {
    "passive": ["mine info", "mine warning", "vllm.part warning"],
    "debug": ALL,
    "info": [line for line in ALL if "debug" not in line],
    "warning": ["mine warning", "vllm.part warning"],
    "error": [],
}


@pytest.mark.parametrize("level", SHOWN)
def test_a_level_says_what_the_console_shows_and_the_file_has_the_rest(
    level: str, console: io.StringIO, tmp_path: Path
) -> None:
    with logs.apart(level), logs.kept(tmp_path / "logs", "driver"):
        speak()
    assert console.getvalue().splitlines() == SHOWN[level]
    kept = (tmp_path / "logs" / "driver.log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in kept] == [
        line for line in ALL if level == "debug" or "debug" not in line
    ]


def test_libraries_draw_no_bars_unless_the_level_or_the_user_wants_them(
    console: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in logs.WITHOUT_PROGRESS:
        monkeypatch.delenv(name, raising=False)
    with logs.apart("passive"):
        assert {name: os.environ[name] for name in logs.WITHOUT_PROGRESS} == logs.WITHOUT_PROGRESS
        assert not logs.shows_progress()
    with logs.apart("info"):
        assert not set(logs.WITHOUT_PROGRESS) & set(os.environ)
        assert logs.shows_progress()
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    with logs.apart("passive"):
        assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    assert logs.shows_progress(), "outside, nothing is quiet"
    for name in logs.WITHOUT_PROGRESS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.undo()


def test_what_is_outdated_within_libraries_is_a_line_and_other_warnings_are_warnings(console: io.StringIO) -> None:
    def warn() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = shown
            with logs.apart("passive"):
                warnings.warn_explicit("old", FutureWarning, "/a/site-packages/b.py", 1)
                warnings.warn_explicit("mine is old", FutureWarning, "/a/mine.py", 1)
                warnings.warn_explicit("wrong", UserWarning, "/a/site-packages/b.py", 1)
            assert warnings.showwarning is shown

    told: list[str] = []

    def shown(message: Warning | str, *_: object) -> None:
        told.append(str(message))

    warn()
    assert told == ["mine is old", "wrong"]
    assert console.getvalue() == ""


def test_a_folder_that_cannot_be_written_is_left_alone(console: io.StringIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with logs.apart("passive"), logs.kept(tmp_path / "file" / "logs", "driver"):
        assert logs.FOLDER not in os.environ, "workers then show all that they have"
        speak()
    assert console.getvalue().splitlines() == SHOWN["passive"]


def test_a_program_without_logging_keeps_pythons_own_way(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    with logs.kept(tmp_path / "logs", "driver"):
        assert root.handlers == before
    assert not (tmp_path / "logs").exists()


def test_a_worker_writes_beside_the_driver_and_is_set_up_once(
    console: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    console_handler = next(one for one in root.handlers if getattr(one, "stream", None) is console)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which a worker never puts back
    with monkeypatch.context() as variables:
        variables.setenv(logs.FOLDER, str(tmp_path))
        variables.setenv(logs.LEVEL, "passive")
        count = len(root.handlers)
        logs.on_worker("train-0")
        logs.on_worker("train-0")
        assert len(root.handlers) == count + 1
        assert len(console_handler.filters) == 1
        speak()
        file = root.handlers[-1]
        root.removeHandler(file)
        file.close()
        console_handler.filters.clear()
    assert console.getvalue().splitlines() == SHOWN["passive"]
    assert "vllm.part info" in (tmp_path / "train-0.log").read_text()
