"""What the trainers that complete prompts share: the engine, how completions are drawn, and what is seen of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.device import default_device
from trainers.backends.fsdp.adapters import layer_names
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.configuration.completion import CompletionConfig, said_model_len
from trainers.data.rows import tokenize_prompts
from trainers.metrics import Metrics
from trainers.parts.weights import is_beside
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf import HfEngine, check_generation_kwargs
from trainers.run.run import resolve_dtype

logger = logging.getLogger(__name__)

TEMPLATE_TOKENS = 1024  # no chat template adds more to a prompt
TOKENIZED_AT_ONCE = 1024  # prompts


def build_engine(
    config: CompletionConfig, model: str, tokenizer: Any, backend: Backend | None, *, gathers: bool = True
) -> Engine:
    """The engine of this worker; ``backend``: the policy, if this worker trains it as well.

    hf then generates with its very module, if that is of transformers (``gathers`` False: whoever calls it sees to it
    that weights which lie in shards are whole meanwhile); vllm has a model of its own in any case.
    """
    if config.rollout_engine == "vllm":
        return build_vllm(config, model, tokenizer, shares_devices=backend is not None or is_beside("train"))
    lender = backend if config.backend == "fsdp" else None
    return HfEngine(
        model if lender is None else lender.module,
        tokenizer,
        batch_size=config.rollout_batch_size,
        dtype=resolve_dtype(config),
        model_init_kwargs=config.model_init_kwargs,
        trust_remote_code=config.trust_remote_code,
        whole_weights=lender.whole_weights if lender is not None and gathers else None,
    )


def check_completions(config: CompletionConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for an engine that is not there, a field it lacks, or a placement it cannot work in.

    Warns of keys that have no effect where role rollout has devices of its own.
    """
    if config.rollout_engine == "vllm":
        from trainers.rollout.vllm.settings import check_sampling_kwargs, checked_engine_kwargs

        checked_engine_kwargs(config.vllm_engine_kwargs)
        check_sampling_kwargs(sampling_of(config))
        if config.eval_dataset and (temperature := getattr(config, "eval_temperature", None)) is not None:
            check_sampling_kwargs(sampling_of(config, temperature))
    else:
        check_generation_kwargs(config.generation_kwargs)
    shares_devices = groups is None or groups.share_devices("rollout", "train")
    idle = [name for name in ("sleep_level", "offload_model", "offload_optimizer") if getattr(config, name)]
    if idle and not shares_devices:
        logger.warning(
            "without effect: %s. Room is made where one device trains and generates by turns, but role rollout has a "
            "device group of its own",
            ", ".join(idle),
        )
    if config.rollout_engine == "vllm" and shares_devices:
        check_can_sleep(config, groups, "rollout")
    size = config.vllm_tensor_parallel_size
    shares_processes = groups is None or groups.group_of("rollout") == groups.group_of("train")
    if size > 1 and shares_processes:
        raise ConfigError(
            f"vllm_tensor_parallel_size={size}: workers that also train have a slice each. Give role rollout a group "
            "of its own; with shares_devices_with it may be on the same devices."
        )
    if config.rollout_engine == "vllm":
        check_model_fits(f"vllm_tensor_parallel_size={size}", size, groups, "rollout")


def check_model_fits(told: str, size: int, groups: DeviceGroups | None, role: str) -> None:
    """Raises ConfigError unless a role's workers, or the GPUs of each, can hold a model ``size`` at a time."""
    group = None if groups is None else groups.group_of(role)
    num_workers = 1 if group is None else group.num_workers
    if group is not None and group.gpus_per_worker > 1:
        if size != group.gpus_per_worker:
            raise ConfigError(
                f"{told}, but a worker of role {role} has {group.gpus_per_worker} GPUs (gpus_per_worker), and vLLM "
                f"holds a model with all of them. Make the two equal, or remove gpus_per_worker: then workers with a "
                "GPU each hold one together."
            )
    elif num_workers % size:
        raise ConfigError(f"{told} does not divide the {num_workers} workers of role {role}")


def check_can_sleep(config: CompletionConfig, groups: DeviceGroups | None, role: str) -> None:
    """Raises ConfigError if the role's vLLM shall make room on a CPU."""
    on_cpu = default_device().type == "cpu" if groups is None else groups.group_of(role).device == "CPU"
    if config.sleep_level and on_cpu:
        raise ConfigError(
            f"sleep_level={config.sleep_level}: vLLM frees memory of GPUs alone, and role {role} is on a CPU. Set it "
            "to 0."
        )


