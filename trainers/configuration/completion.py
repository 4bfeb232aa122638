"""The keys of trainers that complete prompts, and which values of them have a meaning. Imports no torch."""

from __future__ import annotations

import logging
import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from rayhelper import ConfigError
from trainers.configuration.shared import TrainConfig, unread
from trainers.configuration.values import at_least, check_seconds
from trainers.rollout.choice import choose_engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(TrainConfig):
    """The shared keys, and those of prompts that are completed."""

    # Generation
    rollout_engine: Literal["hf", "vllm", "auto"] = "hf"
    """The engine that completes prompts. hf: the transformers model, in slots. vllm: vLLM, which is installed
    separately. auto: hf if the training workers also generate and hf knows the architecture. Otherwise vllm, if it is
    installed."""
    rollout_batch_size: int | None = None
    """Prompts that a rollout worker completes at once (hf). null: its whole slice."""
    max_prompt_length: int | None = None
    """Tokens of a prompt to complete. A longer prompt loses its beginning."""
    drop_long_prompts: bool = False
    """Leave out rows whose prompts have more than ``max_prompt_length`` tokens, instead of cutting the prompts. In GKD:
    for runs that learn only from completions (``lmbda: 1`` or ``seq_kd``)."""
    max_completion_length: int = 512
    """Largest number of tokens of a completion, with its stop token."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in the loss."""
    top_p: float = 1.0
    """Draw from the most probable tokens that hold this share of the probability. 1: from all."""
    top_k: int = 0
    """Draw only from this number of the most probable tokens. 0: from all."""
    min_p: float | None = None
    """Draw from tokens at least this share as probable as the most probable one. null: from all."""
    repetition_penalty: float = 1.0
    """Tokens that have already occurred become less likely by this factor. 1: no penalty."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further tokens that end a completion and belong to it, in addition to the model's end-of-sequence tokens."""
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of transformers' GenerationConfig; with rollout_engine: vllm, of vLLM's SamplingParams."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}."""

    # vLLM, by its own names; needs rollout_engine: vllm
    vllm_gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for weights and KV cache. null or auto: 0.9, or 0.4 if the policy is trained on the same
    GPU."""
    vllm_tensor_parallel_size: int = 1
    """Rollout workers that hold one model together. With gpus_per_worker in the device group of role rollout: the GPUs
    of one worker."""
    vllm_max_model_len: int | None = None
    """Largest number of tokens of a prompt with its completion. null: the sum of both limits if both are set, else the
    model's limit."""
    vllm_clip_completions: bool = False
    """A completion ends when prompt and completion reach ``vllm_max_model_len``, as in vLLM itself. false: a prompt and
    ``max_completion_length`` must fit together."""
    vllm_max_num_seqs: int | None = None
    """Prompts that are completed at the same time. null: vLLM's own choice."""
    vllm_enforce_eager: bool = False
    """Run without CUDA graphs. The engine starts faster and generates more slowly."""
    vllm_enable_prefix_caching: bool = True
    """If several prompts begin with the same tokens, compute these tokens once. A group shares its whole prompt."""
    vllm_enable_lora: bool = False
    """With tuner_type: lora, keep the adapter separate. The engine has the model as it is on disk, and gets only the
    adapter. false: the engine gets the changed weights, with the adapter merged into them."""
    vllm_engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's EngineArgs that have no key of their own here."""
    vllm_patches: bool = True
    """Give vLLM a scheduler that is faster in pure decoding steps. On Hopper GPUs, also give it a faster start of its
    Triton attention. This applies only to vLLM versions in which both were compared. It also applies to the engine of a
    teacher. false: vLLM's own code. The numbers are the same, except for rounding."""

    # From the trainer to the engine
    sleep_level: Literal[0, 1, 2] = 0
    """Memory that an engine on training devices frees while it does not generate. 1: the KV cache is freed, and the
    weights are offloaded to the host. 2: both are freed. hf has nothing to free."""
    offload_model: bool = False
    """The policy is offloaded to the host while an engine with its own weights generates on the same device."""
    offload_optimizer: bool = False
    """Also offload the optimizer states of the policy."""
    weight_bucket_mb: int = 256
    """Megabytes of weights per message to engines in other processes. Each side holds three buckets."""
    weight_checksum: bool = True
    """After every update of weights, compare the weights of the engine with the weights of the trainer."""

    log_completions: bool = False
    """Save completions with their rewards in completions/*.parquet every ``logging_steps``, and show a few of them."""

    def __post_init__(self) -> None:
        if self.rollout_engine == "auto":  # made in Python: what reads a file has chosen by now
            choice = choose_engine(vars(self))
            logger.info("rollout_engine: %s  # auto: %s", choice.engine, choice.reason)
            object.__setattr__(self, "rollout_engine", choice.engine)
        super().__post_init__()
        check_completion(self)

    @property
    def uses_vllm(self) -> bool:
        """Whether any role has an engine of vLLM."""
        return self.rollout_engine == "vllm"


