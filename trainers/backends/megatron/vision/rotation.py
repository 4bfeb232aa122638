"""Rotary positions of pictures (M-RoPE, arXiv 2409.12191): each angle turns by time, by height or by width."""

from __future__ import annotations

from typing import Any

import torch

TOGETHER = (  # the angles of one position stand together; of later models they take turns
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
)


def axes_of(hf: Any) -> torch.Tensor | None:
    """(R,) which position each angle turns by: 0 time, 1 height, 2 width; None: the model knows a single one.

    Later models (Qwen3-VL, Qwen3.5) go time, height, width, time, height, width, ... while there are any of height and
    width; the rest is of time.
    """
    section = hf.rope_parameters.get("mrope_section")
    if section is None:
        return None
    if hf.model_type in TOGETHER:
        return torch.arange(len(section)).repeat_interleave(torch.tensor(section))
    axes_R = torch.zeros(sum(section), dtype=torch.long)
    for axis in (1, 2):
        axes_R[axis : 3 * section[axis] : 3] = axis
    return axes_R


def angles(positions: torch.Tensor, frequencies_R: torch.Tensor, axes_R: torch.Tensor | None) -> torch.Tensor:
    """(S, R) angles of (S,) positions, or of the (3, S) positions of pictures."""
    if positions.dim() == 1:
        return positions[:, None].float() * frequencies_R
    assert axes_R is not None, "the model has positions of pictures"
    return positions.index_select(0, axes_R).T.float() * frequencies_R
