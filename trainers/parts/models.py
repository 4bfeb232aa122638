"""The models of a run: where they are, whether they fit, and how a worker builds its own (a ``Backend``)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rayhelper import ConfigError, RayHelper
from rayhelper.planning.memory import Work
from rayhelper.planning.parallel_sizes import ParallelSizes
from trainers.backends.base import Backend
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.recomputing import device_memory, recomputes
from trainers.backends.scores.head import room_of
from trainers.configuration.packs import micro_batch_tokens, pack_length
from trainers.configuration.shared import RunConfig, TrainConfig, megatron_settings
from trainers.configuration.tuners import peft_fields, quantization_mistake
from trainers.configuration.vision import vision_settings
from trainers.plugins import load_plugins, resolve_model

Dtype = Literal["float32", "bfloat16"]


@RayHelper.function(group="driver", execute="first")
def resolved_models(config: TrainConfig, policy: str, names: Iterable[str]) -> dict[str, str]:
    """The folder or hub name of each named model. One that a plugin builds is built once; the policy is ``policy``.

    Raises ConfigError for a name that is neither a folder nor a model of the hub.
    """
    found = {config.model: policy}
    for name in names:
        if name not in found:
            reuse = bool(config.resume_from_checkpoint)
            found[name] = resolve_model(name, output_dir=config.output_dir, seed=config.seed, reuse=reuse)
            if not Path(found[name]).is_dir():
                _check_on_hub(found[name], config.trust_remote_code)
    return found


def _check_on_hub(model: str, trust_remote_code: bool) -> None:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except OSError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"no model could be loaded from {model!r}: {said} Give a folder or a hub name.") from error


def check_same_tokens(
    key: str, model: str, tokenizer: Any, trust_remote_code: bool = False, *, policy: str | None = None
) -> None:
    """Raises ConfigError if a model that reads the policy's token ids has a tokenizer, and it is another one.

    ``policy``: the model that the policy begins as, whose tokens are known.
    """
    from transformers import AutoTokenizer

    if model == policy:
        return
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return  # weights alone
    try:
        own = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code).get_vocab()
    except Exception:  # of any kind, by what the folder holds: it has no tokenizer to compare
        return
    if any(own.get(token) != token_id for token, token_id in tokenizer.get_vocab().items()):
        raise ConfigError(
            f"{key}: {model!r} has other tokens than the policy, whose token ids it would be given. Set {key} to a "
            "model with the policy's tokenizer, such as the policy itself."
        )


def num_shards(config: TrainConfig) -> int:
    """Data-parallel shards of the role whose method is running, whether its model is built or not.

    Raises ConfigError if the workers of a shard do not divide them.
    """
    num_workers = RayHelper.current().world_size
    if num_workers % config.workers_per_shard:
        raise ConfigError(
            f"tensor_, pipeline_, context_ and sequence parallelism let {config.workers_per_shard} workers work on one "
            f"slice together, but there are {num_workers}. Start a multiple of {config.workers_per_shard}."
        )
    return num_workers // config.workers_per_shard


def build_backend(config: TrainConfig, model: str, *, num_training_steps: int | None, **settings: Any) -> Backend:
    """The backend of this worker, its process group joined; ``num_training_steps`` None: one that only scores.

    ``settings`` are further arguments of the backend, or others than the configuration's, such as ``head="value"`` or
    another ``learning_rate``.
    """
    load_plugins(config.external_plugins)
    if config.backend == "megatron":
        RayHelper.init_process_group()
        arguments: dict[str, Any] = {"vision": vision_settings(config, trains=num_training_steps is not None)}
        return build_megatron(config, model, shared_arguments(config, num_training_steps) | arguments | settings)
    trains = num_training_steps is not None
    if RayHelper.current().world_size > 1 or (trains and config.fsdp_offload_params):
        RayHelper.init_process_group()
    arguments = {
        "gradient_checkpointing": trains and recomputes_activations(config, model),
        "sharding": config.fsdp_sharding_strategy,
        "reshard_after_forward": config.fsdp_reshard_after_forward,
        "offload_params": config.fsdp_offload_params,
        "optimizer_offload": config.optimizer_offload,
        "torch_compile": config.torch_compile,
        "cuda_graphs": config.cuda_graphs and not shares_gpu_with_vllm(config),
        "activation_memory_budget": config.activation_memory_budget,
        "padding_free": config.padding_free or pack_length(config) is not None,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "sequence_parallel_size": config.sequence_parallel_size,
        "model_init_kwargs": config.model_init_kwargs,
        "vision": vision_settings(config, trains=trains),
    }
    if trains and config.has_adapter:
        workers = {"train": RayHelper.current().world_size}
        if mistake := quantization_mistake(config, config.fsdp_sharding_strategy, workers):
            raise ConfigError(mistake)
        arguments |= {"tuner": config.tuner_type, "quantization": config.quantization}
    backend = FsdpBackend(model, **shared_arguments(config, num_training_steps) | arguments | settings)
    if config.sequence_parallel_size > 1:
        RayHelper.shard(*backend.shard)
    return backend


def shares_gpu_with_vllm(config: Any) -> bool:
    """Whether a vLLM engine is on this worker's devices: it would have to find the memory of graphs free each step."""
    here = RayHelper.current()
    is_beside = not here.roles or "rollout" in (*here.roles, *here.neighbours)  # with Ray off one worker has all roles
    return getattr(config, "rollout_engine", None) == "vllm" and is_beside