def check_completion(config: CompletionConfig) -> None:
    """Raises ConfigError naming the first key of completions whose value has no meaning."""
    if not 0 < config.repetition_penalty < math.inf:
        raise ConfigError(f"repetition_penalty must be positive, got {config.repetition_penalty}; 1 changes nothing")
    if config.min_p is not None and not 0 <= config.min_p <= 1:
        raise ConfigError(f"min_p must lie in [0, 1], got {config.min_p}; null keeps every token")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p must lie in (0, 1], got {config.top_p}; 1 keeps every token")
    at_least(config, 0, "top_k")
    unread(config, "rows are prompts, and how long their completions get is not known", "group_by_length")
    check_stop_token_ids(config.stop_token_ids)
    at_least(config, 1, "vllm_tensor_parallel_size", "vllm_max_model_len", "vllm_max_num_seqs", "weight_bucket_mb")
    check_engine(config)
    at_least(config, 1, "max_completion_length", "max_prompt_length", "rollout_batch_size")
    if config.drop_long_prompts and config.max_prompt_length is None:
        raise ConfigError("drop_long_prompts needs max_prompt_length, the largest length. Set it.")
    check_model_len(config)


def check_episodes(config: Any, turn_limit: int | None, what: str) -> None:
    """Raises ConfigError for keys of several turns that have no meaning, or nothing to limit."""
    at_least(config, 1, "max_turns")
    is_each = config.completion_length_limit_scope == "per_round"
    for name, is_set in (("max_turns", turn_limit is not None), ("completion_length_limit_scope: per_round", is_each)):
        if is_set and not config.has_environment:
            raise ConfigError(f"{name} is set, but there is no {what} to answer a turn. Set one.")
    if is_each and turn_limit is None and config.rollout_engine != "vllm":
        raise ConfigError(
            "completion_length_limit_scope: per_round limits each turn, and nothing limits their number: set "
            "max_turns, or write total"
        )


def check_reward_functions(config: Any) -> None:
    """Raises ConfigError for keys of ``reward_funcs`` with no meaning, or where there are no functions to run."""
    at_least(config, 0, "reward_processes")
    if config.reward_processes and not config.reward_funcs:
        raise ConfigError("reward_processes is set, but there are no reward_funcs for them to run. Remove it.")
    check_seconds(config, "reward_timeout_s")
    if config.reward_timeout_s and not config.reward_funcs:
        raise ConfigError("reward_timeout_s is set, but there are no reward_funcs that it would limit. Remove it.")
    weights = getattr(config, "reward_weights", None)
    if weights and not any(weights) and not getattr(config, "teacher_model", None):
        raise ConfigError("reward_weights are all 0: every reward would be 0, and nothing would be learned")


def check_stop_token_ids(ids: list[int]) -> None:
    """Raises ConfigError for what is no list of token ids."""
    if not isinstance(ids, (list, tuple)) or any(type(token) is not int or token < 0 for token in ids):
        raise ConfigError(f"stop_token_ids must be a list of token ids, whole numbers from 0; got {ids!r}")


def check_model_len(config: CompletionConfig) -> None:
    """Raises ConfigError if vLLM would have no room for a prompt and its completion."""
    told, length = said_model_len(config)
    prompt = config.max_prompt_length
    if config.vllm_clip_completions and length is None:
        raise ConfigError("vllm_clip_completions ends completions at vllm_max_model_len. Set that, or remove it.")
    if config.vllm_clip_completions and isinstance(length, int) and 0 <= length <= (prompt or 0):
        raise ConfigError(
            f"{told} has no room for a token after a prompt of {prompt}: raise it, or lower max_prompt_length."
        )
    if config.vllm_clip_completions:
        return
    # vLLM finds a length itself for none and for -1, and says what is wrong with what is no number
    if isinstance(length, int) and 0 <= length < config.max_completion_length + (prompt or 1):
        raise ConfigError(
            f"{told} has no room for a prompt of {prompt or 'at least 1'} and a completion of "
            f"{config.max_completion_length} tokens. Raise it, or lower max_prompt_length or max_completion_length."
        )


