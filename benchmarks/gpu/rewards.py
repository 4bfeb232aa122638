"""A reward that costs nothing and tells completions apart; it notes when it was asked, once a generation."""

from __future__ import annotations

import time
from typing import Any

asked: list[float] = []  # time.perf_counter() of each call


def even(completions: list[Any], **_: Any) -> list[float]:
    asked.append(time.perf_counter())
    return [len(completion) % 7 / 7 for completion in completions]
