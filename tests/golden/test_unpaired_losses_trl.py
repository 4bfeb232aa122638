"""The losses of KTO, CPO, SimPO and ORPO of random log-probabilities, as TRL's own methods compute them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from trainers.losses.kto import add_kto_metrics, kl_estimates, kto_loss
from trainers.losses.preference import Completions, add_preference_metrics, cpo_loss, orpo_loss
from trainers.metrics import Metrics

B, T = 6, 5
ON_CPU = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
LABELS = torch.tensor([True, False, False, True, True, True])


def drawn(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities with a gradient, NaN where there is no token, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.arange(T) < torch.tensor([5, 2, 1, 3, 4, 2])[:, None]
    logps_BT = -scale * torch.rand(B, T, generator=generator, dtype=torch.float64) - 1e-3
    return logps_BT.masked_fill(~mask_BT, torch.nan).requires_grad_(), mask_BT


def summed(logps_BT: torch.Tensor, mask_BT: torch.Tensor, *, mean: bool) -> torch.Tensor:
    total_B = logps_BT.masked_fill(~mask_BT, 0).sum(1)
    return total_B / mask_BT.sum(1) if mean else total_B


def assert_same(actual: torch.Tensor, expected: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Values to 1e-6, and the gradients that they have."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        *(torch.autograd.grad(x, leaves, retain_graph=True) for x in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


CPO_CASES: list[dict[str, Any]] = [
    {},
    {"beta": 0.7, "label_smoothing": 0.2},
    {"loss_type": "hinge", "beta": 0.9},
    {"loss_type": "ipo", "beta": 0.3},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.3, "label_smoothing": 0.1, "cpo_alpha": 0.0},
    {"loss_type": "sigmoid", "alpha": 0.4},
    {"loss_type": "simpo", "alpha": -0.4, "cpo_alpha": 0.5},
]


@pytest.mark.parametrize("options", CPO_CASES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_cpo_and_simpo_equal_trl(options: dict[str, Any], scale: float) -> None:
    (chosen, chosen_mask), (rejected, mask) = drawn(1, scale), drawn(2, scale)
    rejected_mask = mask.flip(0)
    rejected = torch.where(rejected_mask, rejected.nan_to_num(-0.7), torch.nan)
    defaults = {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0}
    settings = defaults | {"cpo_alpha": 1.0} | options
    means = settings["loss_type"] in ("ipo", "simpo")
    sides = [summed(chosen, chosen_mask, mean=means), summed(rejected, rejected_mask, mean=means)]
    losses, chosen_rewards, rejected_rewards = CPOTrainer.cpo_loss(
        SimpleNamespace(accelerator=ON_CPU, **settings), *sides
    )
    num_tokens = float(chosen_mask.sum())
    expected = losses.mean() - settings["cpo_alpha"] * chosen.masked_fill(~chosen_mask, 0).sum() / num_tokens
    actual, diagnostics = cpo_loss(
        Completions(chosen, chosen_mask),
        Completions(rejected, rejected_mask),
        num_pairs=B,
        num_chosen_tokens=num_tokens,
        **options,
    )
    assert_same(actual, expected, chosen)
    metrics = Metrics()
    add_preference_metrics(metrics, diagnostics)
    found = metrics.values()
    assert found["rewards/chosen"] == pytest.approx(float(chosen_rewards.mean()))
    assert found["rewards/margins"] == pytest.approx(float((chosen_rewards - rejected_rewards).mean()))
    assert found["rewards/accuracies"] == pytest.approx(float((chosen_rewards > rejected_rewards).float().mean()))
    assert found["logps/rejected"] == pytest.approx(float(sides[1].mean().detach()))


@pytest.mark.parametrize("beta", [0.1, 1.5])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_orpo_equals_trl(beta: float, scale: float) -> None:
    """TRL computes in float32, and ours in the precision it is given."""
    (whole, learned), (rejected, mask) = drawn(3, scale), drawn(4, scale)
    rejected_mask = mask.flip(0)
    rejected = torch.where(rejected_mask, rejected.nan_to_num(-0.7 * scale), torch.nan)
    is_prompt = torch.arange(T) < torch.tensor([2, 1, 0, 1, 0, 1])[:, None]
    chosen_mask = learned & ~is_prompt
    sides = [summed(whole, chosen_mask, mean=True), summed(rejected, rejected_mask, mean=True)]
    losses, rewards, _, ratio, odds = ORPOTrainer.odds_ratio_loss(
        SimpleNamespace(accelerator=ON_CPU, beta=beta), *sides
    )
    expected = -whole.masked_fill(~learned, 0).sum() / learned.sum() - losses.mean()
    actual, diagnostics = orpo_loss(
        Completions(whole, chosen_mask),
        Completions(rejected, rejected_mask),
        learned,
        num_pairs=B,
        num_learned_tokens=float(learned.sum()),
        beta=beta,
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(x, whole, retain_graph=True)[0] for x in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    metrics = Metrics()
    add_preference_metrics(metrics, diagnostics)
    found = metrics.values()
    expected_metrics = {"rewards/chosen": rewards.mean(), "log_odds_ratio": ratio, "log_odds_chosen": odds}
    assert {name: found[name] for name in expected_metrics} == pytest.approx(
        {name: float(value.detach()) for name, value in expected_metrics.items()}, rel=1e-4, abs=1e-5
    )


def test_orpo_of_certain_completions_has_a_gradient() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    chosen = torch.zeros(1, 1, requires_grad=True)
    sides = Completions(chosen, mask), Completions(torch.zeros(1, 1), mask)
    loss, _ = orpo_loss(*sides, mask, num_pairs=1, num_learned_tokens=1)
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert loss.isfinite()
    assert gradient.isfinite().all()


class Fixed(torch.nn.Module):
    """A model whose log-probabilities are given, as TRL's fused head would find them."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.outputs = iter(outputs)

    def forward(self, **_: Any) -> Any:
        logps = next(self.outputs)
        return SimpleNamespace(log_probs=logps, entropy=logps.detach() * 0, mean_logits=logps.detach() * 0)