def said_model_len(config: CompletionConfig) -> tuple[str, Any]:
    """The key that says vLLM's ``max_model_len``, with its value, and the value."""
    if "max_model_len" in config.vllm_engine_kwargs:
        length = config.vllm_engine_kwargs["max_model_len"]
        return f"vllm_engine_kwargs: {{max_model_len: {length}}}", length
    return f"vllm_max_model_len={config.vllm_max_model_len}", config.vllm_max_model_len


def check_engine(config: CompletionConfig) -> None:
    """Raises ConfigError for keys of an engine that another one was chosen over."""
    share = config.vllm_gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"vllm_gpu_memory_utilization must lie in (0, 1], got {share}")
    if config.rollout_engine == "vllm":
        if config.rollout_batch_size is not None:
            raise ConfigError("rollout_batch_size is for rollout_engine: hf; vLLM takes vllm_max_num_seqs.")
        if config.vllm_enable_lora:
            check_adapter_apart(config)
        elif config.vllm_engine_kwargs.get("quantization") is not None:
            raise ConfigError(
                f"vllm_engine_kwargs: {{quantization: {config.vllm_engine_kwargs['quantization']}}}: an engine "
                "that quantizes weights while it loads them cannot take new weights of the policy. Remove it; or "
                "train an adapter and set vllm_enable_lora: true, with which the engine keeps its weights."
            )
        check_said_once(config)
        return
    defaults = {key.name: key for key in fields(CompletionConfig)}
    for name in (name for name in defaults if name.startswith("vllm_")):
        default = defaults[name].default if defaults[name].default is not MISSING else {}
        is_used = name == "vllm_patches" and config.uses_vllm  # another role's engine reads it
        if getattr(config, name) != default and not is_used:
            raise ConfigError(f"{name} needs rollout_engine: vllm, but it is {config.rollout_engine}.")


# Fields of EngineArgs that stand in vllm_engine_kwargs or, behind vllm_, are keys
KEYS_AND_FIELDS = (
    *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "enable_prefix_caching", "enforce_eager"),
)


def check_said_once(config: CompletionConfig) -> None:
    """Raises ConfigError for a field of EngineArgs that a key and vllm_engine_kwargs say."""
    for name in KEYS_AND_FIELDS:
        key = f"vllm_{name}"
        value = getattr(config, key)
        if name in config.vllm_engine_kwargs and value != getattr(CompletionConfig, key):
            raise ConfigError(
                f"{key}: {value} and vllm_engine_kwargs: {{{name}: {config.vllm_engine_kwargs[name]}}} set the same "
                "field of vLLM's EngineArgs. Remove one of them."
            )


# What is said in lora_kwargs of how an adapter is trained, or shows in its matrices alone
PLAIN_LORA = (
    *("use_rslora", "alpha_pattern", "init_lora_weights", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
MAX_LORA_RANK = 512  # of vLLM


def check_adapter_apart(config: CompletionConfig) -> None:
    """Raises ConfigError for keys under which vLLM cannot hold the policy's adapter apart from the model."""
    merged = "Change that, or set vllm_enable_lora: false, which merges the adapter into the weights that engines get."
    if config.tuner_type != "lora":
        raise ConfigError(
            f"vllm_enable_lora needs an adapter, but tuner_type is {config.tuner_type}. Set tuner_type: lora, or "
            "remove it."
        )
    if config.quantization:
        raise ConfigError(
            "vllm_enable_lora: the engine would use the adapter with weights that are not quantized. The policy's "
            "weights are quantized. Set vllm_enable_lora: false, which sends it the policy's weights."
        )
    if config.sleep_level == 2:
        raise ConfigError(
            "sleep_level: 2 drops the engine's weights, but with vllm_enable_lora only the adapter is sent. "
            "Set sleep_level: 1."
        )
    if config.vllm_engine_kwargs.get("load_format") == "dummy":
        raise ConfigError(
            "vllm_engine_kwargs: {load_format: dummy} draws weights at random, but with vllm_enable_lora only the "
            "adapter is sent. Remove it."
        )
    if config.lora_rank > MAX_LORA_RANK:
        raise ConfigError(
            f"vLLM runs adapters of rank {MAX_LORA_RANK} at most, but lora_rank is {config.lora_rank}. {merged}"
        )
    for name in config.lora_target_modules:
        if name.rpartition(".")[2] in ("lm_head", "embed_tokens"):
            raise ConfigError(f"lora_target_modules holds {name}, which vLLM cannot run an adapter of. {merged}")
    for name, value in config.lora_kwargs.items():
        plain = name in PLAIN_LORA and (name != "init_lora_weights" or value in (True, False, "gaussian", "orthogonal"))
        if not plain and value and value != "none":
            raise ConfigError(f"lora_kwargs holds {name}: {value!r}, which vLLM cannot run an adapter with. {merged}")
