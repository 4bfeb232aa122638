"""A text and those that belong to it, as typed batches: rows of embedding models and rerankers.

    {"messages": [...], "positive_messages": [[...]], "negative_messages": [[...], ...], "label": 0.8}    ms-swift
    {"query": q, "positive": p, "negative": [n, ...]}                                                     MTEB
    {"anchor": q, "positive": p, "negative": n, "negative_2": n}, {"sentence1": a, "sentence2": b, "score": 0.8}

The last line is sentence-transformers'. Texts become turns of the user. Pictures of a conversation stand in ``images``,
those of the others in ``positive_images`` and ``negative_images``, a list each. Everything here runs on the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.batch import Batch, Ragged, Sequences
from trainers.data.broken_rows import Mistake, in_column, warn_left_out, without_broken
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import _ragged

if TYPE_CHECKING:
    from datasets import Dataset

ANCHORS, POSITIVES = ("messages", "anchor", "query", "sentence1"), ("positive_messages", "positive", "sentence2")
NEGATIVES, LABELS = ("negative_messages", "negative"), ("label", "score")
PICTURES = ("images", "positive_images", "negative_images")
MANY = tuple(f"negative_{number}" for number in range(1, 33))
COLUMNS = (*ANCHORS, *POSITIVES, *NEGATIVES, *MANY, *LABELS, *PICTURES)

Messages = list[dict[str, Any]]
Encoded = list[tuple[list[int], Pictures]]  # of the sequences of a row: their ids and pictures


@dataclass(eq=False)
class Groups(Batch):
    """Rows of several sequences, so that no cut of a batch tears one apart. Each one's last token is its target."""

    input_ids: Ragged  # int64: the ids of all sequences of a row, one after the other
    lengths: Ragged  # int64: tokens of each sequence
    labels: np.ndarray | None = None  # float32, one a row
    num_positives: np.ndarray | None = None  # int64: sequences of a row that are right, the first ones
    row_ids: np.ndarray | None = None  # int64: places in the data, for messages
    no_ids: np.ndarray | None = None  # int64, one a row: of a question, the token that says no; its targets say yes
    gradients: Ragged | None = None  # float32 (sequences, H): of the loss, by what the model gives each sequence
    images: list[list[Pictures]] | None = None  # of each sequence; None: no row has any

    def as_sequences(self) -> Sequences:
        """All sequences of the first row, then those of the second, and so on."""
        lengths_S = self.lengths.values
        is_last = np.zeros(len(self.input_ids.values), bool)
        is_last[np.cumsum(lengths_S) - 1] = True
        return Sequences(
            Ragged.split(self.input_ids.values, lengths_S),
            Ragged.split(is_last, lengths_S),
            images=None if self.images is None else [one for row in self.images for one in row],
        )

    def num_targets(self) -> np.ndarray:
        """(rows,) int64: sequences of each row, of which each has one target."""
        return self.lengths.lengths

    def row_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of each row, its sequences padded to the longest."""
        longest = np.array([row.max(initial=0) for row in self.lengths], np.int64)
        tokens: np.ndarray = longest * self.lengths.lengths
        return tokens

    def unpadded_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of all sequences of each row."""
        return self.input_ids.lengths

    def item_costs(self) -> np.ndarray:
        """What ``RayHelper.balanced()`` shares out evenly: tokens."""
        return self.row_lengths()

    def chosen(self, rows: np.ndarray, members: list[np.ndarray]) -> Groups:
        """New rows: of ``rows[k]`` the sequences ``members[k]``, the first of which is right."""
        ids, lengths, images = [], [], []
        for row, places in zip(rows.tolist(), members, strict=True):
            parts = Ragged.split(self.input_ids[row], self.lengths[row])
            ids.append(parts[places].values)
            lengths.append(self.lengths[row][places])
            if self.images is not None:
                images.append([self.images[row][place] for place in places.tolist()])
        return Groups(
            Ragged.of(ids, np.int64),
            Ragged.of(lengths, np.int64),
            labels=None if self.labels is None else self.labels[rows],
            num_positives=np.ones(len(rows), np.int64),
            row_ids=None if self.row_ids is None else self.row_ids[rows],
            no_ids=None if self.no_ids is None else self.no_ids[rows],
            images=images if self.images is not None else None,
        )


@dataclass(frozen=True)
class Conversation:
    """Messages, and the pictures that have places in them."""

    messages: Messages
    images: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Members:
    """The conversations of a row."""

    anchor: Conversation
    positives: list[Conversation]
    negatives: list[Conversation]
    label: float | None


def members_of(row: Mapping[str, Any]) -> Members:
    """The conversations of a row without mistakes."""
    negatives = _conversations(_first(row, NEGATIVES), row.get("negative_images"))
    negatives += [one for name in MANY if row.get(name) for one in _conversations(row[name], None)]
    label = _first(row, LABELS)
    return Members(
        _conversations(_first(row, ANCHORS), [row.get("images") or []])[0],
        _conversations(_first(row, POSITIVES), row.get("positive_images")),
        negatives,
        None if label is None else float(label),
    )


