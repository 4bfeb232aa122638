"""What other systems' commands and files mean is written in our keys, or refused by name: nothing is guessed."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from rayhelper.planning.dry_run import make_plan
from rayhelper.text import parse_text
from trainers.configuration.reading.command_line import load_config
from trainers.configuration.reading.folders import configuration_named
from trainers.grpo.config import GRPOConfig
from trainers.translate import conditions
from trainers.translate.command import main
from trainers.translate.conditions import evaluated
from trainers.translate.roll import ranks_of
from trainers.translate.shell import commands, unknown_in

ROOT = Path(__file__).parents[2]
SCRIPT = r"""
set -x
# sizes
PROMPTS=${PROMPTS:-64}
DRAWS=4
BASE=/data/sums
files="['$BASE/a.parquet', '$BASE/b.parquet']"
COMMON=(
    data.max_prompt_length=$((2 * 128))   # a comment among items
    data.max_response_length=512
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_files="$files" data.val_files=$BASE/test.parquet \
    data.train_batch_size=$PROMPTS data.truncation='error' \
    "${COMMON[@]}" \
    actor_rollout_ref.model.path=org/model \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$DRAWS \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.logger='["console","tensorboard"]' trainer.n_gpus_per_node=4 trainer.nnodes=2 \
    trainer.save_freq=10 trainer.test_freq=5 trainer.total_epochs=3 $@ 2>&1 | tee log.txt
"""
MEANT: dict[str, Any] = {
    "model": "org/model",
    "dataset": ["/data/sums/a.parquet", "/data/sums/b.parquet"],
    "max_prompt_length": 256,
    "num_generations": 4,
    "generation_batch_size": 64 * 4,  # theirs count prompts, ours completions
    "global_batch_size": 16 * 4,
    "per_device_train_batch_size": 2,
    "warmup_steps": 5 * 4,  # a generation is four optimizer steps
    "save_steps": 10 * 4,
    "eval_steps": 5 * 4,
    "num_train_epochs": 3,
    "beta": 0.01,
    "use_bias_correction_kl": False,
    "kl_clip_max": 10.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": 3.0,
    "loss_type": "bnpo",
    "scale_rewards": "group",
    "dataloader_drop_last": True,
    "weight_decay": 0.01,
    "lr_scheduler_type": "constant_with_warmup",
    "eval_temperature": 0.0,
    "vllm_tensor_parallel_size": 2,
    "vllm_gpu_memory_utilization": 0.6,
    "sleep_level": 1,
    "offload_model": True,
    "offload_optimizer": False,
    "report_to": ["tensorboard"],
    "train": {"gpus": 8},
    "rollout": {"gpus": 8, "shares_devices_with": "train"},
}
SIIRL = r"""
export ALG=grpo
export NNODES=${PET_NNODES:-1}
export MODEL_PATH=$HOME/models/m
export BATCH=$((32 * $NNODES))
CMD=(
    python3 -m siirl.main_dag
    algorithm.adv_estimator=\$ALG
    data.train_files=\$HOME/data/train.parquet data.train_batch_size=\$BATCH
    data.max_prompt_length=128 data.max_response_length=256 data.shuffle=False
    actor_rollout_ref.model.path=\$MODEL_PATH actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.sequence_parallel=False actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
    actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.policy_drift_coeff=0.001
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8
    algorithm.weight_factor_in_cpgd='STD_weight'
    trainer.logger=['console'] trainer.n_gpus_per_node=8 trainer.nnodes=\$NNODES trainer.total_epochs=1
)
start() {
    local when=$(date +%s)
    eval "${CMD[@]}" "$@"
}
start "$@"
"""
ROLL = """
pretrain: org/model
num_gpus_per_node: 8
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
adv_estimator: reinforce
whiten_advantages: true
max_steps: 500
save_steps: 100
output_dir: ./out
track_with: none
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 32}
  data_args: {template: qwen2_5, file_name: [math.jsonl], messages: messages}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.99, top_k: 100}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, block_size: 16}}
  device_mapping: list(range(0,8))
