# ruff: noqa: RUF001 - tokens of DeepSeek
"""Tool calls in the forms of Hermes, DeepSeek V3 and gpt-oss, read in one pass over the text.

A regular expression would look for the end of a call again from every beginning: minutes where a model repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote; ``error`` says what is wrong with one that cannot be read."""

    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None  # that the model, or an earlier reader, gave it
    error: str | None = None

    def with_id(self, number: str) -> ToolCall:
        """The same call under an id."""
        return replace(self, id=number)


def calls_of(call: Any) -> ToolCall:
    """The call in ``{"name": ..., "arguments": ...}``, or in OpenAI's form with both under ``function``.

    Arguments may be JSON. What is wrong with it is the call's ``error``.
    """
    name = None
    try:
        function = call.get("function", call)
        name = function["name"]
        arguments = function.get("arguments", function.get("parameters"))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, (Mapping, type(None))):
            raise TypeError(f"arguments must be an object, got {type(arguments).__name__}")
        return ToolCall(str(name), dict(arguments or {}), call.get("id"))
    except Exception as error:  # whatever it is, the model is told
        return ToolCall(None if name is None else str(name), error=f"{type(error).__name__}: {error}")


def json_call(text: str) -> ToolCall:
    """The call in a JSON object."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict):
            raise TypeError(f"a call is an object with name and arguments, got {type(call).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        return ToolCall(error=f"{type(error).__name__}: {error}")
    return calls_of(call)


def between(text: str, begin: str, end: str) -> Iterator[str]:
    """What stands between each ``begin`` and the next ``end``."""
    start = text.find(begin)
    while start >= 0:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            return
        yield text[start + len(begin) : stop]
        start = text.find(begin, stop + len(end))


def hermes(text: str) -> list[ToolCall]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes, Qwen 2.5 and Qwen 3."""
    return [json_call(block) for block in between(text, "<tool_call>", "</tool_call>")]


def deepseek(text: str) -> list[ToolCall]:
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``, of DeepSeek V3.1.

    V3 and R1 write ``function`` in the place of the name, and behind it the name and the arguments in a block of code.
    """
    calls = []
    for block in between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        head, _, tail = block.partition("<｜tool▁sep｜>")
        name, fence, arguments = tail.partition("\n```json\n")
        if fence:
            arguments = arguments.rstrip().removesuffix("```")
        else:
            name, arguments = head, tail
        calls.append(calls_of({"name": name.strip(), "arguments": arguments}))
    return calls


def harmony(text: str) -> list[ToolCall]:
    """Messages ``to=functions.NAME`` that end with ``<|call|>``, of gpt-oss.

    The recipient stands before ``<|channel|>`` or behind the channel's name, as the harmony format allows both. The
    text begins behind ``<|start|>assistant``.
    """
    calls = []
    for piece in text.split("<|call|>")[:-1]:
        head, found, content = piece.rpartition("<|message|>")
        header = head.rpartition("<|start|>")[2]
        recipient = header.partition("to=functions.")[2]
        if found and recipient:
            name = recipient.split("<|", 1)[0].split(maxsplit=1)[0] if recipient.strip() else ""
            calls.append(calls_of({"name": name, "arguments": content}))
    return calls


FORMS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": hermes,
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek,
    "openai": harmony,
}
