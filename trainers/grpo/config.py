"""GRPO's keys, and which values of them have a meaning. Imports no torch, so that a typo is answered at once."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.completion import CompletionConfig, check_episodes, check_reward_functions
from trainers.configuration.roles import REFERENCE, REWARD, ROLLOUT, TEACHER, TRAIN
from trainers.configuration.values import at_least, check_folder
from trainers.grpo.choices import CLIPPED, REGISTRIES, check_plugged, check_read, check_real, is_known
from trainers.grpo.off_policy import check_correction, check_rejection
from trainers.losses.types import ImportanceLevel, RolloutCorrection, RolloutRejection
from trainers.plugins import ADVANTAGES, named, parameters
from trainers.rewards.advantages import Aggregation, Scale
from trainers.rewards.types import AdvantageEstimator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(CompletionConfig):
    """GRPO's keys beside the shared ones."""

    RLHF_TYPE: ClassVar = "grpo"
    SEES_EPISODES: ClassVar = True  # pictures may stand in episodes with an environment
    ROLES: ClassVar = {
        "train": TRAIN,
        "rollout": ROLLOUT,
        "reference": REFERENCE,
        "teacher": TEACHER,
        "reward": REWARD,
    }

    output_dir: str = "outputs/grpo"
    disable_dropout: bool = False
    learning_rate: float = 1e-6

    # Data
    num_generations: int = 8
    """Completions per prompt, G."""
    num_generations_eval: int | None = None
    """Completions per prompt in evaluation. null: ``num_generations``, or 1 when ``eval_temperature`` is 0."""
    generation_batch_size: int | None = None
    """Completions generated at once, over all workers. null: the completions of ``steps_per_generation`` steps."""
    steps_per_generation: int | None = None
    """Micro-batches per worker that one generation fills. null: ``gradient_accumulation_steps``."""
    shuffle_generation: bool = True
    """Whether completions are shuffled before they are divided among the optimizer steps of their generation. false:
    each step takes the next completions of every worker, as in ms-swift."""
    num_iterations: int = 1
    """Number of passes through each generation (mu in the paper)."""

    max_staleness: int = 0
    """Staleness: the policy that generates may be at most this number of generations old. Above 0, the engine generates
    while the policy learns from earlier completions. Above 1, generations wait in a queue. Then role rollout needs its
    own devices."""
    weight_sync_interval: int | None = None
    """With ``max_staleness``: the number of decoding steps after which engines look for new weights. They take them in
    the middle of completions. null: engines take new weights after all completions in flight have ended. It has an
    effect only with Ray. Without Ray, processes generate and train in turn."""

    # Generation
    dynamic_sample: bool | str = False
    """Replace prompts whose completions have equal rewards by the next prompts of the data (arXiv 2503.14476). The name
    of a reward, as in the metric rewards/NAME/mean: only this reward is compared."""
    max_resample_times: int = 3
    """How often ``dynamic_sample`` may draw more prompts. After that, prompts with equal rewards fill the
    generation."""

    # Several turns
    environment: Any = None
    """Name of a registered environment, a dotted path, or {name: ..., argument: value}. It answers the model's text;
    see ``rollout/environments.py``. null: a completion is a single turn."""
    tools: list[Any] = field(default_factory=list)
    """Functions that the model may call: names of registered tools, or dotted paths. They are the environment."""
    tool_call_parser: str = "auto"
    """The function that reads the model's tool calls: a vLLM tool parser, a registered function, or a dotted path. hf:
    the tokenizer's response_template. auto: the parser that fits the chat template."""
    max_turns: int | None = None
    """Turns of the model in one completion. null: as many as fit into ``max_completion_length``."""
    max_tool_calling_iterations: int | None = None
    """How often tools may answer. It is one less than ``max_turns``. Set only one of the two keys."""
    completion_length_limit_scope: Literal["total", "per_round"] = "total"
    """The scope of ``max_completion_length``. total: all turns of a completion together. per_round: each turn of the
    model. Then ``max_turns`` or vLLM's ``max_model_len`` limits the whole completion."""
    environment_reward: bool = True
    """Whether the environment's reward is one of the rewards."""

    # Rewards
    reward_funcs: list[Any] = field(default_factory=list)
    """Names, dotted paths, or {name: ..., argument: value}; see ``rewards/functions.py``."""
    reward_processes: int = 0
    """Processes beside every rollout worker that run ``reward_funcs`` on finished completions while others are
    generated. 0: the driver runs them when all completions have finished."""
    reward_timeout_s: float | None = None
    """Seconds that one call of a reward function may take. null: no limit."""
    reward_model: list[str] = field(default_factory=list)
    """Sequence classifiers with one label, as folders or hub names. Their scores are further rewards (role reward)."""
    reward_weights: list[float] | None = None
    """One weight per reward: first the functions, then the reward models, then the environment. null: 1 for each."""
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    """sum_then_normalize: add the rewards, then normalize the sum. normalize_then_sum: normalize each reward
    separately, then add (GDPO)."""
    scale_rewards: Scale | bool = "group"
    """Divide advantages by the standard deviation of rewards in the group or batch. none (or false): advantages are not
    divided."""

    # Advantages
    advantage_estimator: str | dict[str, Any] = "grpo"
    """How rewards become advantages. The formulas are in rewards/estimators.py. The baseline of grpo is the group's
    mean. rloo: the mean of the other completions in the group. reinforce_plus_plus (or reinforce_plus_plus_baseline):
    the group's mean, with the standard deviation of the batch. reinforce_plus_plus_token: all tokens of the batch,
    without groups. remax: a greedy completion. maxrl: for rewards of 0 and 1. gpg, opo, pass_at_k and grpo_passk follow
    their papers. Or the name of an estimator that a plugin registered, or {name: ..., argument: value}."""
    pass_k: int = 4
    """The k of pass_at_k: at least one of k completions must be correct."""
    pass_threshold: float = 0.5
    """pass_at_k counts a completion as correct from this weighted reward on."""
    kl_in_reward: bool | None = None
    """Subtract beta x KL from the reward, and not from the loss. null: true for rloo, remax and all forms of
    reinforce_plus_plus."""
    reward_clip_range: list[float] | None = None
    """With rloo: the lowest and the highest weighted reward."""
    normalize_advantages: bool = False
    """Divide the advantages of rloo by their standard deviation in the batch."""
    teacher_model: str | None = None
    """A model that judges every token (role teacher): a folder or hub name. It must have the policy's tokens."""
    teacher_kl_coef: float = 1.0
    """Each token's advantage increases by teacher_kl_coef x (log p_teacher - log p_policy)."""

    # Reference
    ref_model: str | None = None
    """The reference model of the KL. null: the starting policy, or the policy without its LoRA adapter."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (arXiv 2404.09656)."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy when it is mixed into the reference."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between mixing the policy into the reference."""

    # Loss
    loss_type: str | dict[str, Any] = "dapo"
    """The loss of a token and how it is averaged; formulas and papers are in losses/surrogates.py. Bundled: grpo, bnpo,
    dr_grpo, dapo, cispo, sapo, luspo, vespo, fipo, gmpo, gpg, clip_cov, kl_cov, dppo_tv, dppo_kl, real, cpgd. Or the
    name of a loss that a plugin registered, or {name: ..., argument: value}."""
    importance_sampling_level: ImportanceLevel = "token"
    """token, sequence (GSPO), sequence_token (GSPO-token), or sequence_product (of the tokens' ratios, RLOO)."""
    beta: float = 0.0
    """Weight of the KL to the reference model. 0: no reference model is loaded."""
    epsilon: float = 0.2
    """The ratio to the old policy is clipped to the range from 1 - epsilon to 1 + epsilon. gmpo clips the log-ratio to
    -epsilon and epsilon; its paper has 0.4. For dppo_tv and dppo_kl it is the largest distance of a token."""
    epsilon_high: float | None = None
    """Upper clip range. null: ``epsilon``. For cispo it is the cap of the ratio itself."""
    delta: float | None = None
    """Upper limit of the ratio for negative advantages (two-sided clipping)."""
    use_bias_correction_kl: bool = True
    """Multiply the KL by the ratio to the old policy, so that its gradient is unbiased off policy."""
    kl_clip_max: float | None = None
    """Largest KL of a token in the loss. A larger KL is cut to it, and has no gradient. null: no limit."""
    policy_drift_coef: float = 0.0
    """Weight of CPGD's policy drift, which holds the policy near the old one (arXiv 2505.12504). siiRL: 0.001."""
    mask_truncated_completions: bool = False
    """Leave completions that reached ``max_completion_length`` out of the loss."""
    difficulty_range: list[float] | None = None
    """Learn only from prompts whose mean reward is between these two numbers, for example [0.1, 0.95]. null: learn from
    all prompts."""
    sapo_temperature_pos: float = 1.0
    """Steepness of sapo's gate for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """Steepness of sapo's gate for negative advantages."""
    real_tau: float = 0.5
    """Temperature of real's scores, which classify the completions of a prompt."""
    vespo_k_pos: float = 2.0
    """vespo weighs a ratio w by e^lambda w^k e^(-lambda w). This is k for advantages >= 0."""
    vespo_lambda_pos: float = 3.0
    """vespo's lambda for advantages >= 0."""
    vespo_k_neg: float = 3.0
    """vespo's k for negative advantages."""
    vespo_lambda_neg: float = 2.0
    """vespo's lambda for negative advantages."""
    fipo_decay_rate: float = 32.0
    """Half-life, in tokens, of the future tokens that fipo counts."""
    fipo_clip_range: float | None = 0.2
    """fipo's weight is clipped to the range from 1 - fipo_clip_range to 1 + fipo_clip_range. null: no limit."""
    fipo_clip_high_only: bool = True
    """fipo's weight is clipped to the range from 1 to 1 + fipo_clip_range instead."""
    fipo_safety_threshold: float | None = 4.0
    """For negative advantages with a ratio above this value, fipo's weight is clipped to 0.8 and 1. null: no
    threshold."""
    clip_cov_ratio: float = 2e-4
    """Share of a step's tokens whose gradient clip_cov removes. It is at least one token."""
    clip_cov_lb: float = 1.0
    """clip_cov draws from tokens with a covariance of advantage and log-probability above this value."""
    clip_cov_ub: float = 5.0
    """clip_cov draws from tokens with a covariance below this value."""
    kl_cov_ratio: float = 2e-4
    """Share of a step's tokens that kl_cov keeps near the old policy. They have the highest covariance."""
    kl_cov_coef: float = 1.0
    """kl_cov's weight of the distance to the old policy, |log ratio|."""
    dppo_ratio_cap: float | None = 20.0
    """Upper limit of the ratio that weighs a token in dppo_tv and dppo_kl. null: no limit."""

    # Completions of another policy
    rollout_importance_sampling_correction: bool | None = None
    """Weigh tokens by the ratio of the training code's probability to the engine's. null: true if a mode is set. The hf
    engine does not need it: in float32 it computes the same numbers as the training code."""
    rollout_importance_sampling_mode: RolloutCorrection | None = None
    """The ratio of each token, of the sequence, or the geometric mean over the sequence. truncate: ratios are cut to
    the limits. mask: ratios beyond the limits become 0. null: sequence_mask. Geometric ratios are near 1: set limits
    such as 0.99 and 1.01."""
    rollout_importance_sampling_clip_max: float | None = 3.0
    """Upper limit of the ratio. null: no limit."""
    rollout_importance_sampling_clip_min: float | None = None
    """Lower limit of the ratio. null: no limit."""
    rollout_rejection: RolloutRejection | None = None
    """Leave tokens or completions out of the loss if engine and training code differ too much. The value names the
    scope and the estimator of the KL (k1, k2, k3). The scope is a token, or the sum, mean or maximum over the sequence.
    sequence_mean_k1 is the geometric mean of the ratios. null: nothing is left out."""
    rollout_rejection_max: float | None = None
    """Largest value that is kept. For k1 it is a ratio, such as 2.0 (token) or 1.01 (sequence_mean). For k2 and k3 it
    is the estimate."""
    rollout_rejection_min: float | None = None
    """For k1: the smallest ratio that is kept. null: 1 / rollout_rejection_max."""
    off_policy_mask_threshold: float | None = None
    """Leave out completions of negative advantage if the policy has moved further than this. The unit is nats per token
    (arXiv 2512.02556). null: no limit."""

    # Exploration
    top_entropy_quantile: float = 1.0
    """Share of the step's tokens that get a policy gradient. They have the highest entropy (arXiv 2506.01939)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. 0: no entropy term. With ``use_adaptive_entropy`` it is the first value."""
    use_adaptive_entropy: bool = False
    """Move ``entropy_coef`` after every step, and apply it only below ``entropy_target`` (arXiv 2505.22312)."""
    entropy_coef_min: float = 0.0
    """With use_adaptive_entropy: the lowest coefficient."""
    entropy_coef_max: float = 1.0
    """With use_adaptive_entropy: the highest coefficient."""
    entropy_coef_delta: float = 0.005
    """With use_adaptive_entropy: the change of the coefficient per step."""
    entropy_target: float = 0.2
    """With use_adaptive_entropy: below this mean entropy of tokens (nats), the bonus is on."""

    # Evaluation
    eval_temperature: float | None = None
    """Temperature in evaluation. 0: greedy. null: ``temperature``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grpo(self)

    @property
    def loss_name(self) -> str:
        """The loss that ``loss_type`` names."""
        name: str = named(self.loss_type)[0]
        return name

    @property
    def estimator(self) -> AdvantageEstimator:
        """The estimator that ``advantage_estimator`` names; its plugin must have been imported."""
        found: AdvantageEstimator = ADVANTAGES[named(self.advantage_estimator)[0]]
        return found

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
        wanted = self.estimator.kl_in_reward if self.kl_in_reward is None else self.kl_in_reward
        return bool(wanted) and self.beta > 0

    @property
    def old_is_rollouts(self) -> bool:
        """Whether the engine's log-probabilities are those of the old policy.

        Begun ahead, the clipped ratio is to the policy that drew the tokens, whose numbers the engine has given.
        """
        return self.max_staleness > 0 and self.rollout_correction is None and self.rollout_rejection is None

    def asks_policy(self, off_policy: bool) -> bool:
        """Whether the policy scores the samples of a generation before it learns from them.

        ``off_policy``: several steps on one generation, so that the policy that generated is soon gone.
        """
        needs_old = (
            off_policy
            or self.has_kl_in_reward
            or self.estimator.needs_logps
            or self.teacher_model is not None
            or self.rollout_correction is not None
            or self.rollout_rejection is not None
        )
        return (needs_old and not self.old_is_rollouts) or self.top_entropy_quantile < 1

    @property
    def selects_tokens(self) -> bool:
        """Whether the loss treats some tokens otherwise, which are chosen among all of a step before it."""
        return self.loss_name in ("clip_cov", "kl_cov")

    @property
    def is_own_reference(self) -> bool:
        """Whether the reference is the policy without its LoRA adapter."""
        return self.has_adapter and self.ref_model is None

    @property
    def has_environment(self) -> bool:
        return self.environment is not None or bool(self.tools)

    @property
    def is_rewarded_by_environment(self) -> bool:
        return self.has_environment and self.environment_reward

    @property
    def turn_limit(self) -> int | None:
        """Turns of the model in one completion; None: no limit."""
        if self.max_tool_calling_iterations is not None:
            return self.max_tool_calling_iterations + 1
        return self.max_turns

    @property
    def is_distilled_alone(self) -> bool:
        """Whether a teacher judges tokens, and nothing rewards completions: their rewards are 0."""
        rewards = self.reward_funcs or self.reward_model or self.is_rewarded_by_environment
        return self.teacher_model is not None and not rewards

    @property
    def functions(self) -> list[Any]:
        """The reward functions, ``no_reward`` where a teacher alone judges."""
        return ["no_reward"] if self.is_distilled_alone else self.reward_funcs

    @property
    def num_rewards(self) -> int:
        return len(self.functions) + len(self.reward_model) + self.is_rewarded_by_environment


def check_grpo(config: GRPOConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning.

    What depends on a loss or an estimator of a plugin that is not imported yet, ``check_chosen`` says later.
    """
    plugged = [is_known(config, key, plugins_imported=False) for key in REGISTRIES]
    check_read(config)
    check_correction(config)
    check_rejection(config)
    check_rewards(config)
    check_sampling(config)
    if all(plugged):
        check_advantages(config)
    check_loss(config)
    check_turns(config)


