"""ROLL's other pipelines in ours, beside the RLVR one of test_translate.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhelper.text import parse_text
from tests.trainers.test_translate import checked, translated
from trainers.data.rows import load_rows

SFT = """
hydra: {run: {dir: .}}
exp_name: sums
seed: 7
logging_dir: ./logs
output_dir: ./out
track_with: tensorboard
num_gpus_per_node: 8
save_steps: 100
eval_steps: 10
resume_from_checkpoint: false
sequence_length: 2048
pretrain: org/model
prompt_key: instruction
query_key: input
response_key: output
validation:
  data_args: {file_name: held.json, template: qwen2_5}
sft_train:
  model_args: {dtype: bf16, ulysses_size: 2}
  training_args: {num_train_epochs: 1, per_device_train_batch_size: 2, learning_rate: 5.0e-6}
  data_args: {file_name: sums.json, template: qwen2_5, preprocessing_num_workers: 4}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 8, param_dtype: bf16, offload_policy: true, reshard_after_forward: false}
  use_sequence_packing: true
  device_mapping: list(range(0,8))
  infer_batch_size: 3
"""


def test_fine_tuning_of_roll(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(SFT, "sft.yaml", tmp_path, capsys, "--from", "roll")
    assert "# rayhelper sft --config" in out
    found = parse_text(out, "ours")
    meant = {"model": "org/model", "max_length": 2048, "loss_scale": "default", "shuffle_dataset": False}
    meant |= {"sequence_parallel_size": 2, "padding_free": True, "fsdp_offload_params": True, "eval_steps": 10}
    meant |= {"fsdp_reshard_after_forward": False, "train": {"gpus": 8}, "per_device_eval_batch_size": 3}
    meant |= {"gradient_accumulation_steps": 1, "lr_scheduler_type": "linear", "dataloader_drop_last": True}
    assert {key: found[key] for key in meant} == meant
    assert "columns" not in found  # instruction, input and output are read as they are
    assert "from sft_train.training_args.learning_rate" in out
    assert "strategy_config.param_dtype: dtype is the type of the forward pass" in err
    checked(out, tmp_path, "sft")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("query_key: input", "query_key: question", "only in the columns instruction, input and output"),
        ("fsdp_size: 8", "ep_size: 8", "experts are divided only by backend: megatron"),
        ("fsdp_size: 8", "fsdp_sise: 8", "strategy_config.fsdp_sise: it has no known meaning"),
        ("sequence_length: 2048", "sequence_length: 2048\nlora_rnk: 8", "unknown key lora_rnk"),
    ],
)
def test_nothing_of_fine_tuning_is_guessed(
    old: str, new: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = translated(SFT.replace(old, new), "sft.yaml", tmp_path, capsys, "--from", "roll")
    assert not out
    assert why in err


def test_a_query_that_no_key_names_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in ROLL, where the column input is a part of the question only with query_key."""
    out, _ = translated(SFT.replace("query_key: input\n", ""), "sft.yaml", tmp_path, capsys, "--from", "roll")
    row = {"instruction": "12+34=", "input": "aside", "output": "46"}
    rows = load_rows([row], columns=parse_text(out, "ours")["columns"])
    said = [(one["role"], one["content"]) for one in rows[0]["messages"]]
    assert said == [("user", "12+34="), ("assistant", "46")]
