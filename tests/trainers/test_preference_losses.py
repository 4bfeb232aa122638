"""Preference and reward-model losses against loops that can be checked by eye."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.losses.preference import (
    Completions,
    add_preference_metrics,
    check_preference_options,
    divergence_scores,
    preference_loss,
)
from trainers.losses.reward_model import add_reward_model_metrics, reward_model_loss
from trainers.metrics import Metrics

SPLITTABLE = [
    *["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"],
    *["discopop", "sft", "sigmoid_norm", "cdpo"],
]
SORTING = ["aot", "aot_unpaired"]
OF_DIFFERENCES = ["sigmoid", "cdpo", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm"]
CHOSEN_LENGTHS, REJECTED_LENGTHS = [4, 1, 2, 3, 2], [2, 3, 0, 3, 1]  # the third pair has no rejected token
NUM_PAIRS, NUM_CHOSEN_TOKENS = 5, sum(CHOSEN_LENGTHS)


def side(lengths: list[int], width: int, seed: int) -> Completions:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    logps = -torch.rand(shape, generator=generator) * 3
    return Completions(
        logps_BT=logps,
        mask_BT=torch.arange(width)[None, :] < torch.tensor(lengths)[:, None],
        ref_logps_BT=logps + 0.7 * torch.randn(shape, generator=generator),
        log_sum_sq_probs_BT=-torch.rand(shape, generator=generator),
    )


def batch(*, weighted: bool = False, reference: bool = True) -> tuple[Completions, Completions]:
    """Five pairs; the chosen completions are padded wider than the rejected ones."""
    dropped = ([] if weighted else ["log_sum_sq_probs_BT"]) + ([] if reference else ["ref_logps_BT"])
    chosen, rejected = side(CHOSEN_LENGTHS, 4, 1), side(REJECTED_LENGTHS, 3, 2)
    return (
        dataclasses.replace(chosen, **dict.fromkeys(dropped)),
        dataclasses.replace(rejected, **dict.fromkeys(dropped)),
    )


def options_of(loss_type: str) -> dict[str, Any]:
    return {"label_smoothing": 0.1} if loss_type in ("cdpo", "exo_pair", "robust", *SORTING) else {}


def loss_and_gradients(chosen: Completions, rejected: Completions, **options: Any) -> list[torch.Tensor]:
    """The loss, and its gradient for the log-probabilities of chosen and of rejected."""
    leaves = [each.logps_BT.clone().requires_grad_() for each in (chosen, rejected)]
    sides = [dataclasses.replace(s, logps_BT=leaf) for s, leaf in zip((chosen, rejected), leaves, strict=True)]
    counts = {"num_pairs": NUM_PAIRS, "num_chosen_tokens": NUM_CHOSEN_TOKENS}
    loss, _ = preference_loss(*sides, **counts | options)
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def score(x: float, kind: str, alpha: float) -> float:
    t = math.exp(x)
    if kind == "forward_kl":
        return 1 - 1 / t
    if kind == "js_divergence":
        return math.log(2 * t / (t + 1))
    return math.log(t) if kind == "reverse_kl" or alpha == 1 else (t ** (alpha - 1) - 1) / (alpha - 1)


def loss_of_pair(
    loss_type: str, c: float, r: float, fc: float, fr: float, lengths: tuple[int, int], **o: float
) -> float:
    """c, r: log-ratios; fc, fr: their divergence scores."""
    beta, e, tau = o["beta"], o["label_smoothing"], o["discopop_tau"]
    wins = sigmoid(beta * (fc - fr))
    per_token = fc / max(lengths[0], 1) - fr / max(lengths[1], 1)
    mixing = sigmoid(beta * (fc - fr) / tau)
    return {
        "sigmoid": lambda: -math.log(wins),
        "cdpo": lambda: -(1 - e) * math.log(wins) - e * math.log(1 - wins),
        "hinge": lambda: max(0.0, 1 - beta * (fc - fr)),
        "ipo": lambda: (per_token - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -math.log(sigmoid(beta * per_token)),
        "exo_pair": lambda: wins * math.log(wins / (1 - e)) + (1 - wins) * math.log((1 - wins) / e),
        "robust": lambda: (-(1 - e) * math.log(wins) + e * math.log(1 - wins)) / (1 - 2 * e),
        "nca_pair": lambda: -math.log(sigmoid(beta * c)) - (math.log(sigmoid(-beta * c) * sigmoid(-beta * r))) / 2,
        "bco_pair": lambda: -math.log(sigmoid(beta * c) * sigmoid(-beta * r)),
        "sppo_hard": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "apo_down": lambda: sigmoid(beta * c) + 1 - sigmoid(beta * (c - r)),
        "discopop": lambda: -math.log(wins) * (1 - mixing) + (1 / wins - 1) * mixing,
    }[loss_type]()


def loss_by_hand(
    loss_type: str,
    chosen: Completions,
    rejected: Completions,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float = 1.0,
    discopop_tau: float = 0.05,
) -> float:
    """The loss of all five pairs, one Python number at a time."""
    total, policy_margins, ref_margins, ratios = 0.0, [], [], []
    for i, lengths in enumerate(zip(CHOSEN_LENGTHS, REJECTED_LENGTHS, strict=True)):
        policy, reference, weight = [], [], 1.0
        for each, length in zip((chosen, rejected), lengths, strict=True):
            logps = each.logps_BT[i].tolist()
            refs = [0.0] * length if each.ref_logps_BT is None else each.ref_logps_BT[i].tolist()
            factors = [1.0 if t < min(lengths) else ld_alpha for t in range(length)]
            policy.append(sum(logps[t] * factors[t] for t in range(length)))
            reference.append(sum(refs[t] * factors[t] for t in range(length)))
            if each.log_sum_sq_probs_BT is not None and length:
                norms = each.log_sum_sq_probs_BT[i].tolist()
                weight *= math.exp(sum(logps[t] - norms[t] for t in range(length)) / length)
        c, r = policy[0] - reference[0], policy[1] - reference[1]
        fc, fr = (score(x, f_divergence_type, f_alpha_divergence_coef) for x in (c, r))
        policy_margins.append(policy[0] - policy[1])
        ref_margins.append(reference[0] - reference[1])
        ratios.append((c, r))
        if loss_type not in (*SORTING, "sft"):
            smoothing = {"beta": beta, "label_smoothing": label_smoothing, "discopop_tau": discopop_tau}
            total += weight * loss_of_pair(loss_type, c, r, fc, fr, lengths, **smoothing)
    if loss_type == "sft":
        return -chosen.logps_BT[chosen.mask_BT].sum().item() / NUM_CHOSEN_TOKENS
    first, second = {
        "aot": (policy_margins, ref_margins),
        "aot_unpaired": ([c for c, _ in ratios], [r for _, r in ratios]),
    }.get(loss_type, ([], []))
    for x, y in zip(sorted(first), sorted(second), strict=True):
        wins = sigmoid(beta * (x - y))
        total -= (1 - label_smoothing) * math.log(wins) + label_smoothing * math.log(1 - wins)
    return total / NUM_PAIRS


@pytest.mark.parametrize("options", [{}, {"beta": 3.0}, {"ld_alpha": 0.25, "discopop_tau": 0.4}], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("loss_type", SPLITTABLE + SORTING)
def test_preference_loss_equals_a_loop(loss_type: str, weighted: bool, options: dict[str, Any]) -> None:
    chosen, rejected = batch(weighted=weighted and loss_type not in (*SORTING, "sft"))
    options = options | options_of(loss_type)
    actual = loss_and_gradients(chosen, rejected, loss_type=loss_type, **options)[0].item()
    assert actual == pytest.approx(loss_by_hand(loss_type, chosen, rejected, **options), rel=1e-5)


@pytest.mark.parametrize(
    ("f_divergence_type", "alpha"),
    [("forward_kl", 0.5), ("js_divergence", 0.5), ("alpha_divergence", 0.5), ("alpha_divergence", 1.0)],
)
@pytest.mark.parametrize("loss_type", OF_DIFFERENCES)
def test_divergences_equal_a_loop(loss_type: str, f_divergence_type: str, alpha: float) -> None:
    options = options_of(loss_type) | {"f_divergence_type": f_divergence_type, "f_alpha_divergence_coef": alpha}
    actual = loss_and_gradients(*batch(), loss_type=loss_type, **options)[0].item()
    assert actual == pytest.approx(loss_by_hand(loss_type, *batch(), **options), rel=1e-5)


@pytest.mark.parametrize("loss_type", OF_DIFFERENCES)
def test_reference_free_is_a_reference_of_zeros(loss_type: str) -> None:
    free = batch(reference=False)
    zeros = [dataclasses.replace(s, ref_logps_BT=torch.zeros_like(s.logps_BT)) for s in free]
    options = options_of(loss_type) | {"loss_type": loss_type}
    actual, expected = loss_and_gradients(*free, **options), loss_and_gradients(*zeros, **options)
    assert actual[0].item() == pytest.approx(loss_by_hand(loss_type, *free, **options_of(loss_type)), rel=1e-5)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loss_type", [name for name in SPLITTABLE if name != "sft"])
def test_weights_of_pairs_are_held_constant(loss_type: str) -> None:
    """The gradient of each pair is its weight times what it would be unweighted."""
    weighted = batch(weighted=True)
    weights = torch.ones(NUM_PAIRS, 1)
    for s in weighted:
        aligned = torch.where(s.mask_BT, s.logps_BT - s.log_sum_sq_probs_BT, 0.0)
        weights = weights * (aligned.sum(1) / s.mask_BT.sum(1).clamp(min=1)).exp().unsqueeze(1)
    options = options_of(loss_type) | {"loss_type": loss_type}
    actual, expected = loss_and_gradients(*weighted, **options), loss_and_gradients(*batch(), **options)
    for k in (1, 2):
        torch.testing.assert_close(actual[k], weights * expected[k])


def test_several_types_add_up_with_their_weights() -> None:
    types, weights = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    parts = [loss_and_gradients(*batch(), loss_type=name) for name in types]
    mixed = loss_and_gradients(*batch(), loss_type=types, loss_weights=weights)
    for k in range(3):
        expected = sum(weight * part[k] for weight, part in zip(weights, parts, strict=True))
        torch.testing.assert_close(mixed[k], expected)
    unweighted = loss_and_gradients(*batch(), loss_type=types)[0]
    torch.testing.assert_close(unweighted, sum(part[0] for part in parts))


def cut(each: Completions, start: int, stop: int) -> Completions:
    """Rows of one side, as wide as the longest of them."""
    width = max(each.mask_BT[start:stop].sum(1).tolist(), default=0)
    return Completions(*(None if c is None else c[start:stop, :width] for c in vars(each).values()))


@settings(deadline=None, max_examples=80)
@given(
    cuts=st.lists(st.integers(0, 5), max_size=3),
    loss_type=st.sampled_from(SPLITTABLE),
    weighted=st.booleans(),
    ld_alpha=st.sampled_from([None, 0.5]),
)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradients(
    cuts: list[int], loss_type: str, weighted: bool, ld_alpha: float | None
) -> None:
    chosen, rejected = batch(weighted=weighted and loss_type != "sft")
    options = options_of(loss_type) | {"loss_type": loss_type, "ld_alpha": ld_alpha}
    whole = loss_and_gradients(chosen, rejected, **options)
    parts = []
    for i, j in pairwise([0, *sorted(cuts), 5]):  # equal edges make empty micro-batches
        loss, *found = loss_and_gradients(cut(chosen, i, j), cut(rejected, i, j), **options)
        widths = [4 - found[0].shape[1], 3 - found[1].shape[1]]
        padded = [torch.nn.functional.pad(g, (0, width)) for g, width in zip(found, widths, strict=True)]
        parts.append([loss, *padded])
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0], rtol=1e-6, atol=1e-6)
    for k in (1, 2):
        torch.testing.assert_close(torch.cat([part[k] for part in parts]), whole[k], rtol=1e-6, atol=1e-6)


def test_two_and_three_pairs_report_the_metrics_of_five() -> None:
    chosen, rejected = batch()
    counts = {"num_pairs": 5, "beta": 0.5}

    def metrics_of(start: int, stop: int) -> Metrics:
        metrics = Metrics()
        add_preference_metrics(
            metrics, preference_loss(cut(chosen, start, stop), cut(rejected, start, stop), **counts)[1]
        )
        return metrics

    merged = Metrics.merge([metrics_of(0, 2), metrics_of(2, 2), metrics_of(2, 5)]).values()
    ratios = [
        [sum((s.logps_BT - s.ref_logps_BT)[i, :length].tolist()) for i, length in enumerate(lengths)]
        for s, lengths in ((chosen, CHOSEN_LENGTHS), (rejected, REJECTED_LENGTHS))
    ]
    assert merged == pytest.approx(metrics_of(0, 5).values(), rel=1e-5)
    assert merged["rewards/chosen"] == pytest.approx(0.5 * sum(ratios[0]) / 5, rel=1e-5)
    assert merged["rewards/accuracies"] == sum(c > r for c, r in zip(*ratios, strict=True)) / 5
    assert merged["rewards/margins"] == pytest.approx(0.5 * (sum(ratios[0]) - sum(ratios[1])) / 5, rel=1e-4)
    assert merged["logps/rejected"] == pytest.approx(rejected.logps_BT[rejected.mask_BT].sum().item() / 5, rel=1e-5)


@pytest.mark.parametrize("loss_type", SPLITTABLE + SORTING)
def test_what_stands_outside_the_mask_is_never_looked_at(loss_type: str) -> None:
    clean = batch(weighted=loss_type not in (*SORTING, "sft"))
    poisoned = [
        dataclasses.replace(
            s,
            **{
                name: column.masked_fill(~s.mask_BT, math.nan)
                for name, column in vars(s).items()
                if name != "mask_BT" and column is not None
            },
        )
        for s in clean
    ]
    options = options_of(loss_type) | {"loss_type": loss_type, "ld_alpha": 0.5}
    expected, actual = loss_and_gradients(*clean, **options), loss_and_gradients(*poisoned, **options)
    for ours, theirs, s in zip(actual, expected, (None, *clean), strict=True):
        assert torch.equal(ours, theirs)
        assert s is None or not ours[~s.mask_BT].any()


@pytest.mark.parametrize("loss_type", SPLITTABLE + SORTING)
def test_micro_batch_without_pairs_gives_zero_and_an_empty_gradient(loss_type: str) -> None:
    nothing = Completions(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), torch.zeros(0, 3))
    loss, *found = loss_and_gradients(nothing, nothing, loss_type=loss_type, **options_of(loss_type))
    assert loss.item() == 0.0
    assert [gradient.shape for gradient in found] == [(0, 3), (0, 3)]
    metrics = Metrics()
    add_preference_metrics(metrics, preference_loss(nothing, nothing, num_pairs=0)[1])
    assert metrics.values() == {}


@pytest.mark.parametrize("loss_type", SORTING)
def test_sorting_losses_refuse_a_part_of_the_step(loss_type: str) -> None:
    chosen, rejected = batch()
    with pytest.raises(ValueError, match=f"{loss_type} sort all pairs .* this micro-batch holds only 2 of 5"):
        preference_loss(cut(chosen, 0, 2), cut(rejected, 0, 2), num_pairs=5, loss_type=loss_type)


@pytest.mark.parametrize("loss_type", SORTING)
def test_sorting_losses_do_not_see_the_order_of_the_pairs(loss_type: str) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    chosen, rejected = batch()
    shuffled = [Completions(*(None if c is None else c[order] for c in vars(s).values())) for s in (chosen, rejected)]
    loss, *found = loss_and_gradients(chosen, rejected, loss_type=loss_type)
    other, *others = loss_and_gradients(*shuffled, loss_type=loss_type)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(others[0], found[0][order])


def test_far_apart_completions_keep_losses_and_gradients_finite() -> None:
    """500 nats either way: exp overflows a float32 at 88."""
    mask = torch.ones(2, 1, dtype=torch.bool)
    zeros = torch.zeros(2, 1)
    chosen = Completions(torch.tensor([[-500.0], [0.0]]), mask, torch.tensor([[0.0], [-500.0]]))
    rejected = Completions(zeros, mask, zeros)
    for loss_type in SPLITTABLE + SORTING:
        options = options_of(loss_type) | {"num_pairs": 2, "beta": 1.0, "loss_type": loss_type}
        assert all(found.isfinite().all() for found in loss_and_gradients(chosen, rejected, **options)), loss_type
    for f_divergence_type in ("forward_kl", "js_divergence", "alpha_divergence"):
        options = {"num_pairs": 2, "beta": 1.0, "f_divergence_type": f_divergence_type}
        assert all(found.isfinite().all() for found in loss_and_gradients(chosen, rejected, **options))


def test_divergence_scores_have_the_slope_of_the_log_ratio_at_zero() -> None:
    """f'(1) = 0 for all but the constant of reverse_kl, and near the reference they differ by a factor only."""
    for kind, slope in (("reverse_kl", 1.0), ("forward_kl", 1.0), ("js_divergence", 0.5), ("alpha_divergence", 1.0)):
        x = torch.zeros(1, requires_grad=True)
        scores = divergence_scores(x, kind)
        scores.sum().backward()
        assert scores.item() == pytest.approx(0.0, abs=1e-7)
        assert x.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dpo"}, "loss_type must be one of sigmoid, .* got 'dpo'"),
        ({"loss_type": []}, "loss_type names no loss"),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]},
            r"one weight for each of the 2 loss types .* \[1.0\]",
        ),
        ({"loss_type": "exo_pair"}, "logarithm of label_smoothing, which is 0"),
        ({"loss_type": "sigmoid", "label_smoothing": 0.1}, "not by sigmoid. 'cdpo' is the smoothed"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"lie in \[0, 0.5\), got 0.5"),
        ({"loss_type": "sigmoid", "beta": 0.0}, "beta must be positive, got 0.0"),
        ({"loss_type": "sigmoid", "ld_alpha": 1.5}, r"ld_alpha must lie in \[0, 1\].* got 1.5"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau must be positive"),
        ({"loss_type": "sigmoid", "f_divergence_type": "kl"}, "f_divergence_type must be one of .* got 'kl'"),
        ({"loss_type": ["sigmoid", "apo_zero"], "f_divergence_type": "forward_kl"}, "no meaning for apo_zero"),
        ({"loss_type": "nca_pair", "reference_free": True}, "nca_pair compare each completion with a reference"),
        (
            {"loss_type": "sigmoid", "reference_free": True, "f_divergence_type": "js_divergence"},
            "measures the distance from a reference",
        ),
        ({"loss_type": ["aot", "sft"], "use_weighting": True}, "aot, sft cannot be weighted pair by pair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_fit_together_are_refused_with_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_preference_options(**options)


def test_the_loss_refuses_what_the_check_refuses() -> None:
    with pytest.raises(ValueError, match="nca_pair compare each completion with a reference"):
        preference_loss(*batch(reference=False), num_pairs=5, loss_type="nca_pair")
    with pytest.raises(ValueError, match="aot cannot be weighted"):
        preference_loss(*batch(weighted=True), num_pairs=5, loss_type="aot")


def test_sides_that_do_not_fit_are_refused_with_words() -> None:
    chosen, rejected = batch()
    with pytest.raises(ValueError, match="got 5 chosen and 2 rejected"):
        preference_loss(chosen, cut(rejected, 0, 2), num_pairs=5)
    with pytest.raises(ValueError, match="ref_logps_BT must be given for both sides or for none: rejected has none"):
        preference_loss(chosen, dataclasses.replace(rejected, ref_logps_BT=None), num_pairs=5)
    with pytest.raises(ValueError, match=r"rejected.logps_BT must have the mask's shape \(5, 3\), got \(5, 2\)"):
        preference_loss(chosen, dataclasses.replace(rejected, logps_BT=rejected.logps_BT[:, :2]), num_pairs=5)
    with pytest.raises(ValueError, match="pass num_chosen_tokens"):
        preference_loss(chosen, rejected, num_pairs=5, loss_type="sft")


REWARDS = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.0]), torch.tensor([0.2, 0.5, -1.0, 0.3, -2.0])
MARGINS = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.1])


