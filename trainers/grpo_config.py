"""GRPO's keys, and which values of them have a meaning. Imports no torch, so that a typo is answered at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from rayhelper import ConfigError
from trainers.advantages import Aggregation, Scale
from trainers.config import TrainConfig, at_least
from trainers.loss_types import ImportanceLevel, PolicyLossType


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainConfig):
    """GRPO's keys beside the shared ones."""

    output_dir: str = "outputs/grpo"
    learning_rate: float = 1e-6

    # Data
    num_generations: int = 8
    """Completions a prompt, G."""
    num_generations_eval: int | None = None
    """Completions a prompt in evaluation; null: ``num_generations``, or 1 when ``eval_temperature`` is 0."""
    max_prompt_length: int | None = None
    """Tokens; longer prompts lose their beginning."""
    generation_batch_size: int | None = None
    """Completions generated at once, over all workers; null: those of ``steps_per_generation``."""
    steps_per_generation: int | None = None
    """Micro-batches that a generation is worth; null: ``gradient_accumulation_steps``."""
    num_iterations: int = 1
    """Times that a generation is gone through (mu in the paper)."""

    # Generation
    rollout_engine: Literal["hf"] = "hf"
    """What completes prompts. hf: transformers' generate."""
    rollout_batch_size: int | None = None
    """Prompts that a rollout worker completes at once; null: all of its slice."""
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

    # Rewards
    reward_funcs: list[Any] = field(default_factory=list)
    """Names, dotted paths, or {name: ..., argument: value}; see ``rewards.py``."""
    reward_weights: list[float] | None = None
    """One a reward function; null: 1 for each."""
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    """sum_then_normalize rewards, or normalize_then_sum (each function on its own, GDPO)."""
    scale_rewards: Scale | bool = "group"
    """Divide advantages by the standard deviation of rewards in the group or batch; none (or false): do not."""

    # Loss
    loss_type: PolicyLossType = "dapo"
    """How token losses are averaged; the formulas and papers stand in losses.py."""
    importance_sampling_level: ImportanceLevel = "token"
    """token, or sequence (GSPO)."""
    beta: float = 0.0
    """Weight of the KL to the reference model; 0: no reference model is loaded."""
    epsilon: float = 0.2
    """The ratio to the old policy is clipped to 1 - epsilon, 1 + epsilon."""
    epsilon_high: float | None = None
    """Upper clip range; null: ``epsilon``. For cispo the cap of the ratio itself."""
    delta: float | None = None
    """Cap of the ratio of negative advantages (two-sided clipping)."""
    use_bias_correction_kl: bool = True
    """Multiply the KL by the ratio to the old policy, so that its gradient is unbiased off policy."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into ``max_completion_length`` out of the loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0: none."""

    # Evaluation
    val_before_train: bool = False
    """Evaluate before the first step too."""
    log_completions: bool = False
    """Keep completions and their rewards in completions/*.parquet every ``logging_steps``, and show a few."""
    eval_temperature: float | None = None
    """0: greedy; null: ``temperature``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grpo(self)


def check_grpo(config: GRPOConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning."""
    if config.num_generations < 2:
        raise ConfigError(
            f"num_generations must be at least 2, to have a group to compare with; got {config.num_generations}"
        )
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ConfigError("generation_batch_size and steps_per_generation say the same thing; set one of them")
    if not config.reward_funcs:
        raise ConfigError("reward_funcs is empty: GRPO needs at least one reward function, such as exact_answer")
    if not 0 < config.temperature < math.inf:
        raise ConfigError(f"temperature must be positive to explore, got {config.temperature}; see eval_temperature")
    if not 0 < config.repetition_penalty < math.inf:
        raise ConfigError(f"repetition_penalty must be positive, got {config.repetition_penalty}; 1 changes nothing")
    if config.min_p is not None and not 0 <= config.min_p <= 1:
        raise ConfigError(f"min_p must lie in [0, 1], got {config.min_p}; null keeps every token")
    if config.val_before_train and not config.eval_dataset:
        raise ConfigError("val_before_train is set, but there is no eval_dataset to evaluate on. Add one.")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p must lie in (0, 1], got {config.top_p}; 1 keeps every token")
    at_least(config, 0, "beta", "epsilon", "epsilon_high", "entropy_coef", "top_k", "eval_temperature")
    at_least(config, 1, "num_iterations", "max_completion_length", "max_prompt_length", "rollout_batch_size")
    at_least(config, 1, "generation_batch_size", "steps_per_generation", "num_generations_eval", "delta")
    if config.loss_type == "cispo" and (config.epsilon_high is None or config.epsilon_high < 1):
        raise ConfigError(
            f"loss_type=cispo caps the importance ratio itself at epsilon_high, got {config.epsilon_high}: every token "
            "would be weighed below 1. Set epsilon_high to 5.0, as the paper does."
        )
    if config.reward_weights is not None and len(config.reward_weights) != len(config.reward_funcs):
        raise ConfigError(
            f"reward_weights has {len(config.reward_weights)} values for {len(config.reward_funcs)} reward_funcs"
        )
