"""The keys of trainers that complete prompts, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from rayhelper import ConfigError
from trainers.config import TrainConfig, at_least


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(TrainConfig):
    """The shared keys, and those of prompts that are completed."""

    # Generation
    rollout_engine: Literal["hf"] = "hf"
    """What completes prompts. hf: transformers' generate."""
    rollout_batch_size: int | None = None
    """Prompts that a rollout worker completes at once; null: all of its slice."""
    max_prompt_length: int | None = None
    """Tokens of a prompt that is to be completed; longer ones lose their beginning."""
    max_completion_length: int = 512
    """Tokens, the stop token included."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in the loss."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this share of the probability; 1: from all."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0: from all."""
    min_p: float | None = None
    """Draw from tokens at least this share as likely as the likeliest; null: from all."""
    repetition_penalty: float = 1.0
    """Tokens that have occurred become less likely by it; 1: never."""
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of transformers' GenerationConfig."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}."""
    log_completions: bool = False
    """Keep completions, with their rewards if there are any, in completions/*.parquet every ``logging_steps``, and show
    a few."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_completion(self)


def check_completion(config: CompletionConfig) -> None:
    """Raises ConfigError naming the first key of completions whose value has no meaning."""
    if not 0 < config.repetition_penalty < math.inf:
        raise ConfigError(f"repetition_penalty must be positive, got {config.repetition_penalty}; 1 changes nothing")
    if config.min_p is not None and not 0 <= config.min_p <= 1:
        raise ConfigError(f"min_p must lie in [0, 1], got {config.min_p}; null keeps every token")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p must lie in (0, 1], got {config.top_p}; 1 keeps every token")
    at_least(config, 0, "top_k")
    at_least(config, 1, "max_completion_length", "max_prompt_length", "rollout_batch_size")
