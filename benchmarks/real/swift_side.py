"""What ms-swift loads with ``--external_plugins``: the reward of all sides, and a JSON line per step in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from swift.callbacks import TrainerCallback, callbacks_map
from swift.rewards import ORM, orms

from benchmarks.real.trl_side import Steps


class Reward(ORM):
    """1.0 where the completion's number equals that of the row's ``answer``."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        from trainers.rewards.functions import exact_answer

        return exact_answer(completions, answer=columns["answer"])


class StepsOfSwift(Steps, TrainerCallback):
    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(Path(os.environ["REAL_STEPS"]))
        self.timed(trainer, "_generate_completions")  # weights to vLLM, and completions


orms["real_reward"] = Reward
callbacks_map["real_steps"] = StepsOfSwift
