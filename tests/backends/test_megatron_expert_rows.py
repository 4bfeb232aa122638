"""Tokens on their way to their experts and back, against megatron-core's own functions."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from trainers.backends.megatron import expert_rows, patches

S, E, K, H = 11, 6, 3, 8


def routed(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, which experts each goes to, and with which probability; the last expert gets none."""
    random = torch.Generator().manual_seed(seed)
    chosen_SK = torch.rand(S, E - 1, generator=random).topk(K).indices
    map_SE = torch.zeros(S, E, dtype=torch.bool).scatter_(1, chosen_SK, value=True)
    probs_SE = torch.rand(S, E, generator=random) * map_SE
    return torch.randn(S, H, generator=random).to(dtype).requires_grad_(), map_SE, probs_SE.requires_grad_()


def there_and_back(module: object, num_out_tokens: object) -> list[torch.Tensor]:
    """What ``module`` makes of routed tokens, and its gradients."""
    tokens_SH, map_SE, probs_SE = routed()
    rows_RH, probs_R, token_R = module.permute(tokens_SH, map_SE, probs_SE, num_out_tokens)  # type: ignore[attr-defined]
    weight_RH = torch.linspace(-1, 1, rows_RH.numel()).view_as(rows_RH)
    answers_RH = rows_RH.sin() * probs_R[:, None] * weight_RH
    back_SH = module.unpermute(answers_RH, token_R, tokens_SH.shape, routing_map=map_SE)  # type: ignore[attr-defined]
    back_SH.square().sum().backward()
    assert tokens_SH.grad is not None
    assert probs_SE.grad is not None
    return [rows_RH, probs_R, token_R, back_SH, tokens_SH.grad, probs_SE.grad]


@pytest.mark.parametrize("num_out_tokens", [S * K, torch.tensor(S * K)], ids=["known", "of the device"])
def test_rows_and_their_sums_are_those_of_megatron_core(num_out_tokens: object) -> None:
    right = there_and_back(moe_utils, S * K)
    found = there_and_back(expert_rows, num_out_tokens)
    for k in range(3):
        assert torch.equal(found[k], right[k])
    for k in range(3, 6):
        torch.testing.assert_close(found[k], right[k], rtol=1e-6, atol=1e-6)


def test_sums_in_bfloat16_are_rounded_once() -> None:
    tokens_SH, map_SE, _ = routed(dtype=torch.bfloat16)
    rows_RH, nothing, token_R = expert_rows.permute(tokens_SH, map_SE, num_out_tokens=S * K)
    assert nothing is None
    random = torch.Generator().manual_seed(1)
    answers_RH = torch.randn(rows_RH.shape, generator=random).bfloat16()
    exact_SH = torch.zeros(S, H, dtype=torch.float64).index_add_(0, token_R, answers_RH.double()).bfloat16()
    assert torch.equal(expert_rows.unpermute(answers_RH, token_R, tokens_SH.shape), exact_SH)
    rows_RH.backward(answers_RH)
    assert torch.equal(tokens_SH.grad, exact_SH)


@pytest.mark.parametrize("order", [[4, 0, 3, 1, 5, 2], [0, 1, 2, 3, 4, 5]])
def test_pieces_are_put_in_order_as_megatron_core_does(order: list[int]) -> None:
    sizes_P, order_P = torch.tensor([3, 0, 5, 1, 0, 2]), torch.tensor(order)
    found = []
    for module in (moe_utils, expert_rows):
        random = torch.Generator().manual_seed(2)
        rows_RH, probs_R = (torch.randn(shape, generator=random).requires_grad_() for shape in ((11, H), (11,)))
        sorted_RH, sorted_R = module.sort_chunks_by_idxs(rows_RH, sizes_P, order_P, probs=probs_R)
        (sorted_RH * sorted_R[:, None] * torch.arange(11)[:, None]).sum().backward()
        alone_RH, nothing = module.sort_chunks_by_idxs(rows_RH, sizes_P, order_P)
        assert nothing is None
        found.append([sorted_RH, sorted_R, alone_RH, rows_RH.grad, probs_R.grad])
    for right, ours in zip(*found, strict=True):
        assert torch.equal(right, ours)


def test_megatron_core_sends_tokens_that_way() -> None:
    patches.apply()
    for name in ("permute", "unpermute", "sort_chunks_by_idxs"):
        assert getattr(token_dispatcher, name) is getattr(expert_rows, name)
