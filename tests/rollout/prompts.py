"""Prompts, a model that is sure of itself, and the plain loops that an engine is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.tiny import tiny_model, tiny_tokenizer
from trainers.batch import Prompts, Ragged, Rollouts, Sequences

LENGTHS = (3, 11, 1, 7, 5, 8)
EOS = 2


def prompts_of(lengths: Iterable[int] = LENGTHS, seed: int = 0) -> Prompts:
    """Random prompts; the second begins with the token that also pads."""
    random = np.random.default_rng(seed)
    rows = [random.integers(4, 260, length) for length in lengths]
    if len(rows) > 1:
        rows[1][0] = 0
    return Prompts(Ragged.of(rows, np.int64))


def save_decided(folder: Path, *, scale: float = 20.0, eos_scale: float = 2.5, **config: Any) -> str:
    """Writes a tiny model whose distributions are peaked, the more the larger ``scale``, and which often stops."""
    model = tiny_model(**config)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        model.lm_head.weight[EOS].mul_(eos_scale)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def plain_greedy(model: Any, prompt: np.ndarray, limit: int, stops: Sequence[int], penalty: float = 1.0) -> list[int]:
    """The most probable next token, one whole forward pass after the other, up to the first stop token.

    The logits of tokens seen before are divided by ``penalty`` if positive, and multiplied if negative.
    """
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        logits_V = model(input_ids=torch.tensor(ids)[None]).logits[0, -1]
        seen = torch.tensor(sorted(set(ids)))
        logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / penalty, logits_V[seen] * penalty)
        ids.append(int(logits_V.argmax()))
        if ids[-1] in stops:
            break
    return [int(token) for token in ids[len(prompt) :]]


@torch.no_grad()
def probabilities(model: Any, prompt: np.ndarray, completion: np.ndarray, temperature: float) -> torch.Tensor:
    """(T, V): what each token of a completion was drawn from, before any truncation."""
    ids = torch.tensor(np.concatenate([prompt, completion]))[None]
    return (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).softmax(-1)


def as_sequences(rollouts: Rollouts) -> Sequences:
    """Prompt and completion as one sequence each, the completion's tokens as targets."""
    pairs = list(zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True))
    return Sequences(
        input_ids=Ragged.of([np.concatenate(pair) for pair in pairs], np.int64),
        target_mask=Ragged.of([[False] * len(prompt) + [True] * len(rest) for prompt, rest in pairs], bool),
    )


def completions(rollouts: Rollouts) -> list[list[int]]:
    return [row.tolist() for row in rollouts.completion_ids]
