"""The best, median and worst completions of the steps of a run that kept them (``log_completions: true``).

What a completion is worth is the sum of its rewards, by ``reward_weights`` where the settings have them. A turn is what
one side wrote: the model, or its environment.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainers.report.recorded import Recorded

MOST_STEPS = 12  # that the page shows: the first, the last, and others evenly between
EACH = 4  # completions of a kind and step
MOST_CHARACTERS = 12_000  # of a text
CLOCK_S = 2.0  # by which the clock of a file system may differ
NOT_REWARDS = frozenset({"step", "prompt", "completion", "turns", "advantage"})
NUMBERED = re.compile(r"completions_(\d+)\.parquet")


@dataclass(frozen=True)
class Shown:
    """A completion that the page shows."""

    kind: str  # best, median, worst, or first where there are no rewards
    row: int
    prompt: str
    turns: list[tuple[str, str]]  # (who, text)
    rewards: dict[str, float | None]
    total: float | None
    advantage: float | None


@dataclass(frozen=True)
class OfStep:
    step: int
    num_all: int
    shown: list[Shown]


def completions(run: Recorded) -> list[OfStep]:
    """The completions of the steps that are shown, the last step first. What cannot be read is told in the run."""
    numbered = {
        int(match[1]): file
        for file in (run.folder / "completions").glob("*.parquet")
        if (match := NUMBERED.fullmatch(file.name))
    }
    last = max(run.last_step, 0) + 1  # completions are kept before the step that learns from them has ended
    begun = _begun(run)
    known = {
        step: file
        for step, file in numbered.items()
        if (not run.series or step <= last) and file.stat().st_mtime >= begun
    }
    if others := len(numbered) - len(known):
        run.problems.append(f"completions: {others} {'file' if others == 1 else 'files'} of an earlier run left out.")
    found = []
    for step in sorted(_spread(sorted(known), MOST_STEPS), reverse=True):
        try:
            found.append(_of_step(step, known[step], run.settings))
        except Exception as error:  # a damaged file raises whatever its reader does
            told = (str(error).splitlines() or [""])[0]
            run.problems.append(f"completions/{known[step].name} cannot be read ({type(error).__name__}: {told}).")
    return found


def _begun(run: Recorded) -> float:
    """When the run was started first, in seconds since the epoch; 0 where that is not known."""
    try:
        return datetime.fromisoformat(run.starts[-1]["at"]).timestamp() - CLOCK_S
    except (IndexError, KeyError, TypeError, ValueError):
        return 0.0


def _of_step(step: int, file: Path, settings: Mapping[str, Any]) -> OfStep:
    import pandas as pd

    table = pd.read_parquet(file)
    columns = {str(name): table[name].tolist() for name in table.columns}
    rewards = {
        name: [_number(value) for value in values]
        for name, values in columns.items()
        if name not in NOT_REWARDS and pd.api.types.is_numeric_dtype(table[name])
    }
    advantages = [_number(value) for value in columns.get("advantage", [])] or [None] * len(table)
    totals = _totals(rewards, settings.get("reward_weights"), len(table))
    shown = []
    for kind, row in chosen(totals):
        prompt, turns = columns.get("prompt", [""] * len(table))[row], columns.get("turns")
        shown.append(
            Shown(
                kind,
                row,
                cut(told(prompt)),
                _turns(columns.get("completion", [""] * len(table))[row], None if turns is None else turns[row]),
                {name: values[row] for name, values in rewards.items()},
                totals[row] if rewards else None,
                advantages[row],
            )
        )
    return OfStep(step, len(table), shown)


def chosen(totals: Sequence[float | None]) -> list[tuple[str, int]]:
    """(kind, row) of the completions that are shown, each row once: best, around the median, worst.

    Rows without a reward are not ranked; without any reward the first ones are shown.
    """
    ranked = [row for row, total in enumerate(totals) if total is not None]
    if not ranked:
        return [("first", row) for row in range(min(len(totals), EACH))]
    ranked.sort(key=lambda row: -(totals[row] or 0.0))
    each = min(EACH, math.ceil(len(ranked) / 3))
    middle = (len(ranked) - each) // 2
    kinds = [("best", ranked[:each]), ("worst", ranked[-each:]), ("median", ranked[middle : middle + each])]
    seen: dict[int, str] = {}
    for kind, rows in kinds:
        for row in rows:
            seen.setdefault(row, kind)
    order = {"best": 0, "median": 1, "worst": 2}
    place = {row: place for place, row in enumerate(ranked)}
    return sorted(((kind, row) for row, kind in seen.items()), key=lambda one: (order[one[0]], place[one[1]]))


def _totals(rewards: Mapping[str, Sequence[float | None]], weights: Any, count: int) -> list[float | None]:
    fits = isinstance(weights, list) and len(weights) == len(rewards) and all(map(_is_number, weights))
    factors = [float(weight) for weight in weights] if fits else [1.0] * len(rewards)
    totals: list[float | None] = []
    for row in range(count):
        parts = [
            factor * value
            for factor, values in zip(factors, rewards.values(), strict=True)
            if (value := values[row]) is not None
        ]
        totals.append(sum(parts) if parts else None)
    return totals


def _turns(completion: Any, turns: Any) -> list[tuple[str, str]]:
    """Who wrote what, in order."""
    if turns is not None and len(turns):
        return [(str(turn.get("role", "")), cut(str(turn.get("text", "")))) for turn in turns]
    if not isinstance(completion, str) and hasattr(completion, "__len__"):
        messages = [message for message in completion if isinstance(message, Mapping)]
        if messages:
            texts = [_part(message).removeprefix(f"[{message.get('role', '')}] ") for message in messages]
            return [(str(message.get("role", "")), cut(text)) for message, text in zip(messages, texts, strict=True)]
    return [("model", cut(told(completion)))]


def told(value: Any) -> str:
    """A prompt or a text of it as a person reads it: messages with their roles."""
    if isinstance(value, str):
        return value
    if hasattr(value, "__len__") and len(value) and all(isinstance(part, Mapping) for part in value):
        return "\n".join(map(_part, value))
    return "" if value is None else str(value)


def _part(part: Mapping[str, Any]) -> str:
    """A message with its role; of a message that has several parts, a text, or what kind of thing it is."""
    if "role" in part:
        calls = part.get("tool_calls")
        called = "" if calls is None or not len(calls) else f" {json.dumps(calls, default=_listed, ensure_ascii=False)}"
        return f"[{part['role']}] {told(part.get('content'))}{called}"
    return str(part["text"]) if part.get("text") is not None else f"[{part.get('type', 'a part without a type')}]"


def _listed(value: Any) -> Any:
    """Arrays, as Parquet gives them, as lists."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def cut(text: str) -> str:
    """The text, without its middle if it is too long."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps: the first, the last, and others evenly between."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(float(value)) else None
