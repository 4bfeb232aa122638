"""Writes embeddings.json: losses, gradients and metrics of ms-swift's own code for embeddings and rerankers.

python -m tests.golden.ms_swift.record_embeddings MS_SWIFT > tests/golden/ms_swift/embeddings.json

MS_SWIFT is its source (4.6). Its modules of losses and metrics are run from there, with stand-ins for what they import
of the rest. The metrics need scipy and scikit-learn.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch

PAIRS = [2] * 6
EVEN, UNEVEN = [4, 4, 4], [3, 5, 4, 3]
INFONCE: list[tuple[list[int], dict[str, str]]] = [
    (PAIRS, {}),
    (EVEN, {"INFONCE_TEMPERATURE": "0.5"}),
    (UNEVEN, {}),
    (EVEN, {"INFONCE_USE_BATCH": "false"}),
    (UNEVEN, {"INFONCE_USE_BATCH": "false"}),
    (EVEN, {"INFONCE_MASK_FAKE_NEGATIVE": "true", "INFONCE_FAKE_NEG_MARGIN": "0.05"}),
    (UNEVEN, {"INFONCE_MASK_FAKE_NEGATIVE": "true"}),
    (EVEN, {"INFONCE_INCLUDE_QQ": "true"}),
    (UNEVEN, {"INFONCE_INCLUDE_QQ": "true", "INFONCE_INCLUDE_DD": "true", "INFONCE_MASK_FAKE_NEGATIVE": "true"}),
    (EVEN, {"INFONCE_INCLUDE_DD": "true"}),
    (UNEVEN, {"INFONCE_HARD_NEGATIVES": "1"}),  # the first of each row
]


def modules_of(source: str) -> SimpleNamespace:
    for name in ("swift", "swift.loss", "swift.metrics"):
        module = ModuleType(name)
        module.__path__ = [os.path.join(source, *name.split("."))]
        sys.modules[name] = module
    sys.modules["swift.utils"] = MagicMock(get_dist_setting=lambda: (0, 0, 1, 1))
    sys.modules["swift.sequence_parallel"] = MagicMock(sequence_parallel=SimpleNamespace(dp_group=None))
    from importlib import import_module

    names = {"losses": "swift.loss.embedding", "reranker": "swift.loss.reranker"}
    names |= {"metrics": "swift.metrics.embedding", "order": "swift.metrics.reranker"}
    return SimpleNamespace(**{name: import_module(path) for name, path in names.items()})


def vectors(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, 6, generator=generator) + 0.5  # alike enough for false negatives
    return torch.nn.functional.normalize(found, dim=-1).requires_grad_()


def main() -> None:
    swift = modules_of(sys.argv[1])
    told: Any = (None, SimpleNamespace())
    recorded: dict[str, list[Any]] = {"infonce": [], "pairs": [], "rerankers": []}
    for seed, (counts, variables) in enumerate(INFONCE):
        texts = vectors(sum(counts), seed)
        labels = torch.tensor([float(place == 0) for count in counts for place in range(count - 1)])
        with patch.dict(os.environ, variables):
            loss = swift.losses.InfonceLoss(*told)({"last_hidden_state": texts}, labels)
            measured = swift.metrics.InfonceMetrics(*told)._calculate_metrics(texts.detach().numpy(), labels.numpy())
        loss.backward()
        row = {"counts": counts, "variables": variables, "texts": texts.tolist(), "loss": loss.item()}
        recorded["infonce"].append(row | {"gradient": texts.grad.tolist(), "metrics": plain(measured)})
    for name, kind in (
        ("cosine_similarity", swift.losses.CosineSimilarityLoss),
        ("contrastive", swift.losses.ContrastiveLoss),
        ("online_contrastive", swift.losses.OnlineContrastiveLoss),
    ):
        for wanted in ([1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]):
            numbers = [0.9, 0.1, 0.4, 0.7, 0.0, 0.3] if name == "cosine_similarity" else wanted
            texts, labels = vectors(12, 7), torch.tensor(numbers, dtype=torch.float32)
            loss = kind(*told)({"last_hidden_state": texts}, labels)
            loss.backward()
            measured = swift.metrics.PairedMetrics(*told)._calculate_metrics(texts.detach().numpy(), labels.numpy())
            row = {"loss_type": name, "labels": numbers, "texts": texts.tolist(), "loss": loss.item()}
            recorded["pairs"].append(row | {"gradient": texts.grad.tolist(), "metrics": plain(measured)})
    counts = [3, 1, 4, 2]
    labels = torch.tensor([int(place == 0) for count in counts for place in range(count)])
    for name, kind in (
        ("pointwise", swift.reranker.PointwiseRerankerLoss),
        ("listwise", swift.reranker.ListwiseRerankerLoss),
    ):
        scores = torch.randn(sum(counts), 1, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with patch.dict(os.environ, {"LISTWISE_RERANKER_TEMPERATURE": "0.7"}):
            loss = kind(*told)(SimpleNamespace(logits=scores), labels)
        loss.backward()
        measured = swift.order.RerankerMetrics(*told)._calculate_metrics(scores.detach().numpy(), labels.numpy())
        row = {"loss_type": f"{name}_reranker", "counts": counts, "scores": scores.flatten().tolist()}
        row |= {"loss": loss.item(), "gradient": scores.grad.flatten().tolist(), "metrics": plain(measured)}
        recorded["rerankers"].append(row)
    print(json.dumps(recorded))


def plain(numbers: dict[str, Any]) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in numbers.items()}


if __name__ == "__main__":
    main()
