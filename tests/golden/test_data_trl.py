"""Prepared SFT data, token for token, against what TRL's SFTTrainer makes of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from trl import SFTConfig, SFTTrainer

from tests.golden.tiny import tiny_model, tiny_tokenizer
from trainers.batch import Sequences
from trainers.data.rows import load_rows, pack, tokenize_sft

WORDS = "one two three four five six seven eight nine ten".split()


def question(i: int) -> str:
    return " ".join(WORDS[: 1 + i % 10])


def reply(i: int) -> str:
    return " ".join(reversed(WORDS[: 1 + (3 * i) % 10]))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TEXT = [{"text": question(i) + ("<|im_end|>" if i % 3 == 0 else "")} for i in range(12)]
PROMPT_COMPLETION = [{"prompt": question(i) + " =", "completion": " " + reply(i)} for i in range(12)]
CONVERSATIONAL = [{"prompt": [user(question(i))], "completion": [assistant(reply(i))]} for i in range(12)]
MESSAGES = [
    {"messages": [user(question(i)), assistant(reply(i)), user(question(i + 1)), assistant(reply(i + 1))]}
    for i in range(12)
]
SHAREGPT = [{"conversations": [{"from": "user", "value": question(i)}, {"from": "assistant", "value": reply(i)}]}
            for i in range(12)]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def trl_rows(model: Any, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> datasets.Dataset:
    args = SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", **settings
    )
    dataset = datasets.Dataset.from_list(rows)
    return SFTTrainer(model, args, train_dataset=dataset, processing_class=tiny_tokenizer()).train_dataset


def assert_same(ours: Sequences, theirs: datasets.Dataset) -> None:
    """Equal tokens, and equal targets: labels that are not -100, less the first of each document."""
    assert [ids.tolist() for ids in ours.input_ids] == theirs["input_ids"]
    for i, labels in enumerate(theirs["labels"]):
        targets = np.array(labels) != -100
        lengths = theirs["seq_lengths"][i] if "seq_lengths" in theirs.column_names else [len(labels)]
        targets[np.cumsum(lengths) - lengths] = False
        assert ours.target_mask[i].tolist() == targets.tolist()


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        pytest.param(TEXT, {"max_length": 20}, id="text"),
        pytest.param(PROMPT_COMPLETION, {"max_length": 64}, id="prompt-completion"),
        pytest.param(PROMPT_COMPLETION, {"max_length": 30}, id="prompt-completion-some-rows-dropped"),
        pytest.param(PROMPT_COMPLETION, {"max_length": 30, "truncation_mode": "keep_end"}, id="keep-end"),
        pytest.param(PROMPT_COMPLETION, {"max_length": 64, "completion_only_loss": False}, id="prompts-learned-too"),
        pytest.param(CONVERSATIONAL, {"max_length": 90}, id="conversational-prompt-completion"),
        pytest.param(CONVERSATIONAL, {"max_length": 90, "assistant_only_loss": True}, id="completion-and-assistant"),
        pytest.param(MESSAGES, {"max_length": None}, id="messages"),
        pytest.param(MESSAGES, {"max_length": 120, "assistant_only_loss": True}, id="messages-assistant-only"),
        pytest.param(SHAREGPT, {"max_length": None}, id="sharegpt"),
    ],
)
def test_tokens_and_targets_are_those_of_trl(
    model: Any, tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    ours = tokenize_sft(load_rows(rows), tiny_tokenizer(), **settings)
    theirs = trl_rows(model, tmp_path, rows, **settings)
    assert_same(ours, theirs)
    assert (len(ours) < len(rows)) == (settings.get("max_length") == 30 and "truncation_mode" not in settings)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("rows", [PROMPT_COMPLETION, MESSAGES], ids=["prompt-completion", "messages"])
def test_packed_rows_are_those_of_trl(model: Any, tmp_path: Path, rows: list[dict[str, Any]], strategy: Any) -> None:
    sequences = tokenize_sft(load_rows(rows), tiny_tokenizer(), max_length=None)
    ours = pack(sequences, max_length=100, strategy=strategy)
    theirs = trl_rows(model, tmp_path, rows, max_length=100, packing=True, packing_strategy=strategy)
    assert_same(ours, theirs)
    assert ours.segment_lengths is not None
    assert [lengths.tolist() for lengths in ours.segment_lengths] == theirs["seq_lengths"]
    assert len(ours) < len(rows) or rows is MESSAGES


def test_wrapped_rows_are_those_of_trl_but_for_the_first_token_of_documents(model: Any, tmp_path: Path) -> None:
    sequences = tokenize_sft(load_rows(TEXT), tiny_tokenizer(), max_length=None)
    ours = pack(sequences, max_length=50, strategy="wrapped")
    theirs = trl_rows(model, tmp_path, TEXT, max_length=50, packing=True, packing_strategy="wrapped")
    assert [ids.tolist() for ids in ours.input_ids] == theirs["input_ids"]
    not_learned = {*sequences.input_ids.offsets[:-1].tolist(), *ours.input_ids.offsets[:-1].tolist()}
    assert set(np.flatnonzero(~ours.target_mask.values).tolist()) == not_learned
    assert all(label != -100 for labels in theirs["labels"] for label in labels)
