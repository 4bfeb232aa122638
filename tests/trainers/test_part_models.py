"""The models of a trainer as its parts: what they say, where they wait, what they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import ConfigError, RayHelper
from tests.e2e.runs import grpo_config, sft_config
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Ragged, Sequences
from trainers.configuration.shared import TrainConfig
from trainers.metrics import Metrics
from trainers.parts.frozen import Reference, Teacher
from trainers.parts.models import resolved_models
from trainers.parts.policy import Critic, ModelLostError, Policy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [save_tiny(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(2)]


def sequences(count: int = 5) -> Sequences:
    lengths = np.arange(4, 4 + count)
    ids = np.random.default_rng(3).integers(4, 250, lengths.sum())
    return Sequences(Ragged.split(ids, lengths), Ragged.of([np.arange(length) >= 2 for length in lengths], bool))


def test_a_model_that_is_nowhere_is_one_line(models: list[str], tmp_path: Path) -> None:
    config = grpo_config(models[0], tmp_path)
    assert resolved_models(config, models[0], models) == {model: model for model in models}
    with pytest.raises(
        ConfigError, match=r"no model could be loaded from 'no/such'.* Give a folder or a hub name"
    ) as told:
        resolved_models(config, models[0], ["no/such"])
    assert "\n" not in str(told.value)


def test_logits_are_divided_by_the_temperature_of_completions_unless_another_is_named(
    models: list[str], tmp_path: Path
) -> None:
    config = grpo_config(models[0], tmp_path, temperature=0.5)
    backend, plain = FsdpBackend(models[0]), sft_config(models[0], tmp_path)
    parts = [(Reference(config), 0.5), (Reference(config, temperature=2.0), 2.0), (Reference(plain), 1.0)]
    for part, temperature in parts:
        part.build(models[0])
        expected = backend.token_logps(sequences(), micro_batch_size=3, temperature=temperature)
        np.testing.assert_allclose(part.logps(sequences()).values, expected.values, atol=1e-6)


def test_a_model_that_rests_is_at_hand_when_it_is_asked_and_only_then(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing moves, so the moves are noted."""
    events: list[str] = []
    for name in ("offload", "reload", "top_logps", "token_logps"):
        method = getattr(FsdpBackend, name)

        def noted(*args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
            events.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(FsdpBackend, name, noted)
    teacher = Teacher(grpo_config(models[0], tmp_path), rests=True)
    teacher.build(models[0])
    top = teacher.top_logps(sequences(), 3)
    logps = teacher.logps(sequences())
    assert events == ["offload", *["reload", "top_logps", "offload"], *["reload", "token_logps", "offload"]]
    is_likeliest = top.ids.values[:, 0] == sequences().input_ids.values[sequences().target_mask.values]
    assert np.all((logps.values <= top.logps.values[:, 0] + 1e-6) | is_likeliest)
    assert top.ids.lengths.tolist() == logps.lengths.tolist()
    nothing = teacher.top_logps(sequences()[:0], 3)
    assert nothing.ids.values.shape == nothing.logps.values.shape == (0, 3)


@RayHelper.worker(group=["train", "reference"])
class Followed:
    """A policy and a reference that follows it."""

    def __init__(self, config: TrainConfig, every: int | None) -> None:
        self.policy = Policy(config, loss=lambda: 1 / 0)
        self.reference = Reference(config, every=every, share=0.25)


def test_a_reference_takes_its_share_of_the_policy_every_few_steps(models: list[str], tmp_path: Path) -> None:
    config = grpo_config(models[0], tmp_path)
    policy, own = (dict(FsdpBackend(model).named_weights()) for model in models)
    groups = {role: {"device": "CPU", "ranks": 1, "workers": [role]} for role in ("train", "reference")}
    with RayHelper.session(groups, runtime="inprocess", strict=True):
        for every, count in ((2, 2), (None, 0)):
            both = Followed(config, every)
            both.policy.build(models[0])
            both.reference.build(models[1])
            for step in range(1, 6):
                both.reference.follow(both.policy, step)
            both.reference.save(tmp_path / str(every))
            found = dict(FsdpBackend(tmp_path / str(every)).named_weights())
            for name, weight in found.items():
                kept = 0.75**count
                torch.testing.assert_close(weight, kept * own[name] + (1 - kept) * policy[name])


def test_a_reference_that_was_freed_is_gone(models: list[str], tmp_path: Path) -> None:
    reference = Reference(grpo_config(models[0], tmp_path))
    reference.build(models[0])
    reference.free()
    with pytest.raises(ModelLostError, match="this worker has no reference: build was not called"):
        reference.logps(sequences())


def test_a_critic_reports_under_names_of_its_own_what_its_policy_reports_too(models: list[str], tmp_path: Path) -> None:
    """Losses add up; tokens are reported by the policy, and so is the peak of devices that both are on."""
    config = grpo_config(models[0], tmp_path)
    measured = Metrics()
    for name in ("grad_norm", "learning_rate"):
        measured.same(name, 1.0)
    for name in ("loss", "moe_aux_loss", "moe_z_loss", "update_tokens", "update_flops", "update_peak_flops"):
        measured.sum(name, 2.0)
    policy = Policy(config, loss=lambda: 1 / 0)
    critic = Critic(config, policy, loss=lambda: 1 / 0)
    own = {f"critic/{name}" for name in ("grad_norm", "learning_rate", "moe_aux_loss", "moe_z_loss")}
    assert critic.reported(measured).values().keys() == {"loss", "update_flops", "update_peak_flops"} | own
    policy.build(models[0])
    assert critic.reported(measured).values().keys() == {"loss", "update_flops"} | own
