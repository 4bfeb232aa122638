"""From ragged sequences to what a model is called with: micro-batches, padded or padding-free.

There is no attention mask: no token looks at what follows it, so padding on the right reaches no target, and attention
keeps its fastest kernel. Rows that hold several documents have positions that start anew with every document, by which
transformers keeps the documents apart (or fsdp/packed_attention.py, by where they begin); the padding behind them is a
document of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from trainers.batch import Ragged, Sequences, on_device

ReadAt = Literal["predicting", "target"]


class Sees(Protocol):
    """What a vision model asks for beside tokens (``fsdp/vision/pixels.py``)."""

    def seen(self, images: Any) -> dict[str, torch.Tensor]: ...

    def kinds(self, ids: np.ndarray) -> np.ndarray: ...


class Seen(NamedTuple):
    """The pictures and videos of a micro-batch."""

    pixels: dict[str, torch.Tensor]  # by the names of the model's arguments
    kind_BT: torch.Tensor  # int64; 1 on tokens that stand for a part of a picture, 2 of a video, else 0


@dataclass
class Dummy:
    """The pixels of a small picture, and how often each pass runs the tower: for pictures, and apart for videos."""

    pixels: dict[str, torch.Tensor]
    num_towers: int = 1


class Part(NamedTuple):
    """What belongs to one of the ranks that share rows (``fsdp/sequence_attention.py``)."""

    targets_M: torch.Tensor  # its own targets, by their places among the N of all ranks
    num_targets: int  # N


class Inputs(NamedTuple):
    """One micro-batch on the device; without any token it is one token of padding and no target.

    With a ``part`` they are one rank's: its tokens of each row, and its targets. The documents are of whole rows.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None  # None: 0, 1, 2, ... in every row
    places_N: torch.Tensor  # in the flattened (B, T): where the numbers of each target are read off
    target_ids_N: torch.Tensor
    document_starts: torch.Tensor | None = None  # (documents + 1,) int32, in the flattened (B, T), which ends the last
    longest_document: int = 0  # tokens; 0: where every row is one document
    part: Part | None = None
    seen: Seen | None = None  # None: no row has a picture
    sees_BTT: torch.Tensor | None = None  # bool, where a query sees a key; None: all before it in its document


def micro_batches(
    row_lengths: np.ndarray, micro_batch_size: int, *, token_budget: int | None = None, padding_free: bool = False
) -> list[np.ndarray]:
    """Indices of the rows of each micro-batch: ``micro_batch_size`` consecutive rows, or what a budget of tokens holds.

    A budget counts padding unless ``padding_free``. Rows go in from the longest to the shortest, each into the first
    micro-batch with room (first fit decreasing); a row above the budget is alone. No rows: no micro-batches.
    """
    num_rows = len(row_lengths)
    if token_budget is None:
        return [
            np.arange(start, min(start + micro_batch_size, num_rows)) for start in range(0, num_rows, micro_batch_size)
        ]
    bins: list[list[int]] = []
    used: list[int] = []
    for row in np.argsort(-row_lengths, kind="stable").tolist():
        length = int(row_lengths[row])
        # padded, a micro-batch is as wide as its first row, which is its longest
        costs = (used[k] + (length if padding_free else int(row_lengths[bins[k][0]])) for k in range(len(bins)))
        k = next((k for k, cost in enumerate(costs) if cost <= token_budget), len(bins))
        if k == len(bins):
            bins.append([])
            used.append(0)
        bins[k].append(row)
        used[k] += length if padding_free else int(row_lengths[bins[k][0]])
    return [np.sort(rows) for rows in bins]


def model_inputs(
    micro: Sequences,
    device: torch.device,
    *,
    padding_free: bool = False,
    read_at: ReadAt = "predicting",
    sharing: tuple[int, int] | None = None,
    vision: Sees | None = None,
) -> Inputs:
    """What a model is called with. ``padding_free``: all rows one after the other, as documents of one row.

    ``read_at``: the numbers of a target are read off at the token before it, which predicts it, or at the target.
    ``sharing``: the index of this rank and the number of ranks that share the rows, padded to a multiple of it.
    ``vision``: of a model that sees pictures.

    Raises:
        ValueError: a predicted target that is the first token of its document, or documents that do not add up to
            their row.
    """
    if not len(micro.input_ids.values):
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        one = torch.zeros(1, 1, dtype=torch.long, device=device)
        if sharing is None:
            return Inputs(one, None, nothing, nothing)
        return Inputs(one, one + sharing[0], nothing, nothing, part=Part(nothing, 0))
    images = micro.images
    if padding_free:
        micro = _in_one_row(micro)
    multiple = 1 if sharing is None else sharing[1]
    input_ids_BT, is_target_BT = (_padded(column, multiple) for column in (micro.input_ids, micro.target_mask))
    position_ids_BT = None if micro.segment_lengths is None else _positions(micro, input_ids_BT.shape[1])
    targets_N = is_target_BT.flatten().nonzero().flatten()
    places_N = targets_N
    if read_at == "predicting":
        places_N = targets_N - 1
        is_first_BT = torch.zeros_like(input_ids_BT, dtype=torch.bool)
        is_first_BT[:, 0] = True
        if position_ids_BT is not None:
            is_first_BT = position_ids_BT == 0
        wrong = (is_target_BT & is_first_BT).any(1).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"the first token of a document cannot be a target (row {wrong[0]} of a "
                f"micro-batch of {len(micro)}). Set its target_mask to False"
            )
    starts, longest = None, 0
    if position_ids_BT is not None:
        begins = (position_ids_BT.flatten() == 0).nonzero().flatten()
        starts = torch.cat([begins, begins.new_tensor([position_ids_BT.numel()])]).to(torch.int32)
        longest = int(starts.diff().max())
    tensors = (input_ids_BT, position_ids_BT, places_N, input_ids_BT.flatten()[targets_N], starts)
    inputs = Inputs(*tensors, longest)
    if vision is not None and images is not None and any(images):
        inputs = inputs._replace(seen=seen_by(vision, images, input_ids_BT))
    return _on_device(inputs if sharing is None else _part_of(inputs, *sharing), device)


