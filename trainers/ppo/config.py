"""PPO's keys, and which values of them have a meaning. Imports no torch, so that a typo is answered at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rayhelper import ConfigError
from trainers.configuration.completion import CompletionConfig, check_reward_functions
from trainers.configuration.roles import CRITIC, REFERENCE, REWARD, ROLLOUT, TRAIN
from trainers.configuration.values import at_least, check_folder
from trainers.rewards.gae import KLEstimator


@dataclass(frozen=True, kw_only=True)
class PPOConfig(CompletionConfig):
    """PPO's keys beside the shared ones."""

    RLHF_TYPE: ClassVar = "ppo"
    ROLES: ClassVar = {
        "train": TRAIN,
        "critic": CRITIC,
        "reference": REFERENCE,
        "reward": REWARD,
        "rollout": ROLLOUT,
    }

    output_dir: str = "outputs/ppo"
    learning_rate: float = 3e-6

    # Models
    value_model: str | None = None
    """The critic's first weights, a folder or hub name with the policy's tokens. null: the weights of ``reward_model``,
    else the policy with a new head."""
    value_learning_rate: float | None = None
    """Learning rate of the critic. null: ``learning_rate``."""
    value_warmup_ratio: float | None = None
    """Share of all steps that are warm-up of the critic. null: the warm-up of the policy."""
    value_max_grad_norm: float | None = None
    """Largest gradient norm of the critic. null: ``max_grad_norm``."""
    ref_model: str | None = None
    """The reference model of the KL. null: the starting policy."""

    # Batches
    num_ppo_epochs: int = 4
    """Number of passes through each batch of completions."""
    num_mini_batches: int = 1
    """Optimizer steps per pass through a batch. A batch has num_mini_batches times the sequences of one step."""

    # Generation
    max_completion_length: int = 53
    """Largest number of tokens of a completion, with its stop token."""
    temperature: float = 0.7
    """Logits are divided by it, in sampling and in the loss."""

    # Rewards
    reward_funcs: list[Any] = field(default_factory=list)
    """Names, dotted paths, or {name: ..., argument: value}; see ``rewards/functions.py``."""
    reward_processes: int = 0
    """Processes beside every rollout worker that run ``reward_funcs`` on finished completions while others are
    generated. 0: the driver runs them when all completions have finished."""
    reward_timeout_s: float | None = None
    """Seconds that one call of a reward function may take. null: no limit."""
    reward_model: str | None = None
    """A sequence classifier with one label, as a folder or hub name. Its score is a further reward. null: none."""
    reward_weights: list[float] | None = None
    """One weight per reward function, then one for the reward model. null: 1 for each."""
    missing_eos_penalty: float | None = None
    """Subtracted from the score of completions that reached ``max_completion_length``. null: nothing."""
    kl_coef: float = 0.05
    """Weight of the KL to the reference model in the rewards of tokens. If ``kl_loss_coef`` is also 0, no reference
    model is loaded."""
    kl_estimator: KLEstimator = "k1"
    """k1 (unbiased), or k3 (never negative, less variance)."""
    score_on_last_token: bool = False
    """The score is the reward of the last token, and the critic has no value behind it (verl, OpenRLHF). false: behind
    a completion that ended is one more place, with a value, and the score is its reward (TRL)."""
    whiten_rewards: bool = False
    """Scale the rewards of all tokens of a batch to variance 1."""

    # Loss
    gamma: float = 1.0
    """Discount of rewards and values per token."""
    lam: float = 0.95
    """GAE's lambda. 1: only rewards count. 0: mostly the critic counts."""
    lam_critic: float | None = None
    """Lambda of the returns that the critic learns. null: ``lam``. With 1.0, as in VAPO (arXiv 2504.05118), the
    critic's bias is not in its targets."""
    length_adaptive_alpha: float | None = None
    """Makes lambda of the policy's advantages 1 - 1 / (alpha l), for l tokens and this alpha (VAPO: 0.05). null: lambda
    is ``lam``."""
    cliprange: float = 0.2
    """The ratio to the old policy is clipped to the range from 1 - cliprange to 1 + cliprange."""
    cliprange_high: float | None = None
    """Upper clip range. null: ``cliprange``."""
    delta: float | None = None
    """Upper limit of the ratio for negative advantages (dual-clip PPO, arXiv 1912.09729). null: no limit."""
    kl_loss_coef: float = 0.0
    """Weight of the KL (k3) to the reference model in the policy's loss, beside ``kl_coef`` in the rewards."""
    kl_clip_max: float | None = None
    """With ``kl_loss_coef``: the largest KL of a token. A larger KL is cut to it, and has no gradient. null: no
    limit."""
    cliprange_value: float = 0.2
    """The critic's value may differ from its old value by at most cliprange_value."""
    vf_coef: float = 0.1
    """The critic's loss is multiplied by it. The critic has its own optimizer. With AdamW, it changes only the effect
    of adam_epsilon and max_grad_norm. See value_learning_rate."""

    # Evaluation
    eval_temperature: float | None = None
    """Temperature in evaluation. 0: greedy. null: ``temperature``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ppo(self)

    @property
    def critic_model(self) -> str:
        """The model whose weights the critic starts from."""
        return self.value_model or self.reward_model or self.model

    @property
    def critic_learning_rate(self) -> float:
        return self.learning_rate if self.value_learning_rate is None else self.value_learning_rate

    def critic_warmup_steps(self, num_steps: int) -> int:
        """Of so many steps of the run, those in which the critic's learning rate rises."""
        ratio = self.warmup_ratio if self.value_warmup_ratio is None else self.value_warmup_ratio
        policys_own = self.warmup_steps if self.value_warmup_ratio is None else 0
        return policys_own or math.ceil(ratio * num_steps)

    @property
    def critic_max_grad_norm(self) -> float:
        return self.max_grad_norm if self.value_max_grad_norm is None else self.value_max_grad_norm

    @property
    def has_reference(self) -> bool:
        """Whether a KL asks for log-probabilities of a reference."""
        return bool(self.kl_coef or self.kl_loss_coef)

    @property
    def is_own_reference(self) -> bool:
        """Whether the reference is the policy without its LoRA adapter."""
        return self.has_adapter and self.ref_model is None


