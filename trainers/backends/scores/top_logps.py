"""The token function of ``top_logps``: the likeliest ids at each target and their log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

from trainers.losses.vocabulary import WHOLE, Vocabulary


class TopLogps:
    """(N, k) each, float32 and int64, under softmax(logits / temperature); no gradient."""

    names = ("top_logps", "top_ids")

    def __init__(self, k: int, temperature: float) -> None:
        self.k, self.temperature = k, temperature

    def inputs(self, micro: Any) -> tuple[torch.Tensor, ...]:
        return ()

    def __call__(
        self, logits_NV: torch.Tensor, *inputs: torch.Tensor, vocabulary: Vocabulary = WHOLE
    ) -> tuple[torch.Tensor, ...]:
        return vocabulary.topk(vocabulary.log_softmax(logits_NV / self.temperature), self.k)
