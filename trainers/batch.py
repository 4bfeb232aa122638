"""Typed batches: what crosses a process boundary.

A batch is a table: every field is a column, and all columns have one entry per sample. Columns of equal entries are
NumPy arrays or lists; columns of token sequences are ``Ragged`` (one flat array and offsets), so that a batch of a
thousand samples travels as a handful of buffers. Batches slice, index, concatenate and know their length, which is
all that ``dispatch='slice'`` and ``collect='flatten'`` ask for. Nothing here is padded: padding happens inside a
worker, by ``padded``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import torch

    from trainers.data.images.pictures import Pictures


def on_device(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """A tensor of the host there; this process does not wait until a GPU has come so far."""
    if getattr(device, "type", device) != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Ragged:
    """Rows of unequal length: ``values`` (sum of lengths,) and ``offsets`` (rows + 1,) with offsets[0] == 0."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        self.values = values
        self.offsets = offsets

    @classmethod
    def of(cls, rows: Iterable[Any], dtype: Any) -> Ragged:
        """The rows (lists, arrays) as one ``Ragged`` of ``dtype``."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        return cls.split(np.concatenate(arrays) if arrays else np.zeros(0, dtype), lengths)

    @classmethod
    def split(cls, values: np.ndarray, lengths: Any) -> Ragged:
        """``values`` (sum of lengths,) cut into consecutive rows of ``lengths``."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(values):
            raise ValueError(f"row lengths sum to {offsets[-1]}, but there are {len(values)} values")
        return cls(values, offsets)

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) int64."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        """An int gives one row (a view); a slice, an array of ints or a mask gives a ``Ragged``."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                stop = max(start, stop)
                offsets = self.offsets[start : stop + 1]
                return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
            index = np.arange(start, stop, step)
        if isinstance(index, (int, np.integer)):
            position = int(index) + (len(self) if index < 0 else 0)
            if not 0 <= position < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            return self.values[self.offsets[position] : self.offsets[position + 1]]
        rows = positions(index, len(self))
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        shift = np.repeat(self.offsets[rows] - (ends - lengths), lengths)  # from place in the result to place here
        return Ragged.split(self.values[np.arange(len(shift)) + shift], lengths)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order."""
        return cls.split(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))

    def padded(self, fill: Any = 0, device: Any = None) -> torch.Tensor:
        """(rows, longest) tensor, rows left-aligned, the rest ``fill``."""
        import torch  # here, so that reading a configuration need not wait for it

        lengths = self.lengths
        width = int(lengths.max()) if len(lengths) else 0
        out = np.full((len(self), width), fill, self.dtype)
        out[np.arange(width)[None, :] < lengths[:, None]] = self.values
        return on_device(torch.from_numpy(out), device)

    def mask(self, device: Any = None) -> torch.Tensor:
        """(rows, longest) bool tensor: True where a row has a value."""
        import torch

        lengths = torch.from_numpy(self.lengths)
        width = int(lengths.max()) if len(lengths) else 0
        return on_device(torch.arange(width)[None, :] < lengths[:, None], device)

    def __iter__(self) -> Iterator[np.ndarray]:
        """The rows, as views."""
        return (self.values[start:stop] for start, stop in itertools.pairwise(self.offsets))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ragged)
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.dtype})"


@dataclass(eq=False)
class Batch:
    """A table whose dataclass fields are its columns; a column may be None in every part of a batch."""

    def __post_init__(self) -> None:
        lengths = {f.name: len(c) for f in dataclasses.fields(self) if (c := getattr(self, f.name)) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a {type(self).__name__} must have one length, got {lengths}")

    def columns(self) -> dict[str, Any]:
        """The columns that are set, by name."""
        return {f.name: c for f in dataclasses.fields(self) if (c := getattr(self, f.name)) is not None}

    def __len__(self) -> int:
        return next((len(column) for column in self.columns().values()), 0)

    def __getitem__(self, index: slice | np.ndarray | Sequence[int]) -> Self:
        """The samples of a slice, of an array of indices or of a mask, as a batch of the same type."""
        if not isinstance(index, slice):
            index = positions(index, len(self))
        return dataclasses.replace(self, **{name: _take(column, index) for name, column in self.columns().items()})

    def __eq__(self, other: object) -> bool:
        """Equal types and equal columns, dtypes included."""
        if not isinstance(other, Batch) or type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.columns(), other.columns()
        return mine.keys() == theirs.keys() and all(_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The samples of all parts, in order. A column is None only if it is None in every part that has samples."""
        filled = [part for part in parts if len(part)] or list(parts[:1])
        columns: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(part, field.name) for part in filled]
            if any(value is None for value in values):
                if not all(value is None for value in values):
                    raise ValueError(f"column {field.name!r} of {cls.__name__} is set in some parts and None in others")
                columns[field.name] = None
            else:
                columns[field.name] = _join(values)
        return cls(**columns)


def positions(index: Any, length: int) -> np.ndarray:
    """The places, from 0, that an array of ints (negative ones count from the end) or a mask of bools means.

    Raises:
        IndexError: an index beyond ``length``, or a mask of another length.
    """
    index = np.asarray(index)
    places: np.ndarray = np.arange(length)[index if index.size else np.zeros(0, np.int64)]
    return places


