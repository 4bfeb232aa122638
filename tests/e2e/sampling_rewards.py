"""Rewards of the sampling tests, apart from them: workers import this file alone."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def has_a_vowel(completions: list[str], **_: Any) -> list[float]:
    return [float(bool(set("aeiou") & set(text))) for text in completions]


def is_answer(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [float(message[-1]["content"] == right) for message, right in zip(completions, answer, strict=True)]


def the_next_is_asked(url: list[str], after: list[str | None], **_: Any) -> list[float]:
    """1 for a row after which another row is sampled while this one is scored."""
    return [
        float(word is not None and json.load(urllib.request.urlopen(f"{here}/asked/{word}", timeout=60))["asked"])
        for here, word in zip(url, after, strict=True)
    ]
