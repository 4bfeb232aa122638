"""Losses against loops that can be checked by eye."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.losses import (
    PolicyDiagnostics,
    add_policy_metrics,
    entropy_bonus,
    grpo_normaliser,
    policy_gradient_loss,
    sft_loss,
    token_entropy,
    token_logps,
)
from trainers.metrics import Metrics

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
LENGTHS = [4, 1, 0, 3, 2]  # loss tokens a row; the third row has none
MAX_COMPLETION_LENGTH = 6


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Five rows of at most four tokens, 0.4 nats off policy, so that ratios leave [0.8, 1.2] on both sides."""
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(5, 4, generator=generator) * 3
    return {
        "logps_BT": logps,
        "old_logps_BT": logps + 0.4 * torch.randn(5, 4, generator=generator),
        "ref_logps_BT": logps + 0.4 * torch.randn(5, 4, generator=generator),
        "advantages": torch.tensor([1.5, -2.0, 0.7, -0.5, 1.0]),
        "mask_BT": torch.arange(4)[None, :] < torch.tensor(LENGTHS)[:, None],
        "token_weights": torch.rand(5, 4, generator=generator),
        "entropy_BT": torch.rand(5, 4, generator=generator),
    }


def normaliser(loss_type: str) -> float:
    return grpo_normaliser(
        loss_type, num_sequences=5, num_tokens=sum(LENGTHS), max_completion_length=MAX_COMPLETION_LENGTH
    )


def loss_by_hand(
    loss_type: str,
    level: str,
    columns: dict[str, torch.Tensor],
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float = math.inf,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
) -> float:
    """The loss of the whole batch, one Python number at a time."""
    total = 0.0
    for i, length in enumerate(LENGTHS):
        row = {name: column[i].tolist() for name, column in columns.items()}
        advantage = row["advantages"]
        log_ratios = [row["logps_BT"][t] - row["old_logps_BT"][t] for t in range(length)]
        if level == "sequence" and length:
            log_ratios = [sum(log_ratios) / length] * length
        row_total = 0.0
        for t in range(length):
            ratio = math.exp(log_ratios[t])
            if loss_type == "cispo":
                loss = -min(ratio, epsilon_high) * advantage * row["logps_BT"][t]
            else:
                clipped = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
                loss = -min(min(ratio, delta) * advantage, clipped * advantage)
            loss *= row["token_weights"][t]
            to_reference = row["ref_logps_BT"][t] - row["logps_BT"][t]
            kl = math.exp(to_reference) - to_reference - 1
            row_total += loss + beta * kl * (ratio if use_bias_correction_kl else 1)
        total += row_total / max(length, 1) if loss_type == "grpo" else row_total
    divisors = {"grpo": 5, "dr_grpo": 5 * MAX_COMPLETION_LENGTH}
    return total / divisors.get(loss_type, sum(LENGTHS))


def loss_and_gradient(columns: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logps = columns["logps_BT"].clone().requires_grad_()
    loss, _ = policy_gradient_loss(**columns | {"logps_BT": logps}, **options)
    loss.backward()
    return loss.detach(), logps.grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.3},
        {"epsilon_high": 0.3, "delta": 1.4},
        {"epsilon_high": 0.3, "delta": 1.1},
        {"beta": 0.5},
        {"beta": 0.5, "use_bias_correction_kl": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_loss_equals_a_loop(loss_type: str, level: str, options: dict[str, Any]) -> None:
    columns = batch()
    loss, _ = policy_gradient_loss(
        **columns,
        loss_type=loss_type,
        normaliser=normaliser(loss_type),
        importance_sampling_level=level,
        **options,
    )
    assert loss.item() == pytest.approx(loss_by_hand(loss_type, level, columns, **options), rel=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 5), max_size=4),
    loss_type=st.sampled_from(LOSS_TYPES),
    level=st.sampled_from(["token", "sequence"]),
)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    cuts: list[int], loss_type: str, level: str
) -> None:
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "normaliser": normaliser(loss_type),
        "beta": 0.3,
    }
    columns = batch()
    whole, whole_gradient = loss_and_gradient(columns, **options)
    edges = [0, *sorted(cuts), 5]  # equal edges make empty micro-batches
    parts = []
    for i, j in pairwise(edges):
        width = max(LENGTHS[i:j], default=0)  # a micro-batch is as wide as its longest row
        part = {n: c[i:j, :width] if c.dim() == 2 else c[i:j] for n, c in columns.items()}
        loss, gradient = loss_and_gradient(part, **options)
        parts.append((loss, torch.nn.functional.pad(gradient, (0, 4 - width))))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), whole_gradient)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_stands_outside_the_mask_is_never_looked_at(loss_type: str, level: str) -> None:
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "normaliser": normaliser(loss_type),
        "beta": 0.3,
    }
    columns = batch()
    expected = loss_and_gradient(columns, **options)
    poisoned = {
        name: column.masked_fill(~columns["mask_BT"], math.nan)
        if name.endswith("_BT") and name != "mask_BT"
        else column
        for name, column in columns.items()
    }
    poisoned["token_weights"] = columns["token_weights"].masked_fill(~columns["mask_BT"], math.inf)
    actual = loss_and_gradient(poisoned, **options)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert not actual[1][~columns["mask_BT"]].any()


