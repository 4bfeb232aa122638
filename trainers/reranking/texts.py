"""A query with each of its documents as tokens: a pair of texts, turns of a conversation, or a question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import _messages
from trainers.data.texts.groups import Conversation, Encoded, Members

# Qwen3-Reranker's, as its model card has it; that of Qwen3-VL-Reranker has other spaces
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
QUESTION = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUESTION_SEEING = "<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}"
INSTRUCTION_SEEING = "Given a search query, retrieve relevant candidates that answer the query."


@dataclass(frozen=True)
class PairEncoder:
    """The token ids of the query with each document: the right ones first.

    ``answer``: the token that ends a question, whose place is where the model answers. None: no question is asked.
    """

    tokenizer: Any
    use_chat_template: bool
    answer: int | None = None
    instruction: str | None = None
    images: ImageReader | None = None

    def __call__(self, members: Members) -> Encoded:
        return [self.encoded(members.anchor, one) for one in (*members.positives, *members.negatives)]

    def encoded(self, query: Conversation, document: Conversation) -> tuple[list[int], Pictures]:
        """The system message of the document, or that of the query, is the instruction of a question."""
        system = [one for part in (document, query) for one in part.messages if one["role"] == "system"][:1]
        asked, told = (_only_turn(part) for part in (query, document))
        if self.answer is None and not self.use_chat_template:
            return self.pair(asked, told, bool(system)), ()
        if self.answer is None:
            messages = [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        else:
            messages = self.question(system, asked, told)
        tokenizer: Any = self.tokenizer
        pictures: Pictures = ()
        if self.images is not None:
            row, found = self.images.placed({"messages": messages, "images": [*query.images, *document.images]})
            messages, pictures, tokenizer = row["messages"], found, self.images.tokenizer(found)
        options: dict[str, Any] = {"return_dict": False}
        if self.answer is not None:
            options |= {"add_generation_prompt": True, "enable_thinking": False}
        ids = list(tokenizer.apply_chat_template(_messages(messages), **options))
        return [*ids, *([] if self.answer is None else [self.answer])], pictures

    def pair(self, query: Any, document: Any, has_system: bool) -> list[int]:
        """Both texts as the tokenizer joins them."""
        if has_system or not isinstance(query, str) or not isinstance(document, str):
            raise ValueError("use_chat_template: false reads only texts. Remove the system message and pictures")
        return list(self.tokenizer(query, document)["input_ids"])

    def question(self, system: list[dict[str, Any]], query: Any, document: Any) -> list[dict[str, Any]]:
        """Qwen3-Reranker's question."""
        if not isinstance(query, str) or not isinstance(document, str):
            raise ValueError("a query and a document must be texts, with <image> in the place of each picture")
        template, default = (QUESTION, INSTRUCTION)
        if self.images is not None:
            template, default = (QUESTION_SEEING, INSTRUCTION_SEEING)
        instruction = system[0]["content"] if system else self.instruction or default
        asked = template.format(instruction=instruction, query=query, document=document)
        return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def _only_turn(text: Conversation) -> Any:
    turns = [message.get("content") for message in text.messages if message["role"] != "system"]
    if len(turns) != 1 or turns[0] is None:
        raise ValueError(
            f"a query and a document have one turn each, in addition to a system message; this one has {len(turns)}"
        )
    return turns[0]
