"""Sums that are right and sums that are wrong, for KTO: the problems of the GRPO example, each answered once.

    "12+34="  ->  "46", desirable;  "56+21="  ->  "78", undesirable

Registers, for ``external_plugins``, the dataset ``judged_sums``, whose splits ``train`` and ``test`` share no problem.
It needs ``examples/grpo/addition.py`` and ``examples/dpo/addition_pairs.py``, which make the problems and the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainers.plugins import DATASETS, register_dataset

SHARE_DESIRABLE = 0.4


@register_dataset("judged_sums")
def judged_sums(split: str) -> list[dict[str, Any]]:
    """One answer to every problem, and whether it is right."""
    draws = np.random.default_rng(2)
    rows = DATASETS["addition_pairs"](split)
    labels = draws.random(len(rows)) < SHARE_DESIRABLE
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": bool(label)}
        for row, label in zip(rows, labels, strict=True)
    ]
