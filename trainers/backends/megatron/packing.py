"""A micro-batch as one row of documents, and the part of its tokens that this worker has.

With context parallelism every document is cut into 2 x size chunks of equal length, padded behind its end, of which
worker r has the r-th from the start and the r-th from the end: so all have as much attention to compute. Padding that
makes the row divisible is a document of its own at the end. No token looks at what follows it, so padding behind a
document reaches no target.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainers.backends.scores.inputs import ReadAt, model_inputs
from trainers.batch import Sequences, on_device

if TYPE_CHECKING:
    from trainers.backends.megatron.vision.tower import Tower

CPU = torch.device("cpu")


class Documents(NamedTuple):
    """Which keys the queries of this worker look at: pieces of queries, each with the keys up to its own end.

    Attention is causal and aligned at the ends: the last query of a piece looks at all of its keys.
    """

    query_starts: torch.Tensor  # (pieces + 1,) int32, among this worker's tokens
    key_starts: torch.Tensor  # (pieces + 1,) int32, among the keys that ``keys`` picks
    longest_query: int
    longest_key: int
    keys: torch.Tensor | None  # of all workers' tokens, one worker after the other; None: there is one worker
    row: Row


class Row(NamedTuple):
    """The whole row, of T tokens, for layers that go through each document from its start."""

    positions: torch.Tensor  # (T,) within documents
    starts: torch.Tensor  # (documents + 1,) int64
    lengths: tuple[int, ...]  # of the documents
    order: torch.Tensor | None  # (T,) where each token lies once all workers' are gathered; None: there is one worker
    own: torch.Tensor | None  # (S,) the tokens of this worker


class Pictures(NamedTuple):
    """The pictures and videos of all documents, and V tokens of this worker that stand for parts of them."""

    pixels: dict[str, torch.Tensor]  # on the CPU, by the names of the tower's arguments
    places_V: torch.Tensor  # among the S
    chosen_V: torch.Tensor  # which feature each of them is, of all pictures and then of all videos


class Packed(NamedTuple):
    """S tokens of this worker; N targets of the micro-batch, M of which are predicted here."""

    input_ids_S: torch.Tensor
    positions_S: torch.Tensor  # within documents; (3, S) of time, height and width where there are pictures
    documents: Documents
    places_M: torch.Tensor  # where the numbers of each target are read off, among the S
    target_ids_M: torch.Tensor
    chosen_M: torch.Tensor  # which of the N they are
    num_targets: int
    document_S: torch.Tensor  # on the CPU: which of the D documents each token is of; -1: padding
    lengths_D: torch.Tensor  # on the CPU: tokens of each, on all workers, without padding
    pictures: Pictures | None = None  # where a worker has the vision tower, and a document has a picture


def pack(
    micro: Sequences,
    device: torch.device,
    *,
    read_at: ReadAt = "predicting",
    context: int = 0,
    context_size: int = 1,
    divisor: int = 1,
    at_least: int = 0,
    tower: Tower | None = None,
) -> Packed:
    """The tokens of ``micro`` for worker ``context`` of ``context_size``; their number is a multiple of ``divisor``.

    ``at_least``: tokens that each worker has at least, padding among them. ``tower``: of a model that sees pictures.

    Raises:
        ValueError: as ``model_inputs``.
    """
    vision = None if tower is None else tower.vision
    given = model_inputs(micro, CPU, padding_free=True, read_at=read_at, vision=vision)
    ids, starts = given.input_ids_BT.flatten(), [0, given.input_ids_BT.numel()]
    if given.document_starts is not None:
        starts = given.document_starts.tolist()
    chunks = 2 * context_size if context_size > 1 else 1
    lengths = [end - start for start, end in pairwise(starts)]
    padded = [-(-length // chunks) * chunks for length in lengths]
    unit = math.lcm(chunks, divisor * context_size)
    wanted = -(-max(sum(padded), at_least * context_size) // unit) * unit
    if missing := wanted - sum(padded):
        lengths.append(0)
        padded.append(missing)

    total = sum(padded)
    ids_T = torch.zeros(total, dtype=torch.long)
    positions_T = torch.cat([torch.arange(length) for length in padded])
    moved = torch.zeros(len(ids), dtype=torch.long)  # where each token of the micro-batch lies now
    begin = 0
    for start, length, width in zip(starts, lengths, padded, strict=False):
        moved[start : start + length] = torch.arange(begin, begin + length)
        begin += width
    ids_T[moved] = ids
    lengths_D = torch.tensor(lengths)
    document_T = torch.full((total,), -1)
    if given.document_starts is not None:  # else there is no token at all, and one of padding
        document_T[moved] = torch.arange(len(lengths)).repeat_interleave(lengths_D)
    own_T = [_own_tokens(padded, worker, context_size) for worker in range(context_size)]
    mine_S = own_T[context]
    where = torch.full((total,), -1)
    where[mine_S] = torch.arange(len(mine_S))
    places_N = where[moved[given.places_N]]
    chosen_M = (places_N >= 0).nonzero().flatten()
    turned_by_T, pictures = positions_T, None
    if tower is not None and given.seen is not None:
        if tower.has_axes:
            turned_by_T = positions_T.repeat(3, 1)
            turned_by_T[:, moved] = tower.positions(given).flatten(1)
        if tower.is_here:
            feature_T = torch.full((total,), -1)
            feature_T[moved] = tower.features_at(ids, given.seen.pixels)
            feature_S = feature_T[mine_S]
            places_V = (feature_S >= 0).nonzero().flatten()
            own = (places_V, feature_S[places_V])
            pictures = Pictures(given.seen.pixels, *(on_device(one, device) for one in own))
    return Packed(
        input_ids_S=on_device(ids_T[mine_S], device),
        positions_S=on_device(turned_by_T[..., mine_S], device),
        documents=_documents(padded, positions_T, own_T, context, device),
        places_M=on_device(places_N[chosen_M], device),
        target_ids_M=on_device(given.target_ids_N[chosen_M], device),
        chosen_M=on_device(chosen_M, device),
        num_targets=len(given.places_N),
        document_S=document_T[mine_S],
        lengths_D=lengths_D,
        pictures=pictures,
    )


def _own_tokens(lengths: list[int], worker: int, num_workers: int) -> torch.Tensor:
    """The tokens of the row that a worker has, in its order."""
    if num_workers == 1:
        return torch.arange(sum(lengths))
    own, begin = [], 0
    for length in lengths:
        width = length // (2 * num_workers)
        for chunk in (worker, 2 * num_workers - 1 - worker):
            own.append(torch.arange(begin + chunk * width, begin + (chunk + 1) * width))
        begin += length
    return torch.cat(own)


def _documents(
    lengths: list[int], positions_T: torch.Tensor, own_T: list[torch.Tensor], worker: int, device: torch.device
) -> Documents:
    num_workers = len(own_T)
    given = (on_device(positions_T, device), _starts(lengths, device, torch.int64), tuple(lengths))
    if num_workers == 1:
        row, starts, longest = Row(*given, None, None), _starts(lengths, device), max(lengths)
        return Documents(starts, starts, longest, longest, None, row)
    queries, prefixes, keys, begin = [], [], [], 0
    for length in lengths:
        width = length // (2 * num_workers)
        for chunk in (worker, 2 * num_workers - 1 - worker):
            queries.append(width)
            prefixes.append((chunk + 1) * width)
            keys.append(torch.arange(begin, begin + prefixes[-1]))
        begin += length
    gathered = torch.empty(begin, dtype=torch.long)  # where each token of the row lies once all workers' are gathered
    gathered[torch.cat(own_T)] = torch.arange(begin)
    return Documents(
        _starts(queries, device),
        _starts(prefixes, device),
        max(queries),
        max(prefixes),
        on_device(gathered[torch.cat(keys)], device),
        Row(*given, on_device(gathered, device), on_device(own_T[worker], device)),
    )


def _starts(lengths: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return on_device(torch.tensor([0, *lengths]).cumsum(0).to(dtype), device)
