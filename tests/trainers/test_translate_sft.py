"""verl's fine-tuning scripts in our keys: the same rows, the same learned tokens, the same mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.tiny import tiny_tokenizer
from tests.trainers.test_translate import checked, translated
from trainers.data.loss_scale import parsed
from trainers.data.rows import load_rows, tokenize_sft
from trainers.losses.tokens import sft_loss

GSM8K = r"""
nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \
     -m verl.trainer.fsdp_sft_trainer \
    data.train_files=/data/gsm8k/train.parquet \
    data.val_files=/data/gsm8k/test.parquet \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    optim.lr=1e-4 \
    data.prompt_dict_keys=['question'] \
    +data.response_dict_keys=['answer'] \
    data.micro_batch_size_per_gpu=64 \
    model.partial_pretrain=Qwen/Qwen3-8B \
    trainer.default_local_dir=$save_path \
    trainer.logger=console \
    trainer.total_epochs=2 $@ \
    model.lora_rank=32 \
    model.lora_alpha=16 \
    model.target_modules=all-linear \
    model.strategy=fsdp \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true
"""
ENGINE = r"""
FSDP_ENGINE_CONFIG="\
    engine=fsdp \
    optim=fsdp \
    optim.lr=1e-5 \
    optim.lr_warmup_steps_ratio=0.2 \
    optim.weight_decay=0.1 \
    optim.betas="[0.9,0.95]" \
    optim.clip_grad=1.0 \
    optim.min_lr_ratio=0.1 \
    optim.lr_scheduler_type=cosine \
    engine.ulysses_sequence_parallel_size=2 \
    engine.strategy=fsdp2 \
    engine.fsdp_size=2"
torchrun -m verl.trainer.sft_trainer \
    data.train_files=/data/train.parquet \
    data.val_files=/data/test.parquet \
    data.train_batch_size=128 \
    data.pad_mode=no_padding \
    data.truncation=error \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=2048 \
    data.messages_key=messages \
    model.path=org/model \
    model.use_remove_padding=True \
    ${FSDP_ENGINE_CONFIG} \
    trainer.test_freq=after_each_epoch \
    trainer.save_freq=-1 \
    trainer.logger=['console','file'] \
    trainer.total_epochs=2 \
    trainer.max_ckpt_to_keep=1 \
    trainer.resume_mode=disable
