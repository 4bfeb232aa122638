"""GKD's keys, and which values of them have a meaning. Imports no torch, so that a typo is answered at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.completion import CompletionConfig, check_episodes
from trainers.configuration.roles import ROLLOUT, TEACHER, TRAIN
from trainers.configuration.shared import check_init_kwargs
from trainers.configuration.values import at_least


@dataclass(frozen=True, kw_only=True)
class GKDConfig(CompletionConfig):
    """Distillation's keys beside the shared ones."""

    RLHF_TYPE: ClassVar = "gkd"
    ROLES: ClassVar = {"train": TRAIN, "rollout": ROLLOUT, "teacher": TEACHER}

    output_dir: str = "outputs/gkd"

    # Teacher
    teacher_model: str | None = None
    """Folder, hub name or a plugin's model, with the student's vocabulary. null: the student without its LoRA adapter.
    If rows have a ``teacher_prompt``, null is the student itself."""
    teacher_model_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the teacher's AutoModelForCausalLM.from_pretrained."""
    teacher_engine: Literal["hf", "vllm"] = "hf"
    """The engine of the teacher_model. hf: transformers, as for the student. vllm: vLLM, which is installed separately.
    It returns only the top ``gkd_logits_topk`` tokens."""
    teacher_engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's EngineArgs for ``teacher_engine: vllm``, such as {max_model_len: 8192}. tensor_parallel_size is
    the number of teacher workers that hold one model together."""
    offload_teacher_model: bool = False
    """Offload a teacher that shares the student's devices to the host between its calls."""

    # Data
    lmbda: float = 0.5
    """Share of the steps that learn from the student's own completions. The other steps learn from the dataset's
    responses."""
    max_staleness: int = 0
    """Staleness: the policy that generates may be at most this number of steps old. Above 0, the student generates
    while it learns from earlier completions. Above 1, completions wait in a queue. Then role rollout needs its own
    devices."""
    seq_kd: bool = False
    """The other steps (see lmbda) learn from the teacher's completions instead."""
    max_length: int | None = 1024
    """Tokens of a dataset row. A longer row loses the beginning of its prompt."""

    # Generation
    max_completion_length: int = 128
    """Largest number of tokens of a completion, with its stop token."""
    temperature: float = 0.9
    """The logits are divided by it, in sampling and in the divergence of both models."""

    # Several turns
    environment: Any = None
    """Name of a registered environment or scheduler, a dotted path, or {name: ..., argument: value}. It answers the
    student's text; see ``rollout/environments.py``. null: a completion is a single turn."""
    max_turns: int | None = None
    """Turns of the student in one completion. null: as many as fit into ``max_completion_length``."""
    completion_length_limit_scope: Literal["total", "per_round"] = "total"
    """The scope of ``max_completion_length``. total: all turns of a completion together. per_round: each turn of the
    student. Then ``max_turns`` or vLLM's ``max_model_len`` limits the whole completion."""

    # Loss
    beta: float = 0.5
    """0: forward KL(teacher || student). 1: reverse KL(student || teacher). Between them: the generalised
    Jensen-Shannon divergence of GKD. The formulas are in losses/distillation.py."""
    gkd_logits_topk: int | None = None
    """Compare only the teacher's top-k tokens; this is k. null: the whole vocabulary. Then the teacher must share the
    student's devices."""
    gkd_topk_add_tail: bool = True
    """With ``gkd_logits_topk``: all other tokens together form one more entry. false: the top k are renormalised."""
    sft_alpha: float = 0.0
    """Weight of the cross-entropy on the dataset's responses. It is added to the loss, and has temperature 1."""

    # Evaluation
    per_device_eval_batch_size: int = 8
    """Sequences that a worker passes through the models at once in evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_gkd(self)

    @property
    def uses_vllm(self) -> bool:
        """Whether the student's engine, or the teacher's, is vLLM."""
        return super().uses_vllm or self.teacher_engine == "vllm"

    @property
    def uses_responses(self) -> bool:
        """Whether any step learns from the dataset's responses."""
        return self.lmbda < 1 and not self.seq_kd

    @property
    def has_environment(self) -> bool:
        return self.environment is not None

    @property
    def has_live_teacher(self) -> bool:
        """Whether the student as it is at each step teaches itself, by prompts of the teacher's own."""
        return self.teacher_model is None and self.tuner_type == "full"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(GKDConfig):
    """Distillation on the student's own completions alone, with the defaults of TRL's DistillationConfig."""

    NAMES: ClassVar = ("distillation",)

    output_dir: str = "outputs/distillation"
    learning_rate: float = 1e-6
    lmbda: float = 1.0
    beta: float = 1.0
    max_completion_length: int = 512
    temperature: float = 1.0