@pytest.mark.parametrize("ahead", [2.0, -2.0], ids=["the KL is positive", "the KL is held at 0"])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.8, "desirable_weight": 0.5, "undesirable_weight": 2.0}, {"loss_type": "apo_zero_unpaired"}],
    ids=str,
)
@pytest.mark.parametrize("labels", [LABELS, torch.ones(B, dtype=torch.bool)], ids=["both", "desirable alone"])
def test_kto_equals_trl(options: dict[str, Any], ahead: float, labels: torch.Tensor) -> None:
    """TRL's own ``_compute_loss``, given the numbers of a model instead of a model."""
    (logps, mask), (ref_logps, _), (kl_logps, _), (ref_kl_logps, _) = (drawn(seed) for seed in (5, 6, 7, 8))
    kept = [
        x.masked_fill(~mask, 0) for x in (logps, ref_logps.detach(), kl_logps.detach() + ahead, ref_kl_logps.detach())
    ]
    defaults = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    settings = defaults | options
    estimates = settings["loss_type"] == "kto"
    model = Fixed([kept[2], kept[0]] if estimates else [kept[0]])
    trainer = SimpleNamespace(
        **settings,
        model=SimpleNamespace(training=True),
        accelerator=ON_CPU,
        aux_loss_enabled=False,
        calculate_KL=estimates,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": {name: [] for name in ("kl", "entropy", "num_tokens")}},
    )
    for name in ("logits", "rewards", "logps"):
        trainer._metrics["train"] |= {f"{name}/{side}": [] for side in ("chosen", "rejected", "margins")}
    trainer._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(trainer, *given)
    columns = {"input_ids": torch.ones(B, T + 1, dtype=torch.long), "attention_mask": torch.ones(B, T + 1)}
    columns["completion_mask"] = torch.cat([torch.zeros(B, 1), mask], 1)
    batch = columns | {f"KL_{name}": column for name, column in columns.items()}
    batch |= {"label": labels, "ref_logps": kept[1].sum(1), "ref_KL_logps": kept[3].sum(1)}
    expected = KTOTrainer._compute_loss(trainer, model, batch, return_outputs=False)

    log_ratios_B = (kept[2] - kept[3]).sum(1)
    kl_B = kl_estimates(log_ratios_B, B) if estimates else torch.zeros(B, dtype=torch.float64)
    assert (kl_B > 0).all().item() == (estimates and ahead > 0)
    actual, diagnostics = kto_loss(kept[0].sum(1), kept[1].sum(1), labels, kl_B, num_rows=B, **options)
    assert_same(actual, expected, logps)
    metrics = Metrics()
    add_kto_metrics(metrics, diagnostics)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    for name, value in metrics.values().items():
        assert value == pytest.approx(logged[name], rel=1e-6), name
    assert {"kl", "rewards/chosen", "logps/chosen"} <= metrics.values().keys() <= logged.keys()


def test_each_group_estimates_its_own_kl() -> None:
    found = kl_estimates(torch.tensor([1.0, 3.0, -4.0, 1.0, 0.5]), 2)
    assert found.tolist() == [2.0, 2.0, 0.0, 0.0, 0.5]
