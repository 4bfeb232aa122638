"""PPO's mathematics beside loops that one can check by eye: places, KL, GAE, whitening, both losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rayhelper import ConfigError
from trainers.batch import Ragged, Rollouts
from trainers.losses.ppo import (
    add_ppo_metrics,
    add_value_metrics,
    ppo_policy_loss,
    ppo_value_loss,
    with_ratio_variance,
)
from trainers.metrics import Metrics
from trainers.ppo.config import PPOConfig
from trainers.ppo.samples import credit, num_counted, policy_samples, value_samples
from trainers.rewards import gae
from trainers.rewards.advantages import total_rewards

RANDOM = np.random.default_rng(3)
LENGTHS = [3, 5, 1, 4]  # of completions; the limit is 5, so the second has no place behind its end
PLACES = [4, 5, 2, 5]


def ragged(lengths: list[int], scale: float = 1.0) -> Ragged:
    return Ragged.split(RANDOM.normal(size=sum(lengths), scale=scale).astype(np.float32), lengths)


def rollouts() -> Rollouts:
    return Rollouts(
        prompt_ids=Ragged.of([[10, 11], [12], [13, 14, 15], [16]], np.int64),
        completion_ids=Ragged.of([[20, 21, 2], [22, 23, 24, 25, 26], [2], [27, 28, 29, 2]], np.int64),
        rollout_logps=ragged(LENGTHS),
        truncated=np.array([False, True, False, False]),
    )


def test_a_completion_that_ended_early_has_one_place_more_than_tokens() -> None:
    places = gae.num_places(np.array(LENGTHS), max_completion_length=5)
    assert places.tolist() == PLACES
    states = value_samples(rollouts(), places, end_token_id=3)
    assert [row.tolist() for row in states.input_ids] == [
        [10, 11, 20, 21, 2, 3],
        [12, 22, 23, 24, 25, 26],
        [13, 14, 15, 2, 3],
        [16, 27, 28, 29, 2, 3],
    ]
    assert [row.astype(int).tolist() for row in states.target_mask] == [
        [0, 0, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 1, 1, 1, 1, 1],
    ]
    samples = policy_samples(rollouts())
    assert samples.input_ids[2].tolist() == [13, 14, 15, 2]
    assert samples.target_mask[2].tolist() == [False, False, False, True]
    assert num_counted(samples) == sum(LENGTHS)


def test_the_score_comes_with_the_last_place() -> None:
    token_rewards = Ragged.of([[1, 2, 3], [1, 2, 3, 4, 5]], np.float64)
    rewards = gae.place_rewards(token_rewards, np.array([10.0, 20.0]), np.array([4, 5]))
    assert [row.tolist() for row in rewards] == [[1, 2, 3, 10], [1, 2, 3, 4, 25]]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimates_equal_the_formulas(estimator: gae.KLEstimator) -> None:
    logps, ref_logps = ragged(LENGTHS), ragged(LENGTHS)
    found = gae.kl_estimates(logps, ref_logps, estimator)
    for k, (logp, ref) in enumerate(zip(logps.values.tolist(), ref_logps.values.tolist(), strict=True)):
        wanted = logp - ref if estimator == "k1" else math.exp(ref - logp) - 1 - (ref - logp)
        assert found.values[k] == pytest.approx(wanted, rel=1e-12)
    assert estimator == "k1" or (found.values >= 0).all()


def test_k1_and_k3_estimate_the_same_divergence() -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    drawn = np.random.default_rng(0).choice(3, size=100_000, p=policy)
    lengths = [len(drawn)]
    logps, ref_logps = (Ragged.split(np.log(p)[drawn], lengths) for p in (policy, reference))
    exact = float((policy * np.log(policy / reference)).sum())
    for estimator in ("k1", "k3"):
        assert gae.kl_estimates(logps, ref_logps, estimator).values.mean() == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 0.0), (0.8, 1.0)])
def test_advantages_equal_the_sum_of_discounted_errors(gamma: float, lam: float) -> None:
    """Equation 16 of the paper, term by term, without the recursion."""
    rewards, values = ragged(PLACES), ragged(PLACES)
    advantages, returns = gae.generalized_advantages(rewards, values, gamma=gamma, lam=lam)
    for row, (reward, value) in enumerate(zip(map(np.float64, rewards), map(np.float64, values), strict=True)):
        following = [*value[1:], 0.0]
        errors = [reward[t] + gamma * following[t] - value[t] for t in range(len(value))]
        for t in range(len(value)):
            wanted = sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, len(value)))
            assert advantages[row][t] == pytest.approx(wanted, rel=1e-9)
            assert returns[row][t] == pytest.approx(wanted + value[t], rel=1e-9)


def test_each_completion_may_have_a_lambda_of_its_own() -> None:
    rewards, values = ragged(PLACES), ragged(PLACES)
    lams = np.array([0.0, 0.3, 0.9, 1.0])
    advantages, returns = gae.generalized_advantages(rewards, values, gamma=0.9, lam=lams)
    for row, lam in enumerate(lams):
        alone = Ragged.of([rewards[row]], np.float32), Ragged.of([values[row]], np.float32)
        expected, expected_returns = gae.generalized_advantages(*alone, gamma=0.9, lam=float(lam))
        assert advantages[row].tolist() == pytest.approx(expected[0].tolist())
        assert returns[row].tolist() == pytest.approx(expected_returns[0].tolist())


def test_the_weights_of_length_adaptive_gae_add_up_to_alpha_times_the_length() -> None:
    """Equation 8 of VAPO: the sum of lambda^t over all t is alpha l; 0.95 is the lambda of 400 tokens."""
    lengths = np.array([40, 400, 4000])
    for length, lam in zip(lengths, gae.adaptive_lam(lengths, 0.05), strict=True):
        assert sum(lam**t for t in range(100_000)) == pytest.approx(0.05 * length)
    assert gae.adaptive_lam(np.array([400]), 0.05).tolist() == [pytest.approx(0.95)]
    assert gae.adaptive_lam(np.array([0, 1, 19, 20]), 0.05).tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "options", [{"lam_critic": 1.0}, {"length_adaptive_alpha": 0.5}, {"lam_critic": 1.0, "length_adaptive_alpha": 0.5}]
)
def test_policy_and_critic_learn_with_lambdas_of_their_own(options: dict[str, float]) -> None:
    """Returns of lambda 1 are the rewards to go, whatever the critic says; advantages follow the policy's lambda."""
    drawn, scores = rollouts(), np.array([1.0, -0.5, 2.0, 0.0])
    states = dataclasses.replace(value_samples(drawn, np.array(PLACES), 3), old_values=ragged(PLACES))
    samples = dataclasses.replace(policy_samples(drawn), old_logps=ragged(LENGTHS))
    fixed = {"kl_coef": 0.0, "kl_estimator": "k1", "whiten_rewards": False, "gamma": 1.0, "lam": 0.95}
    plain, plain_states, _ = credit(samples, states, None, scores, **fixed)
    found, found_states, metrics = credit(samples, states, None, scores, **fixed, **options)
    if "lam_critic" in options:
        assert found_states.returns.values.tolist() == pytest.approx(np.repeat(scores, PLACES).tolist(), abs=1e-6)
    else:
        assert np.array_equal(found_states.returns.values, plain_states.returns.values)
    if "length_adaptive_alpha" in options:
        lams = [max(0.0, 1 - 1 / (0.5 * length)) for length in LENGTHS]
        assert metrics.values()["policy/lam"] == pytest.approx(np.mean(lams))
        acted = []
        for row, (lam, length) in enumerate(zip(lams, LENGTHS, strict=True)):
            values = [*states.old_values[row].astype(float), 0.0]
            errors = [values[t + 1] - values[t] for t in range(PLACES[row])]
            errors[-1] += scores[row]
            acted += [sum(lam ** (s - t) * errors[s] for s in range(t, PLACES[row])) for t in range(length)]
        whitened = (np.array(acted) - np.mean(acted)) / np.std(acted, ddof=1)
        assert found.advantages.values.tolist() == pytest.approx(whitened.tolist(), abs=1e-5)
    else:
        assert np.array_equal(found.advantages.values, plain.advantages.values)