@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (3, 0), (3, 4)], ids=["no_rows", "nothing", "no_tokens", "no_loss"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batch_without_loss_tokens_gives_zero_and_zero_gradient(
    loss_type: str, level: str, shape: tuple[int, int]
) -> None:
    logps = torch.full(shape, -1.0, requires_grad=True)
    loss, diagnostics = policy_gradient_loss(
        logps,
        None,
        torch.ones(shape[0]),
        torch.zeros(shape, dtype=torch.bool),
        loss_type=loss_type,
        normaliser=grpo_normaliser(loss_type, num_sequences=0, num_tokens=0, max_completion_length=5),
        importance_sampling_level=level,
        ref_logps_BT=torch.full(shape, -2.0),
        beta=0.1,
        entropy_BT=torch.ones(shape),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logps.grad.shape == shape
    assert not logps.grad.any()
    metrics = Metrics()
    add_policy_metrics(metrics, diagnostics)
    assert metrics.values() == {}


def test_supervised_loss_of_nothing_is_zero_with_a_gradient_path() -> None:
    logps = torch.zeros(0, 3, requires_grad=True)
    loss = sft_loss(logps, torch.zeros(0, 3, dtype=torch.bool), normaliser=0)
    loss.backward()
    assert loss.item() == 0.0
    assert logps.grad.shape == (0, 3)


def test_row_without_loss_tokens_still_counts_as_a_sequence() -> None:
    """As in TRL: masking a truncated completion weakens the others' mean no less than a zero advantage would."""
    columns = batch()
    loss, _ = policy_gradient_loss(**columns, loss_type="grpo", normaliser=normaliser("grpo"))
    shorter = {name: column[[0, 1, 3, 4]] for name, column in columns.items()}
    without, _ = policy_gradient_loss(**shorter, loss_type="grpo", normaliser=4)
    torch.testing.assert_close(loss, without * 4 / 5)


def test_cispo_caps_the_ratio_at_epsilon_high_itself() -> None:
    """Not at 1 + epsilon_high: with the defaults every weight is at most 0.2, even on policy."""
    logps, advantages, mask = torch.tensor([[-2.0]]), torch.tensor([3.0]), torch.tensor([[True]])
    losses = {
        epsilon_high: policy_gradient_loss(
            logps, None, advantages, mask, loss_type="cispo", normaliser=1, epsilon_high=epsilon_high
        )[0].item()
        for epsilon_high in (None, 0.28, 5.0)
    }
    assert losses == pytest.approx({None: 0.2 * 6, 0.28: 0.28 * 6, 5.0: 1.0 * 6})


def test_cispo_lets_clipped_tokens_learn_and_the_surrogate_does_not() -> None:
    columns = {
        "logps_BT": torch.tensor([[-1.0, -1.0]]),
        "old_logps_BT": torch.tensor([[-4.0, -2.0]]),
        "advantages": torch.tensor([2.0]),
        "mask_BT": torch.tensor([[True, True]]),
    }
    _, surrogate = loss_and_gradient(columns, loss_type="dapo", normaliser=1)
    _, cispo = loss_and_gradient(columns, loss_type="cispo", normaliser=1, epsilon_high=5.0)
    assert surrogate.tolist() == [[0.0, 0.0]]
    assert cispo.tolist() == [pytest.approx([-5.0 * 2, -math.e * 2])]  # the weight, capped or not, is a constant


def test_delta_bounds_what_a_negative_advantage_can_cost() -> None:
    columns = {
        "logps_BT": torch.tensor([[-1.0]]),
        "old_logps_BT": torch.tensor([[-5.0]]),
        "advantages": torch.tensor([-1.0]),
        "mask_BT": torch.tensor([[True]]),
    }
    unbounded, _ = loss_and_gradient(columns, loss_type="dapo", normaliser=1)
    bounded, gradient = loss_and_gradient(columns, loss_type="dapo", normaliser=1, delta=3.0)
    assert unbounded.item() == pytest.approx(math.exp(4), rel=1e-6)
    assert bounded.item() == 3.0
    assert gradient.item() == 0.0


def test_kl_is_added_after_token_weights_and_outside_them() -> None:
    """A token that an entropy mask or a rollout ratio takes out of the policy term still feels the KL."""
    columns = batch() | {"token_weights": torch.zeros(5, 4)}
    loss, diagnostics = policy_gradient_loss(**columns, loss_type="dapo", normaliser=1, beta=0.5)
    mask = columns["mask_BT"]
    ratio = (columns["logps_BT"] - columns["old_logps_BT"]).exp()
    to_reference = columns["ref_logps_BT"] - columns["logps_BT"]
    kl = (ratio * (to_reference.exp() - to_reference - 1))[mask].sum()
    torch.testing.assert_close(loss, 0.5 * kl)
    torch.testing.assert_close(diagnostics.kl, kl)


def test_bias_correction_changes_the_kl_gradient_even_on_policy() -> None:
    """The corrected gradient at ratio 1 is log(p / p_ref), that of KL(policy || reference); plain k3's is not."""
    columns = {
        "logps_BT": torch.tensor([[-1.0]]),
        "old_logps_BT": None,
        "advantages": torch.tensor([0.0]),
        "mask_BT": torch.tensor([[True]]),
        "ref_logps_BT": torch.tensor([[-1.5]]),
    }
    options = {"loss_type": "dapo", "normaliser": 1, "beta": 1.0}
    _, corrected = loss_and_gradient(columns, **options)
    _, plain = loss_and_gradient(columns, **options, use_bias_correction_kl=False)
    assert corrected.item() == pytest.approx(0.5)
    assert plain.item() == pytest.approx(1 - math.exp(-0.5))


def test_sequence_ratio_is_the_geometric_mean_over_loss_tokens() -> None:
    columns = {
        "logps_BT": torch.tensor([[-1.0, -2.0, -3.0]]),
        "old_logps_BT": torch.tensor([[-1.3, -2.0, 99.0]]),
        "advantages": torch.tensor([1.0]),
        "mask_BT": torch.tensor([[True, True, False]]),
    }
    loss, gradient = loss_and_gradient(
        columns, loss_type="grpo", normaliser=1, importance_sampling_level="sequence", epsilon=0.5
    )
    ratio = math.exp((0.3 + 0.0) / 2)
    assert loss.item() == pytest.approx(-ratio)
    assert gradient.tolist() == [pytest.approx([-ratio / 2, -ratio / 2, 0.0])]


def test_token_advantages_equal_to_the_sequences_change_nothing() -> None:
    columns = batch()
    options = {"loss_type": "dapo", "normaliser": 10, "beta": 0.1}
    per_token = columns | {"advantages": columns["advantages"][:, None].expand(5, 4)}
    for ours, theirs in zip(
        loss_and_gradient(per_token, **options), loss_and_gradient(columns, **options), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", 6), ("bnpo", 100), ("dr_grpo", 6 * 512), ("dapo", 100), ("cispo", 100)]
)
def test_normaliser_counts_what_the_loss_type_says(loss_type: str, expected: float) -> None:
    assert grpo_normaliser(loss_type, num_sequences=6, num_tokens=100, max_completion_length=512) == expected


def test_metrics_of_micro_batches_join_into_those_of_the_whole() -> None:
    columns = batch()
    options = {"loss_type": "dapo", "normaliser": 10, "beta": 0.1}
    parts = []
    for i, j in [(0, 5), (0, 1), (1, 3), (3, 3), (3, 5)]:
        metrics = Metrics()
        part = {name: column[i:j] for name, column in columns.items()}
        add_policy_metrics(metrics, policy_gradient_loss(**part, **options)[1])
        parts.append(metrics)
    assert Metrics.merge(parts[1:]).values() == pytest.approx(parts[0].values(), rel=1e-5)


def test_clip_ratios_are_counted_by_sign_of_the_advantage() -> None:
    """Two rows of two tokens: ratios 0.5 and 2; only the move that the advantage asks for is clipped."""
    ratios = torch.tensor([[0.5, 2.0], [0.5, 2.0], [1.0, 0.5]])
    _, diagnostics = policy_gradient_loss(
        ratios.log(),
        torch.zeros(3, 2),
        torch.tensor([1.0, -1.0, -1.0]),
        torch.tensor([[True, True], [True, False], [True, True]]),
        loss_type="dapo",
        normaliser=1,
        entropy_BT=torch.tensor([[1.0, 2.0], [3.0, math.nan], [4.0, 5.0]]),
    )
    metrics = Metrics()
    add_policy_metrics(metrics, diagnostics)
    assert metrics.values() == pytest.approx(
        {
            "clip_ratio/low_mean": 2 / 5,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 5,
            "clip_ratio/high_max": 1 / 2,
            "clip_ratio/region_mean": 3 / 5,
            "entropy": 3.0,
        }
    )


def test_row_without_loss_tokens_does_not_lower_the_smallest_clip_ratio() -> None:
    _, diagnostics = policy_gradient_loss(
        torch.full((2, 2), -2.0),
        torch.full((2, 2), -1.0),
        torch.tensor([-1.0, -1.0]),
        torch.tensor([[True, True], [False, False]]),
        loss_type="dapo",
        normaliser=2,
    )
    assert diagnostics.low_clipped_min.item() == 1.0


def test_cispo_reports_the_share_of_capped_tokens() -> None:
    _, diagnostics = policy_gradient_loss(
        torch.tensor([[1.4, 1.7], [1.7, 1.7]]).log(),
        torch.zeros(2, 2),
        torch.tensor([1.0, -1.0]),
        torch.tensor([[True, True], [True, False]]),
        loss_type="cispo",
        normaliser=3,
        epsilon_high=1.5,
    )
    metrics = Metrics()
    add_policy_metrics(metrics, diagnostics)
    assert metrics.values() == pytest.approx({"cispo_clip_ratio": 1 / 3})


def test_sequence_level_clipping_counts_sequences_that_have_loss_tokens() -> None:
    _, diagnostics = policy_gradient_loss(
        torch.full((3, 2), -1.0),
        torch.full((3, 2), -2.0),
        torch.tensor([1.0, -1.0, 1.0]),
        torch.tensor([[True, True], [True, False], [False, False]]),
        loss_type="grpo",
        normaliser=3,
        importance_sampling_level="sequence",
    )
    assert isinstance(diagnostics, PolicyDiagnostics)
    assert (diagnostics.high_clipped.item(), diagnostics.num_clip_units.item()) == (1, 2)
    assert diagnostics.high_clipped_max.item() == 1.0


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_supervised_loss_equals_a_loop_and_sums_over_any_split(loss_type: str) -> None:
    columns = batch()
    logps, mask = columns["logps_BT"], columns["mask_BT"]
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


def test_entropy_bonus_is_a_mean_over_the_tokens_of_the_step() -> None:
    columns = batch()
    entropy, mask = columns["entropy_BT"].requires_grad_(), columns["mask_BT"]
    parts = [entropy_bonus(entropy[i:j], mask[i:j], coefficient=0.1, num_tokens=10) for i, j in [(0, 1), (1, 5)]]
    torch.testing.assert_close(sum(parts), -0.1 * entropy[mask].mean())
    sum(parts).backward()
    torch.testing.assert_close(entropy.grad, -0.01 * mask.float())


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, bnpo, dr_grpo, dapo, cispo, got 'ppo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ({"beta": 0.1, "ref_logps_BT": None}, "pass ref_logps_BT"),
        ({"old_logps_BT": torch.zeros(5, 3)}, r"old_logps_BT must have the mask's shape \(5, 4\), got \(5, 3\)"),
        ({"advantages": torch.zeros(4)}, r"advantages must hold one value a sequence \(5\)"),
        ({"token_weights": torch.zeros(1, 4)}, r"token_weights must hold one value a sequence"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        policy_gradient_loss(**{**batch(), "loss_type": "dapo", "normaliser": 1, **changes})
