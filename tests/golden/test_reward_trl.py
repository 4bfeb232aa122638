"""Whole runs of reward models beside TRL's RewardTrainer, from the same head: logs, gradients and weights are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from tests.golden.test_dpo_trl import CONVERSATIONS, IMPLICIT, TEXTS, Rows
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import (
    OUR_ARGUMENTS,
    TRL_ARGUMENTS,
    Steps,
    assert_same_numbers,
    assert_same_training,
    logged_steps,
    recorded,
)
from trainers.reward.trainer import RewardConfig, RewardTrainer

SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "adam_epsilon": 1e-6,
}
JUDGED: Rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(TEXTS)]
CASES: dict[str, tuple[dict[str, Any], Rows, Sequence[str]]] = {  # settings, rows, what TRL averages over micro-batches
    "texts": ({}, TEXTS, ()),
    "margins and centring": ({"center_rewards_coefficient": 0.1}, JUDGED, ()),
    "conversations, long ones left out": ({"max_length": 100}, CONVERSATIONS, ()),
    "accumulated": (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        IMPLICIT,
        ("min_reward", "max_reward"),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier with one label, whose head is drawn once for both."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(save_tiny(folder), num_labels=1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_steps_and_evaluation_equal_trl(model: str, tmp_path: Path, name: str) -> None:
    settings, rows, unlike = CASES[name]

    def ours() -> tuple[Steps, torch.nn.Module]:
        arguments = OUR_ARGUMENTS | SETTINGS | settings
        trainer = RewardTrainer(
            RewardConfig(model=model, dataset=rows, eval_dataset=rows[:5], output_dir=str(tmp_path), **arguments)
        )
        trainer.train()
        return logged_steps(tmp_path), trainer.policy.built.module

    def theirs() -> tuple[Steps, torch.nn.Module]:
        arguments = TRL_ARGUMENTS | SETTINGS | {"train_sampling_strategy": "sequential"} | settings
        trainer = trl.RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32),
            args=trl.RewardConfig(output_dir=str(tmp_path), **arguments),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:5]),
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
        steps = trainer.state.log_history[:-1]
        return [*steps, trainer.evaluate()], trainer.model

    our_run, their_run = recorded(ours), recorded(theirs)
    our_evaluation, their_evaluation = our_run.steps.pop(), their_run.steps.pop()
    assert_same_training(our_run, their_run, unlike=unlike)
    further = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens", "epoch")
    compared = {key: value for key, value in their_evaluation.items() if key not in further}
    assert_same_numbers(our_evaluation, compared, "evaluation")
