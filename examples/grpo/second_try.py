"""An environment for the addition of ``addition.py``: a wrong sum is asked for once more.

    "12+34="  ->  "45"  "12+34="  ->  "46"

Registers the environment ``second_try``. A right sum is worth 1, at the second try a half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.plugins import register_environment
from trainers.rollout.environments import Reply


@register_environment("second_try")
class SecondTry:
    def reset(self, row: Mapping[str, Any]) -> None:
        self.problem, self.answer = row["prompt"], row["answer"]
        self.worth = 1.0

    async def step(self, text: str) -> Reply:
        """What the model hears of its sum: nothing more, or the problem again."""
        if text == self.answer:
            return Reply(done=True, reward=self.worth)
        self.worth /= 2
        return Reply(self.problem, reward=0.0)
