"""What is registered as an advantage estimator. Imports nothing, as plugins.py needs it before anything is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AdvantageEstimator:
    """``function`` turns the rewards of a generation into advantages (``estimators.py``)."""

    function: Callable[..., Any]
    needs_group: bool = True  # compares the completions of a prompt, of which there must be two
    needs_logps: bool = False  # reads old_logps (and ref_logps, with beta)
    needs_greedy: bool = False  # reads the rewards of a greedy completion per prompt
    kl_in_reward: bool | None = False  # what kl_in_reward: null means; None: the estimator refuses a KL in the reward

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function, as ``functools`` names it."""
        return self.function
