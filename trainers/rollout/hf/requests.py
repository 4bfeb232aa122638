"""A prompt from ``submit`` until its completion is there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainers.rollout.base import Sampling

Kind = tuple[str, tuple[int, ...]]  # equal for those that may run together


def kind_of(sampling: Sampling, stops: tuple[int, ...]) -> Kind:
    """How a request is drawn, apart from its limit."""
    return repr(dataclasses.replace(sampling, max_completion_length=0)), stops


@dataclass
class Request:
    """A prompt that waits or runs. ``uniform_L``: its random numbers; ``versions``: of weights, and their starts."""

    number: int
    prompt_ids: np.ndarray
    sampling: Sampling
    kind: Kind
    uniform_L: np.ndarray
    images: Any = ()  # the pictures of the prompt
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end the completion."""
        return self.kind[1]

    @property
    def length(self) -> int:
        """Tokens of the row that it needs."""
        return len(self.prompt_ids) + self.sampling.max_completion_length
