"""GRPO's roles on devices of their own, its order of rows, and what it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rayhelper import ConfigError, RayHelper
from tests.backends.test_token_room import Room, needed
from tests.e2e.runs import TEXTS, evenness, final_bytes, grpo_config, interrupted_after, lines
from tests.e2e.test_workers import injected_samples
from tests.golden.tiny import save_tiny
from tests.trainers.test_reward_models import save_reward_model
from trainers.backends.fsdp.token_room import TokenRoom
from trainers.batch import Ragged, Rollouts, Samples
from trainers.cli import placement
from trainers.grpo import trainer as grpo
from trainers.grpo.config import GRPOConfig
from trainers.grpo.plan import RowStream
from trainers.grpo.samples import credit, differing_groups
from trainers.grpo.trainer import GRPOTrainer
from trainers.rewards.advantages import group_advantages

GROUP = {"device": "CPU", "ranks": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "policy": save_tiny(folder / "policy"),
        "teacher": save_tiny(folder / "teacher", seed=1),
        "reward": save_reward_model(folder / "judge"),
        "reward too": save_reward_model(folder / "critic", seed=4),
    }


# Roles


def judged(models: dict[str, str], folder: Path, **keys: Any) -> GRPOConfig:
    """A run that uses all roles, with a reference that follows the policy."""
    settings: dict[str, Any] = {
        "teacher_model": models["teacher"],
        "teacher_kl_coef": 0.1,
        "reward_model": [models["reward"], models["reward too"]],
        "reward_weights": [1.0, 0.1, 0.5, 0.2],
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "top_entropy_quantile": 0.5,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 6.0,
        "num_train_epochs": 1,
    }
    return grpo_config(models["policy"], folder, **settings | keys)


def test_roles_on_groups_of_their_own_equal_one_process(models: dict[str, str], tmp_path: Path) -> None:
    GRPOTrainer(judged(models, tmp_path / "off")).train()
    groups = {role: {**GROUP, "workers": [role]} for role in ("train", "rollout", "reference", "teacher", "reward")}
    with RayHelper.session(groups, runtime="inprocess", strict=True):
        GRPOTrainer(judged(models, tmp_path / "apart")).train()
    assert lines(tmp_path / "apart") == lines(tmp_path / "off")
    assert final_bytes(tmp_path / "apart") == final_bytes(tmp_path / "off")
    first = lines(tmp_path / "off")[0]
    assert {"rewards/judge/mean", "rewards/critic/mean", "teacher_kl", "kl", "top_entropy", "entropy_coef"} <= set(
        first
    )
    assert first["teacher_kl"] > 0.1
    assert lines(tmp_path / "off")[3]["kl"] > 0


def test_a_resumed_run_has_its_reference_and_its_coefficient(models: dict[str, str], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_steps": 4, "num_train_epochs": 2}
    GRPOTrainer(judged(models, tmp_path / "whole", **keys)).train()
    with interrupted_after(9), pytest.raises(KeyboardInterrupt):
        GRPOTrainer(judged(models, tmp_path / "parted", **keys)).train()
    GRPOTrainer(judged(models, tmp_path / "parted", **keys, resume_from_checkpoint="auto")).train()
    assert lines(tmp_path / "parted") == lines(tmp_path / "whole")
    assert final_bytes(tmp_path / "parted") == final_bytes(tmp_path / "whole")
    assert len({line["entropy_coef"] for line in lines(tmp_path / "whole") if "loss" in line}) == 12


def test_roles_that_no_group_names_live_with_train(models: dict[str, str], tmp_path: Path) -> None:
    groups = {"a": {**GROUP, "workers": ["train"]}, "b": {**GROUP, "workers": ["rollout", "teacher"]}}
    config = judged(models, tmp_path, device_groups=groups)
    placed = placement(GRPOTrainer, config)
    assert [group.roles for group in placed.groups] == [("train", "reference", "reward"), ("rollout", "teacher")]
    GRPOTrainer.check(config, placed)
    with pytest.raises(ConfigError, match="role 'rollout' is not in device_groups"):
        placement(GRPOTrainer, judged(models, tmp_path, device_groups={"a": {**GROUP, "workers": ["train"]}}))


def test_devices_of_a_role_that_is_not_used_are_told(models: dict[str, str], tmp_path: Path) -> None:
    groups = {"a": {**GROUP, "workers": ["train", "rollout"]}, "b": {**GROUP, "workers": ["teacher"]}}
    config = grpo_config(models["policy"], tmp_path, device_groups=groups)
    with pytest.raises(ConfigError, match="'b' hosts teacher alone, which this run does not use"):
        GRPOTrainer.check(config, placement(GRPOTrainer, config))


def test_a_column_that_a_reward_asks_for_is_missed_before_models_are_loaded(
    models: dict[str, str], tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"reward_funcs": [needs_gold], "reward_weights": None}
    with pytest.raises(ConfigError, match=r"^reward_funcs: [^\n]*'needs_gold' needs 'gold', but dataset[^\n]*$"):
        GRPOTrainer(grpo_config(models["policy"], tmp_path, **keys))
    keys["dataset"] = [{"prompt": text, "gold": text} for text in TEXTS[:6]]
    with pytest.raises(ConfigError, match="'needs_gold' needs 'gold', but eval_dataset has"):
        GRPOTrainer(grpo_config(models["policy"], tmp_path, **keys))
    assert GRPOTrainer(grpo_config(models["policy"], tmp_path, eval_dataset=None, **keys))


def needs_gold(completions: Sequence[Any], gold: Sequence[str]) -> list[float]:
    return [0.0] * len(completions)


def test_a_model_with_other_tokens_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    save_tiny(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    swapped = file.read_text().replace('"a":', '"swap":').replace('"b":', '"a":').replace('"swap":', '"b":')
    file.write_text(swapped)
    for key in ("teacher_model", "ref_model"):
        with pytest.raises(ConfigError, match=f"{key}: .* has other tokens than the policy"):
            GRPOTrainer(grpo_config(models["policy"], tmp_path, **{key: str(tmp_path / "other")}))


# What a step is made of


def one_step(models: dict[str, str], folder: Path, **keys: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """A step on injected samples, of which one in two tokens is chosen, corrected for the engine."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "warmup_steps": 0,
        "adam_epsilon": 1e-4,
        "entropy_coef": 0.01,
        "top_entropy_quantile": 0.5,
        "rollout_importance_sampling_mode": "token_truncate",
        "off_policy_mask_threshold": 0.1,
        "temperature": 0.9,
    }
    trainer = GRPOTrainer(grpo_config(models["policy"], folder, **settings | keys))
    trainer.build(10)
    samples = injected_samples()
    assert samples.old_logps is not None
    engine = samples.old_logps.values + np.random.default_rng(0).normal(0, 0.3, len(samples.old_logps.values))
    scored = trainer.with_logps(samples, off_policy=False)
    samples = dataclasses.replace(
        scored, old_logps=samples.old_logps, rollout_logps=Ragged(engine.astype(np.float32), samples.old_logps.offsets)
    )
    metrics = trainer.learn(samples, samples).values()
    trainer.policy.export(folder)
    return metrics, load_file(folder / "model.safetensors")


