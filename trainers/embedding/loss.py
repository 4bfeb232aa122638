"""The losses of embeddings, over a pool of rows: plain functions of tensors, and how ``Policy.step`` calls them.

R rows, S texts of all rows, D documents (all texts but the anchors), H numbers of an embedding. The first text of a row
is its anchor, the second its positive, the others its negatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, normalize, relu

from trainers.batch import on_device
from trainers.data.texts.groups import Groups
from trainers.embedding.config import EmbeddingConfig
from trainers.metrics import Metrics


@dataclass(frozen=True)
class PoolOf:
    """How a step's loss is divided. ``normalize``: embeddings have length 1, as the model's files say."""

    num_rows: int  # of the step
    rows: int  # of a pool
    normalize: bool


def loss_of_rows(
    config: EmbeddingConfig,
    step: PoolOf,
    values_BTH: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Groups,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch whose rows do not depend on others; or, with ``gradients``, what has them.

    Such a loss is the sum of embeddings times the gradient of the pool's loss, which was computed beforehand: gradient
    caching (arXiv 2101.06983, section 3).
    """
    values_SH = values_BTH.squeeze(1)
    if micro.gradients is None:
        return embedding_loss(config, step, values_SH, micro, metrics)
    return (values_SH * on_device(torch.tensor(micro.gradients.values), values_SH.device)).sum()


