"""vLLM's schedulers without a model: what they plan is answered with tokens that a seed decides."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch

from trainers.rollout.vllm.start import variables

VOCABULARY = 50


def scheduler_of(
    kind: type[Any],
    model: str,
    *,
    num_pages: int,
    page: int = 16,
    max_num_seqs: int = 16,
    max_model_len: int = 128,
    max_num_batched_tokens: int = 256,
    enable_prefix_caching: bool = True,
    policy: str = "fcfs",
) -> Any:
    """A scheduler of ``kind`` for two layers of a small model whose folder is ``model``."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = copy.copy(_config(model, max_model_len))
    config.scheduler_config, config.cache_config = map(copy.copy, (config.scheduler_config, config.cache_config))
    config.scheduler_config.max_num_seqs, config.scheduler_config.policy = max_num_seqs, policy
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = page, num_pages
    config.cache_config.enable_prefix_caching = enable_prefix_caching
    spec = FullAttentionSpec(block_size=page, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["first", "second"], spec)]
    pages = KVCacheConfig(num_blocks=num_pages, kv_cache_tensors=[], kv_cache_groups=groups)
    return kind(
        vllm_config=config,
        kv_cache_config=pages,
        structured_output_manager=StructuredOutputManager(config),
        block_size=page,
        log_stats=False,
    )


@functools.cache
def _config(model: str, max_model_len: int) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with variables({}):  # vLLM sets some of other libraries
        return VllmConfig(
            model_config=ModelConfig(
                model=model, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=max_model_len
            ),
            scheduler_config=SchedulerConfig(max_model_len=max_model_len, is_encoder_decoder=False),
            cache_config=CacheConfig(),
            device_config=DeviceConfig("cpu"),
        )


def hasher(page: int) -> Any:
    """What gives the pages of a request their names in the prefix cache."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(page, sha256)


def request_of(name: str, prompt: list[int], params: Any, hashes: Any, *, priority: int = 0) -> Any:
    from vllm.v1.request import Request

    params = params.clone()
    return Request(name, prompt, params, None, 0, 0.0, priority=priority, block_hasher=hashes)


def answered(planned: Any, is_sampled: dict[str, bool], random: np.random.Generator) -> Any:
    """A ModelRunnerOutput: a token of each request that is sampled, in an order of its own."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = sorted(planned.num_scheduled_tokens, key=lambda name: name[::-1])
    tokens = random.integers(0, VOCABULARY, len(names))
    logps = random.random((len(names), 1), np.float32)
    drawn = [[int(token)] if is_sampled[name] else [] for name, token in zip(names, tokens, strict=True)]
    lists = LogprobsLists(tokens[:, None], logps, np.zeros(len(names), np.int64))
    places = {name: row for row, name in enumerate(names)}
    return ModelRunnerOutput(names, places, drawn, lists if names else None)