def group_mistake(row: Mapping[str, Any], *, images: ImageReader | None = None) -> Mistake | None:
    """Of a row with a text, those that belong to it and those that do not; ``images``: of a model that sees."""
    for names, what in ((ANCHORS, "anchor"), (POSITIVES, "positive")):
        name = next((name for name in names if row.get(name) is not None), None)
        if name is None:
            return names[0], f"no {what}: a row has one of {', '.join(names)}"
    label = _first(row, LABELS)
    if label is not None and not (isinstance(label, (int, float)) and math.isfinite(label)):
        return "label", f"{str(label)[:40]!r} is not a number"
    if images is None and (name := next((name for name in PICTURES if _any(row.get(name))), None)):
        return name, "has pictures, which this model cannot read"
    try:
        members = members_of(row)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        return "messages", f"cannot be read: {error}"
    for what, conversations in (
        ("messages", [members.anchor]),
        ("positive_messages", members.positives),
        ("negative_messages", members.negatives),
    ):
        for one in conversations:
            seen = () if images is None else ("image", "image_url")
            if mistake := in_column({what: one.messages}, what, text=False, seen=seen):
                return mistake
            if images is not None and (found := images.mistake({"messages": one.messages, "images": one.images})):
                return what, found[1]
    return None if members.positives else ("positive_messages", "no positive")


def tokenize_groups(
    rows: Dataset,
    encode: Callable[[Members], Encoded],
    *,
    max_length: int | None,
    drops: bool,
    num_proc: int | None = None,
    has_images: bool = False,
) -> Groups:
    """What ``encode`` makes of each row: all its sequences. ``has_images``: of a model that sees pictures.

    ``drops``: rows with a sequence of more than ``max_length`` tokens are left out, with one line in the log.

    Raises ValueError for a row that cannot be written like that, or if no row is left.
    """
    from datasets import Features, LargeList, Value

    longest = max_length if drops else None
    names = ("input_ids", "lengths", "label", "num_positives", "row")

    def encode_all(table: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in names}
        for position, index in enumerate(indices):
            members = members_of({name: column[position] for name, column in table.items()})
            try:
                sequences = [ids for ids, _ in encode(members)]
                if not all(sequences):
                    raise ValueError("a text has no token")
            except Exception as error:
                error.add_note(f"while tokenizing row {index} of the dataset")
                raise
            if longest is None or max(map(len, sequences)) <= longest:
                label = math.nan if members.label is None else members.label
                lengths = [len(ids) for ids in sequences]
                values = ([token for ids in sequences for token in ids], lengths, label, len(members.positives), index)
                for name, value in zip(names, values, strict=True):
                    found[name].append(value)
        return found

    numbers = LargeList(Value("int64"))
    types: dict[str, Any] = {"input_ids": numbers, "lengths": numbers, "label": Value("float64")}
    types |= {"num_positives": Value("int64"), "row": Value("int64")}
    options: dict[str, Any] = {"batched": True, "with_indices": True, "num_proc": num_proc, "desc": "Tokenizing"}
    table = rows.map(encode_all, remove_columns=rows.column_names, features=Features(types), **options)
    if dropped := len(rows) - len(table):
        message = "dropped %d of %d rows with a text of more than max_length %s tokens"
        warn_left_out(dropped, message, dropped, len(rows), max_length)
    if len(table) == 0:
        raise ValueError(
            f"none of {len(rows)} rows is left: each has a text of more than max_length {max_length} tokens"
        )
    images = None
    if has_images:
        images = [[pictures for _, pictures in encode(members_of(rows[index]))] for index in table["row"]]
    labels = np.asarray(table["label"], np.float32)
    return Groups(
        _ragged(table, "input_ids", np.int64),
        _ragged(table, "lengths", np.int64),
        labels=None if np.isnan(labels).all() else labels,
        num_positives=np.asarray(table["num_positives"], np.int64),
        images=images,
    )


def read_groups(
    rows: Dataset,
    encode: Callable[[Members], Encoded],
    images: ImageReader | None,
    *,
    skip: bool,
    max_length: int | None,
    drops: bool,
    num_proc: int | None,
) -> Groups:
    """``tokenize_groups`` of the rows that are not broken; ``images``: reads the pictures of a model that sees.

    Raises ConfigError for broken rows, unless ``skip``, and ValueError as ``tokenize_groups`` does.
    """
    rows = without_broken(rows, partial(group_mistake, images=images), *COLUMNS, skip=skip)
    sees = images is not None
    return tokenize_groups(rows, encode, max_length=max_length, drops=drops, num_proc=num_proc, has_images=sees)


def _conversations(value: Any, images: Any) -> list[Conversation]:
    """A text, messages, or a list of these; ``images``: a list of pictures for each."""
    if value is None:
        return []
    if isinstance(value, str) or (value and isinstance(value[0], Mapping)):
        value = [value]
    told = [[{"role": "user", "content": one}] if isinstance(one, str) else list(one) for one in value]
    of_each = list(images or [])
    of_each += [[]] * (len(told) - len(of_each))
    if len(of_each) > len(told):
        raise ValueError(f"{len(of_each)} lists of pictures for {len(told)} conversations")
    return [Conversation(messages, list(own or [])) for messages, own in zip(told, of_each, strict=True)]


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _any(value: Any) -> bool:
    return any(map(_any, value)) if isinstance(value, (list, tuple)) else value is not None
