"""PPO whole: the same numbers however it is cut and wherever its roles run; it resumes; it learns."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rayhelper import ConfigError
from tests.conftest import RaySession
from tests.e2e.runs import (
    TEXTS,
    evenness,
    final_bytes,
    interrupted_after,
    lines,
    ppo_config,
    separate,
    shared,
    shortness,
    together,
)
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.batch import Ragged, Rollouts
from trainers.cli import load_config, placement, run
from trainers.ppo.config import PPOConfig
from trainers.ppo.plan import BatchPlan
from trainers.ppo.samples import credit, policy_samples, value_samples
from trainers.ppo.trainer import PPOTrainer
from trainers.rewards import gae
from trainers.rewards.advantages import total_rewards
from trainers.rewards.models import RewardModel

ROLES = ["train", "critic", "reference", "reward", "rollout"]
Step = tuple[
    dict[str, float], dict[str, torch.Tensor]
]  # metrics of one optimizer step; weights of both models after it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reward_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier that judges texts by weights of its own."""
    folder = tmp_path_factory.mktemp("judge")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        judge.score.weight.data.normal_()
    judge.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Step]:
    """One step in this process, all of so many completions at once."""
    return {count: one_step(model, tmp_path_factory.mktemp("alone"), count) for count in (7, 3)}


