"""What losses are made of, and the supervised one, against loops that can be checked by eye."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.losses.tokens import sft_loss, token_entropy, token_logps

LENGTHS = [4, 1, 0, 3, 2]  # loss tokens a row; the third row has none


def test_supervised_loss_of_nothing_is_zero_with_a_gradient_path() -> None:
    logps = torch.zeros(0, 3, requires_grad=True)
    loss = sft_loss(logps, torch.zeros(0, 3, dtype=torch.bool), normaliser=0)
    loss.backward()
    assert loss.item() == 0.0
    assert logps.grad.shape == (0, 3)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_supervised_loss_equals_a_loop_and_sums_over_any_split(loss_type: str) -> None:
    logps = -torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.arange(4)[None, :] < torch.tensor(LENGTHS)[:, None]
    expected = 0.0
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            logp = logps[i, t].item()
            expected -= logp * (math.exp(logp) if loss_type == "dft" else 1.0) / sum(LENGTHS)
    whole = sft_loss(logps, mask, normaliser=sum(LENGTHS), loss_type=loss_type)
    parts = [
        sft_loss(logps[i:j], mask[i:j], normaliser=sum(LENGTHS), loss_type=loss_type)
        for i, j in [(0, 2), (2, 2), (2, 3), (3, 5)]
    ]
    assert whole.item() == pytest.approx(expected, rel=1e-5)
    assert sum(parts).item() == pytest.approx(expected, rel=1e-5)


def test_dft_holds_its_weight_constant() -> None:
    logps = torch.tensor([[math.log(0.25), math.log(0.5)]], requires_grad=True)
    sft_loss(logps, torch.ones(1, 2, dtype=torch.bool), normaliser=1, loss_type="dft").backward()
    assert logps.grad.tolist() == [pytest.approx([-0.25, -0.5])]


def test_logps_and_entropy_are_those_of_the_scaled_logits_in_float32() -> None:
    logits = (torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    ids = torch.tensor([[0, 6, 3], [2, 2, 5]])
    logps, entropy = token_logps(logits, ids, temperature=0.7), token_entropy(logits, temperature=0.7)
    assert logps.dtype == entropy.dtype == torch.float32
    for i in range(2):
        for t in range(3):
            exponentials = [math.exp(x / 0.7) for x in logits[i, t].tolist()]
            probabilities = [e / sum(exponentials) for e in exponentials]
            assert logps[i, t].item() == pytest.approx(math.log(probabilities[ids[i, t]]), rel=1e-4, abs=1e-5)
            assert entropy[i, t].item() == pytest.approx(-sum(p * math.log(p) for p in probabilities), rel=1e-4)


def test_logps_of_very_sharp_logits_stay_finite_with_their_gradients() -> None:
    logits = torch.tensor([[0.0, 300.0, -300.0]], requires_grad=True)
    (token_logps(logits, torch.tensor([2])).sum() + token_entropy(logits).sum()).backward()
    assert logits.grad.isfinite().all()
