"""Which tokens of a conversation the assistant wrote, by what the chat template makes of its beginnings.

    spans = answer_spans(messages, render, "default")     # [(start, end), ...] in the characters of render(messages)

An answer begins where the template invites one (the generation prompt) and ends where the template is done with it: its
end token belongs to it, and what follows up to the next turn. So it is in ms-swift, whose ``loss_scale`` these are:
``default`` is every answer, ``last_round`` those behind the last turn of a user. A message that says ``loss: true`` or
``loss: false`` of itself is learned, or is not, whichever it is. No marks in the template are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Turns = Literal["default", "last_round"]
Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, and whether an answer is invited


def answer_spans(messages: Sequence[Mapping[str, Any]], render: Render, turns: Turns) -> list[tuple[int, int]]:
    """Characters of ``render(messages, False)`` that are learned.

    Raises:
        ValueError: ``loss`` of a message that is no answer, or a template that writes an answer in another way once
            further turns follow.
    """
    last_user = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=-1)
    whole, spans = render(messages, False), []
    for place, message in enumerate(messages):
        says = message.get("loss")
        if message["role"] != "assistant":
            if says:
                raise ValueError(f"message {place} is of role {message['role']!r} and says loss: of answers alone")
        elif says or (says is None and (turns == "default" or place > last_user)):
            spans.append(_span(messages, place, whole, render))
    return spans


def marked(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """True for the tokens that begin inside of a span; ``offsets`` are those of the tokens."""
    return [any(start <= first < end for start, end in spans) and last > first for first, last in offsets]


def _span(messages: Sequence[Mapping[str, Any]], place: int, whole: str, render: Render) -> tuple[int, int]:
    invited = render(messages[:place], True)
    start = next((k for k, (a, b) in enumerate(zip(invited, whole, strict=False)) if a != b), len(invited))
    until = render(messages[: place + 1], False)
    if whole.startswith(until):
        return start, len(until)
    # The template has left out what the last answer has, such as its thoughts: the answer's end is looked for
    answer = str(messages[place].get("content") or "").split("</think>")[-1].strip()
    found, rest = whole.find(answer, start), until[until.rfind(answer) + len(answer) :]
    end = found + len(answer) + len(rest)
    if not answer or found < 0 or not whole.startswith(rest, found + len(answer)):
        raise ValueError(
            f"the chat template writes message {place} otherwise once further turns follow, so that its end is not "
            "known: set loss_scale: last_round, or assistant_only_loss with a template that marks answers"
        )
    return start, end
