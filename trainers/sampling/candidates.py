"""Candidates of a row: how they travel, and which of them are kept. Pure; nothing here samples or scores.

A row's candidates are judged together and on the driver, so that neither scores nor choices depend on the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainers.batch import Batch

State = Literal["kept", "easy", "no_positive", "failed"]
ORM_WEIGHT = 10.0  # a correct candidate comes before every wrong one


@dataclass(eq=False)
class Questions(Batch):
    """Rows whose prompts are to be answered."""

    positions: np.ndarray  # int64: of the row in the dataset
    rows: list[dict[str, Any]]
    cached: list[list[str] | None]  # an earlier run's completions; None: sample


@dataclass(eq=False)
class Candidates(Batch):
    """What became of the rows: together, a row's texts and failures are as many as it was to have candidates."""

    rows: list[dict[str, Any]]
    texts: list[list[str]]
    failures: list[list[str]]  # one reason for each candidate that there is not
    num_tokens: np.ndarray  # int64: sampled for the row


@dataclass(frozen=True)
class Verdict:
    """What is kept of a row; positions are those of its texts."""

    state: State
    positives: tuple[int, ...] = ()  # the best first
    rejected: int | None = None
    scores: tuple[float, ...] | None = None  # one a text, NaN where a scorer had nothing to say; None: no scorer
    num_correct: int = 0
    reason: str | None = None


def judged(
    num_texts: int,
    failures: Sequence[str],
    prm: Sequence[float] | None,
    orm: Sequence[float] | None,
    *,
    n_best_to_keep: int,
    prm_threshold: float = 0.0,
    easy_query_threshold: float | None = None,
) -> Verdict:
    """What is kept of a row's candidates, given their raw rewards.

    The score is normalised(prm) + 10 x normalised(orm). Positives have orm > 0 and prm > ``prm_threshold``; the
    ``n_best_to_keep`` of the highest score are kept, the earlier one of two alike. ``rejected`` is the candidate of
    the lowest score, if that is below every positive's. The row is easy if the share of correct candidates (orm > 0)
    among all of them, failed ones included, reaches ``easy_query_threshold``. A candidate to which a scorer gave no
    number is neither kept nor rejected. Without scorers all are kept.
    """
    if not num_texts:
        return Verdict("failed", reason="; ".join(dict.fromkeys(failures)) or "no candidates")
    if prm is None and orm is None:
        return Verdict("kept", tuple(range(num_texts)))
    scores_N = np.zeros(num_texts)
    passes_N = np.ones(num_texts, bool)
    num_correct = 0
    if prm is not None:
        prm_N = np.asarray(prm, np.float64)
        scores_N += normalised(prm_N)
        passes_N &= prm_N > prm_threshold
    if orm is not None:
        orm_N = np.asarray(orm, np.float64)
        scores_N += ORM_WEIGHT * normalised(orm_N)
        passes_N &= orm_N > 0
        num_correct = int((orm_N > 0).sum())
    scores = tuple(scores_N.tolist())
    share = num_correct / (num_texts + len(failures))
    if easy_query_threshold is not None and share >= easy_query_threshold:
        return Verdict("easy", scores=scores, num_correct=num_correct)
    passes_N &= ~np.isnan(scores_N)
    best_first = [k for k in np.argsort(-scores_N, kind="stable").tolist() if passes_N[k]][:n_best_to_keep]
    if not best_first:
        return Verdict("no_positive", scores=scores, num_correct=num_correct)
    lowest = int(np.nanargmin(scores_N))
    rejected = lowest if scores_N[lowest] < scores_N[best_first[-1]] else None
    return Verdict("kept", tuple(best_first), rejected, scores, num_correct)


def normalised(values_N: np.ndarray) -> np.ndarray:
    """(x - min) / (max - min) over a row's candidates, NaN left out; equal values all become min(1, value).

    Min-max normalisation and its rule for equal values are ms-swift's, which normalises the part of a worker.
    """
    known = values_N[~np.isnan(values_N)]
    if not len(known):
        return values_N
    low, high = known.min(), known.max()
    if low == high:
        return np.asarray(np.minimum(1.0, values_N))  # keeps NaN
    return np.asarray((values_N - low) / (high - low))


def answered(prompt: Any, text: str) -> list[dict[str, Any]]:
    """The conversation of a prompt and its completion; a prompt that ends with the assistant's words goes on."""
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:
        messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in prompt]
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": (messages[-1]["content"] or "") + text}]
    return [*messages, {"role": "assistant", "content": text}]


def completion_of(prompt: Any, content: str) -> str:
    """The completion that ``answered`` made this last message of."""
    if isinstance(prompt, str) or not prompt or prompt[-1]["role"] != "assistant":
        return content
    return content.removeprefix(prompt[-1]["content"] or "")
