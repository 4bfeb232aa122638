"""A prompt from ``submit`` until its completion is there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainers.rollout.base import Sampling


@dataclass
class Request:
    """A prompt that waits or runs. ``uniform_L``: its random numbers; ``versions``: of weights, and their starts."""

    number: int
    prompt_ids: np.ndarray
    sampling: Sampling
    stops: tuple[int, ...]
    uniform_L: np.ndarray
    images: Any = ()  # the pictures of the prompt
    versions: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Equal for those that may run together
        self.kind = repr(dataclasses.replace(self.sampling, max_completion_length=0)), self.stops

    @property
    def length(self) -> int:
        """Tokens of the row that it needs."""
        return len(self.prompt_ids) + self.sampling.max_completion_length
