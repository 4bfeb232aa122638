"""Completions as texts, and texts as completions in the form of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def chat_completions(prompts: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Completions in the form of their prompts: the text itself, or a list of one assistant message."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def completion_text(completion: Any) -> str:
    """What the assistant wrote, of a completion in either form."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion if message["role"] == "assistant")


def last_turn_text(completion: Any) -> str:
    """What the assistant wrote last, which is what ms-swift gives to reward functions of episodes."""
    turns = [] if isinstance(completion, str) else [one for one in completion if one["role"] == "assistant"]
    return completion_text(turns[-1:] if turns else completion)