def check_gkd(config: GKDConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning."""
    for name in ("lmbda", "beta"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"{name} must lie in [0, 1], got {getattr(config, name)}")
    if not 0 < config.temperature < math.inf:
        raise ConfigError(
            f"temperature must be positive, got {config.temperature}: both models' logits are divided by it"
        )
    at_least(config, 0, "sft_alpha", "max_staleness")
    at_least(config, 1, "gkd_logits_topk")
    at_least(config, 1, "per_device_eval_batch_size")
    at_least(config, 2, "max_length")
    _check_unused(config)
    check_episodes(config, config.max_turns, "environment")
    if config.has_environment and not config.lmbda:
        raise ConfigError("environment answers the student's completions, but with lmbda=0 there are none. Raise it.")
    if config.drop_long_prompts and config.uses_responses:
        raise ConfigError(
            f"drop_long_prompts only drops prompts, and lmbda={config.lmbda} also learns from the dataset's responses. "
            "Remove it (of ms-swift's names: truncation_strategy: left), or write lmbda: 1 or seq_kd."
        )
    _check_teacher_engine(config)


def _check_teacher_engine(config: GKDConfig) -> None:
    check_init_kwargs("teacher_model_init_kwargs", config.teacher_model_init_kwargs, "trust_remote_code")
    if config.teacher_engine == "hf":
        if config.teacher_engine_kwargs:
            raise ConfigError("teacher_engine_kwargs is for teacher_engine: vllm. Set this engine, or remove the key.")
        return
    if config.teacher_model is None:
        raise ConfigError(
            "teacher_engine: vllm is for a teacher_model, and there is none: remove it, or set teacher_model"
        )
    if config.gkd_logits_topk is None:
        raise ConfigError(
            "teacher_engine: vllm gives the teacher's most probable tokens, not the whole vocabulary: set "
            "gkd_logits_topk (such as 64), or teacher_engine: hf"
        )
    if config.teacher_model_init_kwargs:
        raise ConfigError("teacher_model_init_kwargs is for teacher_engine: hf; vLLM takes teacher_engine_kwargs")
    most = config.teacher_engine_kwargs.get("max_logprobs", config.gkd_logits_topk)
    if isinstance(most, int) and 0 <= most < config.gkd_logits_topk:
        raise ConfigError(
            f"teacher_engine_kwargs: max_logprobs={most} is below gkd_logits_topk={config.gkd_logits_topk}. Raise "
            "it, or remove it: then it has the length that is needed."
        )
    length = config.teacher_engine_kwargs.get("max_model_len")
    if isinstance(length, int) and length > 0:
        _check_teacher_length(config, length)


def _check_teacher_length(config: GKDConfig, length: int) -> None:
    """The limits that are known of what the teacher is given."""
    needed = {}
    if config.uses_responses and config.max_length is not None:
        needed["max_length"] = config.max_length
    if config.max_prompt_length is not None:
        needed["max_prompt_length + max_completion_length"] = config.max_prompt_length + config.max_completion_length
    for name, most in needed.items():
        if most > length:
            raise ConfigError(
                f"teacher_engine_kwargs: max_model_len={length} is below {name}={most}. Raise it, or lower that."
            )


def _check_unused(config: GKDConfig) -> None:
    if config.max_staleness and not config.lmbda:
        raise ConfigError(
            "max_staleness applies to the student's completions, but with lmbda=0 there are none. Raise it."
        )
    if config.seq_kd and config.lmbda == 1:
        raise ConfigError("seq_kd is set, but lmbda=1 uses the student's completions on every step. Lower lmbda.")
    if config.seq_kd and config.teacher_model is None:
        raise ConfigError(
            "seq_kd needs a teacher that completes prompts, but teacher_model is null: set teacher_model."
        )
    if config.sft_alpha and not config.uses_responses:
        raise ConfigError(
            f"sft_alpha={config.sft_alpha} weighs the cross-entropy on the dataset's responses, and no step learns "
            f"from them (lmbda={config.lmbda}, seq_kd={config.seq_kd}). Lower lmbda, or remove sft_alpha."
        )
    if config.gkd_logits_topk is None and not config.gkd_topk_add_tail:
        raise ConfigError("gkd_topk_add_tail is for gkd_logits_topk. Set gkd_logits_topk, or remove gkd_topk_add_tail.")
    if config.gkd_logits_topk == 1 and not config.gkd_topk_add_tail:
        raise ConfigError("gkd_logits_topk=1 without its tail compares nothing: set gkd_topk_add_tail, or a larger k")
    for name in ("offload_teacher_model", "teacher_model_init_kwargs"):
        if getattr(config, name) and config.teacher_model is None:
            raise ConfigError(f"{name} is for a teacher_model, and there is none: remove it, or set teacher_model")
