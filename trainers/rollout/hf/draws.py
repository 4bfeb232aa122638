"""How the hf engine draws tokens: each prompt by random numbers of its own.

``torch.multinomial`` draws for all rows of a batch from one generator, so that a completion would depend on the rows
beside it and on the number of workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainers.rollout.base import Sampling

# Fields of GenerationConfig that cut the distribution, which transformers applies as it samples; beside those of
# ``Sampling``
TRUNCATIONS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits")


class Draws:
    """The draws of a batch of prompts, by the random numbers of each (B, T): see ``uniform``.

    ``processors(width, device)`` are logits processors of transformers' greedy search for prompts padded to ``width``:
    they leave the token that was drawn.
    """

    def __init__(self, sampling: Sampling, uniform_BT: np.ndarray) -> None:
        self.sampling, self.uniform_BT = sampling, torch.from_numpy(uniform_BT)

    def processors(self, width: int, device: torch.device) -> Any:
        """In the order in which transformers samples: temperature, truncations, and the draw."""
        from transformers import LogitsProcessorList

        return LogitsProcessorList([*truncations(self.sampling, device), drawing(self.uniform_BT.to(device), width)])


def uniform(seed: int, number: int, limit: int) -> np.ndarray:
    """(limit,) random numbers in [0, 1) of a prompt. The first are the same whatever the limit."""
    return np.random.default_rng([seed, number]).random(limit)


def truncations(sampling: Sampling, device: torch.device) -> list[Any]:
    """What changes the distribution before a token is drawn, as in transformers' sampling."""
    from transformers.generation import logits_process as generation

    further = sampling.generation_kwargs
    found: list[Any] = []
    if sampling.temperature != 1.0:
        found.append(generation.TemperatureLogitsWarper(sampling.temperature))
    if further.get("top_h") is not None:
        found.append(generation.TopHLogitsWarper(top_h=further["top_h"]))
    if sampling.top_k:
        found.append(generation.TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(generation.TopPLogitsWarper(top_p=sampling.top_p))
    if sampling.min_p is not None:
        found.append(generation.MinPLogitsWarper(min_p=sampling.min_p))
    if (mass := further.get("typical_p")) is not None and mass < 1.0:
        found.append(generation.TypicalLogitsWarper(mass=mass))
    if (cutoff := further.get("epsilon_cutoff")) is not None and 0.0 < cutoff < 1.0:
        found.append(generation.EpsilonLogitsWarper(epsilon=cutoff))
    if (cutoff := further.get("eta_cutoff")) is not None and 0.0 < cutoff < 1.0:
        found.append(generation.EtaLogitsWarper(epsilon=cutoff, device=str(device)))
    return found


def drawing(uniform_BT: torch.Tensor, width: int) -> Any:
    """A logits processor that leaves one token per row: where the cumulated probabilities pass its random number."""
    from transformers import LogitsProcessor

    class Drawing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen_B1 = drawn(scores, uniform_BT[:, input_ids.shape[1] - width, None])
            return torch.full_like(scores, -torch.inf).scatter_(1, chosen_B1, 0.0)

    return Drawing()


def drawn(logits_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """(B, 1) tokens, each as likely as softmax says, by the inverse of the cumulated distribution."""
    cumulated_BV = logits_BV.float().softmax(-1).cumsum(-1)
    total_B1 = cumulated_BV[:, -1:]
    # Below the total whatever rounding does; a token of probability 0 never passes
    target_B1 = (uniform_B1 * total_B1).to(total_B1.dtype)
    target_B1 = torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cumulated_BV, target_B1, right=True)
