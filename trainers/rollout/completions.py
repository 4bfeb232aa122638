"""Completions as a batch, and a batch as completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainers.batch import Ragged, Rollouts
from trainers.rollout.base import Completion


def rollouts_of(completions: Sequence[Completion]) -> Rollouts:
    """The completions as a batch."""
    return Rollouts(
        prompt_ids=Ragged.of([completion.prompt_ids for completion in completions], np.int64),
        completion_ids=Ragged.of([completion.ids for completion in completions], np.int64),
        rollout_logps=Ragged.of([completion.logps for completion in completions], np.float32),
        truncated=np.array([completion.truncated for completion in completions], bool),
        policy_versions=Ragged.of([completion.versions for completion in completions], np.int64),
    )


def completions_of(rollouts: Rollouts, first: int) -> Iterator[Completion]:
    """The rows, numbered from ``first``."""
    versions = rollouts.policy_versions
    if versions is None:
        lengths = rollouts.completion_ids.lengths
        versions = Ragged.split(np.full(lengths.sum(), -1, np.int64), lengths)
    columns: tuple[Any, ...] = (rollouts.prompt_ids, rollouts.completion_ids, rollouts.rollout_logps, versions)
    for number, row in enumerate(zip(*columns, rollouts.truncated.tolist(), strict=True), start=first):
        yield Completion(number, *row)


def no_rollouts() -> Rollouts:
    """What becomes of no prompts."""
    none = Ragged.of([], np.int64)
    return Rollouts(none, none, Ragged.of([], np.float32), np.zeros(0, bool), policy_versions=none)