def check_rewards(config: GRPOConfig) -> None:
    if not config.num_rewards:
        raise ConfigError(
            "reward_funcs is empty. Name a reward function, such as exact_answer, or set a reward_model, or a "
            "teacher_model that judges tokens"
        )
    check_reward_functions(config)
    for name in config.reward_model:
        check_folder("reward_model", name)
    if config.reward_weights is not None and len(config.reward_weights) != config.num_rewards:
        models = f" and {len(config.reward_model)} of reward_model" if config.reward_model else ""
        environment = " and the environment" if config.is_rewarded_by_environment else ""
        raise ConfigError(
            f"reward_weights has {len(config.reward_weights)} values for {len(config.reward_funcs)} "
            f"reward_funcs{models}{environment}"
        )


def check_sampling(config: GRPOConfig) -> None:
    """Raises ConfigError for sizes and ways of drawing completions."""
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ConfigError(
            "generation_batch_size and steps_per_generation both set the size of a generation; set one of them"
        )
    if not 0 < config.temperature < math.inf:
        raise ConfigError(f"temperature must be positive to explore, got {config.temperature}; see eval_temperature")
    at_least(config, 0, "eval_temperature", "max_staleness")
    at_least(config, 1, "weight_sync_interval")
    if config.max_staleness and config.dynamic_sample:
        raise ConfigError("max_staleness cannot begin generations whose prompts dynamic_sample chooses later")
    if config.weight_sync_interval is not None and not config.max_staleness:
        raise ConfigError(
            "weight_sync_interval is set, but max_staleness is 0: nothing is completed while the policy learns. "
            "Set max_staleness: 1, or remove it."
        )
    at_least(config, 1, "num_generations", "generation_batch_size", "steps_per_generation", "num_generations_eval")
    at_least(config, 1, "num_iterations", "max_resample_times")
    bounds = config.difficulty_range
    if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
        raise ConfigError(f"difficulty_range must be [lowest, highest] mean reward of a prompt, got {bounds}")
    if config.dynamic_sample and config.num_generations < 2:
        raise ConfigError("dynamic_sample compares the completions of a prompt: num_generations must be at least 2")


