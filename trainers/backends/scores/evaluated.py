"""Losses and metrics of rows without learning from them, for losses that read log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainers.backends.base import Backend, Steppable, TokenFunction
from trainers.backends.scores.token_loss import target_table
from trainers.batch import on_device
from trainers.losses.tokens import token_entropy, token_logps
from trainers.losses.vocabulary import WHOLE, Vocabulary
from trainers.metrics import Metrics

CHUNK_TOKENS = 512  # whose logits evaluation holds at once


class TargetNumbers:
    """A ``TokenFunction``: of each target the mean logit, whether it is the likeliest token and, if asked, log sum p^2.

    None of them has a gradient.
    """

    def __init__(self, with_log_sum_sq_probs: bool = False) -> None:
        self.with_log_sum_sq_probs = with_log_sum_sq_probs
        self.names = ("mean_logits", "is_top1", *(["log_sum_sq_probs"] if with_log_sum_sq_probs else []))

    def inputs(self, micro: Steppable) -> tuple[torch.Tensor, ...]:
        """(N,) the ids of the targets."""
        return (target_ids(micro),)

    @torch.no_grad()
    def __call__(
        self, logits_NV: torch.Tensor, *inputs: torch.Tensor, vocabulary: Vocabulary = WHOLE
    ) -> tuple[torch.Tensor, ...]:
        is_top1_N = (vocabulary.argmax(logits_NV) == on_device(inputs[0], logits_NV.device)).float()
        numbers = (vocabulary.mean(logits_NV), is_top1_N)
        if self.with_log_sum_sq_probs:
            log_sum_sq_N = vocabulary.logsumexp(2 * logits_NV) - 2 * vocabulary.logsumexp(logits_NV)
            numbers += (log_sum_sq_N,)  # type: ignore[assignment]
        return numbers


def target_ids(batch: Steppable) -> torch.Tensor:
    """(N,) the ids of the targets of ``batch.as_sequences()``, in order."""
    sequences = batch.as_sequences()
    return torch.from_numpy(sequences.input_ids.values[sequences.target_mask.values])


@torch.no_grad()
def evaluated(
    backend: Backend,
    batch: Steppable,
    loss_function: Callable[..., torch.Tensor],
    function: TokenFunction,
    *,
    micro_batch_size: int,
    num_rows: int,
    num_shards: int,
) -> Metrics:
    """What ``loss_function`` adds to the metrics of each micro-batch of a worker's rows, and its sum as ``loss``.

    ``batch`` is the worker's slice of ``num_rows`` rows, which are divided over ``num_shards``. Every rank makes as
    many passes, the last ones with nothing in them: with weights in shards they keep step. Of a pipeline the last stage
    alone has features to go on with.
    """
    metrics = Metrics()
    most = -(-num_rows // num_shards)  # rows of any worker
    for k in range(-(-most // micro_batch_size)):
        micro = batch[k * micro_batch_size : (k + 1) * micro_batch_size]
        sequences = micro.as_sequences()
        features_NX = backend.target_features(sequences)
        ids_N = target_ids(micro)
        if not len(micro) or len(features_NX) < len(ids_N):
            continue
        mask_BT, table = target_table(sequences, features_NX.device)
        columns = _token_scores(backend, features_NX, ids_N, function.inputs(micro), function)
        tables = {
            name: table(values_N) for name, values_N in zip(("logps", "entropy", *function.names), columns, strict=True)
        }
        logps_BT, entropy_BT = tables.pop("logps"), tables.pop("entropy")
        further: dict[str, Any] = {f"{name}_BT": values_BT for name, values_BT in tables.items()}
        metrics.sum("loss", loss_function(logps_BT, entropy_BT, mask_BT, micro, metrics, **further))
    return metrics


def _token_scores(
    backend: Backend,
    features_NX: torch.Tensor,
    ids_N: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    function: TokenFunction,
) -> list[torch.Tensor]:
    """Log-probabilities, entropies and what ``function`` gives (N,) of its ``inputs``, some tokens at a time."""
    ids_N, *inputs_N = (on_device(column, features_NX.device) for column in (ids_N, *inputs))
    parts = []
    for start in range(0, max(1, len(ids_N)), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        ids, given = ids_N[chunk], [column[chunk] for column in inputs_N]
        logits_NV = backend.logits(features_NX[chunk])
        logps_N = token_logps(logits_NV, ids, vocabulary=backend.vocabulary)
        entropy_N = token_entropy(logits_NV, vocabulary=backend.vocabulary)
        parts.append((logps_N, entropy_N, *function(logits_NV, *given, vocabulary=backend.vocabulary)))
    return [torch.cat(column) for column in zip(*parts, strict=True)]
