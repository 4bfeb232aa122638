"""What is around the gated delta rule in a layer: a short convolution, the decay of the state, a gated norm."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, silu, softplus

from trainers.backends.megatron.parts import in_one_pass


def convolved(rows_SC: torch.Tensor, weight_CW: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
    """(S, C): each channel's last W tokens of the same document, weighted and summed up, then SiLU.

    ``positions_S``: of the tokens within documents. Computed in float32.
    """
    return in_one_pass(_convolved, (rows_SC, positions_S), weight_CW)


def _convolved(rows_SC: torch.Tensor, positions_S: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
    width, num_tokens = weight_CW.shape[1], rows_SC.shape[0]
    wide_SC, weight_CW = rows_SC.float(), weight_CW.float()
    padded = pad(wide_SC, (0, 0, width - 1, 0))
    total_SC = wide_SC * weight_CW[:, -1]
    for back in range(1, width):
        earlier_SC = padded[width - 1 - back : width - 1 - back + num_tokens]
        is_there_S1 = (positions_S >= back)[:, None]
        total_SC = total_SC + torch.where(is_there_S1, earlier_SC, 0.0) * weight_CW[:, -1 - back]
    return silu(total_SC).to(rows_SC.dtype)


def decay(alpha_SH: torch.Tensor, log_rate_H: torch.Tensor, bias_H: torch.Tensor) -> torch.Tensor:
    """(S, H) float32, at most 0: the logarithm of what is left of a head's state at each token."""
    return -log_rate_H.float().exp() * softplus(alpha_SH.float() + bias_H.float())


def gated_norm(rows_RV: torch.Tensor, gate_RV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) of each row, times SiLU of its gate. Computed in float32."""
    return in_one_pass(_gated_norm, (rows_RV, gate_RV), weight_V, eps)


def _gated_norm(rows_RV: torch.Tensor, gate_RV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    wide_RV = rows_RV.float()
    scale_R1 = torch.rsqrt(wide_RV.square().mean(-1, keepdim=True) + eps)
    return (wide_RV * scale_R1 * weight_V.float() * silu(gate_RV.float())).to(rows_RV.dtype)
