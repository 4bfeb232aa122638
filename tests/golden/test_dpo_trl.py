"""Whole DPO runs beside TRL's DPOTrainer, on the same pairs in the same order: logs, gradients, weights are equal."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.trainer.dpo_trainer import DataCollatorForPreference

from benchmarks.tiny.architectures import save
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import (
    OUR_ARGUMENTS,
    TRL_ARGUMENTS,
    Steps,
    Training,
    assert_same_numbers,
    assert_same_training,
    logged_steps,
    recorded,
)
from trainers.data.preferences import tokenize_preferences
from trainers.dpo.trainer import DPOConfig, DPOTrainer

WORDS = "one two three four five six seven eight nine ten".split()
Rows = list[dict[str, Any]]


def counted(i: int, times: int) -> str:
    return " ".join(WORDS[: 1 + times * i % 7])


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXTS: Rows = [{"prompt": f"{i} is", "chosen": " " + counted(i, 5), "rejected": " " + counted(i, 3)} for i in range(12)]
CONVERSATIONS: Rows = [
    {
        "prompt": [turn("system", "Count."), turn("user", str(i))][i % 2 :],
        "chosen": [turn("assistant", counted(i, 5))],
        "rejected": [turn("assistant", counted(i, 3))],
    }
    for i in range(12)
]
IMPLICIT_TEXTS: Rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in TEXTS]
IMPLICIT: Rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in CONVERSATIONS]


@dataclass(frozen=True)
class Case:
    """What differs from ``SETTINGS``, the rows, which of TRL's numbers ours are not meant to equal."""

    settings: dict[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: TEXTS)
    unlike: Sequence[str] = ()
    other_reference: bool = False
    ours: dict[str, Any] = field(default_factory=dict)  # keys that change no number


SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "adam_epsilon": 1e-6,  # above the rounding of gradients, which Adam makes into whole steps where they are nearly 0
}
# Where a step has several micro-batches, TRL averages what it measured in them; ours are over the tokens of the step.
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
AVERAGED = ("entropy", "mean_token_accuracy", "logits/")
CASES: dict[str, Case] = {
    "sigmoid": Case(),
    "ipo": Case({"loss_type": ["ipo"]}, CONVERSATIONS),
    "several": Case({"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}, IMPLICIT),
    "weighted_pairs": Case({"use_weighting": True, "max_length": 14}),
    "length_desensitized": Case(
        {"ld_alpha": 0.3, "max_length": 14, "truncation_mode": "keep_end"}, other_reference=True
    ),
    "precomputed": Case({"loss_type": ["aot"]}, other_reference=True, ours={"precompute_ref_log_probs": True}),
    "reference_follows": Case({"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7}),
    "accumulated": Case(ACCUMULATED, unlike=AVERAGED),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("reference"), seed=1)


def our_config(model: str, case: Case, folder: Path, **keys: Any) -> DPOConfig:
    arguments = OUR_ARGUMENTS | SETTINGS | case.settings | case.ours | keys
    return DPOConfig(model=model, dataset=case.rows, output_dir=str(folder), **arguments)


def trls_trainer(model: str, reference: str | None, case: Case, folder: Path, **keys: Any) -> trl.DPOTrainer:
    arguments = TRL_ARGUMENTS | SETTINGS | {"train_sampling_strategy": "sequential"} | case.settings

    def loaded(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    return trl.DPOTrainer(
        model=loaded(model),
        ref_model=None if reference is None else loaded(reference),
        args=trl.DPOConfig(output_dir=str(folder), **arguments),
        train_dataset=Dataset.from_list(case.rows),
        processing_class=tiny_tokenizer(),
        **keys,
    )


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """TRL's run without any change to ``SETTINGS``."""
    return train_trls(model, None, Case(), tmp_path_factory.mktemp("plain"))


def train_trls(model: str, reference: str | None, case: Case, folder: Path) -> Training:
    def train() -> tuple[Steps, torch.nn.Module]:
        trainer = trls_trainer(model, reference, case, folder)
        trainer.train()
        return trainer.state.log_history[:-1], trainer.model  # the last entry sums the run up

    return recorded(train)


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_trl(model: str, reference: str, plain: Training, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    other = reference if case.other_reference else None

    def train() -> tuple[Steps, torch.nn.Module]:
        trainer = DPOTrainer(our_config(model, case, tmp_path / "ours", ref_model=other))
        trainer.train()
        return logged_steps(tmp_path / "ours"), trainer.policy.built.module

    ours = recorded(train)
    theirs = train_trls(model, other, case, tmp_path / "trl")
    assert_same_training(ours, theirs, unlike=case.unlike)
    differs = [step["grad_norm"] for step in theirs.steps] != pytest.approx(
        [step["grad_norm"] for step in plain.steps], rel=1e-3
    )
    assert name in ("sigmoid", "accumulated") or differs, "what this case changes makes no difference"


def test_experts_are_balanced_as_by_trl(tmp_path: Path) -> None:
    """In passes of the policy over both completions, and in none of the reference. TRL calls the number aux_loss."""
    experts, case = save("qwen3_moe", tmp_path / "model"), Case({"router_aux_loss_coef": 0.5})

    def train() -> tuple[Steps, torch.nn.Module]:
        trainer = DPOTrainer(our_config(experts, case, tmp_path / "ours"))
        trainer.train()
        return logged_steps(tmp_path / "ours"), trainer.policy.built.module

    ours = recorded(train)
    theirs = train_trls(experts, None, case, tmp_path / "trl")
    assert_same_training(ours, theirs, unlike=["aux_loss"])
    for our_step, their_step in zip(ours.steps, theirs.steps, strict=True):
        assert our_step["moe_aux_loss"] == pytest.approx(their_step["aux_loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["several", "weighted_pairs"])
def test_evaluation_equals_trl(model: str, reference: str, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    rows = case.rows[:5]
    trainer = DPOTrainer(our_config(model, case, tmp_path, ref_model=reference, eval_dataset=rows))
    trainer.prepare_reference()
    trainer.policy.build(model, 1)
    ours = trainer.evaluate()
    theirs = trls_trainer(model, reference, case, tmp_path, eval_dataset=Dataset.from_list(rows)).evaluate()
    further = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens", "epoch")
    assert_same_numbers(ours, {key: value for key, value in theirs.items() if key not in further}, "evaluation")


@pytest.mark.parametrize("max_length", [None, 9, 60])
@pytest.mark.parametrize("truncation_mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("rows", [TEXTS, CONVERSATIONS, IMPLICIT, IMPLICIT_TEXTS], ids=lambda rows: str(rows[0])[:40])
def test_tokens_equal_trl(rows: Rows, truncation_mode: Any, max_length: int | None) -> None:
    tokenizer, cut = tiny_tokenizer(), {"max_length": max_length, "truncation_mode": truncation_mode}
    ours = functools.partial(tokenize_preferences, Dataset.from_list(rows), tokenizer, **cut)
    preparing = SimpleNamespace(_tokenizer=tokenizer)
    arguments = SimpleNamespace(dataset_num_proc=None, **cut)
    table = trl.DPOTrainer._prepare_dataset(preparing, Dataset.from_list(rows), tokenizer, arguments, "train")
    if not len(table):
        with pytest.raises(ValueError, match="Raise max_length"):
            ours()
        return
    theirs = DataCollatorForPreference(pad_token_id=0, **cut)(list(table))
    theirs["completion_mask"][:, 0] = 0  # TRL shifts it away
    sequences = ours().as_sequences()
    assert torch.equal(sequences.input_ids.mask(), theirs["attention_mask"].bool())
    assert torch.equal(sequences.input_ids.padded(0), theirs["input_ids"])
    assert torch.equal(sequences.target_mask.padded(False), theirs["completion_mask"].bool())