@pytest.mark.parametrize("centering", [None, 0.1])
@pytest.mark.parametrize("margins", [None, MARGINS], ids=["no_margin", "margin"])
def test_reward_model_loss_equals_a_loop_and_adds_up(margins: torch.Tensor | None, centering: float | None) -> None:
    def part(start: int, stop: int) -> tuple[torch.Tensor, Metrics]:
        loss, diagnostics = reward_model_loss(
            *(rewards[start:stop] for rewards in REWARDS),
            None if margins is None else margins[start:stop],
            num_pairs=5,
            center_rewards_coefficient=centering,
        )
        metrics = Metrics()
        add_reward_model_metrics(metrics, diagnostics)
        return loss, metrics

    rows = zip(
        *(column.tolist() for column in (*REWARDS, MARGINS if margins is not None else 0 * MARGINS)), strict=True
    )
    expected = sum(-math.log(sigmoid(c - r - m)) + (centering or 0) * (c + r) ** 2 for c, r, m in rows) / 5
    parts = [part(0, 2), part(2, 2), part(2, 5)]
    assert part(0, 5)[0].item() == pytest.approx(expected, rel=1e-6)
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(expected, rel=1e-6)
    merged = Metrics.merge(metrics for _, metrics in parts).values()
    assert merged == pytest.approx(
        {"accuracy": 3 / 5, "margin": 4.8 / 5, "mean_reward": 0.8 / 10, "min_reward": -2.0, "max_reward": 2.0}
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_smallest_and_largest_reward_are_rewards_that_were_given(sign: int) -> None:
    metrics = Metrics()
    rewards = torch.tensor([0.5, 3.0]) * sign, torch.tensor([1.0, 2.0]) * sign
    add_reward_model_metrics(metrics, reward_model_loss(*rewards, num_pairs=2)[1])
    found = metrics.values()
    assert (found["min_reward"], found["max_reward"]) == ((0.5, 3.0) if sign == 1 else (-3.0, -0.5))


def test_reward_model_loss_of_nothing_is_zero_and_reports_nothing() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, diagnostics = reward_model_loss(empty, empty, num_pairs=0)
    loss.backward()
    metrics = Metrics()
    add_reward_model_metrics(metrics, diagnostics)
    assert loss.item() == 0.0
    assert metrics.values() == {}


def test_reward_model_loss_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"rejected_rewards_B must hold one number per pair, .* got \(5, 1\)"):
        reward_model_loss(REWARDS[0], REWARDS[1][:, None], num_pairs=5)
    with pytest.raises(ValueError, match=r"margins_B must hold one number per pair, .* got \(1,\)"):
        reward_model_loss(*REWARDS, MARGINS[:1], num_pairs=5)
