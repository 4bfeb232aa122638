"""What the trainers that complete prompts share: the engine, how completions are drawn, and what is seen of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayhelper import RayHelper
from trainers.backends.base import Backend
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.completion_config import CompletionConfig
from trainers.data.rows import tokenize_prompts
from trainers.metrics import Metrics
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf import HfEngine
from trainers.run import resolve_dtype

ENGINES = {"hf": HfEngine}


def build_engine(
    config: CompletionConfig, model: str, tokenizer: Any, backend: Backend | None, *, gathers: bool = True
) -> Engine:
    """The engine of this worker, with the module of ``backend``, or (None) with a model of its own.

    ``gathers`` False: whoever calls it sees to it that weights which lie in shards are whole meanwhile.
    """
    return ENGINES[config.rollout_engine](
        model if backend is None else backend.module,
        tokenizer,
        batch_size=config.rollout_batch_size,
        dtype=resolve_dtype(config),
        model_init_kwargs=config.model_init_kwargs,
        trust_remote_code=config.trust_remote_code,
        whole_weights=backend.whole_weights if backend is not None and gathers else None,
    )


def sampling_of(config: CompletionConfig, temperature: float | None = None) -> Sampling:
    """How completions are drawn; ``temperature`` None: the configuration's."""
    return Sampling(
        max_completion_length=config.max_completion_length,
        temperature=config.temperature if temperature is None else temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
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


def seed_of(seed: int, step: int, *further: int) -> int:
    """The seed of this worker's completions; it depends on these and the worker alone, so that a resumed run draws
    the same. ``seed``: the run's; ``step``: of completing prompts, -1 for evaluation.
    """
    entropy = [seed, step + 1, RayHelper.current().shard.index, *further]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


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
    metrics.sum("num_tokens", float(rollouts.prompt_ids.lengths.sum() + lengths_B.sum()))
    if rollouts.num_turns is not None and rollouts.num_tool_calls is not None:
        assert rollouts.num_tool_failures is not None
        metrics.mean("num_turns", float(rollouts.num_turns.sum()), len(rollouts))
        num_calls, num_failures = float(rollouts.num_tool_calls.sum()), float(rollouts.num_tool_failures.sum())
        metrics.mean("tools/call_frequency", num_calls, len(rollouts))
        metrics.mean("tools/failure_frequency", num_failures, num_calls or 1.0)
    return metrics
