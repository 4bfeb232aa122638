"""Rewards of rows in verl's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainers.rewards.ground_truth import GroundTruth


def scores(completions: list[str], truth: str, source: str = "openai/gsm8k", **arguments: Any) -> list[float | None]:
    rows = [{"ground_truth": truth, "style": "rule"}] * len(completions)
    return GroundTruth(**arguments)(completions, reward_model=rows, data_source=[source] * len(completions))


def test_gsm8k_is_scored_as_verl_scores_it() -> None:
    """What verl's ``reward_score.gsm8k.compute_score`` gives for these, method strict."""
    completions = [
        *("#### 72", "so #### 1,072", "the answer is 72", r"\boxed{72}", "#### 72.", "####72", "#### 71 #### 72"),
        *("#### 72" + " " * 300, "#### $72", "#### -72"),
    ]
    assert scores(completions, "72") == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert scores(["so #### 1,072", "#### -72"], "1072") == [1, 0]


def test_siirls_rule_of_gsm8k_takes_the_first_number() -> None:
    """What siiRL's ``reward_score.gsm8k.compute_score`` gives for these, method strict."""
    completions = ["#### 72", "#### 72 then #### 71", "#### 71 #### 72", "#### 72" + " " * 300]
    assert scores(completions, "72", rules="siirl") == [1, 1, 0, 1]
    with pytest.raises(ValueError, match="rules 'roll' are unknown"):
        GroundTruth(rules="roll")


def test_another_source_needs_verl_or_a_rule(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data_source 'lighteval/MATH' are scored by a rule of verl"):
        scores(["x"], "x", "lighteval/MATH")
    (tmp_path / "rule.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(data_source == 'lighteval/MATH' and solution_str == ground_truth)}\n"
    )
    assert scores(["x", "y"], "x", "lighteval/MATH", path=str(tmp_path / "rule.py")) == [1, 0]
