"""From hidden states to log-probabilities of single tokens, without the logits of a whole batch.

The output head of a language model is its largest intermediate: tokens x vocabulary. Here only target tokens reach it,
a chunk at a time, and a chunk's logits are computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from trainers.losses import token_entropy, token_logps

CHUNK_BYTES = 256 * 1024 * 1024  # of float32 logits


class Scores(NamedTuple):
    """One entry a target token, float32."""

    logps_N: torch.Tensor
    entropy_N: torch.Tensor
    is_top1_N: torch.Tensor  # 1.0 where the target is the most probable token


class Head:
    """The output embedding of a Hugging Face model, with what its architecture does to the logits afterwards.

    Raises:
        ValueError: the model has no output embedding that can be called on its own.
    """

    def __init__(self, model: Any) -> None:
        self.linear = model.get_output_embeddings()
        if self.linear is None or model.base_model is model:
            raise ValueError(
                f"{type(model).__name__} has no backbone and output embedding to be called one by one; "
                "the fsdp backend trains causal language models (AutoModelForCausalLM)."
            )
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        self.scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self.scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """(N, V) float32."""
        logits_NV: torch.Tensor = self.linear(hidden_NH).float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    def scores(
        self, hidden_NH: torch.Tensor, ids_N: torch.Tensor, temperature: float, *, entropy_gradient: bool = False
    ) -> Scores:
        """Log-probabilities of ``ids_N`` under softmax(logits / temperature), entropies, and top-1 hits."""
        rows = max(1, CHUNK_BYTES // (4 * self.linear.weight.shape[0]))
        parts = [
            self._chunk(hidden_NH[start : start + rows], ids_N[start : start + rows], temperature, entropy_gradient)
            for start in range(0, max(1, len(ids_N)), rows)
        ]
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _chunk(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor, temperature: float, with_gradient: bool) -> Scores:
        if not torch.is_grad_enabled():
            return Scores(*self._score(hidden_NH, ids_N, temperature, with_gradient))
        return Scores(*checkpoint(self._score, hidden_NH, ids_N, temperature, with_gradient, use_reentrant=False))

    def _score(
        self, hidden_NH: torch.Tensor, ids_N: torch.Tensor, temperature: float, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_NV = self.logits(hidden_NH)
        entropy_N = token_entropy(logits_NV if with_gradient else logits_NV.detach(), temperature)
        is_top1_N = (logits_NV.detach().argmax(-1) == ids_N).float()
        return token_logps(logits_NV, ids_N, temperature), entropy_N, is_top1_N