reference:
  strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
rewards:
  math_rule: {worker_cls: some.Worker, tag_included: [gsm8k]}
"""
ROLL_SNIPPET = """
actor_train:
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, use_distributed_optimizer: true,
      num_layers_in_first_pipeline_stage: 13}
  device_mapping: list(range(0,8))
reference:
  strategy_args:
    strategy_name: megatron_infer
    strategy_config: {tensor_model_parallel_size: 2}
  device_mapping: list(range(0,8))
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("PROMPTS", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)


def translated(text: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    """What is printed on stdout and stderr for a file with this text."""
    (tmp_path / name).write_text(text)
    code = main([str(tmp_path / name), *more])
    out, err = capsys.readouterr()
    assert code == (2 if err.startswith("error") else 0)
    return out, err


def checked(written: str, tmp_path: Path, trainer: str = "grpo") -> Any:
    """The configuration of what was written, once it is planned too; data and model are names that need no file."""
    (tmp_path / "ours.yaml").write_text(written)
    kind = configuration_named(trainer)
    assert kind is not None
    argv = ["--model", "m", "--dataset", "d", *(["--eval_dataset", "d"] if "eval_dataset:" in written else [])]
    plan = make_plan(str(tmp_path / "ours.yaml"), None, None, None, 80.0, None)
    assert not plan.findings.mistakes
    return load_config(kind, ["--config", str(tmp_path / "ours.yaml"), *argv])


def test_a_script_of_verl_in_our_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(SCRIPT, "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert {key: found[key] for key in MEANT} == MEANT
    assert (
        "generation_batch_size: 256  # from data.train_batch_size x actor_rollout_ref.rollout.n; 64 prompts x 4" in out
    )
    assert "weight_decay: 0.01  # verl's default of" in out
    assert "without an equivalent: data.truncation" in err
    assert "# data.truncation: " in out
    assert checked(out, tmp_path).loss_type == "bnpo"


def test_workers_that_share_rows_in_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a micro-batch verl counts the tokens of one of these workers, and here they are those of the rows."""
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True"
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
    out, err = translated(
        SCRIPT.replace("data.truncation", f"{ulysses} {tokens} data.truncation"), "r.sh", tmp_path, capsys
    )
    found = parse_text(out, "ours")
    assert (found["sequence_parallel_size"], found["token_budget"]) == (2, 8192)
    assert "ulysses" not in err
    assert checked(out, tmp_path).sequence_parallel_size == 2
    plain, _ = translated(SCRIPT.replace("data.truncation", f"{tokens} data.truncation"), "r.sh", tmp_path, capsys)
    assert "sequence_parallel_size" not in parse_text(plain, "ours")


def test_rows_that_verl_filters_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("True", "False"):
        script = SCRIPT.replace("data.truncation", f"data.filter_overlong_prompts={value} data.truncation")
        out, err = translated(script, "run.sh", tmp_path, capsys)
        assert parse_text(out, "ours").get("drop_long_prompts", False) is (value == "True")
        assert "filter_overlong_prompts" not in err


def test_the_dry_run_of_the_page_replaces_what_needs_the_original_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPT.replace('"tensorboard"', '"wandb"') + "trainer.resume_mode=auto\n"
    written, _ = translated(script, "run.sh", tmp_path, capsys)
    page = (ROOT / "docs" / "translate.md").read_text(encoding="utf-8").partition("## A dry run")[2]
    lines = page.split("```")[1].replace("\\\n", "").splitlines()
    of_words = {words[0]: words for words in map(shlex.split, lines) if words}
    kept = [line for line in written.splitlines() if not re.match(of_words["grep"][2], line)]
    (tmp_path / "cpu.yaml").write_text("\n".join(kept), encoding="utf-8")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "rows.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = load_config(GRPOConfig, of_words["rayhelper"][2:])
    assert (config.model, config.reward_funcs, config.report_to) == ("tiny/model", ["exact_answer"], ["none"])
    assert (config.global_batch_size, config.generation_batch_size, config.use_ray) == (8, 8, False)


def test_every_line_says_where_it_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = translated(SCRIPT, "run.sh", tmp_path, capsys)
    lines = out.split("\n\n")[0].splitlines()
    assert all("  # " in line for line in lines if not line.startswith("#"))


def test_what_differs_from_verl_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(SCRIPT, "run.sh", tmp_path, capsys)
    for told in ("the floor of deviations", "the rule of data_source"):
        assert told in err, told
        assert f"# {told}: " in out
    assert "trainer.test_freq" not in err


@pytest.mark.parametrize(("before", "evaluates"), [("True", True), ("False", False)])
def test_without_test_freq_nothing_is_evaluated_but_before_training(
    before: str, evaluates: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT.replace("trainer.test_freq=5", f"trainer.test_freq=-1 trainer.val_before_train={before}")
    out, err = translated(script, "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert ("eval_dataset" in found) == evaluates
    assert found["val_before_train"] is evaluates
    assert ("trainer.test_freq" if evaluates else "data.val_files") in err


@pytest.mark.parametrize(
    ("mode", "mini", "is_told"),
    [("cispo", 16, True), ("cispo", 64, False), ("geo_mean", 16, False)],
)
def test_a_loss_that_averages_otherwise_than_verl_is_told(
    mode: str, mini: int, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT.replace("ppo_mini_batch_size=16", f"ppo_mini_batch_size={mini}").replace(
        "trainer.nnodes=2", f"trainer.nnodes=2 actor_rollout_ref.actor.policy_loss.loss_mode={mode}"
    )
    _, err = translated(script, "run.sh", tmp_path, capsys)
    assert ("the average of" in err) == is_told


def test_the_environment_sets_what_a_script_leaves_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTS", "32")
    out, _ = translated(SCRIPT, "run.sh", tmp_path, capsys)
    assert parse_text(out, "ours")["generation_batch_size"] == 32 * 4


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("BASE=/data/sums", "", "BASE"),
        ("DRAWS=4", "DRAWS=$(cat draws.txt)", "cat draws.txt"),
        ("DRAWS=4", "if [ $1 ]; then DRAWS=8; fi", "under a condition"),
        ("trainer.nnodes=2", "trainer.nnodes=2 trainer.unheard_of=1", "unknown key trainer.unheard_of"),
        ("adv_estimator=grpo", "adv_estimator=gae", "PPO draws one completion of each prompt, not 4"),
        ("adv_estimator=grpo", "adv_estimator=gae critic.ppo_epochs=5", "it is 5 for the critic and 1"),
        (
            "adv_estimator=grpo",
            "adv_estimator=gae actor_rollout_ref.actor.kl_loss_type=mse",
            "kl_loss_type: mse is not built",
        ),
        ("adv_estimator=grpo", "adv_estimator=vtrace", "vtrace is not translated (known: gae, which is PPO"),
        (
            "verl.trainer.main_ppo algorithm.adv_estimator=grpo",
            "verl.trainer.old_sft_trainer",
            "known: fsdp_sft_trainer",
        ),
        ("use_kl_loss=True", "use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse", "kl_loss_type: mse is not"),
        (
            "data.truncation='error'",
            "data.image_key=images actor_rollout_ref.actor.strategy=megatron",
            "takes pictures only with the strategy fsdp",
        ),
        ("ppo_mini_batch_size=16", "ppo_mini_batch_size=24", "24 does not divide data.train_batch_size, 64"),
    ],
)
def test_nothing_is_guessed(old: str, new: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert old in SCRIPT
    out, err = translated(SCRIPT.replace(old, new), "run.sh", tmp_path, capsys)
    assert not out
    assert why in err


def test_ppo_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its default advantages; what the critic shares with the policy is left out, and the rest is ours."""
    text = SCRIPT.replace("algorithm.adv_estimator=grpo", "critic.model.path=org/critic critic.optim.lr=2e-5")
    text = text.replace("DRAWS=4", "DRAWS=1").replace("kl_loss_coef=0.01", "kl_loss_coef=0.02")
    more = "critic.grad_clip=0.5 critic.optim.lr_warmup_steps_ratio=0.05 critic.ppo_micro_batch_size_per_gpu=32"
    more += " algorithm.lam=0.95"
    text = text.replace("data.truncation='error'", f"{more} algorithm.use_kl_in_reward=True data.truncation='error'")
    out, err = translated(text, "run.sh", tmp_path, capsys)
    assert "# rayhelper ppo --config" in out
    found = parse_text(out, "ours")
    meant = {"num_mini_batches": 4, "global_batch_size": 16, "num_ppo_epochs": 1, "warmup_steps": 5 * 4}
    meant |= {"score_on_last_token": True, "vf_coef": 1.0, "cliprange_value": 0.5, "kl_coef": 0.001, "lam": 0.95}
    meant |= {"cliprange": 0.2, "cliprange_high": 0.28, "delta": 3.0, "gamma": 1.0, "temperature": 1.0}
    meant |= {"value_model": "org/critic", "value_learning_rate": 2e-5, "value_warmup_ratio": 0.05}
    meant |= {"kl_loss_coef": 0.02, "kl_clip_max": 10.0, "value_max_grad_norm": 0.5, "max_grad_norm": 1.0}
    assert {key: found[key] for key in meant} == meant
    assert "critic.ppo_micro_batch_size_per_gpu: the critic learns in micro-batches of the policy's size" in err
    config = checked(out, tmp_path, "ppo")
    assert (config.critic_warmup_steps(200), config.critic_learning_rate) == (10, 2e-5)


def test_rows_with_pictures_keep_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "data.image_key=shown data.truncation='error'"
    found = parse_text(
        translated(SCRIPT.replace("data.truncation='error'", more), "run.sh", tmp_path, capsys)[0], "ours"
    )
    assert (found["rollout_engine"], found["columns"]) == ("vllm", {"shown": "images"})


def test_rows_with_videos_need_the_policy_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "data.image_key=shown data.video_key=clips actor_rollout_ref.actor.freeze_vision_tower=True"
    more += " data.truncation='error'"
    out, err = translated(SCRIPT.replace("data.truncation='error'", more), "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert (found["rollout_engine"], found["columns"]) == ("hf", {"shown": "images", "clips": "videos"})
    assert (found["freeze_vit"], found["freeze_aligner"]) == (True, True)
    assert found["colocate_groups"] == [["train", "rollout"]]
    assert not [key for key in found if key.startswith("vllm_")]
    assert "rollout.gpu_memory_utilization: the engine hf does not read it" in err


def test_a_name_with_a_date_loses_the_date_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "trainer.experiment_name=sums-$(date +%Y%m%d) trainer.default_local_dir=$2/ckpt trainer.total_epochs=3"
    out, err = translated(SCRIPT.replace("trainer.total_epochs=3", more), "run.sh", tmp_path, capsys)
    assert parse_text(out, "ours")["output_dir"] == "checkpoints/verl_examples/sums"
    assert "trainer.experiment_name: $(date +%Y%m%d) is known only while the script runs" in err
    assert "trainer.default_local_dir: 2 is known only" in err


def test_a_micro_batch_of_all_workers_is_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.replace("ppo_micro_batch_size_per_gpu=2", "ppo_micro_batch_size=32")  # of 8 workers
    assert parse_text(translated(text, "r.sh", tmp_path, capsys)[0], "ours")["per_device_train_batch_size"] == 4


def test_a_sum_over_tokens_is_a_mean_with_other_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.replace(
        "use_kl_loss=True", "use_kl_loss=True actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"
    )
    found = parse_text(translated(text, "run.sh", tmp_path, capsys)[0], "ours")
    assert (found["loss_type"], found["max_grad_norm"], found["adam_epsilon"]) == ("dr_grpo", 1.0 / 512, 1e-8 / 512)


def test_a_command_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    words = next(words for words in commands(SCRIPT, os.environ) if "verl.trainer.main_ppo" in words)
    assert main(["--", *words]) == 0
    assert parse_text(capsys.readouterr().out, "ours")["global_batch_size"] == 64


def test_a_script_of_siirl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(SIIRL, "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    meant = {"backend": "megatron", "tensor_model_parallel_size": 2, "param_offload": True, "max_grad_norm": 1.0}
    meant |= {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 11}
    meant |= {"model": "/home/someone/models/m", "generation_batch_size": 256, "shuffle_dataset": False}
    assert {key: found[key] for key in meant} == meant
    assert "policy_drift_coeff: it belongs to CPGD" in err
    assert "sequence_parallel: siirl does not read it" in err
    assert "actor.grad_clip: the strategy megatron reads optim.clip_grad" in err
    assert found["reward_funcs"][0]["rules"] == "siirl"  # whose rule of GSM8K takes the first number
    assert checked(out, tmp_path).gradient_checkpointing is True


def test_one_range_for_both_sides_is_read_only_where_they_are_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's actor.yaml has 0.2 for either side, and its losses prefer them."""
    text = SCRIPT.replace("actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio=0.1")
    assert text != SCRIPT
    out, err = translated(text, "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert (found["epsilon"], found.get("epsilon_high", 0.2)) == (0.2, 0.2)
    assert "actor.clip_ratio: it is read only where clip_ratio_low or clip_ratio_high is null" in err
    both = "actor_rollout_ref.actor.clip_ratio_low=null actor_rollout_ref.actor.clip_ratio_high=null"
    found = parse_text(
        translated(text.replace("clip_ratio=0.1", f"clip_ratio=0.1 {both}"), "r.sh", tmp_path, capsys)[0], "ours"
    )
    assert (found["epsilon"], found.get("epsilon_high", 0.1)) == (0.1, 0.1)


def test_a_pipeline_of_roll(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(ROLL, "rlvr.yaml", tmp_path, capsys)
    found = parse_text(out, "ours")
    meant = {
        "generation_batch_size": 512,
        "gradient_accumulation_steps": 32,
        "dtype": "bfloat16",
        "backend": "megatron",
    }
    # 8 workers of TP 2 are 4 shards: 4 x 32 completions a step, 4 steps a generation, which ROLL counts
    meant |= {"max_steps": 2000, "save_steps": 400, "vllm_engine_kwargs": {"block_size": 16}}
    meant |= {"columns": {"messages": "prompt", "ground_truth": "answer"}, "max_completion_length": 4096}
    assert {key: found[key] for key in meant} == meant
    assert "reference.strategy_args.strategy_name: the reference has the placement of the policy" in err
    assert checked(out, tmp_path).advantage_estimator == "reinforce_plus_plus_token"


@pytest.mark.parametrize(
    ("further", "told"),
    [
        ("train_env_manager: {max_env_num_per_worker: 16}", "of ROLL's agentic pipeline. RLVR and SFT are translated"),
        ("chosen_key: chosen", "rayhelper dpo"),
        ("student_train: {}\nstudent: {infer_batch_size: 1}", "rayhelper gkd"),
        ("async_generation_ratio: 1", "max_staleness: 1 into the translated file"),
        ("importance_sampling: geometric", "geometric is not built (known: token, seq)"),
        ("actor_train.model_args.freeze_module_prefix: vision_model", "and write freeze_vit: true"),
    ],
)
def test_what_roll_has_beside_is_refused_by_name(
    further: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = translated(f"{ROLL}\n{further}\n", "rlvr.yaml", tmp_path, capsys)
    assert (out, told in err) == ("", True), err


@pytest.mark.parametrize(
    ("mapping", "ranks"),
    [
        ("list(range(0, 3))", [0, 1, 2]),
        ("list(range(2))", [0, 1]),
        ("list(range(0,2)) + list(range(4,6))", [0, 1, 4, 5]),
        ("list([6,7,14])", [6, 7, 14]),
        ("[6, 7]", [6, 7]),
        ([1, 2], [1, 2]),
        (None, []),
    ],
)
def test_device_mappings_of_roll(mapping: Any, ranks: list[int]) -> None:
    assert ranks_of(mapping) == ranks


@pytest.mark.parametrize("mapping", ["__import__('os').getcwd()", "list(range(4", "range(4)", "${other}"])
def test_a_device_mapping_that_is_none_is_refused(mapping: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of ranks"):
        ranks_of(mapping)


def test_engines_of_roll_on_a_part_of_the_devices_that_train_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = "device_mapping: list(range(0,8))", "device_mapping: list(range(0, 3))"
    first, second, third, rest = ROLL.split(whole)
    text = f"{first}{whole}{second}{part}{third}{whole}{rest}"
    out, err = translated(text, "rlvr.yaml", tmp_path, capsys)
    assert out == ""
    assert "actor_infer.device_mapping: 3 of the 8 devices of actor_train" in err


def test_the_strategies_of_roll_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(ROLL_SNIPPET, "part.yaml", tmp_path, capsys)
    found = parse_text(out, "ours")
    meant = {"backend": "megatron", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    meant["decoder_first_pipeline_num_layers"] = 13
    meant |= {"use_distributed_optimizer": True, "train": {"gpus": 8}, "reference": {"gpus": 8}}
    assert {key: found[key] for key in meant} == meant
    assert "a part of a file" in err


FLAT = [
    (
        "trl sft --model_name_or_path org/m --dataset_name rows --use_peft true --lora_r 4 --eval_strategy steps",
        {"model": "org/m", "dataset": "rows", "tuner_type": "lora", "lora_rank": 4, "eval_dataset": "rows"},
    ),
    (
        "swift rlhf --rlhf_type grpo --model org/m --dataset rows --reward_funcs accuracy --num_generations 4",
        {"model": "org/m", "num_generations": 4},
    ),
]


@pytest.mark.parametrize(("command", "meant"), FLAT)
def test_commands_of_trl_and_of_ms_swift(
    command: str, meant: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", *command.split()]) == 0
    found = parse_text(capsys.readouterr().out, "ours")
    assert {key: found[key] for key in meant} == meant


def test_a_file_that_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated("learning_rate: 1\n", "x.yaml", tmp_path, capsys)
    assert not out
    assert "--from" in err


CONDITIONS = """set -euo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
N=4
if [ "$DEVICE" = npu ]; then N=8; fi
double() { echo $(($1 * 2)); }
mkdir -p logs
python3 -m verl.trainer.main_ppo n=$N d=$(double $N) "text=x y" name=$(date +%Y) "$@" 2>&1 | tee logs/log.txt
"""


def test_bash_says_what_a_script_sets_under_a_condition() -> None:
    words = ["python3", "-m", "verl.trainer.main_ppo", "n=4", "d=8", "text=x y", "name=\0$(date +%Y)\0"]
    assert evaluated(CONDITIONS, {"DEVICE": "gpu"}) == [words]
    assert evaluated(CONDITIONS, {"DEVICE": "npu"}) == [[*words[:3], "n=8", "d=16", *words[5:]]]
    assert evaluated(CONDITIONS, {}) is None  # a program would decide
    at_once = [["python3", str(number), "x" * 5000] for number in range(12)]
    assert sorted(evaluated(" | ".join(map(" ".join, at_once)), {}) or []) == sorted(at_once)


@pytest.mark.parametrize(
    "line",
    [
        *("if nvidia-smi; then N=8; fi", "[ $(nproc) -gt 3 ] && N=8", "nvidia-smi && N=8", "N=$(($(nproc) / 2))"),
        *("case $(hostname) in a) N=8;; esac", "[ $N = 3 ] || nvidia-smi || N=8", "N=$1", "N=$NOBODY_SETS_IT"),
        *(
            "cd /",
            "echo 1 > {file}",
            "/bin/touch {file}",
            "exec /bin/touch {file}",
            "source {file}",
            "while :; do :; done",
        ),
    ],
)
def test_what_programs_and_files_decide_is_not_known(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "LIMIT_S", 1.0)
    file = tmp_path / "touched"
    assert evaluated(f"N=4\n{line.format(file=file)}\npython3 -m x n=$N", {}) is None
    assert not file.exists()


def test_a_script_of_verl_with_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.replace("DRAWS=4", 'DRAWS=2\nif [ "${DEVICE:-gpu}" = gpu ]; then DRAWS=8; fi')
    assert parse_text(translated(text, "run.sh", tmp_path, capsys)[0], "ours")["num_generations"] == 8
    monkeypatch.setenv("DEVICE", "npu")
    assert parse_text(translated(text, "run.sh", tmp_path, capsys)[0], "ours")["num_generations"] == 2


def test_names_that_verl_has_since_its_last_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "model_engine=megatron reward.custom_reward_function.path=rule.py actor_rollout_ref.actor.optim.min_lr=1e-7"
    more += " actor_rollout_ref.actor.optim.lr_decay_style=cosine data.truncation='error'"
    out, _ = translated(SCRIPT.replace("data.truncation='error'", more), "run.sh", tmp_path, capsys)
    found = parse_text(out, "ours")
    assert (found["backend"], found["lr_scheduler_kwargs"]) == ("megatron", {"min_lr": 1e-7})
    assert found["reward_funcs"][0]["path"] == "rule.py"
    assert "# from reward.custom_reward_function.path x" in out
    out, err = translated(SCRIPT.replace("data.truncation='error'", "model_engine=veomni"), "r.sh", tmp_path, capsys)
    assert not out
    assert "veomni is not built" in err


def test_words_of_a_script() -> None:
    text = "A='one two'\nL=(x \"y z\")\n"
    text += 'run $A "$A" "${L[@]}" ${B:-d} ${A:+e} \'q$A\' \\$A pre"$A"post; next $((3 + 4 * 2))'
    words = ["run", "one", "two", "one two", "x", "y z", "d", "e", "q$A", "$A", "preone twopost"]
    assert commands(text, {}) == [words, ["next", "11"]]
    assert unknown_in(commands("run $MISSING", {})[0][1]) == ["MISSING"]
    assert commands("n=2; run $(expr 16 / $n) `expr $n \\* 3` $(expr $n + 1)", {}) == [["run", "8", "6", "3"]]
    assert unknown_in(commands("run $(expr 16 / $GPUS)", {})[0][1]) == ["GPUS"]


def test_advice_about_what_a_script_leaves_open_can_be_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    for written, advice in (
        ("$(expr 16 / $GPUS)", "Set it in the environment of this command:\n  - <GPUS>: GPUS"),
        ("$(nproc)", "In a copy, replace each $(command) by its value:\n  - <$(nproc)>: $(nproc)"),
    ):
        script.write_text(f"swift sft --model m --dataset d --max_length {written}\n")
        assert main([str(script)]) == 2
        assert advice in capsys.readouterr().err


def test_systems_that_are_unknown_are_refused_with_the_nearest() -> None:
    from trainers.translate.sources import read

    with pytest.raises(ConfigError, match="did you mean verl"):
        read(["x.sh"], "vrl")


@pytest.mark.parametrize(("estimator", "is_said"), [("grpo", False), ("rloo", True)])
def test_the_kl_of_the_loss_stays_there_whatever_an_estimator_has_by_default(
    estimator: str, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SCRIPT.replace("adv_estimator=grpo", f"adv_estimator={estimator}")
    found = parse_text(translated(text, "run.sh", tmp_path, capsys)[0], "ours")
    assert found.get("kl_in_reward") is (False if is_said else None)
    assert (found["beta"], found["use_bias_correction_kl"]) == (0.01, False)


@pytest.mark.parametrize(("mode", "loss_type"), [("gpg", "gpg"), ("clip_cov", "clip_cov")])
def test_the_loss_that_a_command_names_is_ours_of_that_name(
    mode: str, loss_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    further = f"use_kl_loss=False actor_rollout_ref.actor.policy_loss.loss_mode={mode}"
    text = SCRIPT.replace("use_kl_loss=True", further)
    assert parse_text(translated(text, "run.sh", tmp_path, capsys)[0], "ours")["loss_type"] == loss_type
