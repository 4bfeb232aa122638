"""GRPO's keys, and which values of them have a meaning. Imports no torch, so that a typo is answered at once."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.roles import REFERENCE, REWARD, ROLLOUT, TEACHER, TRAIN
from trainers.configuration.shared import at_least, check_folder
from trainers.losses.types import NOT_BUILT, ImportanceLevel, PolicyLossType, RolloutCorrection
from trainers.rewards.advantages import Aggregation, Scale

Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "reinforce_plus_plus_token"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(CompletionConfig):
    """GRPO's keys beside the shared ones."""

    RLHF_TYPE: ClassVar = "grpo"
    ROLES: ClassVar = {
        "train": TRAIN,
        "rollout": ROLLOUT,
        "reference": REFERENCE,
        "teacher": TEACHER,
        "reward": REWARD,
    }

    output_dir: str = "outputs/grpo"
    learning_rate: float = 1e-6

    # Data
    num_generations: int = 8
    """Completions a prompt, G."""
    num_generations_eval: int | None = None
    """Completions a prompt in evaluation; null: ``num_generations``, or 1 when ``eval_temperature`` is 0."""
    generation_batch_size: int | None = None
    """Completions generated at once, over all workers; null: those of ``steps_per_generation``."""
    steps_per_generation: int | None = None
    """Micro-batches that a generation is worth; null: ``gradient_accumulation_steps``."""
    num_iterations: int = 1
    """Times that a generation is gone through (mu in the paper)."""

    max_staleness: int = 0
    """Generations that are begun ahead of the one that is learned from, by a policy that knows less; 0: none; above 1:
    a queue, filled again when its last is needed. Role rollout needs devices of its own."""
    weight_sync_interval: int | None = None
    """With ``max_staleness``: engines look for new weights after so many decoding steps, and go on with them in the
    middle of completions; null: new weights wait until all that was begun has ended. Needs rollout_engine: vllm,
    and has an effect with Ray alone: without it processes generate and train by turns."""

    # Generation
    dynamic_sample: bool = False
    """Replace prompts whose completions are all rewarded alike by the next prompts of the data (arXiv 2503.14476)."""
    max_resample_times: int = 3
    """How often ``dynamic_sample`` asks for further prompts; then prompts rewarded alike fill the generation."""

    # Several turns
    environment: Any = None
    """Name of a registered environment, a dotted path, or {name: ..., argument: value}, which answers what the model
    writes; see ``rollout/environments.py``. null: a completion is a single turn."""
    tools: list[Any] = field(default_factory=list)
    """Functions that the model may call, registered as tools or dotted paths; they are the environment."""
    tool_call_parser: str = "auto"
    """What reads the model's calls of ``tools``: a name of vLLM's tool parsers, hf (the tokenizer's response_template),
    a registered function or a dotted path. auto: what fits the chat template."""
    max_turns: int | None = None
    """Turns of the model in one completion; null: as many as ``max_completion_length`` has room for."""
    max_tool_calling_iterations: int | None = None
    """Times that tools answer: one less than ``max_turns``, of which one is to be set."""

    # Rewards
    reward_funcs: list[Any] = field(default_factory=list)
    """Names, dotted paths, or {name: ..., argument: value}; see ``rewards/functions.py``."""
    reward_processes: int = 0
    """Processes beside every rollout worker that run ``reward_funcs`` on what has finished, while others are still
    written; 0: none, the driver runs them when all have."""
    reward_model: list[str] = field(default_factory=list)
    """Sequence classifiers of one label, folders or hub names, whose scores are further rewards (role reward)."""
    reward_weights: list[float] | None = None
    """One a reward: the functions, then the reward models, then the environment's own reward. null: 1 for each."""
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    """sum_then_normalize rewards, or normalize_then_sum (each function on its own, GDPO)."""
    scale_rewards: Scale | bool = "group"
    """Divide advantages by the standard deviation of rewards in the group or batch; none (or false): do not."""

    # Advantages
    advantage_estimator: Estimator = "grpo"
    """What rewards are compared with; the formulas stand in rewards/advantages.py. grpo: the group. rloo: the others of
    the group. reinforce_plus_plus (or reinforce_plus_plus_baseline): the group, then all differences of the batch, as
    in ms-swift. reinforce_plus_plus_token: all tokens of the batch, the paper's form without groups."""
    kl_in_reward: bool | None = None
    """Subtract beta x KL from the reward, and not from the loss; null: with every estimator but grpo."""
    reward_clip_range: list[float] | None = None
    """Lowest and highest weighted reward, of rloo."""
    normalize_advantages: bool = False
    """Divide the advantages of rloo by their standard deviation in the batch."""
    teacher_model: str | None = None
    """A model, folder or hub name with the policy's tokens, that tokens are judged by too (role teacher)."""
    teacher_kl_coef: float = 1.0
    """A token's advantage gets teacher_kl_coef x (its log-probability under the teacher - under the policy)."""

    # Reference
    ref_model: str | None = None
    """The model that the KL keeps the policy close to; null: the policy as it starts, or without its LoRA adapter."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (arXiv 2404.09656)."""
    ref_model_mixup_alpha: float = 0.6
    """The policy's share in a reference that follows it."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between mixing the policy into the reference."""

    # Loss
    loss_type: PolicyLossType = "dapo"
    """How token losses are averaged; the formulas and papers stand in losses/policy.py."""
    importance_sampling_level: ImportanceLevel = "token"
    """token, sequence (GSPO), sequence_token (GSPO-token), or sequence_product (of the tokens' ratios, RLOO)."""
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
    sapo_temperature_pos: float = 1.0
    """Steepness of sapo's gate for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """For negative ones."""
    vespo_k_pos: float = 2.0
    """vespo's weight of a ratio w is e^lambda w^k e^(-lambda w); this is k of advantages >= 0."""
    vespo_lambda_pos: float = 3.0
    """Its lambda."""
    vespo_k_neg: float = 3.0
    """k of negative advantages."""
    vespo_lambda_neg: float = 2.0
    """Their lambda."""
    fipo_decay_rate: float = 32.0
    """Tokens after which fipo counts the future half."""
    fipo_clip_range: float | None = 0.2
    """fipo's weight lies in 1 - range, 1 + range; null: it is not bounded."""
    fipo_clip_high_only: bool = True
    """It lies in 1, 1 + range instead."""
    fipo_safety_threshold: float | None = 4.0
    """Ratio above which a negative advantage is weighed in 0.8, 1; null: none."""

    # Completions of another policy
    rollout_importance_sampling_correction: bool | None = None
    """Weigh tokens by how likely the training code finds them against the engine that drew them; null: if a mode is
    set. Not needed with the hf engine, which computes the same numbers as the training code in float32."""
    rollout_importance_sampling_mode: RolloutCorrection | None = None
    """token or sequence, whose ratios are cut to the bounds (truncate) or set to 0 beyond them (mask); null:
    sequence_mask."""
    rollout_importance_sampling_clip_max: float | None = 3.0
    """Upper bound of the ratio; null: none."""
    rollout_importance_sampling_clip_min: float | None = None
    """Lower bound of the ratio; null: none."""
    off_policy_mask_threshold: float | None = None
    """Leave out completions of negative advantage from which the policy has moved further than this, in nats a token
    (arXiv 2512.02556); null: none."""

    # Exploration
    top_entropy_quantile: float = 1.0
    """Share of the step's tokens, those of highest entropy, that get a policy gradient (arXiv 2506.01939)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0: none, or where ``use_adaptive_entropy`` begins."""
    use_adaptive_entropy: bool = False
    """Move ``entropy_coef`` after every step, and apply it below ``entropy_target`` alone (arXiv 2505.22312)."""
    entropy_coef_min: float = 0.0
    """Lowest coefficient that it is moved to."""
    entropy_coef_max: float = 1.0
    """Highest one."""
    entropy_coef_delta: float = 0.005
    """How far it is moved at once."""
    entropy_target: float = 0.2
    """Mean entropy of tokens, in nats, that the coefficient keeps up."""

    # Evaluation
    eval_temperature: float | None = None
    """0: greedy; null: ``temperature``."""

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str) and self.loss_type in NOT_BUILT:
            raise ConfigError(NOT_BUILT[self.loss_type])
        super().__post_init__()
        check_grpo(self)

    @property
    def rollout_correction(self) -> RolloutCorrection | None:
        """How log-probabilities of the engine are corrected for; None: not at all."""
        if self.rollout_importance_sampling_correction is None:
            return self.rollout_importance_sampling_mode
        mode: RolloutCorrection = self.rollout_importance_sampling_mode or "sequence_mask"
        return mode if self.rollout_importance_sampling_correction else None

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether beta weighs a KL in the reward, and not in the loss."""
        wanted = self.advantage_estimator != "grpo" if self.kl_in_reward is None else self.kl_in_reward
        return wanted and self.beta > 0

    @property
    def old_is_rollouts(self) -> bool:
        """Whether the engine's log-probabilities are those of the old policy.

        Begun ahead, the clipped ratio is to the policy that drew the tokens, whose numbers the engine has given.
        """
        return self.max_staleness > 0 and self.rollout_correction is None

    def asks_policy(self, off_policy: bool) -> bool:
        """Whether the policy scores the samples of a generation before it learns from them.

        ``off_policy``: several steps on one generation, so that the policy that generated is soon gone.
        """
        needs_old = (
            off_policy
            or self.has_kl_in_reward
            or self.advantage_estimator == "reinforce_plus_plus_token"
            or self.teacher_model is not None
            or self.rollout_correction is not None
        )
        return (needs_old and not self.old_is_rollouts) or self.top_entropy_quantile < 1

    @property
    def is_own_reference(self) -> bool:
        """Whether the reference is the policy without its LoRA adapter."""
        return self.tuner_type == "lora" and self.ref_model is None

    @property
    def has_environment(self) -> bool:
        return self.environment is not None or bool(self.tools)

    @property
    def turn_limit(self) -> int | None:
        """Turns of the model in one completion; None: no limit."""
        if self.max_tool_calling_iterations is not None:
            return self.max_tool_calling_iterations + 1
        return self.max_turns

    @property
    def num_rewards(self) -> int:
        return len(self.reward_funcs) + len(self.reward_model) + self.has_environment


# Keys that only some values of another key look at, and are refused with any other
READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "epsilon": ("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "fipo")),
    "epsilon_high": ("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "fipo", "cispo")),
    "delta": ("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "fipo")),
    "sapo_temperature_pos": ("loss_type", ("sapo",)),
    "sapo_temperature_neg": ("loss_type", ("sapo",)),
    **{f"vespo_{name}": ("loss_type", ("vespo",)) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    **{
        f"fipo_{name}": ("loss_type", ("fipo",))
        for name in ("decay_rate", "clip_range", "clip_high_only", "safety_threshold")
    },
    "reward_clip_range": ("advantage_estimator", ("rloo",)),
    "normalize_advantages": ("advantage_estimator", ("rloo",)),
    "multi_objective_aggregation": ("advantage_estimator", ("grpo",)),
    **{f"entropy_coef_{name}": ("use_adaptive_entropy", ("True",)) for name in ("min", "max", "delta")},
    "entropy_target": ("use_adaptive_entropy", ("True",)),
    "max_resample_times": ("dynamic_sample", ("True",)),
    **{f"ref_model_{name}": ("sync_ref_model", ("True",)) for name in ("mixup_alpha", "sync_steps")},
}


def check_grpo(config: GRPOConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning."""
    check_read(config)
    check_rewards(config)
    check_sampling(config)
    check_advantages(config)
    check_loss(config)
    check_turns(config)


