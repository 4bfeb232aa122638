"""How well the similarities of texts follow their labels: the correlations that ms-swift and MTEB report."""

from __future__ import annotations

import numpy as np


def correlations(first_RH: np.ndarray, second_RH: np.ndarray, labels_R: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's of the labels with cosines, dot products and (negative) distances of R pairs.

    NaN where either is the same for all pairs.
    """
    lengths_R = np.linalg.norm(first_RH, axis=1) * np.linalg.norm(second_RH, axis=1)
    dots_R = (first_RH * second_RH).sum(1)
    similar = {
        "cosine": dots_R / np.maximum(lengths_R, 1e-12),
        "euclidean": -np.linalg.norm(first_RH - second_RH, axis=1),
        "manhattan": -np.abs(first_RH - second_RH).sum(1),
        "dot_product": dots_R,
    }
    found = {f"pearson_{name}": pearson(values_R, labels_R) for name, values_R in similar.items()}
    return found | {f"spearman_{name}": pearson(ranks(values_R), ranks(labels_R)) for name, values_R in similar.items()}


def pearson(one_R: np.ndarray, other_R: np.ndarray) -> float:
    """The correlation of two columns; NaN if one of them never changes."""
    if np.ptp(one_R) == 0 or np.ptp(other_R) == 0:
        return float("nan")
    one_R, other_R = one_R.astype(np.float64) - one_R.mean(), other_R.astype(np.float64) - other_R.mean()
    return float((one_R * other_R).sum() / np.sqrt((one_R**2).sum() * (other_R**2).sum()))


def ranks(values_R: np.ndarray) -> np.ndarray:
    """The place of each value in their order; equal ones share the mean of theirs."""
    _, which_R, counts = np.unique(values_R, return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(counts) - (counts - 1) / 2
    return means[which_R.reshape(-1)]
