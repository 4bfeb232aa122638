"""The experts of a worker, each of whose two products is one call for all of them (``moe_grouped_gemm``).

megatron-core 0.16 without TransformerEngine has the package grouped_gemm multiply them, in bfloat16 alone; here torch
does. It announces to drop GroupedMLP, of which the weights and their place in checkpoints are.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import GroupedMLP

from trainers.backends.megatron.parts import in_one_pass

ALIGNED = 8  # numbers that are 16 bytes in bfloat16, as torch's grouped products want the strides of their tensors


class GroupedExperts(GroupedMLP):  # type: ignore[misc]
    """Gated experts with their weights as GroupedMLP has them, and low ranks to add to their products (low_rank.py)."""

    def forward(
        self, rows_RH: torch.Tensor, counts_E: torch.Tensor, probs_R: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """(R, H) answers times the probability of the row: the first counts_E[0] rows are of the first expert."""
        weights_EHN = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        weights_ENH = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        rows_R2N = self._product("linear_fc1", rows_RH, weights_EHN, counts_E)
        if not self.activation_recompute:
            return self._product("linear_fc2", weighted_swiglu(rows_R2N, probs_R[:, None]), weights_ENH, counts_E), None
        recomputed = tensor_parallel.CheckpointWithoutOutput()
        rows_RN = recomputed.checkpoint(weighted_swiglu, rows_R2N, probs_R[:, None])
        answers_RH = self._product("linear_fc2", rows_RN, weights_ENH, counts_E)
        recomputed.discard_output_and_register_recompute(answers_RH)
        return answers_RH, None

    def _product(
        self, linear: str, rows_RK: torch.Tensor, weights_EKN: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        product_RN = grouped_product(rows_RK, weights_EKN, counts_E)
        low_rank: Any = getattr(self, f"{linear}_low_rank", None)
        if low_rank is None or not low_rank.is_on:
            return product_RN
        added_RN: torch.Tensor = product_RN + low_rank.of_all(rows_RK, counts_E)
        return added_RN


def grouped_product(left_TK: torch.Tensor, weights_EKN: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(T, N): the first counts[0] rows times the first weight, the next counts[1] times the second, and so on.

    One call in bfloat16, of widths that are multiples of ``ALIGNED``; else one a weight.
    """
    rows = counts.tolist()
    is_aligned = all(width % ALIGNED == 0 for width in weights_EKN.shape[1:])
    if left_TK.dtype == torch.bfloat16 and is_aligned and len(left_TK):
        if 0 in rows and _spoils_empty(left_TK.device):
            used = [k for k, count in enumerate(rows) if count]
            weights_EKN, rows = weights_EKN[used], [rows[k] for k in used]
        ends = list(accumulate(rows))
        places = torch.tensor(ends, dtype=torch.int32).to(left_TK.device, non_blocking=True)
        product_TN: torch.Tensor = torch.nn.functional.grouped_mm(left_TK, weights_EKN, offs=places)
        return product_TN
    return torch.cat([part @ weight for part, weight in zip(left_TK.split(rows), weights_EKN, strict=True)])


def _spoils_empty(device: torch.device) -> bool:
    """Whether a weight without rows gets a gradient: on Blackwell, https://github.com/pytorch/pytorch/issues/172439."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def weighted_swiglu(rows_R2N: torch.Tensor, weight_R1: torch.Tensor) -> torch.Tensor:
    """(R, N): what comes between an expert's products (SwiGLU, arXiv 2002.05202), times the probability of the row."""
    return in_one_pass(_weighted_swiglu, (rows_R2N, weight_R1))


def _weighted_swiglu(rows_R2N: torch.Tensor, weight_R1: torch.Tensor) -> torch.Tensor:
    gate_RN, up_RN = rows_R2N.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_RN) * up_RN * weight_R1).to(rows_R2N.dtype)