def check_advantages(config: GRPOConfig) -> None:
    """Raises ConfigError for estimators, KL and the models that are asked for log-probabilities."""
    name, estimator = named(config.advantage_estimator)[0], config.estimator
    if config.num_generations < 2 and estimator.needs_group and not config.is_distilled_alone:
        raise ConfigError(
            f"num_generations must be at least 2, to have a group to compare with; got {config.num_generations}"
        )
    at_least(config, 0, "beta", "teacher_kl_coef", "ref_model_mixup_alpha")
    at_least(config, 1, "ref_model_sync_steps")
    batch_wide, own = ("group", True, "batch"), ("group", True)
    scales = {
        "rloo": (*own, "none", False),
        **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), batch_wide),
    }
    if "scale_rewards" not in parameters(estimator.function) and config.scale_rewards not in scales.get(name, own):
        raise ConfigError(
            f"scale_rewards={config.scale_rewards} is for advantage_estimator=grpo: {name} divides by its own formula "
            "(advantages.py). Remove it."
        )
    at_least(config, 1, "pass_k")
    if name == "pass_at_k" and config.pass_k > config.num_generations:
        raise ConfigError(
            f"pass_k={config.pass_k} completions cannot be drawn from num_generations={config.num_generations}; lower "
            "pass_k, or raise num_generations"
        )
    if estimator.needs_greedy and config.max_staleness:
        raise ConfigError(
            f"advantage_estimator={name} compares with a greedy completion of the policy that generated: not with "
            "max_staleness"
        )
    if config.reward_clip_range is not None and (
        len(config.reward_clip_range) != 2 or config.reward_clip_range[0] > config.reward_clip_range[1]
    ):
        raise ConfigError(f"reward_clip_range must be [lowest, highest], got {config.reward_clip_range}")
    if config.kl_in_reward and not config.beta:
        raise ConfigError("kl_in_reward is set, but beta, which weighs the KL, is 0. Set beta, or remove kl_in_reward.")
    if config.has_kl_in_reward and config.multi_objective_aggregation == "normalize_then_sum":
        raise ConfigError("kl_in_reward subtracts from one sum of rewards, which normalize_then_sum does not compute")
    if config.has_kl_in_reward and not config.use_bias_correction_kl:
        raise ConfigError(
            "use_bias_correction_kl applies to the KL in the loss, but here the KL is in the reward. Remove it."
        )
    if config.kl_clip_max is not None and config.has_kl_in_reward:
        raise ConfigError("kl_clip_max applies to the KL in the loss, but here the KL is in the reward. Remove it.")
    if config.kl_clip_max is not None and config.kl_clip_max <= 0:
        raise ConfigError(f"kl_clip_max must be positive, got {config.kl_clip_max}")
    if name == "reinforce_plus_plus_token" and config.beta and not config.has_kl_in_reward:
        raise ConfigError("advantage_estimator=reinforce_plus_plus_token has its KL in the reward; remove kl_in_reward")
    if estimator.kl_in_reward is None and config.kl_in_reward:
        raise ConfigError(
            f"advantage_estimator={name} counts rewards of 0 and 1, to which no KL can be added. Remove kl_in_reward: "
            "beta then weighs the KL in the loss."
        )
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
            "sync_ref_model needs a separate reference. With tuner_type: lora the reference is the policy without its "
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
    at_least(config, 0, "kl_cov_coef", "entropy_target", "policy_drift_coef")
    at_least(config, 0, "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    at_least(config, 1, "delta", "fipo_safety_threshold", "dppo_ratio_cap")
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{name} must lie in (0, 1], got {getattr(config, name)}")
    if config.clip_cov_lb >= config.clip_cov_ub:
        raise ConfigError(
            f"clip_cov_lb={config.clip_cov_lb} is not below clip_cov_ub={config.clip_cov_ub}: no token lies between"
        )
    for name in ("sapo_temperature_pos", "sapo_temperature_neg", "fipo_decay_rate", "real_tau"):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name} must be positive, got {getattr(config, name)}")
    if config.loss_name != "cispo" and config.epsilon_high is not None and config.epsilon_high < config.epsilon:
        raise ConfigError(
            f"epsilon_high={config.epsilon_high} is below epsilon={config.epsilon}: ratios are clipped to "
            "[1 - epsilon, 1 + epsilon_high], and clip-higher needs the larger range above 1. Raise it, or lower "
            "epsilon."
        )
    if config.loss_name == "real":
        check_real(config)
    check_clip_range(config)
    low, high = config.rollout_importance_sampling_clip_min, config.rollout_importance_sampling_clip_max
    if low is not None and high is not None and low > high:
        raise ConfigError(f"rollout_importance_sampling_clip_min={low} is above ..._clip_max={high}")
    if high == 0:
        raise ConfigError("rollout_importance_sampling_clip_max=0 weighs every token with 0. Write null, or 2.0.")
    if not 0 <= config.top_entropy_quantile <= 1:
        raise ConfigError(f"top_entropy_quantile must lie in [0, 1], got {config.top_entropy_quantile}; 1: all tokens")
    if config.entropy_coef_min > config.entropy_coef_max:
        raise ConfigError(
            f"entropy_coef_min={config.entropy_coef_min} is above entropy_coef_max={config.entropy_coef_max}"
        )
    if config.loss_name == "cispo" and (config.epsilon_high is None or config.epsilon_high < 1):
        raise ConfigError(
            f"loss_type=cispo caps the importance ratio itself at epsilon_high, got {config.epsilon_high}: every token "
            "would be weighed below 1. Set epsilon_high to 5.0, as the paper does."
        )
    if config.loss_name == "gmpo" and config.top_entropy_quantile < 1:
        raise ConfigError(
            "loss_type=gmpo multiplies the ratios of all tokens of a completion: remove top_entropy_quantile"
        )
    meant = {"luspo": "sequence", "vespo": "token"}.get(config.loss_name, config.importance_sampling_level)
    if config.importance_sampling_level != meant:
        logger.warning(
            "loss_type=%s is designed for importance_sampling_level=%s, not %s",
            config.loss_name,
            meant,
            config.importance_sampling_level,
        )


