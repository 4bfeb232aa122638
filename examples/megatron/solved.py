"""Problems with their solutions shown to the teacher alone, for ``external_plugins``: the dataset ``gsm8k_solved``."""

from __future__ import annotations

import json
from pathlib import Path

from trainers.plugins import register_dataset

FILE = Path(__file__).parents[1] / "grpo" / "gsm8k" / "train.jsonl"


@register_dataset("gsm8k_solved")
def solved() -> list[dict[str, str]]:
    """Rows of ``prompt`` and ``teacher_prompt``."""
    return [shown(json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def shown(row: dict[str, str]) -> dict[str, str]:
    """The problem, and the problem with its solution."""
    problem, solution = row["question"], row["answer"]
    return {
        "prompt": problem,
        "teacher_prompt": f"{problem}\n\nA right solution:\n{solution}\n\nSolve the problem in your own words.",
    }