def embedding_loss(
    config: EmbeddingConfig, step: PoolOf, values_SH: torch.Tensor, rows: Groups, metrics: Metrics
) -> torch.Tensor:
    """The loss of whole pools, divided by the rows of the step (or its pools: online_contrastive)."""
    counts_R = torch.from_numpy(rows.lengths.lengths.copy()).to(values_SH.device)
    labels_R = torch.ones(len(rows)) if rows.labels is None else torch.tensor(rows.labels)
    labels_R = on_device(labels_R, values_SH.device)
    whole = normalize(values_SH, dim=-1) if step.normalize else values_SH
    total = values_SH.new_zeros(())
    for start in range(0, len(rows), step.rows):
        of_rows = slice(start, start + step.rows)
        first, last = int(counts_R[:start].sum()), int(counts_R[: start + step.rows].sum())
        counts, labels = counts_R[of_rows], labels_R[of_rows]
        for size, weight in config.weights_of_sizes.items():
            if size is None:
                total = total + weight * pool_loss(config, whole[first:last], counts, labels)
            elif size <= whole.shape[1]:
                total = total + weight * pool_loss(config, normalize(whole[first:last, :size], dim=-1), counts, labels)
        similarity_metrics(config, whole[first:last].detach(), counts, metrics)
    num_parts = -(-step.num_rows // step.rows) if config.loss_type == "online_contrastive" else step.num_rows
    return total / num_parts


def pool_loss(
    config: EmbeddingConfig, texts_SH: torch.Tensor, counts_R: torch.Tensor, labels_R: torch.Tensor
) -> torch.Tensor:
    """The sum of the losses of the rows of one pool."""
    starts_R = counts_R.cumsum(0) - counts_R
    if config.loss_type == "infonce":
        return infonce_loss(
            texts_SH,
            counts_R,
            temperature=config.infonce_temperature,
            use_batch=config.infonce_use_batch,
            fake_neg_margin=config.infonce_fake_neg_margin if config.infonce_mask_fake_negative else None,
            include_qq=config.infonce_include_qq,
            include_dd=config.infonce_include_dd,
        )
    cosines_R = cosine_similarity(texts_SH[starts_R], texts_SH[starts_R + 1])
    if config.loss_type == "cosine_similarity":
        return (cosines_R - labels_R).pow(2).sum()
    function = contrastive_loss if config.loss_type == "contrastive" else online_contrastive_loss
    return function(1 - cosines_R, labels_R, margin=config.margin)


def infonce_loss(
    texts_SH: torch.Tensor,
    counts_R: torch.Tensor,
    *,
    temperature: float,
    use_batch: bool = True,
    fake_neg_margin: float | None = None,
    include_qq: bool = False,
    include_dd: bool = False,
) -> torch.Tensor:
    """-log softmax of each positive, a sum over rows: InfoNCE (arXiv 1807.03748, equation 4).

    ``texts_SH``: of each of R rows its anchor, its positive, its negatives; ``counts_R`` of them. The candidates of an
    anchor are all documents, or with ``use_batch`` false its own. ``include_qq`` adds the similarities to other
    anchors, ``include_dd`` those of the positive to other documents (Qwen3-Embedding, arXiv 2506.05176, equation 1).
    ``fake_neg_margin``: candidates of the anchor that are more similar than its positive by so much are left out.
    """
    device = texts_SH.device
    num_rows = len(counts_R)
    starts_R = counts_R.cumsum(0) - counts_R
    is_document_S = torch.ones(len(texts_SH), dtype=torch.bool, device=device).index_fill(0, starts_R, False)
    anchors_RH, documents_DH = texts_SH[starts_R], texts_SH[is_document_S]
    owners_D = torch.repeat_interleave(torch.arange(num_rows, device=device), counts_R - 1)
    rows_R = torch.arange(num_rows, device=device)
    positives_R = starts_R - rows_R  # each row before has one anchor
    similar_RD = anchors_RH @ documents_DH.T
    limits_R1 = None
    if fake_neg_margin is not None:
        limits_R1 = (similar_RD[rows_R, positives_R].detach() + fake_neg_margin)[:, None]

    def without_fakes(block: torch.Tensor) -> torch.Tensor:
        return block if limits_R1 is None else block.masked_fill(block > limits_R1, -torch.inf)

    if not use_batch:
        similar_RD = similar_RD.masked_fill(owners_D != rows_R[:, None], -torch.inf)
    blocks = [without_fakes(similar_RD)]
    if include_qq:
        itself = torch.eye(num_rows, dtype=torch.bool, device=device)
        blocks.append(without_fakes((anchors_RH @ anchors_RH.T).masked_fill(itself, -torch.inf)))
    if include_dd:
        itself = torch.arange(len(documents_DH), device=device) == positives_R[:, None]
        blocks.append((documents_DH[positives_R] @ documents_DH.T).masked_fill(itself, -torch.inf))
    return cross_entropy(torch.cat(blocks, dim=1) / temperature, positives_R, reduction="sum")


def contrastive_loss(distances_R: torch.Tensor, labels_R: torch.Tensor, *, margin: float) -> torch.Tensor:
    """1/2 (y d^2 + (1 - y) max(0, margin - d)^2), a sum over rows (Hadsell et al. 2006, equation 4)."""
    together, apart = distances_R.pow(2), relu(margin - distances_R).pow(2)
    return (0.5 * (labels_R * together + (1 - labels_R) * apart)).sum()


def online_contrastive_loss(distances_R: torch.Tensor, labels_R: torch.Tensor, *, margin: float) -> torch.Tensor:
    """The contrastive loss of the hard pairs of a pool alone, without its factor 1/2: sentence-transformers' loss.

    Hard are negatives nearer than the farthest positive, and positives farther than the nearest negative. A single pair
    of a kind is compared with the mean of the other kind.
    """
    apart, together = distances_R[labels_R == 0], distances_R[labels_R == 1]
    hard_apart = apart[apart < (together.max() if len(together) > 1 else apart.mean())]
    hard_together = together[together > (apart.min() if len(apart) > 1 else together.mean())]
    return hard_together.pow(2).sum() + relu(margin - hard_apart).pow(2).sum()


@torch.no_grad()
def similarity_metrics(
    config: EmbeddingConfig, texts_SH: torch.Tensor, counts_R: torch.Tensor, metrics: Metrics
) -> None:
    """Of infonce ``mean_pos``, ``mean_neg``, ``margin`` and ``accuracy``; else ``similarity``, the mean cosine."""
    starts_R = counts_R.cumsum(0) - counts_R
    if config.loss_type != "infonce":
        cosines_R = cosine_similarity(texts_SH[starts_R], texts_SH[starts_R + 1])
        metrics.mean("similarity", cosines_R.sum(), len(cosines_R))
        return
    num_rows = len(counts_R)
    rows_R = torch.arange(num_rows, device=texts_SH.device)
    is_document_S = torch.ones(len(texts_SH), dtype=torch.bool, device=texts_SH.device).index_fill(0, starts_R, False)
    documents_DH = texts_SH[is_document_S]
    owners_D = torch.repeat_interleave(rows_R, counts_R - 1)
    positives_R = starts_R - rows_R
    for begin in range(0, num_rows, 256):  # rows of similarities that are held at once
        part = rows_R[begin : begin + 256]
        similar_PD = texts_SH[starts_R[part]] @ documents_DH.T
        is_negative_PD = torch.ones_like(similar_PD, dtype=torch.bool)
        is_negative_PD[torch.arange(len(part), device=part.device), positives_R[part]] = False
        if not config.infonce_use_batch:
            is_negative_PD &= owners_D == part[:, None]
        positive_P = similar_PD.gather(1, positives_R[part][:, None])[:, 0]
        metrics.mean("mean_pos", positive_P.sum(), len(part))
        metrics.mean("mean_neg", similar_PD[is_negative_PD].sum(), is_negative_PD.sum())
        has_any_P = is_negative_PD.any(1)
        hardest_P = similar_PD.masked_fill(~is_negative_PD, -torch.inf).amax(1)
        ahead = (positive_P - hardest_P)[has_any_P]
        metrics.mean("margin", ahead.sum(), len(ahead))
        metrics.mean("accuracy", (ahead > 0).sum(), len(ahead))