def _take(column: Any, index: slice | np.ndarray) -> Any:
    if isinstance(column, list) and not isinstance(index, slice):
        return [column[i] for i in index]
    return column[index]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Ragged):
        return Ragged.concat(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return [item for value in values for item in value]


@dataclass(eq=False)
class Prompts(Batch):
    """What a rollout engine is asked to complete."""

    prompt_ids: Ragged  # int64 token ids
    # What reward functions are told of, where they run beside the engine; else None
    rows: list[Any] | None = None  # of the dataset
    groups: np.ndarray | None = None  # int64: prompts of one number are rewarded together
    numbers: np.ndarray | None = None  # int64: with the seed, what a prompt's draws depend on; None: its place
    images: list[Pictures] | None = None  # of each prompt, in the order of their tokens; None: no prompt has any


@dataclass(eq=False)
class Tasks(Batch):
    """What an environment makes episodes of."""

    rows: list[Any]  # of the dataset
    groups: np.ndarray  # as of ``Prompts``
    numbers: np.ndarray | None = None  # as of ``Prompts``


@dataclass(eq=False)
class Rollouts(Batch):
    """The completions of a rollout engine, one row per completion."""

    prompt_ids: Ragged  # int64
    completion_ids: Ragged  # int64; ends with the stop token unless truncated
    rollout_logps: Ragged  # float32, one a completion token: log-probability under softmax(logits / temperature)
    truncated: np.ndarray  # bool: the length limit came before a stop token
    policy_versions: Ragged | None = (
        None  # int64, one a completion token: optimizer steps that its policy had made; -1: unknown
    )
    kv_cache_usage: np.ndarray | None = None  # float32: the most of the engine's KV cache that was used meanwhile
    # Where reward functions ran beside the engine
    function_rewards: np.ndarray | None = None  # float32 (B, functions); NaN where one had nothing to say
    reward_seconds: np.ndarray | None = None  # float32: a completion's share of the time that they took
    # What episodes with an environment have beside that
    is_sampled: Ragged | None = None  # bool, one a completion token: False on what the environment wrote; None: nothing
    transcripts: list[Any] | None = None  # the completion as messages, or as text where the prompt is
    environment_rewards: np.ndarray | None = None  # float32; NaN where it gave none
    num_turns: np.ndarray | None = None  # int64
    num_tool_calls: np.ndarray | None = None  # int64
    num_tool_failures: np.ndarray | None = None  # int64
    rollout_infos: list[Any] | None = None  # what a scheduler tells reward functions of; a dict a completion
    images: list[Pictures] | None = None  # of each prompt

    def samples(self, mask_truncated: bool = False) -> Samples:
        """Prompt and completion as one sequence each. Targets are the tokens that the model itself wrote.

        ``mask_truncated``: the loss counts no token of truncated completions.
        """
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        lengths_B = self.completion_ids.lengths
        is_sampled = self.is_sampled
        if is_sampled is None:
            is_sampled = Ragged.split(np.ones(lengths_B.sum(), bool), lengths_B)
        num_sampled_B = np.array([int(row.sum()) for row in is_sampled], np.int64)
        kept_B = ~self.truncated if mask_truncated else np.ones(len(self), bool)
        masks = zip(self.prompt_ids.lengths, is_sampled, strict=True)
        return Samples(
            input_ids=Ragged.of([np.concatenate(pair) for pair in pairs], np.int64),
            target_mask=Ragged.of([np.append(np.zeros(length, bool), mask) for length, mask in masks], bool),
            loss_mask=Ragged.split(np.repeat(kept_B, num_sampled_B), num_sampled_B),
            rollout_logps=Ragged.split(self.rollout_logps.values[is_sampled.values], num_sampled_B),
            images=self.images,
        )


@dataclass(eq=False)
class Sequences(Batch):
    """Token sequences for a backend, which returns one log-probability a target token.

    A *target* is a token whose log-probability is asked for, given the tokens before it in its document; the first
    token of a document cannot be one. A row may pack several documents (``segment_lengths``); each sees only itself.
    """

    input_ids: Ragged  # int64
    target_mask: Ragged  # bool, lengths of input_ids: True on targets
    segment_lengths: Ragged | None = None  # int64: lengths of the documents packed into each row; None: one a row
    row_ids: np.ndarray | None = None  # int64: places in the data, for messages
    weights: Ragged | None = None  # float32, one a target: how much it counts in the loss of SFT; None: 1
    # Of each row, in the order of their tokens; a packed row has those of each document; None: no row has any
    images: list[Pictures] | None = None

    def as_sequences(self) -> Sequences:
        """Itself: what a backend asks of every batch that it learns from."""
        return self

    def row_lengths(self) -> np.ndarray:
        """(rows,) int64: the tokens of each row."""
        return self.input_ids.lengths

    def item_costs(self) -> np.ndarray:
        """What ``RayHelper.balanced()`` shares out evenly: tokens."""
        return self.row_lengths()


@dataclass(eq=False)
class Samples(Sequences):
    """Completions to learn from. Per-token columns have one entry per target token (``target_mask``)."""

    advantages: np.ndarray | Ragged | None = None  # float32, one a sequence or one a target
    loss_mask: Ragged | None = None  # bool: True on targets that the loss counts; None: all of them
    old_logps: Ragged | None = None  # float32: the policy that generated (None: the current one)
    ref_logps: Ragged | None = None  # float32: the reference policy
    rollout_logps: Ragged | None = None  # float32: as the rollout engine reported them
    teacher_logps: Ragged | None = None  # float32: the teacher's
    entropies: Ragged | None = None  # float32: of the policy that generated
    policy_mask: Ragged | None = None  # bool: True on targets with a policy gradient; None: all the loss counts
    selected: Ragged | None = None  # bool: True on targets that loss types clip_cov and kl_cov treat otherwise

    @property
    def num_loss_tokens(self) -> int:
        """Targets that the loss counts."""
        return int((self.target_mask if self.loss_mask is None else self.loss_mask).values.sum())


@dataclass(eq=False)
class TopLogps(Batch):
    """A model's K likeliest tokens at each target, the likeliest first."""

    ids: Ragged  # values (N, K) int64
    logps: Ragged  # values (N, K) float32, over the whole vocabulary at its temperature
