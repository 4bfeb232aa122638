"""Files of other systems as they are shipped: what is read of them, and the count of those that are translated."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.translated import outcome
from rayhelper.text import parse_text
from tests.trainers.test_translate import ROLL, SCRIPT, translated


def test_numbers_with_underscores_are_read_as_their_system_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roll = ROLL.replace("max_steps: 500", "max_steps: 1_000")
    assert parse_text(translated(roll, "rlvr.yaml", tmp_path, capsys)[0], "ours")["max_steps"] == 4 * 1000
    verl = SCRIPT.replace("trainer.total_epochs=3", "trainer.total_training_steps=1_000")
    assert parse_text(translated(verl, "run.sh", tmp_path, capsys)[0], "ours")["max_steps"] == 4 * 1000


def test_a_file_that_is_no_yaml_is_refused_and_counted(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("actor_train: [1\n")
    word, (reason,) = outcome(tmp_path / "x.yaml", None, tmp_path)
    assert word == "refused"
    assert "is not valid YAML" in reason
    assert "line 2, column 1" in reason
