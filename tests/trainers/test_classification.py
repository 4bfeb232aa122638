"""Sequence classification: how ms-swift's commands reach it, what it refuses, and what becomes of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import BertConfig

from rayhelper import ConfigError
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.classification.config import ClassificationConfig
from trainers.classification.rows import label_mistake, tokenize_labelled
from trainers.classification.trainer import ClassificationTrainer
from trainers.cli import main
from trainers.commands import command_named, task_of
from trainers.configuration.others.ms_swift import spelled
from trainers.configuration.reading.command_line import given_keys, load_config
from trainers.sft.config import SFTConfig

# ms-swift's examples/train/seq_cls/qwen2_5/sft.sh, regression/sft.sh and multi_label/sft.sh
COMMON = """--model Qwen/Qwen2.5-0.5B --tuner_type lora --load_from_cache_file true --split_dataset_ratio 0.01
--torch_dtype bfloat16 --num_train_epochs 1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32
--target_modules all-linear --save_total_limit 2 --logging_steps 5 --max_length 2048 --output_dir output
--warmup_ratio 0.05 --dataloader_num_workers 4 --task_type seq_cls --use_chat_template false"""
COMMANDS: dict[str, tuple[str, Any]] = {
    "classes": ("--num_labels 2 --dataset DAMO_NLP/jd:cls#2000", "single_label_classification"),
    "regression": (
        "--num_labels 1 --problem_type regression --dataset sentence-transformers/stsb:reg#20000",
        "regression",
    ),
    "several labels": ("--num_labels 5 --problem_type multi_label_classification --dataset d", None),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_ms_swift_are_read(name: str) -> None:
    further, problem = COMMANDS[name]
    command, arguments = spelled(["swift", "sft", *COMMON.split(), *further.split()])
    found = command_named(command, None, task_of(given_keys(arguments, [])[0].values))
    assert (found.config_type, found.trainer) == (ClassificationConfig, ClassificationTrainer)
    config = load_config(ClassificationConfig, arguments)
    assert config.problem == (problem or "multi_label_classification")
    assert (config.use_chat_template, config.truncation_mode, config.tuner_type) == (False, "drop", "lora")


def test_a_number_of_labels_says_the_task_and_other_tasks_stay_what_they_are() -> None:
    assert task_of({"num_labels": "2"}) == "seq_cls"
    assert task_of({"num_labels": 2, "task_type": "causal_lm"}) == "causal_lm"
    assert task_of({"num_labels": None}) is task_of({}) is None
    assert command_named("sft", None, "causal_lm").config_type is SFTConfig
    assert command_named("seq_cls") == command_named("classification")
    assert command_named("dpo", None, "seq_cls") == command_named("dpo")


def test_the_accuracy_that_ms_swift_calls_acc_chooses_checkpoints() -> None:
    keys = "--model m --dataset d --eval_dataset e --eval_steps 2 --save_steps 2 --num_labels 2"
    for name in ("acc", "eval_acc", "accuracy"):
        config = load_config(ClassificationConfig, [*keys.split(), "--metric_for_best_model", name])
        assert config.metric_for_best_model == "accuracy"


def test_other_tasks_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("sft", ["--model", "m", "--dataset", "d", "--task_type", "prm"])
    assert "sft learns causal_lm, seq_cls, embedding, reranker or generative_reranker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("--num_labels 1 --problem_type single_label_classification", "num_labels must be 2 at least"),
        ("--num_labels 2 --problem_type ranking", "problem_type"),
        ("", "num_labels must be given"),
        ("--num_labels 2 --use_chat_template false --system s", "Remove system"),
        ("--num_labels 2 --packing true --max_length null", "packing needs max_length"),
    ],
)
def test_what_has_no_meaning_is_refused(keys: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("sft", ["--task_type", "seq_cls", "--model", "m", "--dataset", "d", *keys.split()])
    assert told in capsys.readouterr().err


def test_a_model_is_checked_before_the_start(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    found = json.loads((tmp_path / "tiny" / "config.json").read_text())
    found |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {str(k): str(k) for k in range(4)}}
    found["label2id"] = {str(k): k for k in range(4)}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(found))
    keys: dict[str, Any] = {"dataset": [{"text": "a", "label": 0}], "output_dir": str(tmp_path)}
    ClassificationTrainer.check(ClassificationConfig(model=model, num_labels=4, **keys), None)
    with pytest.raises(ConfigError, match="is a classifier of 4 labels"):
        ClassificationTrainer.check(ClassificationConfig(model=model, num_labels=2, **keys), None)

    BertConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    ).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="encoders such as BERT are not supported"):
        ClassificationTrainer.check(ClassificationConfig(model=str(tmp_path / "bert"), num_labels=2, **keys), None)


def texts_of(rows: list[dict[str, Any]], **keys: Any) -> list[str]:
    options: dict[str, Any] = {"problem": "single_label_classification", "num_labels": 2} | keys
    found = tokenize_labelled(Dataset.from_list([row | {"label": 1} for row in rows]), tiny_tokenizer(), **options)
    ends = found.target_mask
    assert all(mask.tolist() == [False] * (len(mask) - 1) + [True] for mask in ends)
    assert found.labels is not None
    assert found.labels.tolist() == [1] * len(found)
    return [str(tiny_tokenizer().decode(ids)) for ids in found.input_ids]


def test_conversations_invite_an_answer_unless_they_have_one_and_texts_stay_as_they_are() -> None:
    asked, answered = {"role": "user", "content": "good"}, {"role": "assistant", "content": "yes"}
    invited = "<|im_start|>user\ngood<|im_end|>\n<|im_start|>assistant\n"
    assert texts_of([{"messages": [asked]}, {"messages": [asked, answered]}]) == [invited, f"{invited}yes<|im_end|>\n"]
    assert texts_of([{"prompt": "good"}]) == texts_of([{"text": "good"}]) == ["good"]
    assert texts_of([{"messages": [asked]}], use_chat_template=False) == ["good"]
    with pytest.raises(ValueError, match="one turn of the user, and this row has other turns: user, assistant"):
        texts_of([{"messages": [asked, answered]}], use_chat_template=False)


def test_long_rows_are_cut_or_dropped() -> None:
    rows = [{"text": "abcdef"}, {"text": "xyz"}]
    assert texts_of(rows, max_length=4) == ["abcd", "xyz"]
    assert texts_of(rows, max_length=4, truncation_mode="keep_end") == ["cdef", "xyz"]
    assert texts_of(rows, max_length=4, truncation_mode="drop") == ["xyz"]
    with pytest.raises(ValueError, match="none of 2 rows is left"):
        texts_of(rows, max_length=2, truncation_mode="drop")


def test_several_labels_are_zeros_and_ones() -> None:
    rows = Dataset.from_list([{"text": "a", "label": [0, 2]}, {"text": "b", "label": []}])
    found = tokenize_labelled(rows, tiny_tokenizer(), problem="multi_label_classification", num_labels=3)
    assert found.labels is not None
    assert found.labels.dtype == np.float32
    assert found.labels.tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("problem", "num_labels", "good", "bad"),
    [
        ("single_label_classification", 3, [0, 2, 1.0, True], [3, -1, 0.5, "1", None, [1], float("nan")]),
        ("multi_label_classification", 3, [[], [0, 2]], [1, [3], [0.5], None, ["a"]]),
        ("regression", 1, [0.5, 3, [0.5]], ["0.5", None, [0.5, 1.0], float("inf")]),
        ("regression", 2, [[0.5, 1]], [0.5, [1], [1, None]]),
    ],
)
def test_labels_that_have_no_meaning_are_broken_rows(
    problem: Any, num_labels: int, good: list[Any], bad: list[Any]
) -> None:
    told = [label_mistake({"text": "a", "label": one}, problem=problem, num_labels=num_labels) for one in good]
    assert told == [None] * len(good)
    for one in bad:
        found = label_mistake({"text": "a", "label": one}, problem=problem, num_labels=num_labels)
        assert (found or ("",))[0] == "label", one
