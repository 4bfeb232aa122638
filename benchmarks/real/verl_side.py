"""The reward of all sides, as verl loads it from a file (``reward.custom_reward_function.path``)."""

from __future__ import annotations

from typing import Any

from trainers.rewards.functions import exact_answer


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1.0 where the completion's number equals that of the row's ``answer``."""
    return exact_answer([solution_str], answer=[ground_truth])[0] or 0.0