def test_a_critic_that_knows_the_future_leaves_no_advantage() -> None:
    rewards = ragged(PLACES)
    to_go = [np.cumsum(row[::-1].astype(np.float64))[::-1] for row in rewards]
    advantages, returns = gae.generalized_advantages(rewards, Ragged.of(to_go, np.float64), gamma=1.0, lam=0.95)
    assert np.abs(advantages.values).max() < 1e-6
    assert returns.values == pytest.approx(np.concatenate(to_go))


def test_whitening_counts_what_it_is_told_to() -> None:
    values = np.array([1.0, 2.0, 100.0, 6.0])
    counts = np.array([True, True, False, True])
    whitened = gae.whiten(values, counts)
    assert whitened[2] == 0
    assert whitened[counts].mean() == pytest.approx(0, abs=1e-12)
    assert whitened[counts].var(ddof=1) == pytest.approx(1, rel=1e-6)
    kept = gae.whiten(values, counts, shift_mean=False)
    assert kept[counts] == pytest.approx(whitened[counts] + 3.0)
    assert gae.whiten(values, np.array([True, False, False, False])).tolist() == [0, 0, 0, 0]
    assert gae.whiten(values, np.zeros(4, bool)).tolist() == [0, 0, 0, 0]


def test_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="ref_logps must have as many entries per row"):
        gae.kl_estimates(ragged([2, 3]), ragged([3, 2]), "k1")
    with pytest.raises(ValueError, match="values must have as many entries per row"):
        gae.generalized_advantages(ragged([2, 3]), ragged([3, 2]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="kl_estimator must be one of k1, k3, got 'k2'"):
        gae.kl_estimates(ragged([2]), ragged([2]), "k2")  # type: ignore[arg-type]


def test_rewards_are_weighed_and_a_completion_without_any_has_none() -> None:
    rewards_BK = np.array([[1, 2], [np.nan, 3], [np.nan, np.nan]], np.float32)
    found = total_rewards(rewards_BK, np.array([1.0, 0.5], np.float32))
    assert found[:2].tolist() == [2.0, 1.5]
    assert np.isnan(found[2])


def test_completions_without_a_score_do_not_matter() -> None:
    """What is learned from the others is what would be learned without them."""
    old_logps, old_values, ref_logps = ragged(LENGTHS), ragged(PLACES), ragged(LENGTHS)
    places = np.array(PLACES)

    def learned(rows: list[int], scores: list[float]) -> tuple[Ragged, Ragged, dict[str, float]]:
        samples, states = policy_samples(rollouts()), value_samples(rollouts(), places, end_token_id=3)
        samples.old_logps, states.old_values = old_logps, old_values
        samples, states, metrics = credit(
            samples[rows],
            states[rows],
            ref_logps[rows],
            np.array(scores),
            kl_coef=0.1,
            kl_estimator="k3",
            whiten_rewards=True,
            gamma=0.9,
            lam=0.8,
        )
        assert samples.advantages is not None
        assert states.returns is not None
        assert num_counted(samples) == 8
        assert num_counted(states) == 9
        return samples.advantages, states.returns, metrics.values()

    with_it, without = learned([0, 1, 3], [1.0, 2.0, np.nan]), learned([0, 1], [1.0, 2.0])
    assert with_it[0][:2] == without[0]
    assert with_it[1][:2] == without[1]
    assert with_it[2] == without[2]
    assert not with_it[0][2].any()


def tables(num_columns: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """float64 (3, 5) tables of random numbers, the first with a gradient, and a mask with gaps."""
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(num_columns)]
    columns[0].requires_grad_()
    mask_BT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
    return columns, mask_BT


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def test_the_policy_loss_equals_its_loop() -> None:
    (logps, old, advantages, entropy), mask = tables(4)
    loss, seen = ppo_policy_loss(logps, old, advantages, mask, cliprange=0.3, normaliser=9, entropy_BT=entropy)
    total, clipped, approxkl, ratios, entropies = 0.0, 0, 0.0, [], 0.0
    for b, t in mask.nonzero().tolist():
        difference = (logps[b, t] - old[b, t]).item()
        ratio, advantage = math.exp(difference), float(advantages[b, t])
        free, bounded = -advantage * ratio, -advantage * clamp(ratio, 0.7, 1.3)
        total += max(free, bounded)
        clipped += bounded > free
        approxkl += 0.5 * difference**2
        ratios.append(ratio)
        entropies += float(entropy[b, t])
    assert loss.item() == pytest.approx(total / 9)
    assert 0 < clipped < 9
    metrics = Metrics()
    add_ppo_metrics(metrics, seen)
    assert with_ratio_variance(metrics).values() == pytest.approx(
        {
            "loss/policy_avg": total / 9,
            "policy/clipfrac_avg": clipped / 9,
            "policy/approxkl_avg": approxkl / 9,
            "policy/entropy_avg": entropies / 9,
            "val/ratio": np.mean(ratios),
            "val/ratio_var": np.var(ratios),
        },
        rel=1e-5,
    )


def test_the_value_loss_equals_its_loop() -> None:
    (values, old, returns), mask = tables(3)
    loss, seen = ppo_value_loss(values, old, returns, mask, cliprange_value=0.3, normaliser=9)
    total, clipped = 0.0, 0
    for b, t in mask.nonzero().tolist():
        value, wanted = values[b, t].item(), returns[b, t].item()
        free = (value - wanted) ** 2
        bounded = (clamp(value, float(old[b, t]) - 0.3, float(old[b, t]) + 0.3) - wanted) ** 2
        total += max(free, bounded)
        clipped += bounded > free
    assert loss.item() == pytest.approx(0.5 * total / 9)
    assert 0 < clipped < 9
    metrics = Metrics()
    add_value_metrics(metrics, seen)
    assert metrics.values() == pytest.approx(
        {"loss/value_avg": 0.5 * total / 9, "val/clipfrac_avg": clipped / 9}, rel=1e-6
    )


def policy_term(columns: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    logps, old, advantages = columns
    loss, _ = ppo_policy_loss(logps, old, advantages, mask, cliprange=0.2, normaliser=9, entropy_BT=logps.detach())
    return loss


def value_term(columns: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    return ppo_value_loss(*columns, mask, cliprange_value=0.2, normaliser=9)[0]


@pytest.mark.parametrize("term", [policy_term, value_term])
def test_micro_batches_add_up_and_padding_is_never_looked_at(
    term: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor],
) -> None:
    columns, mask = tables(3)
    whole = term(columns, mask)
    (wanted,) = torch.autograd.grad(whole, columns[0])
    dirty = [column.detach().masked_fill(~mask, math.nan) for column in columns]
    dirty[0].requires_grad_()
    parts = sum(term([column[b : b + 1] for column in dirty], mask[b : b + 1]) for b in range(3))
    assert isinstance(parts, torch.Tensor)
    (found,) = torch.autograd.grad(parts, dirty[0])
    assert parts.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert not found[~mask].any()
    nothing = term(columns, torch.zeros_like(mask))
    assert nothing.item() == 0


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"lam_critic": 1.5}, r"lam_critic must lie in \[0, 1\], got 1.5"),
        ({"length_adaptive_alpha": 0.0}, "length_adaptive_alpha must be positive, got 0.0"),
        (
            {"length_adaptive_alpha": 0.01},
            "a lambda of 0 to completions of up to 100 tokens, and max_completion_length is",
        ),
        ({"length_adaptive_alpha": 0.05, "lam_critic": 1.0, "lam": 0.9}, "lam is 0.9, which has no effect"),
    ],
)
def test_lambdas_without_a_meaning_are_refused(keys: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PPOConfig(model="m", dataset="d", reward_funcs=["exact_answer"], **keys)
