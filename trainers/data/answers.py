"""Which tokens of a conversation the assistant wrote, by what the chat template makes of its beginnings.

    answers = answers_of(messages, render, "default")     # [Answer(start, end, ...), ...]

An answer begins where the template invites one (the generation prompt) and ends where the template is done with it: its
end token belongs to it, and what follows up to the next turn. So it is in ms-swift, whose ``loss_scale`` these are:
``default`` is every answer, ``last_round`` those behind the last turn of a user or a tool. A message that says
``loss: true`` or ``loss: false`` of itself is learned, or is not, whichever it is; its own ``loss_scale`` is the weight
of what it says. No marks in the template are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Turns = Literal["default", "last_round"]
OWN_KEYS = ("loss", "loss_scale")  # what a message says of itself, for nobody else
PROBE = "probe"
Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, and whether an answer is invited


class Answer(NamedTuple):
    """Where an answer stands in a text: characters, the first and the one behind the last."""

    start: int
    end: int
    content_end: int  # what stands from here to the end belongs to the template
    query: str = ""  # the turns between the answer before and this one
    weight: float | None = None  # its own ``loss_scale``


def last_asked(messages: Sequence[Mapping[str, Any]]) -> int:
    """The place of the last turn of a user or a tool, behind which the last round is; -1: there is none."""
    return max((k for k, message in enumerate(messages) if message["role"] in ("user", "tool")), default=-1)


def answers_of(messages: Sequence[Mapping[str, Any]], render: Render, turns: Turns) -> list[Answer]:
    """The answers that are learned, in the characters of ``render(messages, False)``.

    Raises:
        ValueError: ``loss`` of a message that is no answer, or a template that writes an answer in another way once
            further turns follow.
    """
    last = last_asked(messages)
    whole, answers, ending = render(messages, False), [], None
    queries: list[str] = []
    for place, message in enumerate(messages):
        says = message.get("loss")
        if message["role"] != "assistant":
            if says:
                raise ValueError(
                    f"message {place} is of role {message['role']!r} and has loss, which only answers may have"
                )
            queries.append(str(message.get("content") or ""))
            continue
        query, queries = "\n".join(queries), []
        weight = _own_weight(message, place)
        if (says or (says is None and (turns == "default" or place > last))) and (weight is None or weight > 0):
            start, end = _span(messages, place, whole, render)
            if ending is None:
                ending = _ending(messages[:place], render)
            content_end = end - len(ending) if ending and whole.endswith(ending, start, end) else end
            answers.append(Answer(start, end, content_end, query, weight))
    return answers


def _own_weight(message: Mapping[str, Any], place: int) -> float | None:
    weight = message.get("loss_scale")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise ValueError(f"loss_scale of message {place} must be a number, the weight of its text; got {weight!r}")
    return weight


def _ending(messages: Sequence[Mapping[str, Any]], render: Render) -> str:
    """What the template writes behind an answer."""
    text = render([*messages, {"role": "assistant", "content": PROBE}], False)
    return text[text.rfind(PROBE) + len(PROBE) :] if PROBE in text else ""


def _beginning(whole: str, render: Render) -> str:
    """What the template writes before an answer with which a conversation begins: perhaps its own system message."""
    asked = [{"role": "user", "content": PROBE}]
    invitation = render(asked, True).removeprefix(render(asked, False))
    return whole[: whole.find(invitation) + len(invitation)] if invitation in whole else ""


def _span(messages: Sequence[Mapping[str, Any]], place: int, whole: str, render: Render) -> tuple[int, int]:
    invited = render(messages[:place], True) if place else _beginning(whole, render)
    start = next((k for k, (a, b) in enumerate(zip(invited, whole, strict=False)) if a != b), len(invited))
    until = render(messages[: place + 1], False)
    if whole.startswith(until):
        return start, len(until)
    # The template has left out what the last answer has, such as its thoughts: the answer's end is looked for
    answer = str(messages[place].get("content") or "").split("</think>")[-1].strip()
    found, rest = whole.find(answer, start), until[until.rfind(answer) + len(answer) :]
    rest = rest if whole.startswith(rest, found + len(answer)) else rest.lstrip()  # behind a trimmed answer
    end = found + len(answer) + len(rest)
    if not answer or found < 0 or not whole.startswith(rest, found + len(answer)):
        raise ValueError(
            f"the chat template writes message {place} differently if further turns follow, so its end is not "
            "known. Set loss_scale: last_round, or assistant_only_loss with a template that marks answers"
        )
    return start, end
