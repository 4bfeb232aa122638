"""Rows with a label, as typed batches.

    rows = tokenize_labelled(rows, tokenizer, problem="regression", num_labels=1)      # Labelled

A row has ``messages``, ``prompt`` or ``text``, and ``label``: a class from 0 (single_label_classification), a list of
such numbers, which may be empty (multi_label_classification), or a number or a list of ``num_labels`` (regression).
These are the rows of ms-swift's ``task_type: seq_cls``. A vision model sees the pictures of conversations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.batch import Ragged, Sequences
from trainers.classification.config import ProblemType
from trainers.data.broken_rows import Mistake, in_column, warn_left_out
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import TruncationMode, _messages, _ragged, _template_options

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("label", "messages", "prompt", "text")


@dataclass(eq=False)
class Labelled(Sequences):
    """Rows to classify, whose one target is the last token; ``labels`` say what the head is to give there."""

    labels: np.ndarray | None = None  # int64 (rows,): a class each; or float32 (rows, K): numbers, or 0 and 1


def label_mistake(
    row: Mapping[str, Any], *, problem: ProblemType, num_labels: int, seen: tuple[str, ...] = ()
) -> Mistake | None:
    """Of a row to classify: its text, or its label. ``seen``: types of parts of a message that the model sees."""
    name = next((name for name in COLUMNS[1:] if row.get(name) is not None), None)
    if name is None:
        return "messages", "no text: a row has messages, prompt or text"
    found = in_column(row, name, text=name != "messages", seen=seen)
    return found or _label_mistake(row.get("label"), problem, num_labels)


def tokenize_labelled(
    rows: Dataset,
    tokenizer: Any,
    *,
    problem: ProblemType,
    num_labels: int,
    use_chat_template: bool = True,
    max_length: int | None = None,
    truncation_mode: TruncationMode = "keep_start",
    num_proc: int | None = None,
    images: ImageReader | None = None,
) -> Labelled:
    """The tokens and the label of each row.

    Conversations are written by the chat template, and invite an answer if they end with a turn of the user. Texts are
    tokenized as they are, with the special tokens of the tokenizer. So is, without ``use_chat_template``, the one turn
    of a user. Rows of more than ``max_length`` tokens are cut, or dropped with one line in the log. ``images``: of a
    model that sees pictures.

    Raises ValueError for a row that cannot be written like that, or if no row is left.
    """
    from datasets import Features, LargeList, Value

    cut = slice(-max_length, None) if max_length and truncation_mode == "keep_end" else slice(max_length)
    longest = max_length if truncation_mode == "drop" else None
    types = {"input_ids": LargeList(Value("int64")), "label": LargeList(Value("float64")), "row": Value("int64")}

    def encode_all(table: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in types}
        for position, index in enumerate(indices):
            row = {name: column[position] for name, column in table.items()}
            try:
                shown, own = (row, tokenizer) if images is None else images.shown(row)
                ids = _encoded(shown, own, use_chat_template)
                if not ids:
                    raise ValueError("the row has no token")
                if images is not None and longest is None:
                    images.check_cut(ids, ids[cut], f"max_length {max_length}")
            except Exception as error:
                error.add_note(f"while tokenizing row {index} of the dataset")
                raise
            if longest is None or len(ids) <= longest:
                found["input_ids"].append(ids[cut])
                found["label"].append(_numbers(row["label"], problem, num_labels))
                found["row"].append(index)
        return found

    table = rows.map(
        encode_all,
        batched=True,
        with_indices=True,
        num_proc=num_proc,
        remove_columns=rows.column_names,
        features=Features(types),
        desc="Tokenizing",
    )
    if dropped := len(rows) - len(table):
        message = "dropped %d of %d rows of more than max_length %s tokens"
        warn_left_out(dropped, message, dropped, len(rows), max_length)
    if len(table) == 0:
        raise ValueError(f"none of {len(rows)} rows is left: each has more than max_length {max_length} tokens")
    input_ids = _ragged(table, "input_ids", np.int64)
    is_last = np.zeros(len(input_ids.values), bool)
    is_last[input_ids.offsets[1:] - 1] = True
    labels: np.ndarray = _ragged(table, "label", np.float64).values.reshape(len(table), -1)
    labels = labels[:, 0].astype(np.int64) if problem == "single_label_classification" else labels.astype(np.float32)
    pictures: list[Pictures] | None = (
        None if images is None else [images.placed(rows[index])[1] for index in table["row"]]
    )
    return Labelled(input_ids, Ragged(is_last, input_ids.offsets), images=pictures, labels=labels)


def _encoded(row: Mapping[str, Any], tokenizer: Any, use_chat_template: bool) -> list[int]:
    content = next(row[name] for name in COLUMNS[1:] if row.get(name) is not None)
    if not isinstance(content, str) and not use_chat_template:
        content = _only_turn(content)
    if isinstance(content, str):
        return list(tokenizer(content)["input_ids"])
    invites = content[-1]["role"] != "assistant"
    options = _template_options(row) | {"return_dict": False, "add_generation_prompt": invites}
    return list(tokenizer.apply_chat_template(_messages(content), **options))


def _only_turn(messages: list[Any]) -> str:
    """The text of a conversation that is one turn of a user."""
    if len(messages) != 1 or messages[0]["role"] != "user" or not isinstance(messages[0]["content"], str):
        raise ValueError(
            "use_chat_template: false reads the text of one turn of the user, and this row has other turns: "
            f"{', '.join(message['role'] for message in messages)}. Set use_chat_template: true, or remove them."
        )
    text: str = messages[0]["content"]
    return text


def _numbers(label: Any, problem: ProblemType, num_labels: int) -> list[float]:
    """A class, or ``num_labels`` numbers."""
    if problem == "multi_label_classification":
        return [float(k in label) for k in range(num_labels)]
    return [float(number) for number in label] if isinstance(label, list) else [float(label)]


def _label_mistake(label: Any, problem: ProblemType, num_labels: int) -> Mistake | None:
    if problem == "single_label_classification":
        good, wanted = _is_class(label, num_labels), f"a class, a whole number from 0 to {num_labels - 1}"
    elif problem == "multi_label_classification":
        good = isinstance(label, list) and all(_is_class(one, num_labels) for one in label)
        wanted = f"a list of labels, whole numbers from 0 to {num_labels - 1}"
    else:
        numbers = label if isinstance(label, list) else [label]
        good = len(numbers) == num_labels and all(_is_number(number) for number in numbers)
        wanted = "a number" if num_labels == 1 else f"a list of {num_labels} numbers"
    return None if good else ("label", f"{str(label)[:40]!r} is not {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_class(value: Any, num_labels: int) -> bool:
    """A table may hold whole numbers as floats, and two classes as false and true."""
    return _is_number(value) and value == int(value) and 0 <= value < num_labels
