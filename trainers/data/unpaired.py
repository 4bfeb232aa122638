"""Completions that were judged each by itself: TRL's unpaired preference format as typed batches.

    answers = tokenize_unpaired(rows, tokenizer)                     # UnpairedPreferences
    batch = answers[rows].judged(max_length=1024)                    # Judged: to learn from
    others = answers[rows].mismatched(8).sequences(max_length=1024)  # Sequences: prompts with completions of others

A row has ``prompt``, ``completion`` and ``label`` (true: desirable), or, in ms-swift's form, ``messages`` that end with
the completion, and ``label``. A row with ``chosen`` and ``rejected`` is two of them. Each is text or a conversation,
which may have ``tools`` and ``chat_template_kwargs`` beside it. Everything here runs on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.batch import Batch, Ragged, Sequences
from trainers.data.broken_rows import warn_left_out
from trainers.data.images.conversations import COLUMNS as PICTURES
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.preferences import completed_ids, num_empty_thoughts
from trainers.data.rows import TruncationMode, _common_prefix, _messages, _ragged, _template_options

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("prompt", "completion", "label", "messages", "chosen", "rejected")


@dataclass(eq=False)
class Judged(Sequences):
    """Completions to learn from, each judged by itself; one row a completion, whose tokens are the targets."""

    is_desirable: np.ndarray | None = None  # bool, one a row
    ref_logps: Ragged | None = None  # float32, one a target: the reference policy
    kl: np.ndarray | None = None  # float32, one a row: how far the policy is from the reference


@dataclass(eq=False)
class UnpairedPreferences(Batch):
    """Prompts and completions of a dataset, whole: they are cut when they are joined to sequences."""

    prompt_ids: Ragged  # int64
    completion_ids: Ragged  # int64
    is_desirable: np.ndarray  # bool
    images: list[Pictures] | None = None  # of each prompt; None: no prompt has any

    def sequences(self, *, max_length: int | None, truncation_mode: TruncationMode = "keep_start") -> Sequences:
        """Prompt and completion as one sequence each, of at most ``max_length`` tokens.

        Targets are the completion's tokens, except one that is the first of its sequence.
        """
        cut = slice(-max_length, None) if max_length and truncation_mode == "keep_end" else slice(max_length)
        ids = [np.concatenate(pair)[cut] for pair in zip(self.prompt_ids, self.completion_ids, strict=True)]
        lengths = zip(self.prompt_ids.lengths, self.completion_ids.lengths, strict=True)
        masks = [np.repeat([False, True], pair)[cut] for pair in lengths]
        for mask in masks:
            mask[:1] = False
        return Sequences(Ragged.of(ids, np.int64), Ragged.of(masks, bool), images=self.images)

    def sequence_lengths(self, max_length: int | None) -> np.ndarray:
        """(rows,) int64: the tokens of each of ``sequences``."""
        lengths: np.ndarray = self.prompt_ids.lengths + self.completion_ids.lengths
        return lengths if max_length is None else np.minimum(lengths, max_length)

    def judged(self, *, max_length: int | None, truncation_mode: TruncationMode = "keep_start") -> Judged:
        """The sequences, with what was found of each."""
        found = self.sequences(max_length=max_length, truncation_mode=truncation_mode)
        return Judged(found.input_ids, found.target_mask, images=found.images, is_desirable=self.is_desirable)

    def mismatched(self, group_size: int) -> UnpairedPreferences:
        """Each prompt with the completion of the row before it, in groups of ``group_size`` consecutive rows.

        The first row of a group gets the completion of its last one; so a row that is alone keeps its own.
        """
        places = np.arange(len(self))
        begins = places // group_size * group_size
        last = np.minimum(begins + group_size, len(self)) - 1
        return replace(self, completion_ids=self.completion_ids[np.where(places == begins, last, places - 1)])


def tokenize_unpaired(
    rows: Dataset,
    tokenizer: Any,
    *,
    max_length: int | None = None,
    truncation_mode: TruncationMode = "keep_start",
    num_proc: int | None = None,
    images: ImageReader | None = None,
) -> UnpairedPreferences:
    """Prompt, completion and label of each row as tokens: TRL's KTO preparation.

    Text completions end with the tokenizer's end of sequence, conversations as their template ends them. A completion
    starts where the tokens of the prompt alone part from those of prompt and completion. With ``keep_start``, rows
    whose prompt fills ``max_length`` are dropped, and with ``drop`` longer rows, with one line in the log. A text
    completion of a conversation is a turn of the assistant. ``images``: of a model that sees pictures, which prompts
    may have; a row whose pictures would be cut raises ValueError.

    Raises ValueError for rows that are of none of the formats, naming the first, or if none is left.
    """
    from datasets import Features, LargeList, Value

    if (
        images is not None
        and {"chosen", "rejected"} <= set(rows.column_names)
        and set(PICTURES) & set(rows.column_names)
    ):
        raise ValueError(
            "rows with chosen and rejected become two rows each, and pictures are not divided between them yet. "
            "Write rows with prompt, completion and label."
        )
    rows = unpaired(rows)
    names = ("prompt_ids", "completion_ids")
    why = "longer than" if truncation_mode == "drop" else "whose prompt fills"

    def is_left_out(prompt: int, completion: int) -> bool:
        if max_length is None or truncation_mode == "keep_end":
            return False
        return prompt + completion > max_length if truncation_mode == "drop" else prompt >= max_length

    def encode_all(table: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in types}
        for position, index in enumerate(indices):
            row = {name: column[position] for name, column in table.items()}
            try:
                own = tokenizer
                if images is not None:
                    row, pictures = images.placed(_as_completed(row))
                    own = images.tokenizer(pictures)
                prompt_ids, completion_ids, label = _encoded(row, own)
                if images is not None and truncation_mode != "drop":
                    whole = [*prompt_ids, *completion_ids]
                    images.check_cut(whole, whole[cut], f"max_length {max_length}")
            except Exception as error:
                error.add_note(f"while tokenizing row {index} of the dataset")
                raise
            if not is_left_out(len(prompt_ids), len(completion_ids)):
                values = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "label": label, "row": index}
                for name, column in columns.items():
                    column.append(values[name])
        return columns

    types: dict[str, Any] = {**{name: LargeList(Value("int64")) for name in names}, "label": Value("bool")}
    types |= {} if images is None else {"row": Value("int64")}
    cut = slice(-max_length, None) if max_length and truncation_mode == "keep_end" else slice(max_length)
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
        warn_left_out(dropped, "dropped %d of %d rows %s max_length %s", dropped, len(rows), why, max_length)
    if len(table) == 0:
        raise ValueError(f"none of {len(rows)} rows is left: all are {why} max_length {max_length}. Raise it.")
    prompt_ids, completion_ids = (_ragged(table, name, np.int64) for name in names)
    pictures: list[Pictures] | None = None
    if images is not None:
        pictures = [images.placed(_as_completed(rows[index]))[1] for index in table["row"]]
    return UnpairedPreferences(prompt_ids, completion_ids, np.asarray(table["label"], bool), images=pictures)


def unpaired(rows: Dataset) -> Dataset:
    """The rows themselves; of pairs, a desirable and an undesirable row each, in TRL's order."""
    if not {"chosen", "rejected"} <= set(rows.column_names):
        return rows
    from trl import extract_prompt, unpair_preference_dataset  # type: ignore[attr-defined]

    if "prompt" not in rows.column_names:
        rows = rows.map(extract_prompt, desc="Extracting prompts")
    return unpair_preference_dataset(rows, desc="Unpairing")


