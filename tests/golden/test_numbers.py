"""A few of the golden runs give the numbers of the committed file; ``python -m tests.golden.numbers.run`` runs all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.numbers.cases import CASES
from tests.golden.numbers.results import first_difference
from tests.golden.numbers.run import FILE, differences
from tests.golden.numbers.starts import results_of

CHECKED = (
    *("sft/fsdp/off", "dpo/fsdp/inprocess", "grpo/fsdp/inprocess", "ppo/resume/off", "gkd/lora/off"),
    *("sampling/fsdp/off", "reward/fsdp/inprocess"),
)


def test_runs_give_the_numbers_of_the_committed_file(tmp_path: Path) -> None:
    """In one process and with simulated workers; that torchrun and Ray give the same, other tests say."""
    results, failures = results_of([case for case in CASES if case.name in CHECKED], tmp_path / "runs")
    assert not failures
    assert results.keys() == set(CHECKED)
    assert not differences(results)


def test_the_file_has_every_case_and_no_other() -> None:
    assert list(json.loads(FILE.read_text())["cases"]) == [case.name for case in CASES]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"steps": [1]}, "its lines are of steps [1], not [1, 1]"),
        ({"metrics": {"loss": [0.1, None]}}, "step 1: eval_loss is None, not 'nan'"),
        ({"metrics": {"eval_loss": [None, "nan"], "loss": [0.1, None], "extra": [None, 2.0]}}, "step 1: extra"),
        ({"metrics": {"eval_loss": [None, "nan"], "loss": [0.30000000000000004, None]}}, "step 1: loss is 0.3000000"),
        ({"weights": "b"}, "all metrics are equal, but not the weights after step 1"),
    ],
)
def test_the_first_number_that_differs_is_named(changed: dict[str, object], told: str | None) -> None:
    expected = {"steps": [1, 1], "metrics": {"eval_loss": [None, "nan"], "loss": [0.1, None]}, "weights": "a"}
    difference = first_difference({**expected, **changed}, expected)
    assert difference == told if told is None else str(difference).startswith(told)
