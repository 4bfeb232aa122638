"""Rewards and an environment by name: the plugin file of the golden runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.plugins import register_environment, register_reward
from trainers.rollout.environments import Reply


@register_reward("evenness")
def evenness(completion_ids: Sequence[Any], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(int(token) % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@register_reward("shortness")
def shortness(completion_ids: Sequence[Any], **_: Any) -> list[float | None]:
    """Fewer tokens are better; a single token is not scored."""
    return [None if len(ids) == 1 else -float(len(ids)) for ids in completion_ids]


@register_reward("vowel")
def vowel(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(bool(set("aeiou") & set(text))) for text in completions]


@register_environment("turns")
class Turns:
    """As many turns as the row says; a turn's reward is its share of even bytes."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.num_left = row["turns"]

    async def step(self, text: str) -> Reply:
        self.num_left -= 1
        even = sum(byte % 2 == 0 for byte in text.encode()) / max(len(text), 1)
        return Reply("more: " if self.num_left else "", reward=even)
