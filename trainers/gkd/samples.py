"""What a student learns from and a teacher is asked about: prompts, and response tokens that both sides share.

    student   its prompt            | response tokens ◄── targets
    teacher   its prompt, or        | the same response tokens ◄── targets
              ``teacher_prompt``

A response becomes tokens once, by the engine that generated it or by the student's tokenizer; the teacher is given the
token ids. So both models predict the same tokens, the k-th target of one side being the k-th of the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.batch import Ragged, Sequences, TopLogps
from trainers.data.images.conversations import COLUMNS
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import prompt_of, tokenize_prompts, tokenize_sft

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DistillationSamples(Sequences):
    """Prompts with responses, whose tokens are the targets; and what the teacher sees, where that differs.

    Raises:
        ValueError: the teacher's targets are not the student's, token by token.
    """

    teacher_input_ids: Ragged | None = None  # int64; None: the teacher sees what the student sees
    teacher_target_mask: Ragged | None = None  # bool
    top_ids: Ragged | None = None  # (N, K) int64 and float32: the columns of TopLogps
    top_logps: Ragged | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_input_ids is None:
            return
        theirs = self.as_teacher_sequences()
        same = np.array_equal(_num_targets(self), _num_targets(theirs))
        if not same or not np.array_equal(target_ids(self), target_ids(theirs)):
            raise ValueError("the targets of teacher and student must be the same tokens in the same order")

    def as_teacher_sequences(self) -> Sequences:
        """What the teacher is given; its targets are the student's, in order."""
        if self.teacher_input_ids is None:
            return Sequences(self.input_ids, self.target_mask, images=self.images)
        assert self.teacher_target_mask is not None, "the teacher's sequences come with their targets"
        return Sequences(self.teacher_input_ids, self.teacher_target_mask, images=self.images)

    def row_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of each row on the side where they are more."""
        lengths = self.input_ids.lengths
        return lengths if self.teacher_input_ids is None else np.maximum(lengths, self.teacher_input_ids.lengths)

    def answered(self, top: TopLogps | None) -> DistillationSamples:
        """The samples with a teacher's answer, after which its sequences are not needed any more."""
        if top is None:
            return self
        return replace(self, teacher_input_ids=None, teacher_target_mask=None, top_ids=top.ids, top_logps=top.logps)

    @property
    def num_targets(self) -> int:
        return int(self.target_mask.values.sum())


def samples_of(
    prompts: Iterable[Any],
    responses: Ragged,
    teacher_prompts: Iterable[Any] | None = None,
    is_learned: Ragged | None = None,
    images: list[Pictures] | None = None,
) -> DistillationSamples:
    """Prompts and responses as one sequence each; ``teacher_prompts`` None: the teacher's are the student's.

    ``is_learned``: bool, one a token of the responses; None: all of them. ``images``: the pictures of each prompt, the
    teacher's too.
    """
    ids, mask = _joined(prompts, responses, is_learned)
    if teacher_prompts is None:
        return DistillationSamples(ids, mask, images=images)
    theirs, their_mask = _joined(teacher_prompts, responses, is_learned)
    return DistillationSamples(ids, mask, teacher_input_ids=theirs, teacher_target_mask=their_mask, images=images)


def teacher_prompts_of(rows: Iterable[Mapping[str, Any]], tokenizer: Any, **settings: Any) -> list[list[int]] | None:
    """Token ids of what the teacher is to continue, ``settings`` as ``tokenize_prompts``; None: as the student."""
    rows = list(rows)
    if not any(has_teacher_prompt(row) for row in rows):
        return None
    return tokenize_prompts([{**row, "prompt": teacher_prompt_of(row)} for row in rows], tokenizer, **settings)


def has_teacher_prompt(row: Mapping[str, Any]) -> bool:
    return row.get("teacher_prompt") is not None


def teacher_prompt_of(row: Mapping[str, Any]) -> Any:
    """A row's ``teacher_prompt``, or its prompt. Text takes the place of the last user turn of a conversation.

    Raises:
        ValueError: the conversation has no user turn.
    """
    prompt, own = prompt_of(row), row.get("teacher_prompt")
    if own is None:
        return prompt
    if not isinstance(own, str) or isinstance(prompt, str):
        return own
    turns = [k for k, message in enumerate(prompt) if message["role"] == "user"]
    if not turns:
        raise ValueError("teacher_prompt is text, but the prompt has no user turn to put it into: give a conversation")
    return [*prompt[: turns[-1]], {**prompt[turns[-1]], "content": own}, *prompt[turns[-1] + 1 :]]


