"""siiRL's keys in ours, beside what test_translate.py asks; and verl's schedule of Megatron."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayhelper.text import parse_text
from tests.trainers.test_translate import SCRIPT, SIIRL, checked, translated
from trainers.translate.command import main


def with_keys(keys: str, script: str = SIIRL) -> str:
    """The script with further keys."""
    return script.replace("algorithm.weight_factor_in_cpgd='STD_weight'", keys).replace(
        "data.truncation='error'", f"{keys} data.truncation='error'"
    )


def test_what_siirl_takes_where_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SIIRL.replace("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "data.gen_batch_size=96")
    out, err = translated(text.replace("actor_rollout_ref.rollout.name=vllm", ""), "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert (found["per_device_train_batch_size"], found["rollout_engine"]) == (1, "vllm")
    assert (found["lr_scheduler_type"], found["output_dir"]) == ("linear", "checkpoints/siirl_examples/gsm8k")
    assert "data.gen_batch_size: siirl does not read it" in err


def test_long_completions_are_punished_as_in_siirl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = " ".join(f"reward_model.overlong_buffer.{one}" for one in ("enable=True", "len=64", "penalty_factor=2.0"))
    out, _ = translated(with_keys(f"{keys} reward_model.reward_manager=dapo"), "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert found["reward_funcs"][1] == {"name": "soft_overlong", "soft_max_length": 256, "soft_cache_length": 64}
    assert checked(out, tmp_path).reward_weights == [1.0, 2.0]
    out, err = translated(with_keys(keys), "run.sh", tmp_path, capsys)
    assert "reward_weights" not in out
    assert "overlong_buffer.enable: only the reward manager dapo reads it" in err


@pytest.mark.parametrize(
    ("estimator", "mode", "loss", "scale", "drift"),
    [
        ("cpgd weight_factor_in_cpgd=naive", "cpgd", "cpgd", "none", 0.25),
        ("cpgd", "vanilla", "bnpo", "group", 0.25),
        ("grpo", "cpgd", "cpgd", "group", 0.0),
    ],
)
def test_cpgd_is_its_advantages_its_loss_and_its_drift(
    estimator: str,
    mode: str,
    loss: str,
    scale: str,
    drift: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} algorithm.adv_estimator={estimator}"
    keys = keys.replace(" weight", " algorithm.weight")
    text = SIIRL.replace("strategy=megatron", "strategy=fsdp").replace(
        "policy_drift_coeff=0.001", "policy_drift_coeff=0.25"
    )
    text = re.sub(r"actor_rollout_ref.actor.megatron.\S+|\+actor\S+", "", text)
    out, _ = translated(text.replace("algorithm.weight_factor_in_cpgd='STD_weight'", keys), "run.sh", tmp_path, capsys)
    found = checked(out, tmp_path)
    assert (found.loss_type, found.scale_rewards, found.policy_drift_coef) == (loss, scale, drift)


@pytest.mark.parametrize(
    ("metric", "more", "meant"),
    [
        ("acc", "", "ground_truth"),
        ("acc", "custom_reward_function.path=rule.py custom_reward_function.name=judge", "judge"),
        ("seq_reward", "", True),
    ],
)
def test_prompts_are_chosen_by_the_metric_of_dapo(
    metric: str, more: str, meant: str | bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = f"algorithm.workflow_type=dapo algorithm.filter_groups.enable=True algorithm.filter_groups.metric={metric}"
    out, err = translated(with_keys(f"{keys} {more}"), "run.sh", tmp_path, capsys)
    assert checked(out, tmp_path).dynamic_sample == meant
    assert "keeps the others for the next step" in err


@pytest.mark.parametrize("system", ["verl", "siirl", "roll"])
def test_a_file_without_any_key_of_its_system_is_no_configuration(
    system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = translated("tools:\n  - class_name: x\n", "tools.yaml", tmp_path, capsys, "--from", system)
    assert f"is no configuration of {system}: it has none of" in err


def test_a_key_that_a_line_came_from_is_not_listed_as_one_without_equivalent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = translated(SCRIPT, "run.sh", tmp_path, capsys)
    assert "epsilon_high: 0.28  # from actor_rollout_ref.actor.clip_ratio_high" in out
    assert "clip_ratio_high" not in err


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        ("", True),
        ("trainer.use_legacy_worker_impl=disable", False),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", False),
    ],
)
def test_the_mean_over_tokens_of_a_micro_batch_is_told(
    keys: str, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = translated(with_keys(keys, SCRIPT), "run.sh", tmp_path, capsys)
    assert ("averages each micro-batch over its tokens" in err) == is_told


def test_the_schedule_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor = "actor_rollout_ref.actor"
    keys = f"{actor}.strategy=megatron {actor}.grad_clip=0.5 {actor}.optim.clip_grad=0.7"
    found = parse_text(translated(with_keys(keys, SCRIPT), "run.sh", tmp_path, capsys)[0], "ours")
    assert (found["max_grad_norm"], found["lr_scheduler_type"]) == (0.7, "constant_with_warmup")
    keys += f" {actor}.optim.lr_decay_style=linear {actor}.optim.min_lr=1e-7"
    found = parse_text(translated(with_keys(keys, SCRIPT), "run.sh", tmp_path, capsys)[0], "ours")
    assert (found["lr_scheduler_type"], found["lr_scheduler_kwargs"]) == ("polynomial", {"lr_end": 1e-7, "power": 1.0})
    keys = f"{actor}.optim.lr_scheduler_type=cosine {actor}.optim.num_cycles=1.5"
    assert "a cosine falls once" in translated(with_keys(keys, SCRIPT), "run.sh", tmp_path, capsys)[1]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "weight_factor_in_cpgd='STD_weight'",
            "weight_factor_in_cpgd=clip_filter_like_weight algorithm.adv_estimator=cpgd",
            "weight_factor_in_cpgd: clip_filter_like_weight is not built (known: STD_weight, naive)",
        ),
        (
            "algorithm.adv_estimator",
            "algorithm.workflow_type=marft algorithm.adv_estimator",
            "the workflow marft is not built",
        ),
        (
            "algorithm.adv_estimator",
            "algorithm.workflow_type=dapo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=len "
            "algorithm.adv_estimator",
            "filter_groups.metric: len is not built (known: acc, seq_reward, seq_final_reward)",
        ),
    ],
)
def test_what_siirl_has_alone_is_refused_by_name(
    before: str, after: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert before in SIIRL
    (tmp_path / "run.sh").write_text(SIIRL.replace(before, after))
    assert main([str(tmp_path / "run.sh")]) == 2
    assert told in capsys.readouterr().err
