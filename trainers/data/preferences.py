"""Pairs of a chosen and a rejected completion: TRL's preference formats as typed batches.

    pairs = tokenize_preferences(rows, tokenizer, max_length=1024)    # to learn which completion is better (DPO)
    pairs = tokenize_comparisons(rows, tokenizer, max_length=1024)    # to score whole sequences (reward models)

A row has ``chosen`` and ``rejected`` and, mostly, ``prompt``; without it the prompt is what both begin with. Each is
text or a conversation, which may have ``tools`` and ``chat_template_kwargs`` beside it. ``margin`` says how much better
the chosen one was judged. Everything here runs on the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from trainers.batch import Batch, Ragged, Sequences
from trainers.data.broken_rows import warn_left_out
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.loss_scale import parsed
from trainers.data.rows import SFTEncoder, TruncationMode, _common_prefix, _messages, _ragged, _template_options

if TYPE_CHECKING:
    from datasets import Dataset


Tokens = tuple[list[int], list[bool]]  # the ids of a sequence, and which of them are targets


@dataclass(eq=False)
class Preferences(Batch):
    """Pairs of sequences that begin alike; one row a pair, so that no cut of a batch tears a pair apart."""

    chosen_ids: Ragged  # int64
    chosen_mask: Ragged  # bool, lengths of chosen_ids: True on targets
    rejected_ids: Ragged
    rejected_mask: Ragged
    margins: np.ndarray | None = None  # float32, one a pair: how much better the chosen one was judged
    ref_chosen_logps: Ragged | None = None  # float32, one a target: the reference policy
    ref_rejected_logps: Ragged | None = None
    row_ids: np.ndarray | None = None  # int64, one a pair: places in the data, for messages
    num_prompt_targets: np.ndarray | None = None  # int64, one a pair: those of chosen that come first
    images: list[Pictures] | None = None  # of each pair's prompt; None: no pair has any
    nll_weights: np.ndarray | None = None  # float32, one a pair: of its chosen tokens in their likelihood; None: 1

    @classmethod
    def of(
        cls, sequences: Sequences, chosen: np.ndarray, rejected: np.ndarray, ref_logps: Ragged | None = None
    ) -> Preferences:
        """Pair k of rows ``chosen[k]`` and ``rejected[k]``; ``ref_logps``: the reference's of all rows."""
        ids, mask = sequences.input_ids, sequences.target_mask
        pairs = cls(ids[chosen], mask[chosen], ids[rejected], mask[rejected])
        if ref_logps is None:
            return pairs
        return replace(pairs, ref_chosen_logps=ref_logps[chosen], ref_rejected_logps=ref_logps[rejected])

    @property
    def ref_logps(self) -> Ragged | None:
        """The reference's, in the order of ``as_sequences``; None without a reference."""
        if self.ref_chosen_logps is None or self.ref_rejected_logps is None:
            return None
        return Ragged.concat([self.ref_chosen_logps, self.ref_rejected_logps])

    def as_sequences(self) -> Sequences:
        """Twice as many rows: all chosen, then all rejected."""
        return Sequences(
            Ragged.concat([self.chosen_ids, self.rejected_ids]),
            Ragged.concat([self.chosen_mask, self.rejected_mask]),
            images=None if self.images is None else 2 * self.images,
        )

    def row_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of each pair, the shorter sequence padded to the longer."""
        lengths: np.ndarray = 2 * np.maximum(self.chosen_ids.lengths, self.rejected_ids.lengths)
        return lengths

    def unpadded_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of both sequences of each pair."""
        lengths: np.ndarray = self.chosen_ids.lengths + self.rejected_ids.lengths
        return lengths

    def item_costs(self) -> np.ndarray:
        """What ``RayHelper.balanced()`` shares out evenly: tokens."""
        return self.row_lengths()

    def with_prompt_targets(self) -> Preferences:
        """The same pairs; the targets of the chosen sequences are all tokens but the first, those of the prompt too."""
        is_target = np.ones(len(self.chosen_mask.values), bool)
        is_target[self.chosen_mask.offsets[:-1][self.chosen_mask.lengths > 0]] = False
        chosen_mask = Ragged(is_target, self.chosen_mask.offsets)
        num_completion_targets = np.array([row.sum() for row in self.chosen_mask], np.int64)
        num_prompt_targets = np.maximum(self.chosen_mask.lengths - 1, 0) - num_completion_targets
        return replace(self, chosen_mask=chosen_mask, num_prompt_targets=num_prompt_targets)

    def with_nll_batches(self, size: int | None) -> Preferences:
        """The same pairs; their likelihood is a mean over the tokens of ``size`` consecutive pairs, then over pairs.

        None: over all tokens.
        """
        if size is None or len(self) == 0:
            return self
        batches = np.arange(len(self)) // size
        tokens = np.bincount(batches, [row.sum() for row in self.chosen_mask])
        shares = np.bincount(batches) / len(self) * self.num_chosen_tokens / np.maximum(tokens, 1)
        return replace(self, nll_weights=shares[batches].astype(np.float32))

    @property
    def num_tokens(self) -> int:
        return len(self.chosen_ids.values) + len(self.rejected_ids.values)

    @property
    def num_chosen_tokens(self) -> int:
        """Targets of the chosen sequences."""
        return int(self.chosen_mask.values.sum())


