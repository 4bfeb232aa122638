"""The losses of sequence classification, as ``Policy.step`` calls them."""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from trainers.batch import on_device
from trainers.classification.config import ClassificationConfig, ProblemType
from trainers.classification.rows import Labelled
from trainers.metrics import Metrics


def label_loss(
    config: ClassificationConfig,
    num_rows: int,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Labelled,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch, divided by the rows of the whole optimizer step. Each row has one target."""
    assert micro.labels is not None
    logits_BK = values_BT.reshape(len(micro), config.num_labels)
    labels = on_device(torch.tensor(micro.labels), logits_BK.device)  # a copy: what came through Ray is read-only
    if config.problem != "regression":
        metrics.mean("accuracy", num_right(logits_BK.detach(), labels), len(micro))
    return classification_loss(logits_BK, labels, config.problem, num_rows=num_rows)


def classification_loss(
    logits_BK: torch.Tensor, labels: torch.Tensor, problem: ProblemType, *, num_rows: float
) -> torch.Tensor:
    """The loss, a mean over the ``num_rows`` rows of the whole step; of several labels a mean over them too.

    ``labels``: int64 (B,) classes, or float32 (B, K). No departure from transformers' sequence classifiers
    (``ForSequenceClassificationLoss``) in equal micro-batches.

    Raises: ValueError for labels of another shape.
    """
    wanted = logits_BK.shape[:1] if problem == "single_label_classification" else logits_BK.shape
    if labels.shape != wanted:
        raise ValueError(f"labels of {problem} must be {tuple(wanted)}, got {tuple(labels.shape)}")
    if problem == "single_label_classification":
        return cross_entropy(logits_BK, labels, reduction="sum") / num_rows
    function = binary_cross_entropy_with_logits if problem == "multi_label_classification" else mse_loss
    return function(logits_BK, labels, reduction="sum") / (num_rows * logits_BK.shape[1])


def num_right(logits_BK: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Rows whose likeliest class is theirs; of several labels, those of which every one is right (above one half)."""
    if labels.dim() == 1:
        return (logits_BK.argmax(1) == labels).sum()
    return ((logits_BK > 0) == (labels > 0)).all(1).sum()