def measured_room(module: torch.nn.Module, device: torch.device) -> TokenRoom:
    """As on a GPU with memory for 60 tokens."""
    told = SimpleNamespace(module=module)
    return Room(told, needed(told, 60))


@pytest.mark.parametrize("keys", [{"tuner_type": "full"}, {"tuner_type": "lora", "beta": 0.3}], ids=["full", "lora"])
def test_how_a_step_is_cut_does_not_change_it(models: dict[str, str], tmp_path: Path, keys: dict[str, Any]) -> None:
    metrics, weights = one_step(models, tmp_path / "whole", **keys)
    cuts: list[dict[str, Any]] = [{"per_device_train_batch_size": size} for size in (1, 2, 4)]
    cuts += [{"padding_free": True}, {"token_budget": 24}, {"per_device_train_batch_size": 2, "token_budget": "auto"}]
    for cut in cuts:
        with patch.object(TokenRoom, "of", measured_room):
            found = one_step(models, tmp_path / "cut", **keys | cut)
        assert found[0] == pytest.approx(metrics, rel=1e-5, abs=1e-5), cut
        furthest = max(float((found[1][name] - weight).abs().max()) for name, weight in weights.items())
        assert furthest < 1e-6, cut


def test_the_reference_of_an_adapter_is_the_model_without_it(models: dict[str, str], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tuner_type": "lora", "beta": 0.1, "max_steps": 3}
    own = GRPOTrainer(grpo_config(models["policy"], tmp_path / "own", **keys))
    own.train()
    GRPOTrainer(grpo_config(models["policy"], tmp_path / "other", **keys, ref_model=models["policy"])).train()
    assert lines(tmp_path / "own") == lines(tmp_path / "other")
    assert lines(tmp_path / "own")[2]["kl"] > 0
    with pytest.raises(ConfigError, match="sync_ref_model needs a separate reference"):
        grpo_config(models["policy"], tmp_path, **keys, sync_ref_model=True)


def test_a_teacher_that_is_the_policy_changes_nothing_at_first(models: dict[str, str], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 1, "num_iterations": 1}
    GRPOTrainer(grpo_config(models["policy"], tmp_path / "without", **keys)).train()
    GRPOTrainer(grpo_config(models["policy"], tmp_path / "with", **keys, teacher_model=models["policy"])).train()
    (without, _), (taught, _) = lines(tmp_path / "without"), lines(tmp_path / "with")
    assert taught.pop("teacher_kl") == 0.0
    assert taught == pytest.approx(without, rel=1e-6)


# The order of the rows


def shared_fate(completion_ids: Sequence[Any], row: Sequence[int], **_: Any) -> list[float]:
    """Rows 1, 4 and 5 are rewarded alike, whatever is written."""
    return [0.5 if k in (1, 4, 5) else value for k, value in zip(row, evenness(completion_ids), strict=True)]


def dynamic(models: dict[str, str], folder: Path, **keys: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "dataset": [{"prompt": text, "row": k} for k, text in enumerate(TEXTS[:6])],
        "eval_dataset": None,
        "shuffle_dataset": False,
        "reward_funcs": [shared_fate],
        "reward_weights": None,
        "dynamic_sample": True,
        "generation_batch_size": 8,
        "global_batch_size": 8,
        "num_iterations": 1,
        "max_steps": 6,
    }
    return grpo_config(models["policy"], folder, **settings | keys)


class NotingTrainer(GRPOTrainer):
    """Notes which rows were completed and which were learned from."""

    def prepare(self) -> None:
        super().prepare()
        self.drawn: list[list[int]] = []
        self.learned: list[list[int]] = []

    def started(self, places: np.ndarray, *args: Any, **kwargs: Any) -> Any:
        self.drawn.append(places.tolist())
        return super().started(places, *args, **kwargs)

    def explore(self, *args: Any) -> Any:
        explored, metrics = super().explore(*args)
        self.learned.append([TEXTS.index(prompt) for prompt in explored.prompts[::4]])
        return explored, metrics


def test_prompts_rewarded_alike_give_way_to_the_next_ones(models: dict[str, str], tmp_path: Path) -> None:
    trainer = NotingTrainer(dynamic(models, tmp_path))
    trainer.train()
    epochs = [*[[0, 1], [2]], *[[3, 4], [5], [0]], *[[1, 2], [3]], *[[4, 5], [0, 1], [2]], *[[3, 4], [5], [0]]]
    assert trainer.drawn == [*epochs, [1, 2], [3]]  # each epoch is 0 to 5, each row once
    assert trainer.learned == [[0, 2], [3, 0], [2, 3], [0, 2], [3, 0], [2, 3]]
    told = lines(tmp_path)
    assert [line["resampled_share"] for line in told] == pytest.approx([1 / 3, 1 / 2, 1 / 3, 3 / 5, 1 / 2, 1 / 3])
    assert all(line["frac_reward_zero_std"] == 0.0 for line in told)
    assert told[-1]["epoch"] == 22 / 6


def test_one_reward_decides_which_prompts_give_way(models: dict[str, str], tmp_path: Path) -> None:
    """Another reward differs in every group: with the sum of both, no prompt would give way."""
    keys = {"reward_funcs": [shared_fate, "tests.e2e.runs.shortness", "tests.e2e.runs.evenness"], "max_steps": 1}
    config = dynamic(models, tmp_path, **keys, dynamic_sample="shared_fate")
    trainer = NotingTrainer(config)
    trainer.train()
    assert (trainer.drawn, trainer.learned) == ([[0, 1], [2]], [[0, 2]])
    with pytest.raises(ConfigError, match="compares the rewards 'fate', and this run has none of that name"):
        GRPOTrainer.check(dataclasses.replace(config, dynamic_sample="fate"), None)


def test_prompts_rewarded_alike_fill_up_when_the_tries_are_used_up(models: dict[str, str], tmp_path: Path) -> None:
    trainer = NotingTrainer(dynamic(models, tmp_path, max_resample_times=1, max_steps=2))
    trainer.train()
    assert trainer.drawn == [[0, 1], [2], [3, 4], [5]]
    assert trainer.learned == [[0, 2], [3, 4]]


def test_a_resumed_run_draws_the_rows_that_come_next(models: dict[str, str], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_steps": 2, "shuffle_dataset": True}
    GRPOTrainer(dynamic(models, tmp_path / "whole", **keys)).train()
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        GRPOTrainer(dynamic(models, tmp_path / "parted", **keys)).train()
    GRPOTrainer(dynamic(models, tmp_path / "parted", **keys, resume_from_checkpoint="auto")).train()
    assert lines(tmp_path / "parted") == lines(tmp_path / "whole")
    assert final_bytes(tmp_path / "parted") == final_bytes(tmp_path / "whole")


def two_differ(row: Sequence[int], **_: Any) -> list[float]:
    """Only the completions of rows 1 and 4 are rewarded differently."""
    return [float(place) if k in (1, 4) else 0.5 for place, k in enumerate(row)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_generation_draws_a_row_twice(models: dict[str, str], tmp_path: Path, shuffle: bool) -> None:
    """Of six rows two tell something, fewer than a generation has prompts: each one draws all rows and no more."""
    keys = {"generation_batch_size": 16, "shuffle_dataset": shuffle, "reward_funcs": [two_differ], "max_steps": 6}
    trainer = NotingTrainer(dynamic(models, tmp_path, **keys))
    trainer.train()
    assert [len(places) for places in trainer.drawn] == [4, 2] * 3
    for first, second in zip(trainer.drawn[::2], trainer.drawn[1::2], strict=True):
        assert sorted([*first, *second]) == [0, 1, 2, 3, 4, 5]
    assert [{1, 4} <= set(rows) and len(set(rows)) == 4 for rows in trainer.learned] == [True] * 3


def test_too_few_rows_to_draw_further_ones_are_told(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A generation has 6 prompts, each row once, and the dataset 6 rows"):
        GRPOTrainer(dynamic(models, tmp_path, generation_batch_size=24)).train()


def test_a_row_that_comes_up_again_at_the_turn_of_an_epoch_is_passed_over() -> None:
    stream = RowStream(5, seed=3, shuffle=True)
    orders = [stream.epochs[epoch].tolist() for epoch in range(2)]
    assert stream.take(3).tolist() == orders[0][:3]
    across = stream.take(4)
    assert across.tolist() == [*orders[0][3:], *[row for row in orders[1] if row not in orders[0][3:]][:2]]
    resumed = RowStream(5, seed=3, shuffle=True, num_drawn=stream.num_drawn)
    assert stream.take(4, held=across.tolist()).tolist() == resumed.take(4, held=across.tolist()).tolist()
    assert stream.num_drawn == resumed.num_drawn
    assert len(stream.take(2, held=range(5))) == 0


def test_each_reward_is_looked_at_where_each_is_normalised_alone() -> None:
    """The weighted sums are alike in both groups, the rewards of the second are not, and its advantages are not 0."""
    rewards_BK = np.array([[1, 1], [1, 1], [1, 0], [0, 2]], np.float32)
    weights_K = np.array([2, 1], np.float32)
    advantages, _ = group_advantages(
        rewards_BK, num_generations=2, weights_K=weights_K, multi_objective_aggregation="normalize_then_sum"
    )
    assert np.abs(advantages) == pytest.approx([0, 0, 1.5**0.5, 1.5**0.5], abs=1e-3)
    assert differing_groups(rewards_BK, weights_K, 2, "normalize_then_sum").tolist() == [False, True]
    assert differing_groups(rewards_BK, weights_K, 2, "sum_then_normalize").tolist() == [False, False]
    weightless = np.array([[1, 0], [1, 2], [1, np.nan], [1, np.nan]], np.float32)
    assert differing_groups(weightless, np.array([1, 0]), 2, "normalize_then_sum").tolist() == [False, False]


def test_the_loss_counts_prompts_of_medium_difficulty_alone(models: dict[str, str], tmp_path: Path) -> None:
    """What ROLL's own difficulty_mask says of these scores with 0.25 and 0.95: the limits themselves are left out."""
    scores_PG = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0.5, 0.5, 0, 0], [0.1] * 4])
    keys = {"num_generations": 4, "difficulty_range": [0.25, 0.95], "beta": 0.0}
    config = grpo_config(models["policy"], tmp_path, **keys, advantage_estimator="reinforce_plus_plus_token")
    rollouts = Rollouts(
        prompt_ids=Ragged.of([[1]] * 24, np.int64),
        completion_ids=Ragged.of([[2, 3]] * 24, np.int64),
        rollout_logps=Ragged.of([[-1.0, -1.0]] * 24, np.float32),
        truncated=np.zeros(24, bool),
    )
    samples = dataclasses.replace(rollouts.samples(), old_logps=rollouts.rollout_logps)
    samples, metrics = credit(config, samples, scores_PG.reshape(24, 1), np.ones(1), ["one"])
    assert samples.loss_mask is not None
    assert [bool(row.all()) for row in samples.loss_mask] == [8 <= place < 12 for place in range(24)]
    assert metrics.values()["difficulty_kept"] == pytest.approx(1 / 6)
    assert isinstance(samples.advantages, Ragged)
    assert samples.advantages.values[samples.loss_mask.values].mean() == pytest.approx(0, abs=1e-6)
    with pytest.raises(ConfigError, match=r"difficulty_range must be \[lowest, highest\]"):
        grpo_config(models["policy"], tmp_path, difficulty_range=[0.9, 0.1])


def test_a_step_without_tokens_leaves_the_entropy_coefficient(models: dict[str, str], tmp_path: Path) -> None:
    """Its entropy is not 0: nothing was measured."""
    keys: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 100.0, "beta": 0.0}
    trainer = GRPOTrainer(grpo_config(models["policy"], tmp_path, **keys))
    trainer.build(2)
    samples = injected_samples()
    trainer.learn(samples, samples)
    measured = trainer.entropy_coef
    assert measured.coefficient > 0.01
    assert measured.entropy is not None
    nothing = Ragged(np.zeros_like(samples.loss_mask.values), samples.loss_mask.offsets)
    metrics = trainer.learn(dataclasses.replace(samples, loss_mask=nothing), samples)
    assert trainer.entropy_coef == measured
    assert metrics.values()["entropy_coef"] == measured.coefficient