def tokenize_preferences(
    rows: Dataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    truncation_mode: TruncationMode = "keep_start",
    num_proc: int | None = None,
    images: ImageReader | None = None,
    learns_answers: bool = False,
) -> Preferences:
    """One pair a row and, as targets, the tokens of its completions: TRL's DPO preparation.

    Text completions end with the tokenizer's end of sequence, conversations as their template ends them. Completions
    start where the tokens of the prompt alone part from those of the prompt with either of them. Each sequence is cut
    to ``max_length`` tokens; with ``keep_start``, rows whose prompt fills it are dropped, and with ``drop`` rows with a
    longer sequence, with one line in the log. The first token of a sequence is no target. A text completion of a
    conversation is a turn of the assistant. ``images``: of a model that sees pictures, which prompts may have; a pair
    whose pictures would be cut raises ValueError. ``learns_answers``: of conversations, the answers in the prompt are
    targets of both sequences too, as in ms-swift's ORPO.

    Raises ValueError for rows that are no pairs, naming the first, or if none is left.
    """
    if truncation_mode not in get_args(TruncationMode):
        raise ValueError(f"truncation_mode is {truncation_mode!r}; known: {', '.join(get_args(TruncationMode))}")
    cut = slice(-max_length, None) if max_length and truncation_mode == "keep_end" else slice(max_length)

    def encode(row: dict[str, Any]) -> tuple[Tokens, Tokens] | None:
        pair, own = _seen(row, tokenizer, images)
        prompt_ids, *completed = _tokenized(pair, own)
        start = min(_common_prefix(prompt_ids, ids) for ids in completed)
        if max_length and truncation_mode == "keep_start" and start >= max_length:
            return None
        if max_length and truncation_mode == "drop" and max(len(ids) for ids in completed) > max_length:
            return None
        if images is not None:
            for ids in completed:
                images.check_cut(ids, ids[cut], f"max_length {max_length}")
        if learns_answers and not isinstance(pair["prompt"], str):
            sides = [_answered(pair, name, own) for name in ("chosen", "rejected")]
        else:
            begins = [start + num_empty_thoughts(ids[start:], own) for ids in completed]
            sides = [(ids, _from(begin, len(ids))) for begin, ids in zip(begins, completed, strict=True)]
        chosen, rejected = ((ids[cut], mask[cut]) for ids, mask in sides)
        return _without_first(chosen), _without_first(rejected)

    why = "longer than" if truncation_mode == "drop" else "whose prompt fills"
    return _encoded(rows, encode, num_proc, f"{why} max_length {max_length}", images)


def tokenize_comparisons(
    rows: Dataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    num_proc: int | None = None,
    images: ImageReader | None = None,
) -> Preferences:
    """One pair a row and, as the one target of each sequence, the token at which it is scored: TRL's for reward models.

    That is the last token which is no padding, where transformers' sequence classifiers look; so where the end of
    sequence is also the padding, the token before it. Pairs with a sequence of more than ``max_length`` tokens are
    dropped, with one line in the log. ``images``: of a model that sees pictures, which prompts may have.

    Raises ValueError for rows that are no pairs, naming the first, or if none is left.
    """

    def encode(row: dict[str, Any]) -> tuple[Tokens, Tokens] | None:
        pair, own = _seen(row, tokenizer, images)
        sides = [_scored(ids, tokenizer.pad_token_id) for ids in _tokenized(pair, own)[1:]]
        if max_length and max(len(ids) for ids, _ in sides) > max_length:
            return None
        return sides[0], sides[1]

    return _encoded(rows, encode, num_proc, f"longer than max_length {max_length}", images)