def check_read(config: GRPOConfig) -> None:
    """Raises ConfigError for a key that is set and that nothing would look at."""
    defaults = {one.name: one.default for one in fields(GRPOConfig)}
    for name, (key, readers) in READ_BY.items():
        if getattr(config, name) != defaults[name] and str(getattr(config, key)) not in readers:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, which nothing looks at with {key}={getattr(config, key)} (it is "
                f"read with {', '.join(readers).lower()}). Remove it, or set {key}."
            )
    if config.rollout_correction is None:
        for name in ("mode", "clip_max", "clip_min"):
            name = f"rollout_importance_sampling_{name}"
            if getattr(config, name) != defaults[name]:
                raise ConfigError(f"{name} is set, but rollout_importance_sampling_correction is not. Set both.")


def check_rewards(config: GRPOConfig) -> None:
    if not config.reward_funcs and not config.reward_model and not config.has_environment:
        raise ConfigError(
            "reward_funcs is empty: GRPO needs at least one reward function, such as exact_answer, or a reward_model"
        )
    at_least(config, 0, "reward_processes")
    if config.reward_processes and not config.reward_funcs:
        raise ConfigError("reward_processes is set, but there are no reward_funcs for them to run. Remove it.")
    for name in config.reward_model:
        check_folder("reward_model", name)
    if config.reward_weights is not None and len(config.reward_weights) != config.num_rewards:
        models = f" and {len(config.reward_model)} of reward_model" if config.reward_model else ""
        environment = " and the environment" if config.has_environment else ""
        raise ConfigError(
            f"reward_weights has {len(config.reward_weights)} values for {len(config.reward_funcs)} "
            f"reward_funcs{models}{environment}"
        )