"""
MEANT: dict[str, dict[str, Any]] = {
    GSM8K: {
        "dataset": "/data/gsm8k/train.parquet",
        "eval_dataset": "/data/gsm8k/test.parquet",
        "columns": {"extra_info.question": "prompt", "extra_info.answer": "completion"},
        "system": "",
        "loss_scale": "default",
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "global_batch_size": 256,
        "per_device_train_batch_size": 64,
        "dataloader_drop_last": True,
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "num_train_epochs": 2,
        "max_steps": -1,
        "save_steps": 0,
        "eval_steps": None,
        "tuner_type": "lora",
        "lora_rank": 32,
        "lora_alpha": 16,
        "lora_target_modules": ["all-linear"],
        "gradient_checkpointing": True,
        "sequence_parallel_size": 2,
        "padding_free": True,
        "report_to": ["none"],
        "resume_from_checkpoint": "auto",
    },
    ENGINE: {
        "columns": {},
        "loss_scale": "default",
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "global_batch_size": 128,
        "token_budget": 4096,  # two workers share each sequence
        "learning_rate": 1e-5,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_ratio": 0.2,
        "tuner_type": "full",
        "sequence_parallel_size": 2,
        "eval_strategy": "epoch",
        "save_steps": 0,
        "save_total_limit": 1,
        "resume_from_checkpoint": None,
    },
}


@pytest.mark.parametrize("script", [GSM8K, ENGINE], ids=["fsdp_sft_trainer", "sft_trainer"])
def test_fine_tuning_of_verl(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(script, "run.sh", tmp_path, capsys)
    assert "# rayhelper sft --config" in out, err
    config = checked(out, tmp_path, "sft")
    meant = {name: value for name, value in MEANT[script].items() if name not in ("dataset", "eval_dataset")}
    assert {name: getattr(config, name) for name in meant} == meant
    assert "dataset: /data/" in out
    assert ("the mean of the loss" in err) == (script == GSM8K)  # the newer trainer averages all tokens of a step
    assert ("the end of an answer" in err) == (script == GSM8K)


@pytest.mark.parametrize(
    ("script", "key", "why"),
    [
        (GSM8K, "optim.lr_scheduler=wsd", "optim.lr_scheduler_type: wsd is not translated"),
        (GSM8K, "optim.min_lr_ratio=0.1", "fsdp_sft_trainer does not read it"),
        (GSM8K, "data.custom_cls.path=rows.py", "register_dataset"),
        (GSM8K, "data.truncation=middle", "middle is unknown (known: error, right, left)"),
        (GSM8K, "data.train_max_samples=10", "FILE#COUNT"),
        (GSM8K, "data.maximum_length=7", "unknown key data.maximum_length"),
        (ENGINE, "engine=megatron", "megatron is not translated for fine-tuning"),
        (ENGINE, "model.lora_adapter_path=adapter", "merge the adapter"),
    ],
)
def test_what_fine_tuning_has_beside_is_refused_by_name(
    script: str, key: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = translated(script.rstrip() + f" {key}\n", "run.sh", tmp_path, capsys)
    assert out == ""
    assert why in err


def test_fine_tuning_on_ray_has_the_nodes_and_gpus_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = ENGINE.replace("verl.trainer.sft_trainer ", "verl.trainer.sft_trainer_ray trainer.nnodes=2 ").rstrip()
    out, err = translated(f"{script} trainer.n_gpus_per_node=8\n", "run.sh", tmp_path, capsys)
    assert checked(out, tmp_path, "sft").use_ray
    for line in ("nnodes: 2", "nproc_per_node: 8", "train: {gpus: 16}"):
        assert line in out, err
    out, err = translated(f"{script} trainer.n_gpus_per_node=all\n", "run.sh", tmp_path, capsys)
    assert out == ""
    assert "nnodes and n_gpus_per_node must be numbers, got 2, all" in err


def test_the_left_end_is_cut_where_verl_cuts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = translated(GSM8K.rstrip() + " data.truncation=left\n", "run.sh", tmp_path, capsys)
    assert "truncation_mode: keep_end" in out
    assert "data.truncation" not in err


def test_conversations_of_verl_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = " data.multiturn.enable=true data.multiturn.messages_key=turns data.prompt_dict_keys=null\n"
    lines = [line for line in GSM8K.splitlines() if "_dict_keys" not in line and "data.prompt_key" not in line]
    lines = [line for line in lines if "data.response_key" not in line]
    out, _ = translated(
        "\n".join(lines).rstrip() + more.replace(" data.prompt_dict_keys=null", ""), "run.sh", tmp_path, capsys
    )
    config = checked(out, tmp_path, "sft")
    assert (config.columns, config.system, config.loss_scale) == ({"turns": "messages"}, None, "default")


def test_verls_rows_are_learned_as_verl_builds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl: the template around the prompt, then the answer and the end token, of which the answer is learned."""
    config = checked(translated(GSM8K, "run.sh", tmp_path, capsys)[0], tmp_path, "sft")
    row = {
        "prompt": [{"role": "user", "content": "2+2? Think."}],  # for RL, in the same file
        "extra_info": {"question": "2+2?", "answer": "It is 4", "index": 0},
    }
    tokenizer = tiny_tokenizer()
    rows = load_rows([row], columns=config.columns, system=config.system)
    found = tokenize_sft(rows, tokenizer, max_length=config.max_length, loss_scale=parsed(config.loss_scale))
    asked = [{"role": "user", "content": "2+2?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer("It is 4" + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    ids, is_learned = found.input_ids.values.tolist(), found.target_mask.values.tolist()
    assert ids[: len(before) + len(answer)] == before + answer
    learned = [token for token, is_target in zip(ids, is_learned, strict=True) if is_target]
    assert learned[: len(answer)] == answer
    assert tokenizer.decode(learned[len(answer) :]) == "\n"  # of the template: the translation reports it


def test_the_mean_of_sft_trainer_is_ours() -> None:
    """sft_loss of verl: each micro-batch's sum / tokens of the batch x ranks, and the ranks' gradients are averaged."""
    torch.manual_seed(0)
    logps = torch.randn(8, 5, dtype=torch.float64)
    mask = torch.rand(8, 5) < 0.6
    ranks = 2
    of_verl = torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        for first in range(rank * 4, rank * 4 + 4, 2):
            micro = slice(first, first + 2)
            of_verl += -(logps[micro] * mask[micro]).sum() / mask.sum() * ranks
    ours = sft_loss(logps, mask, normaliser=int(mask.sum()), loss_type="nll", weights_BT=None)
    torch.testing.assert_close(ours, of_verl / ranks)
