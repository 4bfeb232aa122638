"""Sums to prefer and sums to avoid, for DPO and reward models: the problems of the GRPO example, answered twice.

    "12+34="  ->  "46" rather than "47"

Registers, for ``external_plugins``, the dataset ``addition_pairs``, whose splits ``train`` and ``test`` share no
problem. It needs ``examples/grpo/addition.py``, which makes the problems and the model, beside it.
"""

from __future__ import annotations

import numpy as np

from trainers.plugins import DATASETS, register_dataset

MISTAKES = (-10, -2, -1, 1, 2, 10)


@register_dataset("addition_pairs")
def addition_pairs(split: str) -> list[dict[str, str]]:
    """The right sum of every problem, and one that is near."""
    draws = np.random.default_rng(1)
    rows = DATASETS["addition"](split)
    mistakes = draws.choice(MISTAKES, size=len(rows))
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(int(row["answer"]) + mistake)}
        for row, mistake in zip(rows, mistakes, strict=True)
    ]