def check_sampling(config: GRPOConfig) -> None:
    """Raises ConfigError for sizes and ways of drawing completions."""
    if config.num_generations < 2 and config.advantage_estimator != "reinforce_plus_plus_token":
        raise ConfigError(
            f"num_generations must be at least 2, to have a group to compare with; got {config.num_generations}"
        )
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ConfigError("generation_batch_size and steps_per_generation say the same thing; set one of them")
    if not 0 < config.temperature < math.inf:
        raise ConfigError(f"temperature must be positive to explore, got {config.temperature}; see eval_temperature")
    at_least(config, 0, "eval_temperature", "max_staleness")
    at_least(config, 1, "weight_sync_interval")
    if config.max_staleness and config.dynamic_sample:
        raise ConfigError("max_staleness cannot begin generations whose prompts dynamic_sample chooses later")
    if config.weight_sync_interval is not None:
        if not config.max_staleness:
            raise ConfigError(
                "weight_sync_interval is set, but max_staleness is 0: nothing is completed while the policy learns. "
                "Set max_staleness: 1, or remove it."
            )
        if config.rollout_engine != "vllm":
            raise ConfigError(
                f"weight_sync_interval needs rollout_engine: vllm, whose weights can change between two steps, but it "
                f"is {config.rollout_engine}."
            )
    at_least(config, 1, "num_iterations")
    at_least(config, 1, "num_generations", "generation_batch_size", "steps_per_generation", "num_generations_eval")
    at_least(config, 1, "max_resample_times")
    if config.dynamic_sample and config.num_generations < 2:
        raise ConfigError("dynamic_sample compares the completions of a prompt: num_generations must be at least 2")


