"""Completions whose reward functions run in processes beside the engine: what GRPO and PPO share of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rayhelper import RayHelper
from trainers.batch import Prompts, Rollouts
from trainers.data.rows import prompt_of
from trainers.rewards.functions import chat_completions
from trainers.rewards.pool import RewardPool
from trainers.rollout.base import Completion, Engine, Sampling


def pool_of(config: Any) -> RewardPool | None:
    """What ``reward_processes`` asks for; None: the driver runs the functions, or another worker gives completions out.

    Raises ConfigError for functions that other processes cannot be told.
    """
    if not config.reward_processes or not RayHelper.current().shard.leader:
        return None
    return RewardPool(
        config.reward_funcs, num_processes=config.reward_processes, external_plugins=config.external_plugins
    )


def with_rows(prompts: Prompts, rows: Any, groups: np.ndarray) -> Prompts:
    """The prompts with what the functions are told of."""
    return dataclasses.replace(prompts, rows=list(rows), groups=groups)


def complete(
    engine: Engine,
    prompts: Prompts,
    sampling: Sampling,
    pool: RewardPool | None,
    tokenizer: Any,
    *,
    seed: int,
    **between: Any,
) -> Rollouts:
    """One completion a prompt, in order; with a pool rewarded, each group while others are still written."""
    if pool is None:
        return engine.generate(prompts, sampling, seed=seed, **between)
    rows, groups = prompts.rows, prompts.groups
    assert rows is not None, "with_rows comes first"
    assert groups is not None
    with pool.scoring(rows, groups) as scoring:

        def finished(done: Completion) -> None:
            text = tokenizer.decode(done.ids, skip_special_tokens=True)
            (completion,) = chat_completions([prompt_of(rows[done.number])], [text])
            scoring.add(done.number, completion, done.ids)

        return scoring.rewarded(engine.generate(prompts, sampling, seed=seed, finished=finished, **between))
