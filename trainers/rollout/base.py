"""The questions a rollout engine answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainers.batch import Prompts, Rollouts


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; transformers' names and meanings."""

    max_completion_length: int
    temperature: float = 1.0  # 0.0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    generation_kwargs: dict[str, Any] = field(default_factory=dict)  # further fields of transformers' GenerationConfig


class Engine(Protocol):
    """Completes prompts. One instance a worker; a batch may be empty."""

    def generate(self, prompts: Prompts, sampling: Sampling, *, seed: int) -> Rollouts:
        """One completion a prompt, in order. The same weights, prompts and seed give the same completions."""
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the given weights (Hugging Face names), in place."""
        ...
