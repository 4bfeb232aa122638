"""Losses and advantage estimators of plugins: found by name, given their keys, and refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError
from tests.conftest import registries_restored
from trainers.batch import Ragged, Samples
from trainers.grpo.choices import GIVEN, READ_BY, REGISTRIES, check_plugged, keys_of
from trainers.grpo.config import GRPOConfig, check_chosen
from trainers.grpo.samples import with_selection, with_slopes
from trainers.losses.policy import add_policy_metrics, grpo_normaliser, policy_gradient_loss
from trainers.losses.surrogates import PolicyTerms
from trainers.metrics import Metrics
from trainers.plugins import load_plugins, register_advantage, register_loss
from trainers.rewards.estimators import RewardBatch, estimated

PLUGIN = """
from trainers.plugins import register_advantage, register_loss

@register_loss("mine", average="sequence_means")
def mine(batch, *, epsilon, steepness=2.0):
    return -batch.advantages_BX * batch.logps_BT * steepness

@register_advantage("centred")
def centred(batch, *, reward_clip_range, scale=1.0):
    return scale * (batch.sums_PG - batch.sums_PG.mean(axis=1, keepdims=True))
"""
NEEDED: dict[str, Any] = {"model": "m", "dataset": "d", "reward_funcs": ["exact_answer"], "num_generations": 2}


@pytest.fixture(autouse=True)
def _clean_registries() -> Iterator[None]:
    with registries_restored():
        yield


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    file = tmp_path / "methods.py"
    file.write_text(PLUGIN)
    return str(file)


def config(plugin: str | None = None, **keys: Any) -> GRPOConfig:
    return GRPOConfig(**NEEDED | {"external_plugins": [plugin] if plugin else []} | keys)


def checked(plugin: str, **keys: Any) -> GRPOConfig:
    """As the trainer does before it starts: the configuration is read, the plugins are imported, and it is checked."""
    found = config(plugin, **keys)
    load_plugins(found.external_plugins)
    check_chosen(found)
    return found


def test_the_bundled_ones_are_in_the_registries_of_plugins() -> None:
    for registry, bundled in REGISTRIES.values():
        assert set(bundled) <= set(registry)
        assert all(callable(registry[name].function) for name in bundled)


def test_the_keys_that_are_refused_elsewhere_are_the_parameters_of_what_is_bundled() -> None:
    every_key = set(GRPOConfig.__dataclass_fields__) - {"scale_rewards", "beta"}  # which have checks of their own
    for key, (registry, bundled) in REGISTRIES.items():
        found: dict[str, set[str]] = {}
        for name in bundled:
            for one in keys_of(registry[name].function) & every_key:
                found.setdefault(one, set()).add(name)
        stated = {name: set(readers) for name, (reader, readers) in READ_BY.items() if reader == key}
        assert found == {name: readers for name, readers in stated.items() if name not in GIVEN}


def test_names_of_a_plugin_are_accepted_with_the_keys_that_they_take(plugin: str) -> None:
    found = checked(
        plugin,
        loss_type={"name": "mine", "steepness": 3.0},
        advantage_estimator="centred",
        epsilon=0.1,
        reward_clip_range=[0.0, 1.0],
    )
    assert found.loss_name == "mine"
    assert not found.estimator.needs_logps


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"loss_type": "min"}, r"loss_type must be one of grpo, .*mine.*, got 'min'.* Did you mean 'mine'\?"),
        ({"advantage_estimator": "centered"}, "advantage_estimator must be one of grpo, .* got 'centered'.*'centred'"),
        ({"loss_type": "mine", "delta": 2.0}, "delta is 2.0, which has no effect with loss_type=mine"),
        ({"loss_type": "mine", "sapo_temperature_neg": 2.0}, "sapo_temperature_neg is 2.0, which has no effect with"),
        ({"advantage_estimator": "centred", "normalize_advantages": True}, "normalize_advantages is True"),
        ({"advantage_estimator": "centred", "scale_rewards": "batch"}, "scale_rewards=batch is for"),
        ({"loss_type": {"name": "mine", "speed": 1}}, "mine cannot be called with .*speed.*epsilon, steepness"),
        (
            {"loss_type": {"name": "mine", "epsilon": 0.3}},
            "epsilon is a key of the configuration. Write it as a separate key",
        ),
    ],
)
def test_what_does_not_fit_a_plugin_is_refused_when_plugins_are_imported(
    plugin: str, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        checked(plugin, **keys)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"loss_type": "dappo"},
            r"loss_type must be one of grpo, .* got 'dappo'. Did you mean 'dapo'\? Register your own",
        ),
        ({"loss_type": {"nam": "dapo"}}, r"loss_type must be one of .* or \{name: \.\.\., argument: value\}; got"),
        (
            {"loss_type": {"name": "dapo", "epsilon": 0.1}},
            "dapo takes its arguments as separate keys. Write epsilon beside loss_type",
        ),
        ({"advantage_estimator": "gae"}, "advantage_estimator must be one of grpo, rloo, .* got 'gae'"),
    ],
)
def test_without_plugins_a_mistake_is_answered_while_the_configuration_is_read(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(**keys)


def test_a_name_that_two_files_register_is_refused(plugin: str) -> None:
    load_plugins([plugin])

    def other(batch: Any) -> Any:
        return batch.logps_BT

    with pytest.raises(ValueError, match=r"loss 'mine' is registered twice: by mine of .*methods.py and by"):
        register_loss("mine")(other)
    with pytest.raises(ValueError, match="advantage 'grpo' is registered twice"):
        register_advantage("grpo")(other)


def test_terms_of_an_own_loss_are_weighed_averaged_and_logged_like_those_of_a_bundled_one() -> None:
    @register_loss("squares", average="sequence_means")
    def squares(batch: Any) -> PolicyTerms:
        return PolicyTerms(batch.logps_BT**2, means={"squares/first": batch.logps_BT[:, :1]})

    logps = torch.tensor([[1.0, 2.0], [3.0, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, seen = policy_gradient_loss(
        logps,
        None,
        torch.ones(2),
        mask,
        loss_type="squares",
        normaliser=grpo_normaliser("squares", num_sequences=2, num_tokens=3, max_completion_length=9),
        rollout_ratios=torch.tensor([[1.0], [0.5]]),
    )
    assert loss.item() == ((1 + 4) / 2 + 9 * 0.5) / 2
    metrics = Metrics()
    add_policy_metrics(metrics, seen)
    assert metrics.values() == {"squares/first": 2.0}


def test_advantages_of_an_own_estimator_may_be_of_completions_or_of_tokens() -> None:
    @register_advantage("by_token")
    def by_token(batch: RewardBatch) -> Ragged:
        return Ragged.split(np.arange(batch.lengths_B.sum(), dtype=np.float64), batch.lengths_B)

    @register_advantage("flat")
    def flat(batch: RewardBatch) -> np.ndarray:
        return batch.sums_PG.reshape(-1)

    @register_advantage("short")
    def short(batch: RewardBatch) -> np.ndarray:
        return batch.sums_PG[:, :1]

    batch = RewardBatch(np.array([[1.0, 0.0], [np.nan, np.nan]]), np.array([2.0, 1.0]), 2, np.array([1, 2]))
    values, statistics = estimated("flat", SimpleNamespace(), batch)
    assert (values.tolist(), values.dtype, statistics.reward) == ([2.0, 0.0], np.float32, 2.0)
    tokens, _ = estimated("by_token", SimpleNamespace(), batch)
    assert [row.tolist() for row in tokens] == [[0.0], [1.0, 2.0]]
    with pytest.raises(ValueError, match=r"'short' gave advantages of shape \(1, 1\); it must be \(1, 2\)"):
        estimated("short", SimpleNamespace(), batch)
    assert check_plugged(config(advantage_estimator="flat")) is None


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"advantage_estimator": "pass_at_k", "pass_k": 3}, "pass_k=3 completions cannot be drawn from"),
        ({"advantage_estimator": "pass_at_k", "pass_k": 0}, "pass_k must be at least 1"),
        ({"pass_k": 2}, "pass_k is 2, which has no effect with advantage_estimator=grpo"),
        ({"advantage_estimator": "maxrl", "beta": 0.1, "kl_in_reward": True}, "maxrl counts rewards of 0 and 1"),
        ({"advantage_estimator": "remax", "max_staleness": 1}, "remax compares with a greedy completion"),
        ({"advantage_estimator": "opo", "num_generations": 1}, "num_generations must be at least 2"),
        ({"loss_type": "gpg", "epsilon": 0.1}, "epsilon is 0.1, which has no effect with loss_type=gpg"),
        ({"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "importance_sampling_level is sequence"),
        ({"loss_type": "clip_cov", "clip_cov_ratio": 0.0}, r"clip_cov_ratio must lie in \(0, 1\]"),
        ({"loss_type": "clip_cov", "clip_cov_lb": 6.0}, "clip_cov_lb=6.0 is not below clip_cov_ub=5.0"),
        ({"loss_type": "kl_cov", "kl_cov_coef": -1.0}, "kl_cov_coef must be at least 0"),
        ({"loss_type": "kl_cov", "clip_cov_lb": 0.5}, "clip_cov_lb is 0.5, which has no effect with"),
        ({"loss_type": "dppo_tv", "dppo_ratio_cap": 0.5}, "dppo_ratio_cap must be at least 1"),
        ({"rollout_rejection": "token_k1"}, "rollout_rejection=token_k1 needs rollout_rejection_max"),
        ({"rollout_rejection_max": 2.0}, "bounds of rollout_rejection, which is not set"),
        ({"rollout_rejection": "token_k3", "rollout_rejection_max": 1, "rollout_rejection_min": 0.1}, "is only for k1"),
        ({"rollout_rejection": "token_k1", "rollout_rejection_max": 0.5}, "rollout_rejection_max=0.5 leaves nothing"),
        ({"rollout_rejection": "token_k1", "rollout_rejection_max": -1.0}, "must be positive"),
        ({"loss_type": "gmpo", "top_entropy_quantile": 0.2}, "gmpo multiplies the ratios of all tokens"),
    ],
)
def test_keys_that_do_not_go_with_a_method_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(**keys)


def test_remax_needs_no_group_and_has_its_kl_in_the_reward() -> None:
    assert config(advantage_estimator="remax", num_generations=1, beta=0.1).has_kl_in_reward
    assert not config(advantage_estimator="maxrl", beta=0.1).has_kl_in_reward


def test_tokens_are_selected_among_all_loss_tokens_of_a_step() -> None:
    """Those that are clipped already are left out by clip_cov; what the loss does not count is never selected."""
    lengths = [3, 2]
    logps = Ragged.split(np.log(np.array([0.9, 0.8, 0.1, 0.7, 0.2], np.float32)), lengths)
    samples = Samples(
        input_ids=Ragged.split(np.arange(7), [4, 3]),
        target_mask=Ragged.of([[False, True, True, True], [False, True, True]], bool),
        advantages=np.array([1.0, -1.0], np.float32),
        loss_mask=Ragged.of([[True, True, True], [True, False]], bool),
        old_logps=Ragged.split(np.log(np.array([0.5, 0.8, 0.1, 0.7, 0.2], np.float32)), lengths),
    )
    counted_logps, advantages = logps.values[:4], np.array([1.0, 1.0, 1.0, -1.0])
    covariance = (advantages - advantages.mean()) * (counted_logps - counted_logps.mean())
    assert np.argsort(-covariance).tolist()[:2] == [0, 1]

    chosen = with_selection(config(loss_type="kl_cov", kl_cov_ratio=0.25), samples, logps, seed=(0,)).selected
    assert chosen is not None
    assert [row.tolist() for row in chosen] == [[True, False, False], [False, False]]
    keys: dict[str, Any] = {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.25}
    chosen = with_selection(config(loss_type="clip_cov", **keys), samples, logps, seed=(0,)).selected
    assert chosen is not None
    assert [row.tolist() for row in chosen] == [[False, True, False], [False, False]]  # the first is clipped


def test_real_has_the_loss_and_the_gradient_of_ms_swift_however_a_step_is_cut() -> None:
    """The formula is that of ms-swift 4.6 (swift/rlhf_trainers/grpo_trainer.py), of whole groups at once."""
    lengths, tau = torch.tensor([3, 1, 2, 4, 2, 3]), 0.7
    mask_BT = torch.arange(4)[None] < lengths[:, None]
    old_BT = -torch.rand(6, 4)
    logps_BT = (old_BT + torch.randn(6, 4)).requires_grad_()
    advantages_B = torch.tensor([0.5, -0.5, 0.0, 0.0, -1.0, 1.0])

    scores_B = ((logps_BT - old_BT) * mask_BT).sum(1) / lengths
    expected = torch.zeros(())
    for start in (0, 2, 4):  # the second prompt has no better completion, and so no loss
        scores, is_better = scores_B[start : start + 2] / tau, advantages_B[start : start + 2] > 0
        if 0 < is_better.sum() < 2:
            expected = (
                expected + (1 + scores[~is_better].exp().sum()).log() + (1 + (-scores[is_better]).exp().sum()).log()
            )
    (expected / 3).backward()

    def ragged(values_BT: torch.Tensor) -> Ragged:
        return Ragged.split(values_BT.detach()[mask_BT].numpy(), lengths.numpy())

    samples = Samples(
        input_ids=Ragged.split(np.arange(int(lengths.sum()) + 6), lengths.numpy() + 1),
        target_mask=Ragged.of([[False, *[True] * int(length)] for length in lengths], bool),
        advantages=advantages_B.numpy(),
        loss_mask=ragged(mask_BT),
        old_logps=ragged(old_BT),
    )
    found, loss = with_slopes(config(loss_type="real", real_tau=tau), samples, lambda _: ragged(logps_BT))
    assert loss == pytest.approx(float(expected.detach()) / 3, rel=1e-6)
    own_BT = logps_BT.detach().clone().requires_grad_()
    assert isinstance(found.advantages, np.ndarray)
    for part in (slice(0, 1), slice(1, 6)):
        own, _ = policy_gradient_loss(
            own_BT[part],
            old_BT[part],
            torch.tensor(found.advantages[part]),
            mask_BT[part],
            loss_type="real",
            normaliser=float(lengths.sum()),
        )
        assert own.item() == 0.0
        own.backward()
    torch.testing.assert_close(own_BT.grad, logps_BT.grad)


def test_a_method_of_the_script_itself_is_refused_where_workers_would_not_have_it() -> None:
    def local(batch: Any) -> Any:
        return batch.sums_PG

    local.__module__ = "__main__"
    register_loss("local")(local)
    register_advantage("local")(local)
    for key in REGISTRIES:
        check_plugged(config(**{key: "local"}))
        with pytest.raises(ConfigError, match=f"{key}: local is registered by the script itself, which Ray's workers"):
            check_plugged(config(**{key: "local"}, use_ray=True))
