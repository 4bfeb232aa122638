"""The losses of rerankers, as ``Policy.step`` calls them, and what is measured of the order of documents.

The documents of a query are a row: the right one first. R rows, S documents of all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from trainers.backends.scores.evaluated import target_ids
from trainers.batch import on_device
from trainers.data.texts.groups import Groups
from trainers.losses.vocabulary import WHOLE, Vocabulary
from trainers.metrics import Metrics
from trainers.reranking.config import RerankingConfig


@dataclass(frozen=True)
class Counts:
    """What a step, or an evaluation, has over all workers."""

    documents: int
    lists: int  # rows with enough documents for listwise_reranker
    rows: int
    num_shards: int  # the rows are divided over


class YesOrNo:
    """A ``TokenFunction``: at the target of each question the logit of yes, which it is, less that of no."""

    names: tuple[str, ...] = ("score",)

    def inputs(self, micro: Groups) -> tuple[torch.Tensor, ...]:
        """(N,) the ids of yes and of no."""
        assert micro.no_ids is not None
        no_ids = torch.from_numpy(np.repeat(micro.no_ids, micro.num_targets()))
        return target_ids(micro), no_ids

    def __call__(
        self, logits_NV: torch.Tensor, *inputs: torch.Tensor, vocabulary: Vocabulary = WHOLE
    ) -> tuple[torch.Tensor, ...]:
        yes_N, no_N = (vocabulary.pick(logits_NV, on_device(ids, logits_NV.device)) for ids in inputs)
        return (yes_N - no_N,)


def scored_loss(
    config: RerankingConfig,
    counts: Counts,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Groups,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch whose model gives scores. Each sequence has one target."""
    return reranking_loss(config, counts, values_BT.sum(1), micro, metrics)


def answered_loss(
    config: RerankingConfig,
    counts: Counts,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Groups,
    metrics: Metrics,
    score_BT: torch.Tensor,
    **further: torch.Tensor,
) -> torch.Tensor:
    """The loss of one micro-batch whose model answers yes or no."""
    return reranking_loss(config, counts, score_BT.sum(1), micro, metrics)


def reranking_loss(
    config: RerankingConfig, counts: Counts, scores_S: torch.Tensor, micro: Groups, metrics: Metrics
) -> torch.Tensor:
    """The loss of the rows of a micro-batch, divided by what the whole step has of documents, or of rows."""
    counts_R = on_device(torch.tensor(micro.lengths.lengths), scores_S.device)
    order_metrics(config, scores_S.detach(), counts_R, metrics)
    if config.loss_type == "pointwise_reranker":
        return pointwise_loss(scores_S, counts_R) / counts.documents
    least = config.listwise_reranker_min_group_size
    temperature = config.listwise_reranker_temperature
    return listwise_loss(scores_S, counts_R, temperature=temperature, min_group_size=least) / max(1, counts.lists)


def pointwise_loss(scores_S: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy of every document, a sum; the first one of each row is right."""
    is_right_S = torch.zeros_like(scores_S).index_fill(0, counts_R.cumsum(0) - counts_R, 1.0)
    return binary_cross_entropy_with_logits(scores_S, is_right_S, reduction="sum")


def listwise_loss(
    scores_S: torch.Tensor, counts_R: torch.Tensor, *, temperature: float = 1.0, min_group_size: int = 2
) -> torch.Tensor:
    """-log softmax of the right document among those of its row, a sum: ListNet's top one (Cao et al. 2007).

    Rows of fewer than ``min_group_size`` documents count nothing.
    """
    scores_RD = by_rows(scores_S, counts_R)[counts_R >= min_group_size]
    return cross_entropy(
        scores_RD / temperature, scores_RD.new_zeros(len(scores_RD), dtype=torch.long), reduction="sum"
    )


def by_rows(scores_S: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """(R, D) the scores of each row, -inf where it has fewer documents."""
    longest = int(counts_R.max()) if len(counts_R) else 0
    is_there_RD = torch.arange(longest, device=scores_S.device) < counts_R[:, None]
    table_RD = torch.full(is_there_RD.shape, -math.inf, dtype=scores_S.dtype, device=scores_S.device)
    return table_RD.masked_scatter(is_there_RD, scores_S)


@torch.no_grad()
def order_metrics(config: RerankingConfig, scores_S: torch.Tensor, counts_R: torch.Tensor, metrics: Metrics) -> None:
    """``accuracy``: documents that are told right, or listwise rows whose right one is first. ``mrr`` and ``ndcg`` of
    rows with two documents at least: one over the place of the right one, and one over log2 of the place + 1."""
    scores_RD = by_rows(scores_S, counts_R)
    places_R = 1 + (scores_RD[:, 1:] > scores_RD[:, :1]).sum(1)
    is_list_R = counts_R >= 2
    places = places_R[is_list_R].double()
    metrics.mean("mrr", (1 / places).sum(), len(places))
    metrics.mean("ndcg", (1 / torch.log2(places + 1)).sum(), len(places))
    if config.loss_type == "listwise_reranker":
        metrics.mean("accuracy", (places_R == 1).sum(), len(places_R))
        return
    is_right_S = torch.zeros_like(scores_S, dtype=torch.bool).index_fill(0, counts_R.cumsum(0) - counts_R, True)
    metrics.mean("accuracy", ((scores_S > 0) == is_right_S).sum(), len(scores_S))
