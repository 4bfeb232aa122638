"""Whole runs of CPO, SimPO and ORPO beside TRL's trainers, on the same pairs in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.experimental.cpo import CPOConfig as TRLCPOConfig
from trl.experimental.cpo import CPOTrainer as TRLCPOTrainer
from trl.experimental.orpo import ORPOConfig as TRLORPOConfig
from trl.experimental.orpo import ORPOTrainer as TRLORPOTrainer

from tests.golden.test_dpo_trl import TEXTS, Rows
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
from trainers.cpo.config import CPOConfig, ORPOConfig, PairConfig, SimPOConfig
from trainers.cpo.trainer import CPOTrainer

SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "adam_epsilon": 1e-6,  # above the rounding of gradients, which Adam makes into whole steps where they are nearly 0
}
# TRL's mean over the logits of every position, of prompts and of padding too; ours are those of the completions
UNLIKE = ("logits/",)
# TRL averages what micro-batches give; ours are means over the tokens of the step. Equal where all have as many.
ALIKE: Rows = [{"prompt": f"{i} is", "chosen": f" {'abc'[i % 3]}{i % 7}", "rejected": " four"} for i in range(12)]


@dataclass(frozen=True)
class Case:
    """Which trainer, what differs from ``SETTINGS``, and which of TRL's numbers ours are not meant to equal."""

    kind: type[PairConfig] = CPOConfig
    settings: dict[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: TEXTS)
    unlike: Sequence[str] = UNLIKE
    lora: bool = False


CASES: dict[str, Case] = {
    "cpo": Case(),
    "cpo smoothed": Case(CPOConfig, {"label_smoothing": 0.1, "cpo_alpha": 0.3, "beta": 0.5}),
    "cpo hinge": Case(CPOConfig, {"loss_type": "hinge", "max_length": 20}),
    "cpo ipo": Case(CPOConfig, {"loss_type": "ipo", "beta": 0.7}),
    "simpo": Case(SimPOConfig),
    "simpo alone": Case(SimPOConfig, {"cpo_alpha": 0.0, "simpo_gamma": 1.4}, unlike=(*UNLIKE, "nll_loss")),
    "alphapo": Case(SimPOConfig, {"cpo_alpha": 0.5, "alpha": 0.25}),
    "orpo": Case(ORPOConfig),
    # where both completions are cut to the same, which is likelier is a matter of rounding
    "orpo cut": Case(ORPOConfig, {"beta": 2.0, "max_length": 20}, unlike=(*UNLIKE, "rewards/accuracies")),
    "cpo accumulated": Case(
        CPOConfig, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, ALIKE, ("logits/",)
    ),
    "cpo lora": Case(CPOConfig, {"learning_rate": 3e-3}, lora=True),
    "orpo lora": Case(ORPOConfig, {"learning_rate": 3e-3}, lora=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def our_config(model: str, case: Case, folder: Path, **keys: Any) -> PairConfig:
    arguments = OUR_ARGUMENTS | SETTINGS | case.settings | keys
    if case.lora:
        arguments |= {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    return case.kind(model=model, dataset=case.rows, output_dir=str(folder), **arguments)


def trls_trainer(model: str, case: Case, folder: Path, **keys: Any) -> Any:
    ours = our_config(model, case, folder)
    arguments = TRL_ARGUMENTS | SETTINGS | {"train_sampling_strategy": "sequential"} | case.settings
    if case.lora:
        keys["peft_config"] = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")
    if isinstance(ours, CPOConfig):
        shared = {name: getattr(ours, name) for name in ("loss_type", "beta", "simpo_gamma")}
        trainer, config = TRLCPOTrainer, TRLCPOConfig(output_dir=str(folder), **shared | arguments)
    else:
        trainer, config = TRLORPOTrainer, TRLORPOConfig(output_dir=str(folder), **arguments)
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(case.rows),
        processing_class=tiny_tokenizer(),
        **keys,
    )


def test_orpo_without_prompts_learns_the_likelihood_that_cpo_learns(model: str, tmp_path: Path) -> None:
    """CPO's, which equals TRL's above, is that of the chosen completions alone."""
    found = {}
    for kind, keys in ((CPOConfig, {}), (ORPOConfig, {"learns_prompts": False}), (ORPOConfig, {})):
        folder = tmp_path / f"{kind.__name__}{keys}"
        CPOTrainer(our_config(model, Case(kind), folder, **keys)).train()
        found[folder.name] = logged_steps(folder)[0]
    cpo, alone, whole = found.values()
    assert alone["nll_loss"] == cpo["nll_loss"] != whole["nll_loss"]
    assert alone["loss"] == pytest.approx(alone["nll_loss"] - 0.1 * alone["log_odds_ratio"], rel=1e-6)
    assert alone["log_odds_ratio"] == pytest.approx(whole["log_odds_ratio"], rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_trl(model: str, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    first: dict[str, torch.Tensor] = {}
    if case.lora:  # the adapter that ours starts with
        untrained = CPOTrainer(our_config(model, case, tmp_path / "untrained"))
        untrained.policy.build(model, 1)
        first |= {key: weight.detach().clone() for key, weight in untrained.policy.built.module.named_parameters()}

    def ours() -> tuple[Steps, torch.nn.Module]:
        trainer = CPOTrainer(our_config(model, case, tmp_path / "ours"))
        trainer.train()
        return logged_steps(tmp_path / "ours"), trainer.policy.built.module

    def theirs() -> tuple[Steps, torch.nn.Module]:
        trainer = trls_trainer(model, case, tmp_path / "trl")
        with torch.no_grad():
            for key, parameter in trainer.model.named_parameters():
                if first and parameter.requires_grad:
                    parameter.copy_(first[key.removeprefix("base_model.model.")])
        trainer.train()
        trained = trainer.model.get_base_model() if case.lora else trainer.model
        return trainer.state.log_history[:-1], trained  # the last entry sums the run up

    assert_same_training(recorded(ours), recorded(theirs), unlike=case.unlike)


@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo"])
def test_evaluation_equals_trl(model: str, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    rows = case.rows[:4]
    trainer = CPOTrainer(our_config(model, case, tmp_path, eval_dataset=rows, per_device_eval_batch_size=4))
    trainer.policy.build(model, 1)
    ours = trainer.evaluate()
    further = {"eval_dataset": Dataset.from_list(rows)}
    theirs = trls_trainer(model, Case(case.kind, {"per_device_eval_batch_size": 4}), tmp_path, **further).evaluate()
    unlike = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model", "epoch", "eval_logits")
    assert_same_numbers(ours, {k: v for k, v in theirs.items() if not k.startswith(unlike)}, "evaluation")
