"""What is wrong with a run beyond the values of single keys, found before any process starts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayhelper import ConfigError, DeviceGroups
from trainers.backends.device import default_device
from trainers.configuration.completion import CompletionConfig, said_model_len
from trainers.configuration.megatron_checks import check_megatron
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.roles import LEARNS
from trainers.configuration.shared import TrainConfig
from trainers.configuration.tuners import quantization_mistake
from trainers.data.images.processor import ImageReader
from trainers.data.rows import tokenize_prompts
from trainers.parts.engine import lora_settings_of_engine, sampling_of
from trainers.parts.model_checks import (
    check_files,
    check_lengths,
    check_model_folder,
    check_new_tokens,
    check_optimizer,
    check_sequences,
    positions_of,
)
from trainers.parts.models import lora_settings, resolve_dtype
from trainers.plugins import load_plugins
from trainers.rollout.hf.settings import check_generation_kwargs
from trainers.run.run import resumed_state
from trainers.run.trackers import check_known

logger = logging.getLogger(__name__)

TEMPLATE_TOKENS = 1024  # no chat template adds more to a prompt
TOKENIZED_AT_ONCE = 1024  # prompts


def check_before_start(config: TrainConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for missing or damaged files, and for settings that megatron does not support. Model,
    tokenizer, workers and arguments must also fit together."""
    with mistakes_of("external_plugins"):
        load_plugins(config.external_plugins)
    check_known(config.report_to)
    check_files(config, groups)
    if config.backend == "megatron":
        check_megatron(config, groups, lora_settings(config))
    learning = {role for role, kind in config.ROLES.items() if kind.does in LEARNS}
    placed = [] if groups is None else groups.groups
    workers = {role: group.num_workers for group in placed for role in group.roles if role in learning}
    if mistake := quantization_mistake(config, config.fsdp_sharding_strategy, workers):
        raise ConfigError(mistake)
    check_optimizer(config)
    check_model_folder(config)
    check_lengths(config)
    check_sequences(config, groups)
    check_new_tokens(config)
    resumed_state(config)


def num_train_shards(config: TrainConfig, groups: DeviceGroups | None, role: str = "train") -> int:
    """Data-parallel shards of the role's workers that ``groups`` will start; None: this process is the only worker."""
    num_workers = 1 if groups is None else groups.group_of(role).num_workers
    return num_workers // config.workers_per_shard


def check_completions(config: CompletionConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for an engine that is not installed, an unknown field, or a placement that it does not
    support.

    Warns of keys that have no effect if role rollout has its own devices.
    """
    if config.rollout_engine == "vllm":
        from trainers.rollout.vllm.adapter import check_adapter
        from trainers.rollout.vllm.settings import check_model_on_cpu, check_sampling_kwargs, checked_engine_kwargs

        if is_on_cpu(groups, "rollout"):
            check_model_on_cpu(config.model, dtype=resolve_dtype(config), trust_remote_code=config.trust_remote_code)
        if config.vllm_enable_lora and Path(config.model).is_dir():
            check_adapter(
                config.model,
                lora_settings_of_engine(config, config.model)["lora_target_modules"],
                on_cpu=is_on_cpu(groups, "rollout"),
                trust_remote_code=config.trust_remote_code,
            )
        checked_engine_kwargs(config.vllm_engine_kwargs)
        check_sampling_kwargs(sampling_of(config))
        if config.evaluates and (temperature := getattr(config, "eval_temperature", None)) is not None:
            check_sampling_kwargs(sampling_of(config, temperature))
    else:
        check_generation_kwargs(config.generation_kwargs)
    shares_devices = groups is None or groups.share_devices("rollout", "train")
    idle = [name for name in ("sleep_level", "offload_model", "offload_optimizer") if getattr(config, name)]
    if idle and not shares_devices:
        logger.warning(
            "without effect: %s. These keys free memory if one device trains and generates in turn. But role rollout "
            "has its own device group",
            ", ".join(idle),
        )
    if config.rollout_engine == "vllm" and shares_devices:
        check_can_sleep(config, groups, "rollout")
    size = config.vllm_tensor_parallel_size
    shares_processes = groups is None or groups.group_of("rollout") == groups.group_of("train")
    if size > 1 and shares_processes:
        raise ConfigError(
            f"vllm_tensor_parallel_size={size}: workers that also train have a slice each. Give role rollout its own "
            "group. With shares_devices_with, it may use the same devices."
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
                "holds a model with all of them. Make the two equal, or remove gpus_per_worker: then several "
                "workers, with one GPU each, hold one model."
            )
    elif num_workers % size:
        raise ConfigError(f"{told} does not divide the {num_workers} workers of role {role}")


def is_on_cpu(groups: DeviceGroups | None, role: str) -> bool:
    """Whether the role's workers have no GPU."""
    return default_device().type == "cpu" if groups is None else groups.group_of(role).device == "CPU"


def check_can_sleep(config: CompletionConfig, groups: DeviceGroups | None, role: str) -> None:
    """Raises ConfigError if the role's vLLM shall make room on a CPU."""
    if config.sleep_level and is_on_cpu(groups, role):
        raise ConfigError(
            f"sleep_level={config.sleep_level}: vLLM frees only memory of GPUs, and role {role} is on a CPU. Set it "
            "to 0."
        )


def check_prompts_fit(
    config: CompletionConfig,
    datasets: Mapping[str, Any],
    tokenizer: Any,
    model: str,
    images: ImageReader | None = None,
) -> None:
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
    least = 1 if config.vllm_clip_completions else config.max_completion_length
    room = length - least
    for key, rows in datasets.items():
        long = (
            (k, row)
            for k, row in enumerate(rows or ())
            if images is not None or len(str(row).encode()) + TEMPLATE_TOKENS > room
        )
        while some := list(itertools.islice(long, TOKENIZED_AT_ONCE)):
            places, texts = zip(*some, strict=True)
            options: dict[str, Any] = {"chat_template_kwargs": config.chat_template_kwargs, "images": images}
            found = tokenize_prompts(texts, tokenizer, **options)
            for place, prompt_ids in zip(places, found, strict=True):
                if len(prompt_ids) > room:
                    raise ConfigError(
                        f"{key}: the prompt of row {place} (from 0, of {len(rows)}) has {len(prompt_ids)} tokens. With "
                        f"a completion of {least} tokens (max_completion_length), this is more than {told}. Set "
                        f"max_prompt_length to at most {room}, which cuts the beginning of longer prompts. Or change "
                        "one of the lengths, or remove the row."
                    )


def model_length(model: str, *, trust_remote_code: bool) -> int | None:
    """Positions that the model knows; None: it does not say, or vLLM takes another number."""
    from transformers import AutoConfig

    return positions_of(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code))


def check_staleness(max_staleness: int, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for completions begun ahead where there is nothing that could run beside training."""
    if max_staleness and (groups is None or groups.share_devices("rollout", "train")):
        raise ConfigError(
            f"max_staleness={max_staleness} generates while the policy is trained, but both are on the same devices. "
            "Give role rollout a group with its own devices, or remove the key."
        )
