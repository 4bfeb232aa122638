"""The texts of rows as tokens: by the model's chat template, or as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import _messages
from trainers.data.texts.groups import Conversation, Encoded, Members


@dataclass(frozen=True)
class TextEncoder:
    """The token ids of anchor, positives and negatives of a row, in this order."""

    tokenizer: Any
    use_chat_template: bool
    max_length: int | None
    truncation_mode: Literal["drop", "keep_start"]
    images: ImageReader | None = None
    system: str | None = None  # before texts that have no system message
    end_id: int | None = None  # of end_token

    def __call__(self, members: Members) -> Encoded:
        if len(members.positives) != 1:
            raise ValueError(f"the row has {len(members.positives)} positives; an anchor has one")
        return [self.encoded(one) for one in (members.anchor, *members.positives, *members.negatives)]

    def encoded(self, text: Conversation) -> tuple[list[int], Pictures]:
        messages, tokenizer = text.messages, self.tokenizer
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        pictures: Pictures = ()
        if self.images is not None:
            row, found = self.images.placed({"messages": messages, "images": text.images})
            messages, pictures, tokenizer = row["messages"], found, self.images.tokenizer(found)
        cuts = self.max_length is not None and self.truncation_mode == "keep_start"
        if not self.use_chat_template:
            options: dict[str, Any] = {"truncation": True, "max_length": self.max_length} if cuts else {}
            return list(tokenizer(plain_text(messages), **options)["input_ids"]), pictures
        invites = messages[-1]["role"] != "assistant"
        ids = list(tokenizer.apply_chat_template(_messages(messages), return_dict=False, add_generation_prompt=invites))
        ids += [] if self.end_id is None else [self.end_id]
        kept = ids[: self.max_length] if cuts else ids
        if self.images is not None:
            self.images.check_cut(ids, kept, f"max_length {self.max_length}")
        return kept, pictures


def plain_text(messages: list[dict[str, Any]]) -> str:
    """The text of one turn, a system message and a space before it (Qwen3-Embedding's instruction)."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = [message["content"] for message in messages if message["role"] != "system"]
    if len(turns) != 1 or len(system) > 1 or not all(isinstance(text, str) for text in (*system, *turns)):
        raise ValueError(
            "use_chat_template: false reads the text of one turn, perhaps with a system message, and this row has "
            f"{', '.join(message['role'] for message in messages)}. Set use_chat_template: true, or remove them."
        )
    return " ".join([*system, *turns])
