"""The products and the activation of experts, in one call for all of them or not."""

from __future__ import annotations

import pytest
import torch

from trainers.backends.megatron import grouped_experts
from trainers.backends.megatron.grouped_experts import grouped_product, weighted_swiglu


def products(counts: list[int], dtype: torch.dtype, width: int = 16) -> list[torch.Tensor]:
    """What ``grouped_product`` gives, and the gradients of both factors."""
    random = torch.Generator().manual_seed(1)
    left_TK = torch.randn(sum(counts), 8, generator=random).to(dtype).requires_grad_()
    weights_EKN = torch.randn(len(counts), 8, width, generator=random).to(dtype).requires_grad_()
    product_TN = grouped_product(left_TK, weights_EKN, torch.tensor(counts))
    product_TN.backward(torch.randn(sum(counts), width, generator=random).to(dtype))
    assert left_TK.grad is not None
    assert weights_EKN.grad is not None
    return [product_TN, left_TK.grad, weights_EKN.grad]


@pytest.mark.parametrize("spoils", [False, True])
@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("counts", [[3, 5, 1], [0, 4, 0, 0, 2], [0, 0], [6, 0]])
def test_each_expert_multiplies_its_rows(
    counts: list[int], width: int, spoils: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where experts have no rows, which some devices must not be told of, and where rows are of odd widths."""
    monkeypatch.setattr(grouped_experts, "_spoils_empty", lambda device: spoils)
    exact = products(counts, torch.float64, width)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for found, right in zip(products(counts, dtype, width), exact, strict=True):
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), right, rtol=rounding, atol=5 * rounding)
    unused = [k for k, count in enumerate(counts) if not count]
    assert not products(counts, torch.bfloat16, width)[2][unused].any()


def test_the_activation_of_experts_is_swiglu_times_the_probability() -> None:
    random = torch.Generator().manual_seed(3)
    rows_R2N, probs_R1 = torch.randn(7, 10, generator=random), torch.rand(7, 1, generator=random)
    gate_RN, up_RN = rows_R2N.chunk(2, dim=1)
    right_RN = gate_RN / (1 + (-gate_RN).exp()) * up_RN * probs_R1
    torch.testing.assert_close(weighted_swiglu(rows_R2N, probs_R1), right_RN)
    low_RN = weighted_swiglu(rows_R2N.bfloat16(), probs_R1)
    gate_RN, up_RN = rows_R2N.bfloat16().float().chunk(2, dim=1)
    assert torch.equal(low_RN, (torch.nn.functional.silu(gate_RN) * up_RN * probs_R1).bfloat16())  # rounded once