def _encoded(
    rows: Dataset,
    encode: Callable[[dict[str, Any]], tuple[Tokens, Tokens] | None],
    num_proc: int | None,
    why: str,
    images: ImageReader | None = None,
) -> Preferences:
    """What ``encode`` makes of each row, without those of which it makes nothing."""
    from datasets import Features, LargeList, Value

    names = ("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")
    types: dict[str, Any] = {name: LargeList(Value("bool" if name.endswith("mask") else "int64")) for name in names}
    has_margins = "margin" in rows.column_names
    types |= {"margin": Value("float32")} if has_margins else {}

    def encode_all(table: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        further = [*(["margin"] if has_margins else []), *(["row"] if images is not None else [])]
        columns: dict[str, list[Any]] = {name: [] for name in [*names, *further]}
        for position, index in enumerate(indices):
            row = {name: column[position] for name, column in table.items()}
            try:
                encoded = encode(row)
                if encoded is not None and has_margins:
                    columns["margin"].append(float(row["margin"]))
            except Exception as error:
                error.add_note(f"while tokenizing row {index} of the dataset")
                raise
            if encoded is not None:
                for name, values in zip(names, [*encoded[0], *encoded[1]], strict=True):
                    columns[name].append(values)
                if images is not None:
                    columns["row"].append(index)
        return columns

    table = rows.map(
        encode_all,
        batched=True,
        with_indices=True,
        num_proc=num_proc,
        remove_columns=rows.column_names,
        features=Features(types | ({} if images is None else {"row": Value("int64")})),
        desc="Tokenizing",
    )
    if dropped := len(rows) - len(table):
        warn_left_out(dropped, "dropped %d of %d pairs %s", dropped, len(rows), why)
    if len(table) == 0:
        raise ValueError(f"none of {len(rows)} pairs is left: all are {why}. Raise max_length.")
    columns: dict[str, Any] = {
        name: _ragged(table, name, np.bool_ if name.endswith("mask") else np.int64) for name in names
    }
    if images is not None:
        columns["images"] = [images.placed(_pair_of(rows[index]))[1] for index in table["row"]]
    return Preferences(**columns, margins=np.asarray(table["margin"], np.float32) if has_margins else None)


def with_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with the turns that begin both of its conversations as its prompt, if it has none of its own."""
    from trl import extract_prompt  # type: ignore[attr-defined]

    is_whole = all(isinstance(row.get(name), list) and row[name] for name in ("chosen", "rejected"))
    if row.get("prompt") is not None or not is_whole or row["chosen"] == row["rejected"]:
        return row
    extracted: dict[str, Any] = extract_prompt({name: row[name] for name in ("chosen", "rejected")})
    return {**row, **extracted}


def _pair_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its prompt by itself, and all of it text or all of it conversations."""
    from trl import extract_prompt  # type: ignore[attr-defined]

    row = {name: value for name, value in row.items() if value is not None}
    if "chosen" not in row or "rejected" not in row:
        raise ValueError(
            f"a row to compare has 'chosen' and 'rejected', and mostly 'prompt'; this one has {', '.join(row)}. Rename "
            "with `columns`."
        )
    pair: dict[str, Any] = row if "prompt" in row else {**row, **extract_prompt(row)}
    if isinstance(pair["prompt"], str):
        return pair
    texts = {name: pair[name] for name in ("chosen", "rejected") if isinstance(pair[name], str)}
    return pair | {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}


def _seen(row: Mapping[str, Any], tokenizer: Any, images: ImageReader | None) -> tuple[dict[str, Any], Any]:
    """The pair of a row, and the tokenizer for it: where ``images`` are read, with places for its pictures."""
    pair = _pair_of(row)
    if images is None:
        return pair, tokenizer
    shown, pictures = images.placed(pair)
    return shown, images.tokenizer(pictures)


def completed_ids(prompt: Any, completion: Any, tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt and its completion: what reward models are trained on, and are given to score.

    Texts get the tokenizer's special tokens and end with its end of sequence, if it has one. Conversations are as their
    template makes them, with ``options`` as its variables.
    """
    if isinstance(prompt, str):
        eos = tokenizer.eos_token or ""
        return list(tokenizer(prompt + completion + ("" if completion.endswith(eos) else eos))["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("the rows are conversations, but the tokenizer has no chat_template: set one, or use texts")
    messages = _messages([*prompt, *completion])
    return list(tokenizer.apply_chat_template(messages, **{**options, "return_dict": False}))


def _tokenized(pair: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompt alone, and of the prompt with the chosen and with the rejected completion."""
    prompt, options = pair["prompt"], _template_options(pair) | {"return_dict": False}
    completed = [completed_ids(prompt, pair[name], tokenizer, options) for name in ("chosen", "rejected")]
    if isinstance(prompt, str):
        return [list(tokenizer(prompt)["input_ids"]), *completed]
    return [list(tokenizer.apply_chat_template(_messages(prompt), add_generation_prompt=True, **options)), *completed]


def num_empty_thoughts(ids: Sequence[int], tokenizer: Any) -> int:
    """The tokens of the empty thoughts that ``thoughts.py`` put before an answer, which are not learned."""
    text = getattr(tokenizer, "empty_thoughts", "")
    empty = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
    return len(empty) if list(ids[: len(empty)]) == empty else 0


def _answered(pair: Mapping[str, Any], name: str, tokenizer: Any) -> Tokens:
    """The tokens of prompt and completion, of which all answers are learned."""
    scale = parsed("default+ignore_empty_think" if getattr(tokenizer, "empty_thoughts", "") else "default")
    encoder = SFTEncoder(tokenizer, None, None, False, "text", tokenizer.eos_token, scale)
    others = {key: value for key, value in pair.items() if key not in ("prompt", "chosen", "rejected")}
    ids, weights = encoder({**others, "messages": [*pair["prompt"], *pair[name]]})
    return ids, [weight > 0 for weight in weights]


def _from(start: int, length: int) -> list[bool]:
    return [position >= start for position in range(length)]


def _without_first(tokens: Tokens) -> Tokens:
    ids, mask = tokens
    return ids, [False, *mask[1:]] if mask else []


def _scored(ids: list[int], pad_token_id: int) -> Tokens:
    """The ids, and as their target the last that is no padding; the last of all if every one is."""
    place = next((k for k in reversed(range(len(ids))) if ids[k] != pad_token_id), len(ids) - 1)
    return ids, [position == place for position in range(len(ids))]
