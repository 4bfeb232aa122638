"""A process reward for sums: a number for every digit of an answer, of which sampling takes the lowest.

    "12+34="  answered "47":  1.0 for the 4, 0.5 for the 7

Registers ``right_digits`` for ``external_plugins``. A real one would look at the steps of a chain of thought.
"""

from __future__ import annotations

from typing import Any

from trainers.plugins import register_reward


@register_reward("right_digits")
def right_digits(completions: list[str], answer: list[str], **_: Any) -> list[list[float]]:
    """1 for each digit that is right, 0.5 for each that is wrong, missing or too many."""
    return [
        [1.0 if text[k : k + 1] == right[k : k + 1] else 0.5 for k in range(max(len(text), len(right)))]
        for text, right in zip(completions, answer, strict=True)
    ]