@pytest.fixture(scope="module")
def off(model: str, reward_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run in this process, with a reward model beside the functions."""
    folder = tmp_path_factory.mktemp("off")
    PPOTrainer(whole_config(model, folder, reward_model)).train()
    return folder


def whole_config(model: str, folder: Path, reward_model: str) -> PPOConfig:
    return ppo_config(model, folder, reward_model=reward_model, reward_weights=[1.0, 0.1, 0.3])


def injected_rollouts(count: int) -> Rollouts:
    """Completions of 1 to 13 random tokens; with a limit of 13 the first has no place behind its end."""
    random = np.random.default_rng(5)
    prompts, completions = [2, 9, 4, 1, 6, 3, 5][:count], [13, 1, 7, 2, 10, 5, 1][:count]
    return Rollouts(
        prompt_ids=Ragged.split(random.integers(4, 260, sum(prompts)), prompts),
        completion_ids=Ragged.split(random.integers(4, 260, sum(completions)), completions),
        rollout_logps=Ragged.split(np.zeros(sum(completions), np.float32), completions),
        truncated=np.array(completions) == 13,
    )


def one_step(model: str, folder: Path, count: int, **keys: Any) -> Step:
    """One optimizer step of policy and critic over the workers there are; one completion has no score."""
    # Adam divides gradients by their own size: an epsilon above their rounding errors keeps those from growing
    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "warmup_steps": 0, "adam_epsilon": 1e-4}
    trainer = PPOTrainer(ppo_config(model, folder, **settings | {"temperature": 0.9} | keys))
    trainer.build(10)
    rollouts, random = injected_rollouts(count), np.random.default_rng(6)
    samples = policy_samples(rollouts)
    states = value_samples(rollouts, gae.num_places(rollouts.completion_ids.lengths, 13), end_token_id=2)
    logps, values = trainer.policy.logps(samples), trainer.critic.values(states)

    def moved(column: Ragged) -> Ragged:
        """So far off that some are clipped."""
        return Ragged(column.values + random.normal(0, 0.3, len(column.values)).astype(np.float32), column.offsets)

    samples, states, _ = credit(
        dataclasses.replace(samples, old_logps=moved(logps)),
        dataclasses.replace(states, old_values=moved(values)),
        trainer.reference.logps(samples),
        np.append(random.normal(size=count - 1), np.nan),
        kl_coef=0.1,
        kl_estimator="k1",
        whiten_rewards=False,
        gamma=0.9,
        lam=0.8,
    )
    metrics = trainer.learn(samples, states).values()
    trainer.policy.export(folder)
    trainer.critic.save(folder / "critic")
    weights = load_file(folder / "model.safetensors")
    critic = load_file(folder / "critic" / "model.safetensors")
    return metrics, weights | {f"critic.{name}": weight for name, weight in critic.items()}


def assert_same_step(found: Step, expected: Step, where: str) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6), where
    furthest = {name: float((found[1][name] - weight).abs().max()) for name, weight in expected[1].items()}
    assert max(furthest.values()) < 1e-6, f"{where}: {furthest}"


@pytest.mark.parametrize(
    "keys",
    [
        {"per_device_train_batch_size": 1},
        {"per_device_train_batch_size": 3},
        {"padding_free": True},
        {"token_budget": 20},
    ],
    ids=str,
)
def test_how_a_step_is_cut_does_not_change_it(
    keys: dict[str, Any], alone: dict[int, Step], model: str, tmp_path: Path
) -> None:
    assert_same_step(one_step(model, tmp_path, 7, **keys), alone[7], str(keys))
    untrained = load_file(Path(model) / "model.safetensors")
    assert max(float((alone[7][1][name] - weight).abs().max()) for name, weight in untrained.items()) > 1e-3
    for name in ("policy/clipfrac_avg", "val/clipfrac_avg"):
        assert 0 < alone[7][0][name] < 1, name


@pytest.mark.parametrize(("num_workers", "count"), [(2, 7), (4, 3)])
def test_a_step_over_several_workers_is_the_step_of_one(
    num_workers: int, count: int, alone: dict[int, Step], model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """Two workers, weights in shards, with four and three completions; four, the last of them without any."""
    sharding = "full_shard" if num_workers == 2 else "no_shard"
    with ray_session(together(num_workers)):
        found = one_step(model, tmp_path, count, per_device_train_batch_size=2, fsdp_sharding_strategy=sharding)
    assert_same_step(found, alone[count], f"{count} completions on {num_workers} workers")


def test_roles_on_separate_groups_equal_roles_that_share_one(
    off: Path, model: str, reward_model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """Every completion was drawn from weights that went from one worker to another."""
    with ray_session(separate()):
        PPOTrainer(whole_config(model, tmp_path, reward_model)).train()
    assert lines(tmp_path) == lines(off)
    assert final_bytes(tmp_path) == final_bytes(off)


def test_a_run_logs_what_trl_logs(off: Path) -> None:
    logged = lines(off)
    steps = [line for line in logged if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["episode"] for line in steps if "episode" in line] == [4, 6, 10, 12]
    every = {f"policy/{name}_avg" for name in ("approxkl", "clipfrac", "entropy")}
    every |= {"loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var"}
    every |= {"loss", "grad_norm", "learning_rate", "critic/grad_norm", "critic/learning_rate"}
    first = {f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores")}
    first |= {"val/num_eos_tokens", "reward", "rewards/evenness/mean", "completions/mean_length"}
    assert all(every <= line.keys() for line in steps)
    assert [first <= line.keys() for line in steps] == [line["step"] in (1, 5, 7, 11) for line in steps]
    assert {"eval_reward", "eval_rewards/evenness/mean"} <= logged[-1].keys()
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-5)  # the policy is the reference yet
    assert abs(steps[-2]["objective/kl"]) > 1e-3
    vf_coef = PPOConfig(model="m", dataset="d", reward_funcs=["format"]).vf_coef
    assert steps[3]["loss"] == pytest.approx(steps[3]["loss/policy_avg"] + vf_coef * steps[3]["loss/value_avg"])


def test_a_reward_model_scores_beside_the_functions(
    model: str, reward_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = PPOTrainer(whole_config(model, tmp_path, reward_model))
    with caplog.at_level(logging.ERROR):
        trainer.build(10)
    rows = trainer.rows.select(range(5))
    starts = trainer.generator.starts(rows, trainer.tokenizer, np.arange(5))
    rollouts = trainer.generator.complete(starts, 0, temperature=1.0)
    rewards_BK = trainer.rewarder(rows, rollouts)
    ids = [row.tolist() for row in rollouts.completion_ids]
    texts = tiny_tokenizer().batch_decode(ids, skip_special_tokens=True)
    judged = RewardModel(reward_model, batch_size=1).score(rows["prompt"], texts)
    columns = [evenness(ids), [np.nan if r is None else r for r in shortness(ids)], judged]
    assert rewards_BK == pytest.approx(np.array(columns).T, rel=1e-5, nan_ok=True)
    assert np.std(judged) > 0.1
    assert trainer.rewarder.names == ["evenness", "shortness", Path(reward_model).name]
    total = total_rewards(rewards_BK, trainer.rewarder.weights)
    wanted = np.nansum(rewards_BK * np.array([1, 0.1, 0.3]), axis=1)
    assert total == pytest.approx(wanted)
    judge = load_file(Path(reward_model) / "model.safetensors")["score.weight"]
    assert torch.equal(trainer.critic.built.module.score.weight.detach(), judge)


def test_the_policy_without_its_adapter_is_the_reference(model: str, tmp_path: Path) -> None:
    """A run that loads no reference equals one that is given the starting model as its reference."""
    lora = {"tuner_type": "lora", "lora_rank": 4, "max_steps": 6}
    free, given = tmp_path / "free", tmp_path / "given"
    trainer = PPOTrainer(ppo_config(model, free, **lora))
    trainer.train()
    assert trainer.reference.backend is None
    PPOTrainer(ppo_config(model, given, **lora, ref_model=model)).train()
    without_rounding = [
        {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in line.items()} for line in lines(given)
    ]
    assert lines(free) == without_rounding
    assert abs(lines(free)[4]["objective/kl"]) > 1e-4
    assert (free / "final" / "adapter").is_dir()


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "dropout", attention_dropout=0.1)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    keys: dict[str, Any] = {"save_steps": 4, "eval_steps": 6, "val_before_train": True, "disable_dropout": False}
    PPOTrainer(ppo_config(model, whole, **keys)).train()
    with interrupted_after(9), pytest.raises(KeyboardInterrupt):
        PPOTrainer(ppo_config(model, parted, **keys)).train()
    assert (parted / "checkpoint-4" / "critic" / "optimizer.pt").is_file()
    PPOTrainer(ppo_config(model, parted, **keys, resume_from_checkpoint="auto")).train()
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)


def first_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def test_it_learns_what_only_the_critic_can_tell(model: str, tmp_path: Path) -> None:
    """Two tokens of eight are drawn, and the first decides the reward, which comes after the second.

    With lam 0 the first token's advantage is V_1 - V_0, so nothing is learned from values of another place, from those
    of an earlier critic, or in the other direction.
    """
    config = PPOConfig(
        **shared(model, tmp_path)
        | {
            "seed": 0,
            "dataset": [{"prompt": "ab"}] * 32,
            "reward_funcs": [first_even],
            "generation_kwargs": {"suppress_tokens": list(range(252))},
            "max_completion_length": 2,
            "per_device_train_batch_size": 32,
            "max_steps": 60,
            "save_steps": 0,
            "temperature": 1.0,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "learning_rate": 1e-3,
            "value_learning_rate": 3e-3,
            "cliprange_value": 10.0,
            "kl_coef": 0.0,
            "lam": 0.0,
        }
    )
    PPOTrainer(config).train()
    rewards = [line["reward"] for line in lines(tmp_path) if "reward" in line]
    assert len(rewards) == 15
    assert rewards[0] < 0.7
    assert np.mean(rewards[-4:]) > 0.9


def test_lambdas_of_vapo_reach_policy_and_critic(model: str, tmp_path: Path) -> None:
    """The first losses of a batch tell which one had another lambda."""
    runs: dict[str, dict[str, Any]] = {
        "plain": {},
        "critic": {"lam_critic": 1.0},
        "policy": {"length_adaptive_alpha": 0.5},
    }
    for name, keys in runs.items():
        PPOTrainer(ppo_config(model, tmp_path / name, max_steps=2, lam=0.5, **keys)).train()
    plain, critic, policy = (lines(tmp_path / name)[0] for name in runs)
    assert critic["loss/value_avg"] != plain["loss/value_avg"]
    assert critic["loss/policy_avg"] == plain["loss/policy_avg"]
    assert policy["loss/value_avg"] == plain["loss/value_avg"]
    assert 0 <= policy["policy/lam"] < 1
    assert "policy/lam" not in plain


def test_a_kl_in_the_loss_needs_a_reference_and_no_kl_in_the_reward(model: str, tmp_path: Path) -> None:
    """The first step is taken by the reference itself; later ones have gone away from it."""
    keys = {"kl_coef": 0.0, "kl_loss_coef": 10.0, "kl_clip_max": 10.0, "max_steps": 4, "value_max_grad_norm": 1e-3}
    trainer = PPOTrainer(ppo_config(model, tmp_path, **keys))
    trainer.train()
    first, *_, last = [line for line in lines(tmp_path) if "policy/kl_loss_avg" in line]
    assert (first["policy/kl_loss_avg"], first["objective/non_score_reward"]) == (pytest.approx(0, abs=1e-6), 0)
    assert last["policy/kl_loss_avg"] > 1e-6
    limits = [part.backend.max_grad_norm for part in (trainer.policy, trainer.critic)]
    assert limits == [trainer.config.max_grad_norm, 1e-3]


def test_a_plan_goes_through_every_completion_once_an_epoch() -> None:
    config = PPOConfig(
        model="m",
        dataset="d",
        reward_funcs=["format"],
        global_batch_size=4,
        num_mini_batches=2,
        num_ppo_epochs=3,
        num_train_epochs=2,
    )
    plan = BatchPlan.of(config, num_rows=21, num_workers=1, saved_order={})
    assert (plan.batch_size, plan.steps_per_epoch, plan.num_steps) == (8, 6 + 6 + 6, 36)
    assert [plan.batch(step) for step in (0, 5, 6, 12, 17, 18)] == [0, 0, 1, 2, 2, 3]
    assert [plan.num_episodes(batch) for batch in range(7)] == [0, 8, 16, 21, 29, 37, 42]
    parts = list(plan.mini_batches(8, seed=(0, 0)))
    assert len(parts) == 6
    for epoch in range(3):
        assert sorted(np.concatenate(parts[2 * epoch : 2 * epoch + 2])) == list(range(8))
    assert [len(part) for part in plan.mini_batches(5, seed=(0, 0))] == [3, 2] * 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reward_funcs": []}, "give reward_funcs, such as exact_answer, or a reward_model"),
        ({"reward_weights": [1.0]}, "reward_weights has 1 values for 2 rewards"),
        ({"kl_estimator": "k2"}, "kl_estimator must be one of k1, k3"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"lam": 1.1}, r"lam must lie in \[0, 1\]"),
        ({"num_mini_batches": 0}, "num_mini_batches must be at least 1"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty must be at least 0"),
        ({"ref_model": "other", "kl_coef": 0.0}, "ref_model is set, but kl_coef is 0"),
        ({"value_model": "./nowhere"}, "value_model: there is no folder './nowhere'"),
    ],
)
def test_mistakes_are_found_before_anything_starts(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config("tiny", tmp_path, **keys)


def test_a_column_that_a_reward_asks_for_is_missed_before_models_are_loaded(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"reward_funcs": [needs_gold], "reward_weights": None}
    with pytest.raises(ConfigError, match=r"^reward_funcs: [^\n]*'needs_gold' needs 'gold', but dataset[^\n]*$"):
        PPOTrainer(ppo_config(model, tmp_path, **keys))
    keys["dataset"] = [{"prompt": text, "gold": text} for text in TEXTS[:6]]
    with pytest.raises(ConfigError, match="'needs_gold' needs 'gold', but eval_dataset has"):
        PPOTrainer(ppo_config(model, tmp_path, **keys))
    assert PPOTrainer(ppo_config(model, tmp_path, eval_dataset=None, **keys))


def needs_gold(completions: Sequence[Any], gold: Sequence[str]) -> list[float]:
    return [0.0] * len(completions)


def test_models_with_other_tokens_are_refused(model: str, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    tokens = tiny_tokenizer()
    swapped = tokens.backend_tokenizer.to_str().replace('"a":', '"swap":').replace('"b":', '"a":')
    (tmp_path / "other" / "tokenizer.json").write_text(swapped.replace('"swap":', '"b":'))
    with pytest.raises(ConfigError, match=r"value_model: .* has other tokens than the policy"):
        PPOTrainer(ppo_config(model, tmp_path, value_model=other))


def test_the_examples_are_placed_and_one_trains_two_steps(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one on Ray: test_examples.py."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    small = ["--max_steps=2", "--global_batch_size=8", "--val_before_train=false", "--eval_dataset=null"]
    arguments = [*small, "--eval_steps=null", f"--model={model}", f"--output_dir={tmp_path}"]
    apart = [(("train", "rollout"), 1), (("critic", "reference", "reward"), 1)]
    for name, expected in (("quickstart_ray", apart), ("quickstart", [(tuple(ROLES), 1)])):
        config = load_config(PPOConfig, ["--config", f"examples/ppo/{name}.yaml", *arguments])
        assert [(group.roles, group.num_workers) for group in placement(PPOTrainer, config).groups] == expected
    run(PPOTrainer, config)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert (tmp_path / "final" / "model.safetensors").is_file()