def check_clip_range(config: GRPOConfig) -> None:
    """Raises ConfigError for a clip range that no ratio, or no probability, can leave on one of its sides."""
    loss, upper = config.loss_name, config.epsilon if config.epsilon_high is None else config.epsilon_high
    if loss in (*CLIPPED, "clip_cov") and config.epsilon > 1:
        raise ConfigError(
            f"epsilon must lie in [0, 1], got {config.epsilon}: ratios are clipped to 1 - epsilon, and none is below "
            "0. Write 1 for no lower bound, and epsilon_high for the upper one."
        )
    if config.fipo_clip_range is not None and config.fipo_clip_range > 1 and not config.fipo_clip_high_only:
        raise ConfigError(
            f"fipo_clip_range must lie in [0, 1], got {config.fipo_clip_range}: weights are clipped to 1 - "
            "fipo_clip_range, and none is below 0. Lower it, or set fipo_clip_high_only."
        )
    for name, value in (("epsilon", config.epsilon), ("epsilon_high", upper)):
        if loss == "dppo_tv" and value > 1:
            raise ConfigError(
                f"{name} must lie in [0, 1], got {value}: loss_type=dppo_tv compares probabilities, which differ by at "
                "most 1"
            )


def check_turns(config: GRPOConfig) -> None:
    if config.environment is not None and config.tools:
        raise ConfigError("environment and tools both answer the model; set one of them")
    if config.tool_call_parser != "auto" and not config.tools:
        raise ConfigError("tool_call_parser reads calls of tools, but there are no tools. Set tools, or remove it.")
    if config.max_turns is not None and config.max_tool_calling_iterations is not None:
        raise ConfigError("max_turns and max_tool_calling_iterations both limit the turns; set one of them")
    if not config.environment_reward and not config.has_environment:
        raise ConfigError("environment_reward: false is for an environment, and there is none. Remove it.")
    check_episodes(config, config.turn_limit, "environment (or tools)")
    at_least(config, 0, "max_tool_calling_iterations")


def check_chosen(config: GRPOConfig) -> None:
    """Raises ConfigError for a loss or an estimator of a plugin that is not there, or that does not fit other keys.

    Called before any process starts, when the plugins are imported.
    """
    check_plugged(config)
    check_advantages(config)
