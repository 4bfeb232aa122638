"""What ``generation_kwargs`` do to the logits of single tokens, whatever stands before them.

They come before the repetition penalty and the temperature, as in transformers and in vLLM. ``logit_bias`` is vLLM's
name, which transformers has not: there it is a ``sequence_bias`` of single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayhelper import ConfigError
from trainers.rollout.base import Sampling

BIASES = ("logit_bias", "suppress_tokens", "min_new_tokens")


class Biases:
    """``biases(logits_BV, counts_B)``: the logits that are drawn from. ``counts_B``: tokens that each row has drawn."""

    def __init__(self, sampling: Sampling, stops: Sequence[int], size: int, device: torch.device) -> None:
        given = sampling.generation_kwargs
        self.added_V = self.is_stop_V = None
        added = {**logit_bias_of(given), **dict.fromkeys(given.get("suppress_tokens") or (), -math.inf)}
        if added:
            self.added_V = torch.zeros(size, device=device)
            self.added_V[_tokens(added, size)] = torch.tensor(list(added.values()), device=device)
        self.least = given.get("min_new_tokens") or 0
        if self.least:
            self.is_stop_V = torch.zeros(size, dtype=torch.bool, device=device)
            self.is_stop_V[[stop for stop in stops if stop < size]] = True

    @property
    def is_on(self) -> bool:
        return self.added_V is not None or self.is_stop_V is not None

    def __call__(self, logits_BV: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
        if self.added_V is not None:
            logits_BV = logits_BV + self.added_V
        if self.is_stop_V is not None:
            is_early_BV = (counts_B < self.least)[:, None] & self.is_stop_V
            logits_BV = logits_BV.masked_fill(is_early_BV, -math.inf)
        return logits_BV


def logit_bias_of(given: Mapping[str, Any], key: str = "generation_kwargs") -> dict[int, float]:
    """The numbers of ``logit_bias`` by token id.

    Raises:
        ConfigError: it is something else than a mapping of token ids to numbers.
    """
    found = given.get("logit_bias")
    if found is None:
        return {}
    try:
        read = {int(token): float(bias) for token, bias in dict(found).items()}
    except (TypeError, ValueError):
        read = {-1: math.nan}
    if any(token < 0 or math.isnan(bias) or bias == math.inf for token, bias in read.items()):
        raise ConfigError(f"{key}: logit_bias must map token ids to numbers, such as {{5: -10}}; got {found}")
    return read


def for_transformers(given: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The fields as GenerationConfig has them, for ``size`` tokens."""
    further = {name: value for name, value in given.items() if name != "logit_bias"}
    if bias := logit_bias_of(given):
        own = further.get("sequence_bias") or []
        listed = [[list(tokens), value] for tokens, value in (own.items() if isinstance(own, dict) else own)]
        _tokens(bias, size)
        further["sequence_bias"] = [*listed, *([[token], value] for token, value in bias.items())]
    return further


def _tokens(given: Mapping[int, float], size: int) -> list[int]:
    for token in given:
        if not 0 <= token < size:
            raise ConfigError(f"generation_kwargs names token {token}, but the model's tokens are 0 to {size - 1}")
    return list(given)
