"""The engine of a rollout worker, and how completions are drawn: prompts, sampling, seeds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch.distributed as dist

from rayhelper import ConfigError, RayHelper
from trainers.backends.base import Backend
from trainers.backends.fsdp.tuners.adapters import layer_names
from trainers.batch import Prompts, Ragged, Tasks
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.shared import RunConfig
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import tokenize_prompts
from trainers.parts.models import resolve_dtype
from trainers.parts.weights import is_beside
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.choice import vllm_share
from trainers.rollout.hf.engine import HfEngine

if TYPE_CHECKING:
    from trainers.rollout.vllm.engine import VllmEngine

StartsT = TypeVar("StartsT", bound=Prompts | Tasks)


def build_engine(
    config: CompletionConfig, model: str, tokenizer: Any, backend: Backend | None, *, gathers: bool = True
) -> Engine:
    """The engine of this worker; ``backend``: the policy, if this worker trains it as well.

    hf then generates with its very module, if that is of transformers (``gathers`` False: whoever calls it sees to it
    that weights which lie in shards are whole meanwhile); vllm has a model of its own in any case.

    Raises:
        ConfigError: hf does not decode this architecture as it is trained.
    """
    if config.rollout_engine == "vllm":
        return build_vllm(config, model, tokenizer, shares_devices=backend is not None or is_beside("train"))
    lender = backend if config.backend == "fsdp" else None
    engine = HfEngine(
        model if lender is None else lender.module,
        tokenizer,
        batch_size=config.rollout_batch_size,
        dtype=resolve_dtype(config),
        model_init_kwargs=config.model_init_kwargs,
        trust_remote_code=config.trust_remote_code,
        whole_weights=lender.whole_weights if lender is not None and gathers else None,
        vision=getattr(lender, "vision", None),
        gets_part=config.backend == "megatron",  # which may have frozen the vision tower, and then sends none of it
        processing=config.image_processor_kwargs,
        videos=config.video_processor_kwargs,
    )
    if gathers:
        engine.check_decoding()
    return engine


def check_shards_are_here(config: CompletionConfig, backend: Backend | None) -> None:
    """Raises ConfigError where ``hf`` decodes with sharded weights of the policy, but not on all train workers.

    For a worker of role rollout; ``backend``: the policy, if this worker trains it. Under torchrun a group of role
    rollout may hold some of the train workers only.
    """
    here = RayHelper.current()
    if backend is None or config.rollout_engine != "hf" or config.backend != "fsdp" or not here.roles:
        return
    num_engines, num_train = here.world_size, dist.get_world_size() if dist.is_initialized() else 1
    if num_engines < num_train and config.fsdp_sharding_strategy != "no_shard":
        raise ConfigError(
            f"role rollout has {num_engines} of the {num_train} workers that train. rollout_engine: hf generates with "
            "the policy's own weights, which are sharded over all of these workers. Put both roles into one group, or "
            "set fsdp_sharding_strategy: no_shard."
        )


def build_vllm(config: CompletionConfig, model: str, tokenizer: Any, *, shares_devices: bool) -> Engine:
    """vLLM with the configuration's settings; ``shares_devices``: on the device of this worker a model is trained."""
    return vllm_engine(
        config,
        model,
        tokenizer,
        config.vllm_tensor_parallel_size,
        sleep_level=config.sleep_level if shares_devices else 0,
        **lora_settings_of_engine(config, model),
        patches=config.vllm_patches,
        engine_kwargs=vllm_settings(config, shares_devices=shares_devices),
    )


def vllm_engine(config: RunConfig, model: str, tokenizer: Any, size: int, **settings: Any) -> VllmEngine:
    """vLLM on this worker and the others of ``size`` that hold one model; ``settings``: further ones of VllmEngine."""
    from trainers.rollout.vllm.engine import VllmEngine

    return VllmEngine(
        model,
        tokenizer,
        dtype=resolve_dtype(config),
        seed=config.seed,
        tensor_parallel_size=size,
        alone=not share_model(size),
        trust_remote_code=config.trust_remote_code,
        processing=getattr(config, "image_processor_kwargs", None),
        **settings,
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
    is_whole = getattr(config, "completion_length_limit_scope", "total") == "total"
    if length is None and config.max_prompt_length is not None and is_whole:
        length = config.max_prompt_length + config.max_completion_length
    share = config.vllm_gpu_memory_utilization
    settings = {
        "gpu_memory_utilization": share or vllm_share(shares_devices=shares_devices),
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
        clips=config.vllm_clip_completions,
        generation_kwargs=config.generation_kwargs,
    )


def prompts_of(config: CompletionConfig, rows: Any, tokenizer: Any, images: ImageReader | None = None) -> Prompts:
    """The rows' prompts as token ids, with their pictures if the model sees any.

    Equal prompts have one tuple of pictures together: it travels once in a message.
    """
    prompt_ids = tokenize_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        chat_template_kwargs=config.chat_template_kwargs,
        images=images,
    )
    if images is None:
        return Prompts(Ragged.of(prompt_ids, np.int64))
    known: dict[Pictures, Pictures] = {}
    pictures: list[Pictures] = [images.prompt(row)[1] for row in rows]
    return Prompts(Ragged.of(prompt_ids, np.int64), images=[known.setdefault(row, row) for row in pictures])


def numbered(starts: StartsT) -> StartsT:
    """The prompts, or tasks, with their places as the numbers by which they draw, wherever they are completed."""
    return dataclasses.replace(starts, numbers=np.arange(len(starts)))


def seed_of(seed: int, step: int, *further: int) -> int:
    """The seed of completions; it depends on these alone, so that a resumed run draws the same, and so do any number
    of workers. ``seed``: the run's; ``step``: of completing prompts, -1 for evaluation.
    """
    entropy = [seed, step + 1, 0, *further]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