def check_advantages(config: GRPOConfig) -> None:
    """Raises ConfigError for estimators, KL and the models that are asked for log-probabilities."""
    estimator = config.advantage_estimator
    at_least(config, 0, "beta", "teacher_kl_coef", "ref_model_mixup_alpha")
    at_least(config, 1, "ref_model_sync_steps")
    scales = {"rloo": ("group", True, "none", False), "reinforce_plus_plus_token": ("group", True)}
    if estimator != "grpo" and config.scale_rewards not in scales.get(estimator, ("group", True, "batch")):
        raise ConfigError(
            f"scale_rewards={config.scale_rewards} is for advantage_estimator=grpo: {estimator} divides as its formula "
            "says (advantages.py). Remove it."
        )
    if config.reward_clip_range is not None and (
        len(config.reward_clip_range) != 2 or config.reward_clip_range[0] > config.reward_clip_range[1]
    ):
        raise ConfigError(f"reward_clip_range must be [lowest, highest], got {config.reward_clip_range}")
    if config.kl_in_reward and not config.beta:
        raise ConfigError("kl_in_reward is set, but beta, which weighs the KL, is 0. Set beta, or remove kl_in_reward.")
    if config.has_kl_in_reward and config.multi_objective_aggregation == "normalize_then_sum":
        raise ConfigError("kl_in_reward needs one sum of rewards to be subtracted from: not with normalize_then_sum")
    if config.has_kl_in_reward and not config.use_bias_correction_kl:
        raise ConfigError("use_bias_correction_kl is of the KL in the loss, and here it is in the reward. Remove it.")
    if estimator == "reinforce_plus_plus_token" and config.beta and not config.has_kl_in_reward:
        raise ConfigError("advantage_estimator=reinforce_plus_plus_token has its KL in the reward; remove kl_in_reward")
    for name in ("teacher_model", "ref_model"):
        check_folder(name, getattr(config, name))
    if config.teacher_kl_coef != 1.0 and config.teacher_model is None:
        raise ConfigError("teacher_kl_coef is set, but teacher_model is not. Set both, or neither.")
    if not config.beta and (config.ref_model is not None or config.sync_ref_model):
        raise ConfigError(
            "ref_model and sync_ref_model are set for a KL whose weight beta is 0. Set beta, or remove it."
        )
    if config.sync_ref_model and config.is_own_reference:
        raise ConfigError(
            "sync_ref_model needs a reference of its own, and with tuner_type: lora it is the policy without its "
            "adapter. Set ref_model (to the same model), or remove sync_ref_model."
        )
    if not 0 <= config.ref_model_mixup_alpha <= 1:
        raise ConfigError(f"ref_model_mixup_alpha must lie in [0, 1], got {config.ref_model_mixup_alpha}")