def build_vllm(config: CompletionConfig, model: str, tokenizer: Any, *, shares_devices: bool) -> Engine:
    """vLLM with the configuration's settings; ``shares_devices``: on the device of this worker a model is trained."""
    from trainers.rollout.vllm.engine import VllmEngine

    size = config.vllm_tensor_parallel_size
    return VllmEngine(
        model,
        tokenizer,
        dtype=resolve_dtype(config),
        seed=config.seed,
        tensor_parallel_size=size,
        alone=not share_model(size),
        sleep_level=config.sleep_level if shares_devices else 0,
        trust_remote_code=config.trust_remote_code,
        **lora_settings_of_engine(config, model),
        patches=config.vllm_patches,
        engine_kwargs=vllm_settings(config, shares_devices=shares_devices),
    )


def lora_settings_of_engine(config: CompletionConfig, model: str) -> dict[str, Any]:
    """What an engine must know of the policy's adapter if it is to hold it apart from the model."""
    if not config.vllm_enable_lora:
        return {}
    targets = layer_names(model, config.lora_target_modules, trust_remote_code=config.trust_remote_code)
    return {"lora_rank": config.lora_rank, "lora_target_modules": targets}


def share_model(size: int) -> bool:
    """Whether this worker's vLLM has to do with other workers.

    Every ``size`` workers of the role whose method is running hold one model together, and get the same slice, unless
    each has as many GPUs. What else a worker hosts may need the process group of all.
    """
    worker = RayHelper.current()
    if worker.gpus_per_worker > 1:
        return False
    if size > 1:
        RayHelper.shard(worker.rank // size, worker.world_size // size, leader=worker.rank % size == 0)
    return size > 1 or len(worker.roles) != 1


def vllm_settings(config: CompletionConfig, *, shares_devices: bool) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs."""
    length = config.vllm_max_model_len
    if length is None and config.max_prompt_length is not None:
        length = config.max_prompt_length + config.max_completion_length
    share = config.vllm_gpu_memory_utilization
    settings = {
        "gpu_memory_utilization": share or (0.4 if shares_devices else 0.9),
        "max_model_len": length,
        "max_num_seqs": config.vllm_max_num_seqs,
        "enforce_eager": config.vllm_enforce_eager or None,
        "enable_prefix_caching": config.vllm_enable_prefix_caching,
    }
    return {name: value for name, value in settings.items() if value is not None} | config.vllm_engine_kwargs


def sampling_of(config: CompletionConfig, temperature: float | None = None) -> Sampling:
    """How completions are drawn; ``temperature`` None: the configuration's."""
    return Sampling(
        max_completion_length=config.max_completion_length,
        temperature=config.temperature if temperature is None else temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop_token_ids=tuple(config.stop_token_ids),
        generation_kwargs=config.generation_kwargs,
    )


def prompts_of(config: CompletionConfig, rows: Any, tokenizer: Any) -> Prompts:
    """The rows' prompts as token ids."""
    prompt_ids = tokenize_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    return Prompts(Ragged.of(prompt_ids, np.int64))


def check_prompts_fit(config: CompletionConfig, datasets: Mapping[str, Any], tokenizer: Any, model: str) -> None:
    """Raises ConfigError naming the first row whose prompt leaves vLLM no room for a completion.

    ``datasets``: rows by the key that names them; None: they are not completed. With ``max_prompt_length`` there is
    room always. Rows with fewer bytes of text than there is room for tokens, by ``TEMPLATE_TOKENS``, are not tokenized.
    """
    if config.rollout_engine != "vllm" or config.max_prompt_length is not None:
        return
    told, length = said_model_len(config)
    if length is None and not config.vllm_engine_kwargs.keys() & {"hf_overrides", "hf_config_path"}:
        length = model_length(model, trust_remote_code=config.trust_remote_code)
        told = f"the model's {length} positions"
    if not isinstance(length, int) or length < 0:
        return  # vLLM finds one itself
    room = length - config.max_completion_length
    for key, rows in datasets.items():
        long = ((k, row) for k, row in enumerate(rows or ()) if len(str(row).encode()) + TEMPLATE_TOKENS > room)
        while some := list(itertools.islice(long, TOKENIZED_AT_ONCE)):
            places, texts = zip(*some, strict=True)
            found = tokenize_prompts(texts, tokenizer, chat_template_kwargs=config.chat_template_kwargs)
            for place, prompt_ids in zip(places, found, strict=True):
                if len(prompt_ids) > room:
                    raise ConfigError(
                        f"{key}: the prompt of row {place} (from 0, of {len(rows)}) has {len(prompt_ids)} tokens, and "
                        f"with a completion of {config.max_completion_length} (max_completion_length) that is more "
                        f"than {told}. Set max_prompt_length, {room} at most, which takes the beginning away from "
                        "longer prompts, change one of the lengths, or take the row out."
                    )


def model_length(model: str, *, trust_remote_code: bool) -> int | None:
    """Positions that the model knows; None: it does not say, or vLLM takes another number."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "llama3" and ("factor" in rope or kind in ("longrope", "su")):
        return None
    return getattr(config, "max_position_embeddings", None)


def seed_of(seed: int, step: int, *further: int) -> int:
    """The seed of this worker's completions; it depends on these and the worker alone, so that a resumed run draws
    the same. ``seed``: the run's; ``step``: of completing prompts, -1 for evaluation.
    """
    entropy = [seed, step + 1, RayHelper.current().shard.index, *further]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def check_staleness(max_staleness: int, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for completions begun ahead where there is nothing that could run beside training."""
    if max_staleness and (groups is None or groups.share_devices("rollout", "train")):
        raise ConfigError(
            f"max_staleness={max_staleness} generates while the policy is trained, but both are on the same "
            "devices. Give role rollout a group with devices of its own, or remove it."
        )


def add_token_staleness(metrics: Metrics, rollouts: Rollouts, version: int) -> None:
    """How many optimizer steps the policy, which has made ``version``, is ahead of the one that drew each token."""
    if rollouts.policy_versions is None:
        return
    known = rollouts.policy_versions.values[rollouts.policy_versions.values >= 0]
    if len(known):
        metrics.mean("staleness/tokens_mean", float((version - known).sum()), len(known))
        metrics.max("staleness/tokens_max", float(version - known.min()))
    drawn_by = [len(np.unique(row[row >= 0])) for row in rollouts.policy_versions]
    metrics.mean("staleness/mixed_completions", float(sum(count > 1 for count in drawn_by)), len(drawn_by))


def rollout_metrics(rollouts: Rollouts) -> Metrics:
    """Lengths of the completions (of what the model wrote of them), and how many ran into the limit; TRL's names."""
    metrics = Metrics()
    lengths_B = rollouts.completion_ids.lengths
    if rollouts.is_sampled is not None:
        lengths_B = np.array([int(row.sum()) for row in rollouts.is_sampled], np.int64)
    finished = lengths_B[~rollouts.truncated]
    for suffix, lengths in (("length", lengths_B), ("terminated_length", finished if len(finished) else np.zeros(1))):
        metrics.mean(f"completions/mean_{suffix}", float(lengths.sum()), len(lengths))
        metrics.min(f"completions/min_{suffix}", float(lengths.min()))
        metrics.max(f"completions/max_{suffix}", float(lengths.max()))
    metrics.mean("completions/clipped_ratio", float(rollouts.truncated.sum()), len(rollouts))
    if rollouts.reward_seconds is not None:
        metrics.sum("rewards/pool_seconds", float(rollouts.reward_seconds.sum()))
    if rollouts.kv_cache_usage is not None:
        metrics.max("rollout/kv_cache_usage", float(rollouts.kv_cache_usage.max()))
    metrics.sum("num_tokens", float(rollouts.prompt_ids.lengths.sum() + lengths_B.sum()))
    if rollouts.num_turns is not None and rollouts.num_tool_calls is not None:
        assert rollouts.num_tool_failures is not None
        metrics.mean("num_turns", float(rollouts.num_turns.sum()), len(rollouts))
        num_calls, num_failures = float(rollouts.num_tool_calls.sum()), float(rollouts.num_tool_failures.sum())
        metrics.mean("tools/call_frequency", num_calls, len(rollouts))
        metrics.mean("tools/failure_frequency", num_failures, num_calls or 1.0)
    return metrics
