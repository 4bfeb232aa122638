"""Whole KTO runs beside TRL's KTOTrainer, on the same rows in the same order: logs, gradients, weights are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from benchmarks.tiny.architectures import save
from tests.golden.test_dpo_trl import CONVERSATIONS as PAIRED_CONVERSATIONS
from tests.golden.test_dpo_trl import TEXTS as PAIRED_TEXTS
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
from trainers.data.unpaired import tokenize_unpaired
from trainers.kto.trainer import KTOConfig, KTOTrainer

Rows = list[dict[str, Any]]
LABELS = [True, False, False, True, True, False, True, True, True, False, False, True]


def judged(pairs: Rows) -> Rows:
    """One completion of each pair, with the label in ``LABELS``."""
    sides = ["chosen" if label else "rejected" for label in LABELS]
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": label}
        for pair, side, label in zip(pairs, sides, LABELS, strict=True)
    ]


TEXTS, CONVERSATIONS = judged(PAIRED_TEXTS), judged(PAIRED_CONVERSATIONS)


@dataclass(frozen=True)
class Case:
    """What differs from ``SETTINGS``, the rows, which of TRL's numbers ours are not meant to equal."""

    settings: dict[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: TEXTS)
    unlike: Sequence[str] = ()
    other_reference: bool = False
    lora: bool = False
    ours: dict[str, Any] = field(default_factory=dict)  # keys of ours alone
    experts: bool = False  # of a mixture, in place of the model


SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "adam_epsilon": 1e-6,  # above the rounding of gradients, which Adam makes into whole steps where they are nearly 0
}
# Where a step has several micro-batches, TRL averages what it measured in them; ours are over the rows of the step.
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
AVERAGED = ("entropy", "logits/", "logps/", "rewards/")
CASES: dict[str, Case] = {
    "kto": Case(),
    "conversations": Case({"beta": 0.5}, CONVERSATIONS, other_reference=True),
    "pairs": Case({"desirable_weight": 0.7, "undesirable_weight": 1.3}, PAIRED_TEXTS, other_reference=True),
    "apo_zero_unpaired": Case({"loss_type": "apo_zero_unpaired", "desirable_weight": 2.0}, other_reference=True),
    "cut": Case({"max_length": 11, "beta": 0.3}, other_reference=True),
    "precomputed": Case(other_reference=True, ours={"precompute_ref_log_probs": True}),
    "reference_follows": Case({"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7}),
    "accumulated": Case(ACCUMULATED, unlike=AVERAGED, other_reference=True, ours={"kl_batch_size": 2}),
    "lora": Case({"learning_rate": 3e-3}, lora=True),
    "experts": Case({"router_aux_loss_coef": 0.5}, unlike=["aux_loss"], experts=True),
}
# What has no KL above 0 in three steps is compared with a reference of other weights, in which it has.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("reference"), seed=1)


def our_config(model: str, case: Case, folder: Path, **keys: Any) -> KTOConfig:
    arguments = OUR_ARGUMENTS | SETTINGS | case.settings | case.ours | keys
    if case.lora:
        arguments |= {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    return KTOConfig(model=model, dataset=case.rows, output_dir=str(folder), **arguments)


def trls_trainer(model: str, reference: str | None, case: Case, folder: Path, **keys: Any) -> trl.KTOTrainer:
    def loaded(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    if case.lora:
        keys["peft_config"] = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")
    return trl.KTOTrainer(
        model=loaded(model),
        ref_model=None if reference is None else loaded(reference),
        args=trl.KTOConfig(output_dir=str(folder), **TRL_ARGUMENTS | SETTINGS | case.settings),
        train_dataset=Dataset.from_list(case.rows),
        processing_class=tiny_tokenizer(),
        **keys,
    )


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_trl(model: str, reference: str, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    other = reference if case.other_reference else None
    model = save("qwen3_moe", tmp_path / "experts") if case.experts else model

    def ours() -> tuple[Steps, torch.nn.Module]:
        trainer = KTOTrainer(our_config(model, case, tmp_path / "ours", ref_model=other))
        trainer.train()
        return logged_steps(tmp_path / "ours"), trainer.policy.built.module

    def theirs() -> tuple[Steps, torch.nn.Module]:
        trainer = trls_trainer(model, other, case, tmp_path / "trl")
        if case.lora:  # the adapter that ours starts with
            with torch.no_grad():
                for parameter_name, parameter in trainer.model.named_parameters():
                    if parameter.requires_grad:
                        parameter.copy_(first[parameter_name.removeprefix("base_model.model.")])
        trainer.train()
        trained = trainer.model.get_base_model() if case.lora else trainer.model
        return trainer.state.log_history[:-1], trained  # the last entry sums the run up

    first: dict[str, torch.Tensor] = {}
    if case.lora:
        untrained = KTOTrainer(our_config(model, case, tmp_path / "untrained"))
        untrained.policy.build(model, 1)
        first |= {key: weight.detach().clone() for key, weight in untrained.policy.built.module.named_parameters()}
    expected = recorded(theirs)
    found = recorded(ours)
    assert_same_training(found, expected, unlike=case.unlike)
    if case.experts:
        balances = [step["aux_loss"] for step in expected.steps]
        assert [step["moe_aux_loss"] for step in found.steps] == pytest.approx(balances, abs=1e-5)
    assert_moved(expected, model)
    is_estimated = case.settings.get("loss_type", "kto") == "kto" and case.other_reference
    assert any(step["kl"] > 0.01 for step in expected.steps) == is_estimated, "the KL says nothing"


def assert_moved(training: Training, model: str) -> None:
    """The weights, or the half of an adapter that starts at 0, are others than at the start."""
    started = AutoModelForCausalLM.from_pretrained(model).state_dict()
    zeros = {name: torch.zeros_like(weight) for name, weight in training.weights.items() if "lora_B" in name}
    first = zeros or {name: started[name] for name in training.weights}
    assert max(float((training.weights[name] - weight).abs().max()) for name, weight in first.items()) > 1e-4


@pytest.mark.parametrize("settings", [{}, {"loss_type": "apo_zero_unpaired"}], ids=["kto", "apo_zero_unpaired"])
def test_evaluation_equals_trl(model: str, reference: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    case = Case(settings, CONVERSATIONS)
    rows = case.rows[:4]
    keys = {"eval_dataset": rows, "per_device_eval_batch_size": 4}
    trainer = KTOTrainer(our_config(model, case, tmp_path, ref_model=reference, **keys))
    trainer.reference.build(reference)
    trainer.policy.build(model, 1)
    ours = trainer.evaluate()
    case = Case(settings | {"per_device_eval_batch_size": 4}, case.rows)
    theirs = trls_trainer(model, reference, case, tmp_path, eval_dataset=Dataset.from_list(rows)).evaluate()
    further = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens", "epoch")
    assert_same_numbers(ours, {key: value for key, value in theirs.items() if key not in further}, "evaluation")


@pytest.mark.parametrize("max_length", [None, 9, 60])
@pytest.mark.parametrize(
    "rows", [TEXTS, CONVERSATIONS, PAIRED_TEXTS, PAIRED_CONVERSATIONS], ids=["texts", "chat", "pairs", "chat pairs"]
)
def test_tokens_of_own_and_of_other_completions_equal_trl(rows: Rows, max_length: int | None) -> None:
    tokenizer = tiny_tokenizer()
    preparing = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0)
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=max_length, per_device_train_batch_size=5)
    table = trl.KTOTrainer._prepare_dataset(preparing, Dataset.from_list(rows), tokenizer, arguments, "eval")
    if not len(table):
        with pytest.raises(ValueError, match="Raise it"):
            tokenize_unpaired(Dataset.from_list(rows), tokenizer, max_length=max_length)
        return
    theirs = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=max_length)(list(table))
    ours = tokenize_unpaired(Dataset.from_list(rows), tokenizer, max_length=max_length)
    assert ours.is_desirable.tolist() == theirs["label"].tolist()
    for prefix, answers in (("", ours), ("KL_", ours.mismatched(5))):
        sequences = answers.sequences(max_length=max_length)
        theirs[f"{prefix}completion_mask"][:, 0] = 0  # TRL shifts it away
        assert torch.equal(sequences.input_ids.mask(), theirs[f"{prefix}attention_mask"].bool())
        assert torch.equal(sequences.input_ids.padded(0), theirs[f"{prefix}input_ids"])
        assert torch.equal(sequences.target_mask.padded(False), theirs[f"{prefix}completion_mask"].bool())