def check_loss(config: GRPOConfig) -> None:
    """Raises ConfigError for constants of the loss, and warns where its paper means another level of ratios."""
    at_least(config, 0, "epsilon", "epsilon_high", "entropy_coef", "entropy_coef_min", "entropy_coef_delta")
    at_least(
        config, 0, "rollout_importance_sampling_clip_min", "rollout_importance_sampling_clip_max", "fipo_clip_range"
    )
    at_least(config, 1, "delta", "fipo_safety_threshold")
    for name in ("sapo_temperature_pos", "sapo_temperature_neg", "fipo_decay_rate"):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name} must be positive, got {getattr(config, name)}")
    if config.loss_type != "cispo" and config.epsilon_high is not None and config.epsilon_high < config.epsilon:
        raise ConfigError(
            f"epsilon_high={config.epsilon_high} is below epsilon={config.epsilon}: ratios are clipped to "
            "[1 - epsilon, 1 + epsilon_high], and clip-higher wants more room above. Raise it, or lower epsilon."
        )
    low, high = config.rollout_importance_sampling_clip_min, config.rollout_importance_sampling_clip_max
    if low is not None and high is not None and low > high:
        raise ConfigError(f"rollout_importance_sampling_clip_min={low} is above ..._clip_max={high}")
    if not 0 <= config.top_entropy_quantile <= 1:
        raise ConfigError(f"top_entropy_quantile must lie in [0, 1], got {config.top_entropy_quantile}; 1: all tokens")
    if config.entropy_coef_min > config.entropy_coef_max:
        raise ConfigError(
            f"entropy_coef_min={config.entropy_coef_min} is above entropy_coef_max={config.entropy_coef_max}"
        )
    if config.loss_type == "cispo" and (config.epsilon_high is None or config.epsilon_high < 1):
        raise ConfigError(
            f"loss_type=cispo caps the importance ratio itself at epsilon_high, got {config.epsilon_high}: every token "
            "would be weighed below 1. Set epsilon_high to 5.0, as the paper does."
        )
    meant = {"luspo": "sequence", "vespo": "token"}.get(config.loss_type, config.importance_sampling_level)
    if config.importance_sampling_level != meant:
        logger.warning(
            "loss_type=%s is meant with importance_sampling_level=%s, not %s",
            config.loss_type,
            meant,
            config.importance_sampling_level,
        )


def check_turns(config: GRPOConfig) -> None:
    if config.environment is not None and config.tools:
        raise ConfigError("environment and tools both answer what the model writes; set one of them")
    if config.tool_call_parser != "auto" and not config.tools:
        raise ConfigError("tool_call_parser reads calls of tools, but there are no tools. Set tools, or remove it.")
    if config.max_turns is not None and config.max_tool_calling_iterations is not None:
        raise ConfigError("max_turns and max_tool_calling_iterations say the same thing; set one of them")
    if config.turn_limit is not None and not config.has_environment:
        raise ConfigError("max_turns is set, but there is no environment (or tools) to answer a turn. Set one.")
    at_least(config, 1, "max_turns")
    at_least(config, 0, "max_tool_calling_iterations")
