"""A tokenizer that writes answers with the thoughts that their rows have: ms-swift's way, whatever the template does.

    tokenizer = WrittenAnswers(tokenizer, keeps=True, adds_empty="every")
    tokenizer.apply_chat_template(messages)          # earlier answers keep <think> ... </think>

Chat templates of thinking models leave the thoughts of earlier answers out, and write empty ones before others. Here
the template writes marks in place of answers, and the answers take the place of the marks, with all empty thoughts
that the template wrote before them. An invitation to answer ends before its thoughts, so that they are learned.

Source: ``_add_non_thinking_prefix`` and ``_remove_history_thinking`` of ms-swift's ``swift/template/base.py``, and
``Qwen3_5Template`` for templates that trim answers. Departure: ms-swift leaves a message's ``reasoning_content`` out;
here it is the thoughts of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from trainers.data.answers import last_asked
from trainers.data.loss_scale import parsed

EMPTY = re.compile(r"<think>\s*</think>")  # in a template: the model may think or not
MARK = "\ue000answer {}\ue001"
REASONING = "reasoning_content"
_WRITTEN = r"(<think>\s*(?:</think>\s*)?)?"  # by the template, before an answer
_INVITED = re.compile(r"<think>\s*(</think>\s*)?\Z")

Added = Literal["every", "last", "none"]


class Habits(NamedTuple):
    """What a chat template does to answers without thoughts."""

    empty: str  # what it writes before the last one
    earlier: str  # and before those of earlier rounds
    trims: bool  # whether it takes spaces off their ends


def written(tokenizer: Any, config: Any, images: Any = None) -> Any:
    """The tokenizer for the answers of a trainer's rows, by ``AnswersConfig``; ``images`` reads rows with it too."""
    if config.preserve_thinking is None:
        return tokenizer
    scale = parsed(getattr(config, "loss_scale", None))
    learns_all = config.preserve_thinking if scale is None else scale.base != "last_round"
    adds: Added = "none" if not config.add_non_thinking_prefix else "every" if learns_all else "last"
    found = WrittenAnswers(tokenizer, keeps=config.preserve_thinking, adds_empty=adds)
    if images is not None:
        images.plain = found
    return found


class WrittenAnswers:
    """``tokenizer``, for conversations whose answers are learned.

    ``keeps``: earlier rounds keep their thoughts. ``adds_empty``: which answers without thoughts begin with empty ones,
    if the model may think or not; those of the last round come behind the last turn of a user or a tool.
    """

    def __init__(self, tokenizer: Any, *, keeps: bool, adds_empty: Added) -> None:
        self._tokenizer, self._keeps, self._adds_empty = tokenizer, keeps, adds_empty

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """As the tokenizer's."""
        if options.pop("return_assistant_tokens_mask", False):
            raise ValueError("preserve_thinking: assistant_only_loss cannot be read with it. Write loss_scale: default")
        tokenize, as_dict = options.pop("tokenize", True), options.pop("return_dict", True)
        text = self._text(messages, options)
        if not tokenize:
            return text
        encoded = self._tokenizer(text, add_special_tokens=False)
        return encoded if as_dict else encoded["input_ids"]

    @cached_property
    def empty_thoughts(self) -> str:
        """What answers without thoughts begin with; '' for a model that cannot leave its thoughts out."""
        adds = self._adds_empty != "none" and may_not_think(self._tokenizer.chat_template)
        return self._habits.empty if adds else ""

    @cached_property
    def _habits(self) -> Habits:
        marks = [MARK.format(number) for number in range(2)]
        asked = {"role": "user", "content": "?"}
        messages = [turn for mark in marks for turn in (asked, {"role": "assistant", "content": f"{mark} "})]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        found = [re.search(rf"((?:<think>\s*</think>\s*)?){mark}", text) for mark in marks]
        earlier, last = ("" if match is None else match[1] for match in found)
        return Habits(last, earlier, trims=f"{marks[0]} " not in text)

    def _text(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        last = last_asked(messages)
        turns, answers = [], {}
        for place, message in enumerate(messages):
            said = _said(message) if message["role"] == "assistant" else None
            if said is not None:
                mark = MARK.format(place)
                answers[mark] = (self._answer(said, place > last), not said)
                is_listed = isinstance(message.get("content"), list)
                message = {name: value for name, value in message.items() if name != REASONING}
                message["content"] = [{"type": "text", "text": mark}] if is_listed else mark
            turns.append(message)
        text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, **options)
        for mark, (answer, is_empty) in answers.items():  # calls alone follow it where they would without the mark
            found = list(re.finditer(_WRITTEN + mark + r"\n*" * is_empty, text))
            if len(found) != 1:
                raise ValueError(
                    f"preserve_thinking: the chat template writes an answer {len(found)} times. Remove the key"
                )
            text = text[: found[0].start()] + answer + text[found[0].end() :]
        return _INVITED.sub("", text) if options.get("add_generation_prompt") else text

    def _answer(self, said: str, is_last: bool) -> str:
        if self._habits.trims:
            said = _trimmed(said)
        if not self._keeps and not is_last:
            return self._habits.earlier + said.split("</think>")[-1].strip()
        adds = (self._adds_empty == "every" or is_last) and not said.startswith("<think>")
        return self.empty_thoughts + said if adds else said


def may_not_think(template: Any) -> bool:
    """Whether a chat template writes empty thoughts: its model may think or not."""
    return isinstance(template, str) and EMPTY.search(template.replace("\\n", "\n")) is not None


def _said(message: Mapping[str, Any]) -> str | None:
    """The text of an answer, with what it holds as reasoning in front; None if it is no text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            return None
        content = "".join(part["text"] for part in content)
    reasoning = message.get(REASONING)
    return f"<think>\n{reasoning}\n</think>\n\n{content}" if isinstance(reasoning, str) else content


def _trimmed(said: str) -> str:
    """An answer as templates that trim it write it."""
    said = said.strip()
    if "<think>" not in said or "</think>" not in said:
        return said
    before, _, behind = said.partition("</think>")
    thoughts = before.rsplit("<think>", 1)[-1].strip()
    return f"<think>\n{thoughts}\n</think>\n\n" + behind.lstrip("\n")
