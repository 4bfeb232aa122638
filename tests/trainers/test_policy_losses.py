"""The losses of the GRPO family against loops that can be checked by eye; against TRL: tests/golden."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.losses.policy import PolicyDiagnostics, add_policy_metrics, grpo_normaliser, policy_gradient_loss
from trainers.losses.policy_terms import FipoWeight, SapoGate, VespoWeight, discounted_sums, importance_ratios
from trainers.losses.types import ImportanceLevel, PolicyLossType
from trainers.metrics import Metrics

LOSS_TYPES = list(get_args(PolicyLossType))
LEVELS = list(get_args(ImportanceLevel))
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
        "rollout_ratios": torch.rand(5, 4, generator=generator) + 0.5,
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
    sapo: SapoGate | None = None,
    vespo: VespoWeight | None = None,
    fipo: FipoWeight | None = None,
) -> float:
    """The loss of the whole batch, one Python number at a time."""
    sapo, vespo, fipo = sapo or SapoGate(), vespo or VespoWeight(), fipo or FipoWeight()
    total = 0.0
    for i, length in enumerate(LENGTHS):
        row = {name: column[i].tolist() for name, column in columns.items()}
        advantage = row["advantages"]
        raw = [row["logps_BT"][t] - row["old_logps_BT"][t] for t in range(length)]
        log_ratios = raw
        if level in ("sequence", "sequence_token") and length:
            log_ratios = [sum(raw) / length] * length
        if level == "sequence_product":
            log_ratios = [sum(raw)] * length
        ratios = [math.exp(x) for x in log_ratios]
        w = math.exp(sum(raw)) * math.prod(row["rollout_ratios"][:length])
        k, lam = (vespo.k_pos, vespo.lambda_pos) if advantage >= 0 else (vespo.k_neg, vespo.lambda_neg)
        geometric = 1.0  # mean of the clipped ratios and of the engine's
        for t in range(length):
            bounded = min(max(raw[t], -epsilon), epsilon_high)
            kept = min(raw[t], bounded) if advantage > 0 else max(raw[t], bounded)
            geometric *= (math.exp(kept) * row["rollout_ratios"][t]) ** (1 / length)
        row_total = 0.0
        for t, ratio in enumerate(ratios):
            clipped = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
            loss = -min(min(ratio, delta) * advantage, clipped * advantage)
            if loss_type == "cispo":
                loss = -min(ratio, epsilon_high) * advantage * row["logps_BT"][t]
            if loss_type == "sapo":
                tau = sapo.temperature_pos if advantage > 0 else sapo.temperature_neg
                loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
            if loss_type == "vespo":
                loss = -math.exp(lam) * w**k * math.exp(-lam * w) * advantage * row["logps_BT"][t]
            if loss_type == "fipo":
                future = [0.5 ** ((s - t) / fipo.decay_rate) * raw[s] for s in range(t, length) if ratios[s] <= delta]
                weight = math.exp(sum(future))
                if fipo.clip_range is not None:
                    low = 1.0 if fipo.clip_high_only else 1 - fipo.clip_range
                    weight = min(max(weight, low), 1 + fipo.clip_range)
                if fipo.safety_threshold is not None and advantage < 0 and ratio > fipo.safety_threshold:
                    weight = min(max(weight, 0.8), 1.0)
                loss *= weight
            if loss_type == "gmpo":
                loss = -advantage * geometric
            if loss_type == "cpgd":
                bound = math.log(1 + epsilon_high) if advantage > 0 else math.log(1 - epsilon)
                kept = min(raw[t], bound) if advantage > 0 else max(raw[t], bound)
                loss = -advantage * (row["old_logps_BT"][t] + kept)
            if loss_type == "gpg":
                loss = -advantage * row["logps_BT"][t]
            if loss_type == "kl_cov":
                loss = -ratio * advantage
            if loss_type == "real":
                loss = 0.0  # its gradient alone is of the advantage
            if loss_type.startswith("dppo"):
                p, old_p = math.exp(row["logps_BT"][t]), math.exp(row["old_logps_BT"][t])
                gone = abs(p - old_p)
                if loss_type == "dppo_kl":
                    rest, old_rest = max(1 - p, 0.0), max(1 - old_p, 0.0)
                    others = math.log((old_rest + 1e-8) / (rest + 1e-8))
                    gone = old_p * math.log(old_p / p) + old_rest * others
                too_far = gone > epsilon_high if advantage > 0 and p > old_p else gone > epsilon
                asked = (p > old_p) == (advantage > 0)
                loss = 0.0 if too_far and asked else -math.exp(raw[t]) * advantage * row["logps_BT"][t]
            corrected = loss_type in ("vespo", "gmpo")
            loss *= row["token_weights"][t] * (1.0 if corrected else row["rollout_ratios"][t])
            to_reference = row["ref_logps_BT"][t] - row["logps_BT"][t]
            kl = math.exp(to_reference) - to_reference - 1
            row_total += loss + beta * kl * (ratio if use_bias_correction_kl else 1)
        total += row_total / max(length, 1) if loss_type in ("grpo", "sapo", "gmpo") else row_total
    divisors = {"grpo": 5, "sapo": 5, "luspo": 5, "gmpo": 5, "dr_grpo": 5 * MAX_COMPLETION_LENGTH}
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
@pytest.mark.parametrize("level", LEVELS)
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
    level=st.sampled_from(LEVELS),
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


@pytest.mark.parametrize("level", LEVELS)
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
    for name in ("token_weights", "rollout_ratios"):
        poisoned[name] = columns[name].masked_fill(~columns["mask_BT"], math.inf)
    actual = loss_and_gradient(poisoned, **options)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert not actual[1][~columns["mask_BT"]].any()


@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (3, 0), (3, 4)], ids=["no_rows", "nothing", "no_tokens", "no_loss"])
@pytest.mark.parametrize("level", LEVELS)
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


def test_a_kl_beyond_its_bound_counts_as_the_bound() -> None:
    """By hand: exp(3) - 3 - 1 = 16.1 counts 10, with no gradient; exp(1) - 2 = 0.718 is as it is."""
    columns = {
        "logps_BT": torch.tensor([[-4.0, -2.0]]),
        "old_logps_BT": None,
        "advantages": torch.tensor([0.0]),
        "mask_BT": torch.tensor([[True, True]]),
        "ref_logps_BT": torch.tensor([[-1.0, -1.0]]),
    }
    options = {"loss_type": "dapo", "normaliser": 1, "beta": 0.5, "use_bias_correction_kl": False}
    loss, gradient = loss_and_gradient(columns, **options, kl_clip_max=10.0)
    assert loss.item() == pytest.approx(0.5 * (10 + math.e - 2))
    assert gradient.flatten().tolist() == pytest.approx([0.0, 0.5 * (1 - math.e)])


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
    ("loss_type", "expected"),
    [
        *((name, 6) for name in ("grpo", "sapo", "luspo", "gmpo")),
        *(
            (name, 100)
            for name in (
                "bnpo",
                "real",
                "dapo",
                "cispo",
                "vespo",
                "fipo",
                "gpg",
                "clip_cov",
                "kl_cov",
                "dppo_tv",
                "dppo_kl",
            )
        ),
        ("dr_grpo", 6 * 512),
    ],
)
def test_normaliser_counts_what_the_loss_type_says(loss_type: str, expected: float) -> None:
    assert grpo_normaliser(loss_type, num_sequences=6, num_tokens=100, max_completion_length=512) == expected


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_metrics_of_micro_batches_join_into_those_of_the_whole(loss_type: str) -> None:
    columns = batch()
    options = {"loss_type": loss_type, "normaliser": 10, "beta": 0.1}
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


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("sapo", {"sapo": SapoGate(temperature_pos=2.0, temperature_neg=5.0)}),
        ("vespo", {"vespo": VespoWeight(k_pos=1.0, lambda_pos=0.5, k_neg=4.0, lambda_neg=1.5)}),
        ("fipo", {"fipo": FipoWeight(decay_rate=1.0, clip_high_only=False)}),
        ("fipo", {"fipo": FipoWeight(decay_rate=2.0, clip_range=None, safety_threshold=None)}),
        ("fipo", {"fipo": FipoWeight(clip_range=0.6, clip_high_only=False, safety_threshold=1.0), "delta": 1.3}),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_constants_of_a_loss_type_do_what_a_loop_does(loss_type: str, level: str, options: dict[str, Any]) -> None:
    columns = batch()
    loss, _ = policy_gradient_loss(
        **columns,
        loss_type=loss_type,
        normaliser=normaliser(loss_type),
        importance_sampling_level=level,
        **options,
    )
    expected = loss_by_hand(loss_type, level, columns, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(loss_by_hand(loss_type, level, columns), rel=1e-3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_token_gradients_of_a_sequence_ratio_add_up_to_the_sequences(loss_type: str) -> None:
    """GSPO-token equals GSPO in value and gradient while a sequence has one advantage and every token one weight."""
    columns = batch() | {"token_weights": torch.full((5, 1), 0.7), "rollout_ratios": torch.full((5, 1), 1.2)}
    options = {"loss_type": loss_type, "normaliser": 10, "epsilon_high": 0.3, "fipo": FipoWeight(clip_range=0.0)}
    sequence = loss_and_gradient(columns, **options, importance_sampling_level="sequence")
    token = loss_and_gradient(columns, **options, importance_sampling_level="sequence_token")
    for ours, theirs in zip(token, sequence, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_sequence_token_gives_each_token_its_own_advantage() -> None:
    """Two tokens of opposite advantage, both at the ratio of their sequence, each pushed its own way."""
    columns = {
        "logps_BT": torch.tensor([[-1.0, -2.0]]),
        "old_logps_BT": torch.tensor([[-1.1, -2.1]]),
        "advantages": torch.tensor([[2.0, -3.0]]),
        "mask_BT": torch.tensor([[True, True]]),
    }
    options = {"loss_type": "grpo", "normaliser": 1}
    _, gradient = loss_and_gradient(columns, **options, importance_sampling_level="sequence_token")
    ratio = math.exp(0.1)
    assert gradient.tolist() == [pytest.approx([-ratio * 2 / 2, ratio * 3 / 2])]
    _, shared = loss_and_gradient(columns, **options, importance_sampling_level="sequence")
    assert shared.tolist() == [pytest.approx([ratio / 4, ratio / 4])]


def test_product_of_ratios_is_the_probability_ratio_of_the_completion() -> None:
    logps, old_logps = torch.tensor([[0.5, 0.4, 0.1]]).log(), torch.tensor([[0.25, 0.2, 0.9]]).log()
    mask = torch.tensor([[True, True, False]])
    assert importance_ratios(logps, old_logps, mask, "sequence_product").tolist() == [[pytest.approx(4.0)]]
    assert importance_ratios(logps, old_logps, mask, "sequence").tolist() == [[pytest.approx(2.0)]]


@pytest.mark.parametrize(("advantage", "temperature"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_weighs_a_token_most_on_policy_and_never_stops_it(advantage: float, temperature: float) -> None:
    """Its slope is sech^2 of half the distance: 1 on policy, as in the plain policy gradient, and never 0."""
    for ratio in (0.2, 1.0, 3.0):
        columns = {
            "logps_BT": torch.tensor([[-1.0]]),
            "old_logps_BT": torch.tensor([[-1.0 - math.log(ratio)]]),
            "advantages": torch.tensor([advantage]),
            "mask_BT": torch.tensor([[True]]),
        }
        _, gradient = loss_and_gradient(columns, loss_type="sapo", normaliser=1)
        slope = 1 / math.cosh(temperature * (ratio - 1) / 2) ** 2
        assert gradient.item() == pytest.approx(-slope * ratio * advantage)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gmpo_has_the_gradient_of_its_geometric_mean_by_finite_differences(advantage: float) -> None:
    """And none at tokens that are clipped: their log-ratio has left the range the way that the advantage asks for."""
    logps = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    columns = {
        "old_logps_BT": torch.tensor([[-1.1, -2.9, -1.0]], dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "mask_BT": torch.ones(1, 3, dtype=torch.bool),
    }
    options = {"loss_type": "gmpo", "normaliser": 1, "epsilon": 0.4}
    _, gradient = loss_and_gradient(columns | {"logps_BT": logps}, **options)
    for t in range(3):
        step = torch.zeros(1, 3, dtype=torch.float64)
        step[0, t] = 1e-6
        higher, _ = policy_gradient_loss(logps + step, **columns, **options)
        lower, _ = policy_gradient_loss(logps - step, **columns, **options)
        assert gradient[0, t].item() == pytest.approx(((higher - lower) / 2e-6).item(), abs=1e-8)
    assert (gradient[0] == 0).tolist() == ([False, True, True] if advantage > 0 else [False, False, False])


def test_selected_tokens_lose_their_gradient_or_are_drawn_back() -> None:
    """Clip-Cov: as if the token were not there; KL-Cov: its gradient gets the coefficient, by the sign of its move."""
    selected = torch.zeros(5, 4, dtype=torch.bool)
    selected[0, 1] = selected[3, 2] = selected[2, 0] = True  # the last one has no loss token in its row
    columns = batch() | {"rollout_ratios": None, "token_weights": None}
    options = {"normaliser": 10}
    _, plain = loss_and_gradient(columns, loss_type="dapo", **options)
    _, clipped = loss_and_gradient(columns | {"selected_BT": selected}, loss_type="clip_cov", **options)
    assert torch.equal(clipped, plain.masked_fill(selected, 0.0))
    _, free = loss_and_gradient(columns, loss_type="kl_cov", **options)
    _, drawn = loss_and_gradient(columns | {"selected_BT": selected}, loss_type="kl_cov", kl_cov_coef=0.7, **options)
    moves = (columns["logps_BT"] - columns["old_logps_BT"]).sign()
    torch.testing.assert_close(drawn - free, 0.07 * moves * (selected & columns["mask_BT"]))


def test_dppo_lets_unlikely_tokens_go_far_and_holds_likely_ones() -> None:
    """A ratio of 10 at a probability of 0.001 stays in reach, one of 1.5 at 0.5 does not; PPO has it the other way."""
    columns = {
        "logps_BT": torch.tensor([[0.01, 0.75]]).log(),
        "old_logps_BT": torch.tensor([[0.001, 0.5]]).log(),
        "advantages": torch.tensor([1.0]),
        "mask_BT": torch.ones(1, 2, dtype=torch.bool),
    }
    _, tv = loss_and_gradient(columns, loss_type="dppo_tv", normaliser=1, epsilon=0.2)
    assert tv.tolist() == [pytest.approx([-10.0, 0.0])]
    _, kl = loss_and_gradient(columns, loss_type="dppo_kl", normaliser=1, epsilon=0.05, dppo_ratio_cap=4.0)
    assert kl.tolist() == [pytest.approx([-4.0, 0.0])]
    _, ppo = loss_and_gradient(columns, loss_type="dapo", normaliser=1, epsilon=0.6)
    assert ppo.tolist() == [pytest.approx([0.0, -1.5])]


@pytest.mark.parametrize("loss_type", ["dppo_tv", "dppo_kl"])
def test_dppo_without_a_cap_weighs_by_the_ratio_itself(loss_type: str) -> None:
    columns = {**batch(), "logps_BT": batch()["old_logps_BT"] + 4.0}  # e^4 is 54.6
    told: dict[str, Any] = {"loss_type": loss_type, "normaliser": 1, "epsilon": 1e9}
    capped, far, free = (loss_and_gradient(columns, **told, dppo_ratio_cap=cap)[1] for cap in (20.0, 1e9, None))
    assert torch.equal(free, far)
    assert not torch.equal(free, capped)


def test_luspo_sums_where_grpo_averages() -> None:
    columns = batch()
    lengths = torch.tensor(LENGTHS)
    options = {"normaliser": 5, "importance_sampling_level": "sequence"}
    luspo, _ = policy_gradient_loss(**columns, **options, loss_type="luspo")
    longer = columns | {"advantages": columns["advantages"] * lengths}
    grpo, _ = policy_gradient_loss(**longer, **options, loss_type="grpo")
    torch.testing.assert_close(luspo, grpo)


def test_vespo_weighs_by_the_whole_completion_and_by_what_the_engine_drew() -> None:
    """Ratios 2 and 1/2 cancel; a rollout ratio of 1.5 then moves w to where a positive advantage counts less."""
    columns = {
        "logps_BT": torch.tensor([[-1.0, -2.0]]),
        "old_logps_BT": torch.tensor([[-1.0 - math.log(2), -2.0 + math.log(2)]]),
        "advantages": torch.tensor([1.0]),
        "mask_BT": torch.tensor([[True, True]]),
    }
    _, plain = loss_and_gradient(columns, loss_type="vespo", normaliser=1)
    assert plain.tolist() == [pytest.approx([-1.0, -1.0])]
    corrected = columns | {"rollout_ratios": torch.tensor([[1.5, 1.0]])}
    _, gradient = loss_and_gradient(corrected, loss_type="vespo", normaliser=1)
    phi = math.exp(3) * 1.5**2 * math.exp(-3 * 1.5)
    assert gradient.tolist() == [pytest.approx([-phi, -phi])]


def test_vespo_stays_finite_far_off_policy() -> None:
    columns = batch() | {"old_logps_BT": torch.full((5, 4), -500.0), "rollout_ratios": torch.zeros(5, 4)}
    for old in (-500.0, 500.0):
        columns["old_logps_BT"] = torch.full((5, 4), old)
        loss, gradient = loss_and_gradient(columns, loss_type="vespo", normaliser=1)
        assert loss.isfinite()
        assert gradient.isfinite().all()


def test_fipo_favours_the_token_whose_future_was_reinforced() -> None:
    """The first token's future has grown likelier, the last one's is itself alone, and it has not moved."""
    columns = {
        "logps_BT": torch.tensor([[-1.0, -1.0, -1.0]]),
        "old_logps_BT": torch.tensor([[-1.0, -1.1, -1.0]]),
        "advantages": torch.tensor([1.0]),
        "mask_BT": torch.tensor([[True, True, True]]),
    }
    _, gradient = loss_and_gradient(columns, loss_type="fipo", normaliser=1, fipo=FipoWeight(decay_rate=1.0))
    assert gradient.tolist() == [pytest.approx([-math.exp(0.05), -math.exp(0.1) * math.exp(0.1), -1.0])]


@settings(deadline=None, max_examples=30)
@given(num_tokens=st.integers(0, 40), discount=st.floats(0.1, 1.0))
def test_discounted_sums_equal_a_loop(num_tokens: int, discount: float) -> None:
    values = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(num_tokens), dtype=torch.float64)
    expected = torch.zeros(2, num_tokens + 1, dtype=torch.float64)
    for t in reversed(range(num_tokens)):
        expected[:, t] = values[:, t] + discount * expected[:, t + 1]
    torch.testing.assert_close(discounted_sums(values, discount), expected[:, :-1])


def test_rollout_ratios_do_not_reach_the_kl() -> None:
    columns = batch() | {"rollout_ratios": torch.zeros(5, 1)}
    loss, diagnostics = policy_gradient_loss(**columns, loss_type="dapo", normaliser=1, beta=0.5)
    torch.testing.assert_close(loss, 0.5 * diagnostics.kl)


def test_vespo_and_fipo_report_their_mean_weights() -> None:
    columns = {
        "logps_BT": torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]),
        "old_logps_BT": torch.tensor([[-1.0, -1.0], [-1.0 - math.log(2), -1.0], [9.0, 9.0]]),
        "advantages": torch.tensor([1.0, 1.0, 1.0]),
        "mask_BT": torch.tensor([[True, True], [True, False], [False, False]]),
    }
    seen = {}
    for loss_type in ("vespo", "fipo"):
        metrics = Metrics()
        add_policy_metrics(metrics, policy_gradient_loss(**columns, loss_type=loss_type, normaliser=1)[1])
        seen |= metrics.values()
    assert seen["vespo/phi_seq_mean"] == pytest.approx((1 + 4 * math.exp(-3)) / 2)
    assert seen["fipo/weight_mean"] == pytest.approx((1 + 1 + 1.2) / 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, .*, got 'ppo'"),
        ({"rollout_ratios": torch.zeros(5)}, "rollout_ratios must hold one value per sequence"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ({"beta": 0.1, "ref_logps_BT": None}, "pass ref_logps_BT"),
        ({"old_logps_BT": torch.zeros(5, 3)}, r"old_logps_BT must have the mask's shape \(5, 4\), got \(5, 3\)"),
        ({"advantages": torch.zeros(4)}, r"advantages must hold one value per sequence \(5\)"),
        ({"token_weights": torch.zeros(1, 4)}, r"token_weights must hold one value per sequence"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        policy_gradient_loss(**{**batch(), "loss_type": "dapo", "normaliser": 1, **changes})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_log_ratio_that_no_exponential_holds_gives_finite_losses_and_gradients(
    gap: float, loss_type: PolicyLossType, level: ImportanceLevel
) -> None:
    """e^89 is no float32: one such token made every weight NaN."""
    columns = batch()
    columns["old_logps_BT"] = columns["logps_BT"] - gap
    columns["ref_logps_BT"] = columns["logps_BT"] + gap
    columns["logps_BT"].requires_grad_()
    loss, seen = policy_gradient_loss(
        **columns, loss_type=loss_type, normaliser=5.0, importance_sampling_level=level, beta=0.1
    )
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(columns["logps_BT"].grad.isfinite().all())
    assert seen.kl is not None
    assert bool(seen.kl.isfinite())


def test_log_ratios_are_held_within_twenty() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    logps = torch.tensor([[19.9, 20.1, -20.1, float("nan")]])
    found = importance_ratios(logps, torch.zeros(1, 4), mask, "token")[0]
    assert found[:3].tolist() == torch.tensor([19.9, 20.0, -20.0]).exp().tolist()
    assert bool(found[3].isnan())
