"""Weights that no checkpoint gives: drawn by name, so that they are alike in every backend, however a model is cut."""

from __future__ import annotations

import math
import zlib

import torch

VALUE_HEAD = "score.weight"  # in a checkpoint


def value_head(hidden_size: int, std: float, seed: int, num_labels: int = 1) -> torch.Tensor:
    """(num_labels, H) float32, normal with the standard deviation that the model's configuration has for new ones."""
    return torch.nn.init.normal_(torch.empty(num_labels, hidden_size), std=std, generator=_generator(VALUE_HEAD, seed))


def adapter_a(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The matrix A of a LoRA adapter, float32: as that of a linear layer (arXiv 2106.09685 and peft); B is zero.

    ``name``: as peft writes it in a file.
    """
    return torch.nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=_generator(name, seed))


def adapter_b_of_embedding(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The matrix B of a LoRA adapter of an embedding, float32: standard normal, as peft draws it; A is zero."""
    return torch.nn.init.normal_(torch.empty(shape), generator=_generator(name, seed))


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
