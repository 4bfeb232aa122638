"""Rows that no trainer can use: found as the data is read, before any step, all in one error.

    rows = without_broken(rows, prompt_mistake, skip=False)      # ValueError, or the rows without the broken ones

Rows are also left out elsewhere, as too long or without a token to learn: ``warn_left_out`` logs and counts them.
A *mistake* of a row is (column, what is wrong), or None. Whether a chat template takes a row is not asked here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

NUM_TOLD = 5
OPTIONS = "chat_template_kwargs"
Mistake = tuple[str, str]
Seen = Sequence[str]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counted:
    """Rows that were read, and how many of them were left out. ``is_open``: more may still be left out."""

    source: Any = None  # and split
    num_read: int = 0
    num_left_out: int = 0
    is_open: bool = False


NOTHING = Counted()
# Of the training data that was read last. The header of the run shows it.
counted: ContextVar[Counted] = ContextVar("counted", default=NOTHING)


def counted_of(source: Any) -> Counted:
    """What was counted of this source and split, if it was read last; counting ends."""
    seen = replace(counted.get(), is_open=False)
    counted.set(seen)
    return seen if seen.source == source else NOTHING


def warn_left_out(count: int, message: str, *values: object) -> None:
    """Logs that so many rows are left out, and counts them."""
    logger.warning(message, *values)
    if counted.get().is_open:
        counted.set(replace(counted.get(), num_left_out=counted.get().num_left_out + count))


def without_broken(
    rows: Dataset, mistake_of: Callable[[Mapping[str, Any]], Mistake | None], *columns: str, skip: bool
) -> Dataset:
    """The rows that have no mistake in ``columns``. A dataset that has none of the columns is left as it is.

    Raises:
        ValueError: there are broken rows and ``skip`` is false, or all rows are broken. It names the first few.
    """
    present = [name for name in columns if name in rows.column_names]
    if not present:
        return rows
    present += [name for name in (OPTIONS,) if name in rows.column_names]
    found = {number: mistake_of(row) or _options(row) for number, row in enumerate(rows.select_columns(present))}
    broken = {number: mistake for number, mistake in found.items() if mistake is not None}
    if not broken:
        return rows
    first = [f"row {number} ({column}: {what})" for number, (column, what) in list(broken.items())[:NUM_TOLD]]
    told = f"{len(broken)} of {len(rows)} rows are broken: {', '.join(first)}{', ...' * (len(broken) > NUM_TOLD)}"
    if not skip:
        raise ValueError(f"{told}. Rows count from 0. Correct them, or leave them out with skip_broken_rows: true.")
    if len(broken) == len(rows):
        raise ValueError(f"{told}. No row is left.")
    warn_left_out(len(broken), "skip_broken_rows: %s. They are left out.", told)
    return rows.select([number for number in range(len(rows)) if number not in broken])


def prompt_mistake(row: Mapping[str, Any], empty: bool = False, seen: Seen = ()) -> Mistake | None:
    """Of a row to complete: its ``prompt``, or its ``messages`` without a last turn of the assistant.

    ``empty``: a text may be empty, as an environment makes a prompt of the row. ``seen``: as ``in_column``.
    """
    if row.get("prompt") is not None:
        return in_column(row, "prompt", empty=empty, seen=seen)
    if row.get("messages") is None:
        return ("prompt" if "prompt" in row else "messages"), "null"
    if mistake := in_column(row, "messages", text=False, seen=seen):
        return mistake
    messages = row["messages"]
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        return "messages", "no turn to answer"
    return None


def supervised_mistake(row: Mapping[str, Any], text_field: str = "text", seen: Seen = ()) -> Mistake | None:
    """Of a row to learn from: ``prompt`` and ``completion``, ``messages``, or a text. ``seen``: as ``in_column``."""
    if row.get("prompt") is not None and row.get("completion") is not None:
        of_both = [in_column(row, name, empty=True, seen=seen) for name in ("prompt", "completion")]
        return of_both[0] or of_both[1] or _alike(row)
    if row.get("messages") is not None:
        return in_column(row, "messages", text=False, seen=seen)
    if row.get(text_field) is not None:
        return None if isinstance(row[text_field], str) else (text_field, f"{_called(row[text_field])}, not text")
    empty = next((name for name in (text_field, "messages", "completion", "prompt") if row.get(name, 0) is None), None)
    return None if empty is None else (empty, "null")  # without such a column tokenization tells which are missing


def pair_mistake(row: Mapping[str, Any], seen: Seen = ()) -> Mistake | None:
    """Of a row that compares ``chosen`` and ``rejected``, with or without a ``prompt`` and a ``margin``.

    ``seen``: as ``in_column``, of the prompt.
    """
    for name in ("chosen", "rejected"):
        if mistake := in_column(row, name, empty=True):
            return mistake
    if row.get("prompt") is not None and (mistake := in_column(row, "prompt", empty=True, seen=seen)):
        return mistake
    if "margin" in row and (isinstance(row["margin"], bool) or not isinstance(row["margin"], (int, float))):
        return "margin", f"{_called(row['margin'])}, not a number"
    return None


def judged_mistake(row: Mapping[str, Any], seen: Seen = ()) -> Mistake | None:
    """Of a row with a completion that was judged by itself, or of a pair of them. ``seen``: as ``in_column``."""
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return pair_mistake(row, seen)
    if not isinstance(row.get("label"), bool) and row.get("label") not in (0, 1):
        return "label", f"{_called(row.get('label'))}, neither true nor false"
    if row.get("completion") is None and row.get("messages") is not None:
        if mistake := in_column(row, "messages", text=False, seen=seen):
            return mistake
        messages = row["messages"]
        is_answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
        return None if is_answered else ("messages", "no prompt that the assistant answers in its last turn")
    of_prompt = in_column(row, "prompt", empty=True, seen=seen)
    return of_prompt or in_column(row, "completion", empty=True) or _completed(row)


def response_mistake(row: Mapping[str, Any], seen: Seen = ()) -> Mistake | None:
    """Of a row with a prompt that is learned from: its ``completion``, or the last turn of its ``messages``.

    ``seen``: as ``in_column``.
    """
    if row.get("completion") is not None:
        return in_column(row, "completion", empty=True, seen=seen) or _completed(row)
    messages = row.get("messages")
    if messages is None:
        return "completion", "null"
    return None if messages[-1]["role"] == "assistant" else ("messages", "no last turn of the assistant")


def in_column(
    row: Mapping[str, Any], name: str, *, text: bool = True, empty: bool = False, seen: Seen = ()
) -> Mistake | None:
    """What is wrong with a column that holds a conversation, or (``text``) a text, which ``empty`` may be empty.

    ``seen``: types of parts beside text that the model reads.
    """
    value = row.get(name)
    if isinstance(value, str) and text:
        return None if value or empty else (name, "empty")
    if not isinstance(value, list):
        return name, "null" if value is None else f"{_called(value)}, not {'text or ' * text}a conversation"
    if not value:
        return name, "a conversation without messages"
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            return name, f"message {number} is {_called(message)}"
        if not isinstance(message.get("role"), str):
            return name, f"message {number} has no role"
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            return name, f"message {number} has no content"
        if odd := _odd_part(message):
            return name, f"message {number} has {odd}"
        if media := _media(message.get("content"), seen):
            return name, f"message {number} has a part of type {media!r}, which this run cannot read"
    return None


def _odd_part(message: Mapping[str, Any]) -> str | None:
    """What in a message no template can write: a part without text, or a call that is no mapping."""
    content, calls = message.get("content"), message.get("tool_calls")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, (str, Mapping)):
            return f"a part that is {_called(part)}"
        if isinstance(part, Mapping) and part.get("type") in (None, "text") and not isinstance(part.get("text"), str):
            return f"a part whose text is {_called(part.get('text'))}"
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        return f"tool_calls that are {_called(calls)}, not a list of mappings"
    return None


def _options(row: Mapping[str, Any]) -> Mistake | None:
    given = row.get(OPTIONS)
    return None if given is None or isinstance(given, Mapping) else (OPTIONS, f"{_called(given)}, not a mapping")


def _media(content: Any, seen: Seen) -> str | None:
    """The type of a part of a message that is neither text nor ``seen``."""
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return next((str(part["type"]) for part in parts if part.get("type", "text") not in ("text", *seen)), None)


def _alike(row: Mapping[str, Any]) -> Mistake | None:
    if isinstance(row["prompt"], str) == isinstance(row["completion"], str):
        return None
    return "completion", f"{_called(row['completion'])}, and prompt is {_called(row['prompt'])}"


def _completed(row: Mapping[str, Any]) -> Mistake | None:
    """A text may complete a conversation, as a turn of the assistant."""
    return None if isinstance(row["completion"], str) else _alike(row)


def _called(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:20]!r}"
    if isinstance(value, (bool, int, float)):
        return f"the number {value}"
    names = {bytes: "bytes", list: "a list", dict: "a mapping", type(None): "null"}
    return names.get(type(value), type(value).__name__)
