"""What is seen of completions, as metrics."""

from __future__ import annotations

import numpy as np

from trainers.batch import Rollouts
from trainers.metrics import Metrics


def rollout_metrics(rollouts: Rollouts) -> Metrics:
    """Metrics with TRL's names: lengths of the completions (only the model's own text), and the share that reached the
    limit."""
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