def seen_by(vision: Sees, images: Any, input_ids_BT: torch.Tensor) -> Seen:
    """The pictures of rows, and which of their tokens stand for them, on the device of the tokens."""
    kind_BT = torch.from_numpy(vision.kinds(input_ids_BT.cpu().numpy())).long()
    pixels = {name: on_device(values, input_ids_BT.device) for name, values in vision.seen(images).items()}
    return Seen(pixels, kind_BT.to(input_ids_BT.device))


def _part_of(inputs: Inputs, index: int, size: int) -> Inputs:
    """What the ``index``-th of ``size`` ranks computes: its part of each row, and the targets read off in it."""
    rows, width = inputs.input_ids_BT.shape
    length = width // size
    own = slice(index * length, (index + 1) * length)
    positions_BT = inputs.position_ids_BT
    if positions_BT is None:
        positions_BT = torch.arange(width).expand(rows, width)
    row_N, column_N = inputs.places_N // width, inputs.places_N % width
    targets_M = (column_N // length == index).nonzero().flatten()
    return inputs._replace(
        input_ids_BT=inputs.input_ids_BT[:, own].contiguous(),
        position_ids_BT=positions_BT[:, own].contiguous(),
        places_N=(row_N * length + column_N - own.start)[targets_M],
        target_ids_N=inputs.target_ids_N[targets_M],
        part=Part(targets_M, len(inputs.places_N)),
    )


def _on_device(inputs: Inputs, device: torch.device) -> Inputs:
    part = inputs.part
    moved: dict[str, Any] = {
        name: on_device(value, device) for name, value in inputs._asdict().items() if isinstance(value, torch.Tensor)
    }
    if part is not None:
        moved["part"] = part._replace(targets_M=on_device(part.targets_M, device))
    if inputs.seen is not None:
        pixels = {name: on_device(values, device) for name, values in inputs.seen.pixels.items()}
        moved["seen"] = Seen(pixels, on_device(inputs.seen.kind_BT, device))
    return inputs._replace(**moved)


def _padded(column: Ragged, multiple: int) -> torch.Tensor:
    """(B, T) the column, with zeros up to a multiple of so many."""
    column_BT = column.padded(0)
    return torch.nn.functional.pad(column_BT, (0, -column_BT.shape[1] % multiple))


def num_targets(sequences: Sequences) -> np.ndarray:
    """(B,) target tokens of each row."""
    ends = np.concatenate([[0], np.cumsum(sequences.target_mask.values)])
    counts: np.ndarray = ends[sequences.target_mask.offsets[1:]] - ends[sequences.target_mask.offsets[:-1]]
    return counts


def targets_of_rows(batch: Any) -> np.ndarray:
    """(rows,) target tokens of each row of a batch, of whose rows each may be several sequences."""
    if isinstance(batch, Sequences):
        return num_targets(batch)
    counts: np.ndarray = batch.num_targets()
    return counts


def in_order(parts: list[Any], rows: list[np.ndarray]) -> Any:
    """The rows of all micro-batches, ``Ragged`` parts whose rows were ``rows``, in the caller's order."""
    joined = Ragged.concat(parts)
    return joined[np.argsort(np.concatenate(rows), kind="stable")]


def _in_one_row(micro: Sequences) -> Sequences:
    lengths = micro.input_ids.lengths if micro.segment_lengths is None else micro.segment_lengths.values
    total = [len(micro.input_ids.values)]
    return Sequences(
        input_ids=Ragged.split(micro.input_ids.values, total),
        target_mask=Ragged.split(micro.target_mask.values, total),
        segment_lengths=Ragged.split(lengths[lengths > 0], [int((lengths > 0).sum())]),
    )


def _positions(micro: Sequences, width: int) -> torch.Tensor:
    """(B, width) positions within documents."""
    assert micro.segment_lengths is not None
    rows = []
    for row, (lengths, total) in enumerate(zip(micro.segment_lengths, micro.input_ids.lengths, strict=True)):
        if lengths.sum() != total:
            raise ValueError(
                f"segment_lengths of row {row} of a micro-batch add up to {lengths.sum()}; the row has {total} tokens"
            )
        lengths = np.append(lengths, width - total)
        rows.append(np.arange(width) - np.repeat(np.cumsum(lengths) - lengths, lengths))
    return torch.from_numpy(np.stack(rows))