def _as_completed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with ``prompt`` and ``completion``."""
    prompt, completion = _prompt_and_completion(row)
    return {name: value for name, value in row.items() if name != "messages"} | {
        "prompt": prompt,
        "completion": completion,
    }


def _encoded(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int], bool]:
    """Token ids of prompt and completion, and the label."""
    prompt, completion = _prompt_and_completion(row)
    options = _template_options(row) | {"return_dict": False}
    ids = completed_ids(prompt, completion, tokenizer, options)
    if isinstance(prompt, str):
        prompt_ids = list(tokenizer(prompt)["input_ids"])
    else:
        prompt_ids = list(tokenizer.apply_chat_template(_messages(prompt), add_generation_prompt=True, **options))
    start = _common_prefix(prompt_ids, ids)
    start += num_empty_thoughts(ids[start:], tokenizer)
    return ids[:start], ids[start:], bool(row["label"])


def _prompt_and_completion(row: Mapping[str, Any]) -> tuple[Any, Any]:
    if row.get("completion") is not None and row.get("prompt") is not None:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(completion, str) and not isinstance(prompt, str):
            completion = [{"role": "assistant", "content": completion}]
        return prompt, completion
    if row.get("messages"):
        return row["messages"][:-1], row["messages"][-1:]
    raise ValueError(
        "a row of KTO has 'prompt', 'completion' and 'label', or 'messages' and 'label', or 'chosen' and 'rejected'. "
        f"This row has {', '.join(name for name, value in row.items() if value is not None)}. Rename with `columns`."
    )
