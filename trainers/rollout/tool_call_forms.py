# ruff: noqa: RUF001 - tokens of DeepSeek
"""Tool calls in the forms of Hermes, DeepSeek V3, gpt-oss and Gemma 4, read in one pass over the text.

A regular expression would look for the end of a call again from every beginning: minutes where a model repeats it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SPACES = re.compile(r"\s*")
MOST_LONGER = 64  # calls of a turn whose JSON may hold the marker of their end
GEMMA4_QUOTE = '<|"|>'
GEMMA4_WORD = re.compile(r"[^,{}\[\]]*")
GEMMA4_WORDS = {"true": True, "false": False, "null": None, "None": None}
GEMMA4_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", re.ASCII)


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
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes, Qwen 2.5 and Qwen 3.

    A text inside the JSON may hold ``</tool_call>``. So few of those are looked at that a turn of them costs no time.
    """
    begin, end = "<tool_call>", "</tool_call>"
    calls, num_longer = list[ToolCall](), 0
    start = text.find(begin)
    while start >= 0 and (stop := text.find(end, start := start + len(begin))) >= 0:
        call = json_call(text[start:stop])
        if call.error and call.name is None and num_longer < MOST_LONGER:
            num_longer += 1
            longer = _end_of_json(text, start)
            if longer > stop and text.startswith(end, longer):
                call, stop = json_call(text[start:longer]), longer
        calls.append(call)
        start = text.find(begin, stop + len(end))
    return calls


def _end_of_json(text: str, start: int) -> int:
    """Where the spaces behind the JSON value end that begins there; -1 if there is none."""
    try:
        stop = json.JSONDecoder().raw_decode(text, SPACES.match(text, start).end())[1]  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return -1
    return SPACES.match(text, stop).end()  # type: ignore[union-attr]


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


def gemma4(text: str) -> list[ToolCall]:
    """``<|tool_call>call:NAME{key:value,...}<tool_call|>``, of Gemma 4.

    Texts stand between ``<|"|>``, so that a number inside a list or a mapping is a number, and null is None.
    """
    calls = []
    for block in between(text, "<|tool_call>", "<tool_call|>"):
        name, brace, _ = block.partition("{")
        name = name.strip().removeprefix("call:").strip()
        try:
            if not brace or not name:
                raise ValueError("a call is call:NAME{key:value,...}")
            arguments, stop = _gemma4_value(block, block.index("{"))
            if block[stop:].strip():
                raise ValueError(f"text behind the call: {block[stop:].strip()[:40]!r}")
            calls.append(ToolCall(name, arguments))
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(name or None, error=f"{type(error).__name__}: {error}"))
    return calls


def _gemma4_value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at ``at``, and where it ends. Raises ValueError."""
    at = SPACES.match(text, at).end()  # type: ignore[union-attr]
    if text.startswith(GEMMA4_QUOTE, at):
        at += len(GEMMA4_QUOTE)
        stop = text.index(GEMMA4_QUOTE, at)
        return text[at:stop], stop + len(GEMMA4_QUOTE)
    if text.startswith(("{", "["), at):
        return _gemma4_items(text, at + 1, "}" if text[at] == "{" else "]")
    word = GEMMA4_WORD.match(text, at)
    said = "" if word is None else word[0].strip()
    if word is None or not said:
        raise ValueError(f"no value at character {at}")
    if said in GEMMA4_WORDS:
        return GEMMA4_WORDS[said], word.end()
    return (json.loads(said) if GEMMA4_NUMBER.fullmatch(said) else said), word.end()


def _gemma4_items(text: str, at: int, end: str) -> tuple[Any, int]:
    """The mapping or list that ``end`` ends, of which the first item begins at ``at``, and where it ends."""
    pairs: dict[str, Any] = {}
    items: list[Any] = []
    while True:
        at = SPACES.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith(end, at) and not (pairs or items):
            break
        if end == "}":
            quoted = text.startswith(GEMMA4_QUOTE, at)
            stop = text.index(":", text.index(GEMMA4_QUOTE, at + len(GEMMA4_QUOTE)) if quoted else at)
            key = text[at:stop].strip().removeprefix(GEMMA4_QUOTE).removesuffix(GEMMA4_QUOTE)
            pairs[key], at = _gemma4_value(text, stop + 1)
        else:
            item, at = _gemma4_value(text, at)
            items.append(item)
        at = SPACES.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith(end, at):
            break
        if not text.startswith(",", at):
            raise ValueError(f"expected , or {end} at character {at}")
        at += 1
    return (pairs if end == "}" else items), at + 1


FORMS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": hermes,
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek,
    "openai": harmony,
    "gemma4": gemma4,
}
