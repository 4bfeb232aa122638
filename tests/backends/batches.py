"""Batches, losses and the plain loops that the backend is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from trainers.batch import Ragged, Samples, Sequences
from trainers.metrics import Metrics

LENGTHS = (5, 12, 3, 9, 17, 4, 8, 6)  # of the eight documents most tests use


def samples_of(lengths: Iterable[int] = LENGTHS, seed: int = 0) -> Samples:
    """Random documents; targets are two thirds of the tokens behind the first, and the last; advantages of any sign."""
    random = np.random.default_rng(seed)
    ids = [random.integers(4, 260, length) for length in lengths]
    masks = [random.random(len(row)) < 2 / 3 for row in ids]
    for mask in masks:
        mask[0], mask[-1] = False, True
    return Samples(
        input_ids=Ragged.of(ids, np.int64),
        target_mask=Ragged.of(masks, bool),
        advantages=random.normal(size=len(ids)).astype(np.float32),
    )


def packed(documents: Sequences, rows: Sequence[Sequence[int]]) -> Sequences:
    """One row for every list of documents, without advantages."""

    def joined(column: Ragged) -> Ragged:
        return Ragged.of([np.concatenate([column[i] for i in row]) for row in rows], column.dtype)

    return Sequences(
        input_ids=joined(documents.input_ids),
        target_mask=joined(documents.target_mask),
        segment_lengths=Ragged.of([[len(documents.input_ids[i]) for i in row] for row in rows], np.int64),
    )


def weighted_loss(
    normaliser: float,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Samples,
    metrics: Metrics,
) -> torch.Tensor:
    """-sum(advantage x logp) / normaliser: every sequence pulls with a strength of its own."""
    assert micro.advantages is not None
    metrics.mean("entropy", float(entropy_BT[mask_BT].sum()), int(mask_BT.sum()))
    advantages_B1 = torch.from_numpy(micro.advantages)[:, None].to(logps_BT.device)
    return -(advantages_B1 * logps_BT)[mask_BT].sum() / normaliser


def mean_loss(
    normaliser: float,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Sequences,
    metrics: Metrics,
) -> torch.Tensor:
    """-sum(logp) / normaliser."""
    return -logps_BT[mask_BT].sum() / normaliser


def plain_scores(model: Any, sequences: Sequences, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies and top-1 hits of all targets: each document alone through the whole model."""
    logps, entropies, hits = [], [], []
    for ids, is_target in zip(sequences.input_ids, sequences.target_mask, strict=True):
        logits_TV = model(input_ids=torch.tensor(ids)[None]).logits[0] / temperature
        for t in np.flatnonzero(is_target):
            distribution_V = logits_TV[t - 1].log_softmax(-1)
            logps.append(distribution_V[ids[t]])
            entropies.append(-(distribution_V.exp() * distribution_V).sum())
            hits.append(float(distribution_V.argmax() == ids[t]))
    return torch.stack(logps), torch.stack(entropies), torch.tensor(hits)


def plain_loss(model: Any, samples: Samples, temperature: float = 1.0) -> torch.Tensor:
    """What ``weighted_loss`` gives for the whole batch, with the number of targets as its normaliser."""
    logps_N = plain_scores(model, samples, temperature)[0]
    assert samples.advantages is not None
    counts = [int(mask.sum()) for mask in samples.target_mask]
    advantages_N = torch.from_numpy(np.repeat(samples.advantages, counts))
    return -(advantages_N * logps_N).sum() / len(logps_N)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters, tied ones once."""
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between tensors of equal names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