def test_models_of_one_name_are_logged_apart(models: dict[str, str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("judge/final", "old/judge", "evenness")]
    for folder in folders:
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(models["reward"])
    config = grpo_config(models["policy"], tmp_path / "run", reward_model=list(map(str, folders)), reward_weights=None)
    assert GRPOTrainer(config).rewarder.names == ["evenness", "shortness", "judge", "judge_2", "evenness_2"]


# It learns


def alternation(completion_ids: Sequence[Any], **_: Any) -> list[float]:
    """The share of tokens that are even in even places and odd in odd ones."""
    return [sum(int(token) % 2 == k % 2 for k, token in enumerate(ids)) / len(ids) for ids in completion_ids]


def rewards_of_learning(models: dict[str, str], folder: Path, **keys: Any) -> list[float]:
    """The mean reward of each step."""
    settings: dict[str, Any] = {
        "dataset": [{"prompt": letter} for letter in "abcdefgh"],
        "eval_dataset": None,
        "reward_funcs": [alternation],
        "reward_weights": None,
        "num_generations": 16,
        "generation_batch_size": None,
        "global_batch_size": 128,
        "per_device_train_batch_size": 128,
        "max_completion_length": 2,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "num_iterations": 1,
        "beta": 0.0,
        "max_steps": 24,
    }
    GRPOTrainer(grpo_config(models["policy"], folder, **settings | keys)).train()
    return [line["reward"] for line in lines(folder)]


def test_it_learns_what_belongs_in_each_place(models: dict[str, str], tmp_path: Path) -> None:
    rewards = rewards_of_learning(models, tmp_path, learning_rate=1e-2, max_steps=40)
    assert rewards[0] < 0.6
    assert np.mean(rewards[-4:]) > 0.85


def test_it_does_not_learn_from_advantages_of_the_wrong_sign(models: dict[str, str], tmp_path: Path) -> None:
    def turned(*args: Any) -> tuple[Samples, Any]:
        samples, metrics = credit(*args)
        assert isinstance(samples.advantages, np.ndarray)
        return dataclasses.replace(samples, advantages=-samples.advantages), metrics

    with patch.object(grpo, "credit", turned):
        assert np.mean(rewards_of_learning(models, tmp_path)[-4:]) < 0.3


ESTIMATORS: dict[str, dict[str, Any]] = {
    "rloo": {"loss_type": "grpo", "importance_sampling_level": "sequence_product"},
    "reinforce_plus_plus_token": {},
    "opo": {"loss_type": "gmpo", "epsilon": 0.4},
    "remax": {},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_other_estimators_learn_too(models: dict[str, str], tmp_path: Path, estimator: str) -> None:
    """With a little KL in the reward, or in the loss where the estimator has none there."""
    keys: dict[str, Any] = {"advantage_estimator": estimator, "beta": 1e-3, **ESTIMATORS[estimator]}
    rewards = rewards_of_learning(models, tmp_path, **keys)
    assert np.mean(rewards[-4:]) > 0.75
    assert lines(tmp_path)[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines(tmp_path)[-1]["kl"] > 0.1