def check_ppo(config: PPOConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning."""
    if not config.reward_funcs and config.reward_model is None:
        raise ConfigError("there is nothing to learn from: give reward_funcs, such as exact_answer, or a reward_model")
    if config.vllm_clip_completions:
        raise ConfigError(
            "vllm_clip_completions: PPO treats a completion shorter than max_completion_length as finished. "
            "Remove it, and lower max_prompt_length or max_completion_length."
        )
    check_reward_functions(config)
    for name in ("value_model", "ref_model", "reward_model"):
        check_folder(name, getattr(config, name))
    num_rewards = len(config.reward_funcs) + (config.reward_model is not None)
    if config.reward_weights is not None and len(config.reward_weights) != num_rewards:
        raise ConfigError(
            f"reward_weights has {len(config.reward_weights)} values for {num_rewards} rewards "
            "(reward_funcs, and reward_model as the last)"
        )
    if config.ref_model is not None and not config.has_reference:
        raise ConfigError("ref_model is set, but kl_coef is 0, so it would have no effect. Remove one of them.")
    if config.kl_clip_max is not None and (config.kl_clip_max <= 0 or not config.kl_loss_coef):
        raise ConfigError(
            f"kl_clip_max={config.kl_clip_max} limits the KL in the loss: it must be positive, and needs kl_loss_coef"
        )
    if not 0 < config.temperature < math.inf:
        raise ConfigError(f"temperature must be positive to explore, got {config.temperature}; see eval_temperature")
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"{name} must lie in [0, 1], got {getattr(config, name)}")
    if config.lam_critic is not None and not 0 <= config.lam_critic <= 1:
        raise ConfigError(f"lam_critic must lie in [0, 1], got {config.lam_critic}; null: the value of lam")
    alpha = config.length_adaptive_alpha
    if alpha is not None and alpha <= 0:
        raise ConfigError(
            f"length_adaptive_alpha must be positive, got {alpha}; null: lambda does not depend on lengths"
        )
    if alpha is not None and alpha * config.max_completion_length <= 1:
        raise ConfigError(
            f"length_adaptive_alpha={alpha} gives a lambda of 0 to completions of up to {1 / alpha:.10g} tokens, and "
            f"max_completion_length is {config.max_completion_length}. Raise one of them."
        )
    default_lam = next(one.default for one in fields(PPOConfig) if one.name == "lam")
    if alpha is not None and config.lam_critic is not None and config.lam != default_lam:
        raise ConfigError(
            f"lam is {config.lam}, which has no effect: length_adaptive_alpha gives the policy's lambda, and "
            "lam_critic the critic's. Remove one of them."
        )
    at_least(config, 0, "kl_coef", "missing_eos_penalty", "vf_coef", "value_learning_rate", "eval_temperature")
    at_least(config, 0, "kl_loss_coef", "value_max_grad_norm", "cliprange", "cliprange_high", "value_warmup_ratio")
    if config.value_warmup_ratio is not None and config.value_warmup_ratio >= 1:
        raise ConfigError(f"value_warmup_ratio must lie in [0, 1), got {config.value_warmup_ratio}")
    highest = 1 + (config.cliprange if config.cliprange_high is None else config.cliprange_high)
    if config.delta is not None and config.delta < highest:
        raise ConfigError(
            f"delta={config.delta} is below {highest:.10g}, where cliprange already limits the ratio. Raise delta."
        )
    if not config.cliprange_value > 0:
        raise ConfigError(
            f"cliprange_value must be positive, got {config.cliprange_value}: with 0 the critic does not learn"
        )
    at_least(config, 1, "num_ppo_epochs", "num_mini_batches")