def has_response(row: Mapping[str, Any]) -> bool:
    """Whether a row has a ``completion``, or ``messages`` that end with a turn of the assistant."""
    if row.get("completion") is not None:
        return row.get("prompt") is not None
    messages = row.get("messages")
    return bool(messages) and messages[-1]["role"] == "assistant"  # type: ignore[index]


def tokenize_responses(
    rows: Dataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> DistillationSamples:
    """One sample a row, of its prompt and its response: the ``completion``, or the last turn of ``messages``.

    A response begins where prompt and prompt + response part as tokens. A row of more than ``max_length`` tokens loses
    the beginning of its prompt, the teacher's too, as in TRL's ChatML collator. Departure from that: a token that lies
    across the border of prompt and response is one of the response. ``images``: of a model that sees pictures.

    Raises:
        ValueError: a row without a response, or with one that leaves no room for a token of the prompt, or for a
            picture in it.
    """
    options = dict(chat_template_kwargs or {})
    pairs = rows.map(
        _as_pair,
        fn_kwargs={"options": options},
        with_indices=True,
        remove_columns=rows.column_names,
        desc="Splitting prompts from responses",
    )
    sequences = tokenize_sft(pairs, tokenizer, max_length=None, completion_only_loss=True, images=images)
    if len(sequences) != len(rows):
        raise ValueError(f"{len(rows) - len(sequences)} of {len(rows)} rows have a response without tokens")
    starts = [int(np.argmax(mask)) for mask in sequences.target_mask]
    prompts = [ids[:start] for ids, start in zip(sequences.input_ids, starts, strict=True)]
    responses = Ragged.of([ids[start:] for ids, start in zip(sequences.input_ids, starts, strict=True)], np.int64)
    teacher_prompts = teacher_prompts_of(rows, tokenizer, chat_template_kwargs=options, images=images)
    if max_length is not None:
        whole: list[list[Any]] = [prompts, *([] if teacher_prompts is None else [teacher_prompts])]
        prompts, *others = (_cut(one, responses, max_length, images) for one in whole)
        teacher_prompts = others[0] if others else None
    return samples_of(prompts, responses, teacher_prompts, images=sequences.images)


def _as_pair(row: dict[str, Any], index: int, options: dict[str, Any]) -> dict[str, Any]:
    if not has_response(row):
        raise ValueError(
            f"row {index} has no response: 'prompt' and 'completion', or 'messages' that end with the assistant's turn"
        )
    if row.get("completion") is not None:
        pair = {"prompt": row["prompt"], "completion": row["completion"]}
    else:
        pair = {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    pair |= {name: row[name] for name in ("tools", *COLUMNS) if row.get(name) is not None}
    template = options | {
        name: value for name, value in (row.get("chat_template_kwargs") or {}).items() if value is not None
    }
    return pair | ({"chat_template_kwargs": template} if template else {})


def _cut(prompts: list[Any], responses: Ragged, max_length: int, images: ImageReader | None = None) -> list[Any]:
    """The prompts without what would make prompt and response longer than ``max_length``."""
    room = max_length - responses.lengths
    full = np.flatnonzero(room < 1)
    if len(full):
        raise ValueError(
            f"the response of row {full[0]} has {responses.lengths[full[0]]} tokens, which leaves no token of the "
            f"prompt within max_length={max_length}. Raise max_length, or remove the row."
        )
    too_long = sum(len(prompt) > kept for prompt, kept in zip(prompts, room, strict=True))
    if too_long:
        logger.warning(
            "%d of %d rows lose the beginning of their prompt to max_length %d", too_long, len(prompts), max_length
        )
    cut = [prompt[max(0, len(prompt) - kept) :] for prompt, kept in zip(prompts, room, strict=True)]
    for prompt, kept in zip(prompts, cut, strict=True) if images is not None else ():
        images.check_cut(prompt, kept, f"max_length {max_length}")  # type: ignore[union-attr]
    return cut


def _joined(prompts: Iterable[Any], responses: Ragged, is_learned: Ragged | None) -> tuple[Ragged, Ragged]:
    learned = [np.ones(len(one), bool) for one in responses] if is_learned is None else list(is_learned)
    pairs = [(np.asarray(prompt, np.int64), response) for prompt, response in zip(prompts, responses, strict=True)]
    mask = [np.append(np.zeros(len(prompt), bool), own) for (prompt, _), own in zip(pairs, learned, strict=True)]
    return Ragged.of([np.concatenate(pair) for pair in pairs], np.int64), Ragged.of(mask, bool)


def _num_targets(sequences: Sequences) -> np.ndarray:
    return np.array([int(mask.sum()) for mask in sequences.target_mask], np.int64)


def target_ids(sequences: Sequences) -> np.ndarray:
    ids: np.ndarray = sequences.input_ids.values[sequences.target_mask.values]
    return ids