def recomputes_activations(config: TrainConfig, model: str) -> bool:
    """What ``gradient_checkpointing`` means for a model that is trained on this worker's device. Every rank."""
    if config.gradient_checkpointing != "auto":
        return config.gradient_checkpointing
    length = longest_sequence(config)
    num_workers, num_sharing = RayHelper.current().world_size, config.sequence_parallel_size
    is_divided = config.fsdp_sharding_strategy == "full_shard"
    sizes = ParallelSizes(shared_rows=num_sharing, data=num_workers // num_sharing if is_divided else 1)
    work = Work(
        micro_batch=config.per_device_train_batch_size,
        length=length or 0,
        compute_bytes=4 if resolve_dtype(config) == "float32" else 2,
        kept_share=config.activation_memory_budget if config.torch_compile is True else 1.0,
        kept_logits=room_of(config.logits_memory_gib, recomputes=False),
        adapter=1 if config.has_adapter else 0,
    )
    memory = None if length is None else device_memory()
    return recomputes(model, sizes, work, memory=memory, trust_remote_code=config.trust_remote_code)


def longest_sequence(config: Any) -> int | None:
    """Tokens of a sequence at most; None: no key says it."""
    prompt, completion = getattr(config, "max_prompt_length", None), getattr(config, "max_completion_length", None)
    both = prompt + completion if prompt and completion else None
    return getattr(config, "max_length", None) or both


def build_megatron(config: TrainConfig, model: str, arguments: dict[str, Any]) -> Backend:
    """The ``megatron`` backend, which divides the model as the configuration says."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.fields import divided

    settings = replace(megatron_settings(config), **divided(config.megatron))
    arguments = {name: value for name, value in arguments.items() if name != "pooling"}  # which is last, or refused
    backend = MegatronBackend(model, settings=settings, **{"async_save": config.async_save, **arguments})
    RayHelper.shard(*backend.shard)
    return backend


def shared_arguments(config: TrainConfig, num_training_steps: int | None) -> dict[str, Any]:
    """What every backend is told; ``num_training_steps`` None: one that only scores."""
    trains, steps = num_training_steps is not None, num_training_steps or 0
    return {
        "dtype": resolve_dtype(config),
        "learning_rate": None if num_training_steps is None else config.learning_rate,
        "num_training_steps": steps,
        "weight_decay": config.weight_decay,
        "optim": config.optim,
        "optim_kwargs": config.optim_kwargs,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "max_grad_norm": config.max_grad_norm,
        "lr_scheduler_type": config.lr_scheduler_type,
        "lr_scheduler_kwargs": config.lr_scheduler_kwargs,
        "warmup_steps": config.warmup_steps or math.ceil(config.warmup_ratio * steps),
        "disable_dropout": config.disable_dropout,
        "lora": lora_settings(config) if trains else None,
        "logits_memory_gib": config.logits_memory_gib,
        "token_budget": micro_batch_tokens(config),
        "peak_tflops": config.peak_tflops,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
    }


def resolve_dtype(config: RunConfig) -> Dtype:
    """'float32' or 'bfloat16': what ``auto`` means on this process's device."""
    import torch

    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def lora_settings(config: TrainConfig) -> dict[str, Any] | None:
    """Fields of peft's configuration of the tuner; None: all weights are trained.

    ``disable_dropout`` is of the adapter too, as in TRL, which disables all dropout once the adapter is there.
    """
    return peft_fields(config, disable_dropout=config.disable_dropout) if config.has_adapter else None
