"""Conversations that are learned as plain texts, without the chat template: ms-swift's rows of pretraining.

{"messages": [{"role": "assistant", "content": "I love music."}]}         the text: I love music.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

TURNS = (["assistant"], ["user", "assistant"])  # the second: one text, without anything between the two


def without_template(rows: Dataset, text_field: str) -> Dataset:
    """The rows with the contents of ``messages`` in ``text_field``; other rows are as they were.

    Raises ValueError for a conversation of other turns, or of more than text.
    """
    if "messages" not in rows.column_names:
        return rows

    def text(row: dict[str, Any]) -> dict[str, Any]:
        return {text_field: _text_of(row["messages"]) if row["messages"] else row.get(text_field)}

    return rows.map(text, remove_columns=["messages"], desc="Without the chat template")


def _text_of(messages: list[Mapping[str, Any]]) -> str:
    roles, contents = zip(*((turn["role"], turn["content"]) for turn in messages), strict=True)
    if list(roles) not in TURNS or not all(isinstance(content, str) for content in contents):
        raise ValueError(
            "use_chat_template: false learns the text of one turn of the assistant, perhaps after one of the user, and "
            f"this row has {', '.join(roles)}. Set use_chat_template: true, which writes the turns by the template."
        )
    return "".join(contents)
