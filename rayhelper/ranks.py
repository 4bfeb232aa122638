"""Ranks and nodes as people write them. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def runs(numbers: Sequence[int]) -> tuple[str, ...]:
    """Rising numbers as few texts: '0-3', '8', '16-62 step 2'."""
    found = []
    i = 0
    while i < len(numbers):
        step = numbers[i + 1] - numbers[i] if i + 1 < len(numbers) else 1
        j = i
        while j + 1 < len(numbers) and numbers[j + 1] - numbers[j] == step:
            j += 1
        if step > 1 and j - i < 2:
            j = i  # two numbers are no pattern
        last = f"-{numbers[j]}" + (f" step {step}" if step > 1 else "")
        found.append(f"{numbers[i]}{last if j > i else ''}")
        i = j + 1
    return tuple(found)
