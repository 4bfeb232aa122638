"""Whole SFT runs beside TRL's SFTTrainer, on the same rows in the same order: logs, gradients and weights are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM

from benchmarks.tiny.architectures import save
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import (
    OUR_ARGUMENTS,
    TRL_ARGUMENTS,
    Steps,
    Training,
    assert_same_training,
    logged_steps,
    recorded,
)
from trainers.sft.trainer import SFTConfig, SFTTrainer

WORDS = "one two three four five six seven eight nine ten".split()
Rows = list[dict[str, Any]]


def counted(i: int) -> str:
    return " ".join(WORDS[: 1 + 7 * i % 10])


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXT: Rows = [{"text": counted(i)} for i in range(12)]
PROMPT_COMPLETION: Rows = [{"prompt": f"{i} is", "completion": " " + counted(i)} for i in range(12)]
MESSAGES: Rows = [
    {"messages": [turn("user", str(i)), turn("assistant", counted(i)), turn("user", "?"), turn("assistant", "!" * i)]}
    for i in range(12)
]
CONVERSATIONS: Rows = [
    {"prompt": [turn("user", str(i))], "completion": [turn("assistant", counted(i))]} for i in range(12)
]


@dataclass(frozen=True)
class Case:
    """What differs from ``SETTINGS``, the rows, and which of TRL's numbers ours are not meant to equal."""

    settings: dict[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: PROMPT_COMPLETION)
    unlike: Sequence[str] = ()
    model: dict[str, Any] = field(default_factory=dict)


SETTINGS: dict[str, Any] = {"learning_rate": 3e-4, "per_device_train_batch_size": 4, "max_steps": 3}
EPOCHS: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2}
# Where a step has several micro-batches, TRL averages the entropies and accuracies it measured in them; ours are over
# all loss tokens of the step. Its epoch counts micro-batches and ours steps: alike where steps fill the epoch.
AVERAGED = ("entropy", "mean_token_accuracy")
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
DECAYING: dict[str, Any] = {"weight_decay": 1.0, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 5}
CASES: dict[str, Case] = {
    "prompt_completion": Case(),
    "prompts_learned_too": Case({"completion_only_loss": False}),
    "text": Case(rows=TEXT),
    "text_cut": Case({"max_length": 20}, TEXT),
    "messages": Case(rows=MESSAGES),
    "assistant_only": Case({"assistant_only_loss": True}, MESSAGES),
    "assistant_and_completion_only": Case({"assistant_only_loss": True}, CONVERSATIONS),
    "packing_bfd": Case({"packing": True, "max_length": 64, "per_device_train_batch_size": 2}),
    "packing_bfd_split": Case({"packing": True, "packing_strategy": "bfd_split", "max_length": 24}, TEXT),
    "packing_accumulated": Case({"packing": True, "max_length": 64} | ACCUMULATED, unlike=[*AVERAGED, "epoch"]),
    "dft": Case({"loss_type": "dft"}),
    "accumulated": Case(ACCUMULATED, unlike=AVERAGED),
    "accumulated_dft": Case(ACCUMULATED | {"loss_type": "dft"}, unlike=AVERAGED),
    "two_epochs_of_ten_rows": Case(EPOCHS, PROMPT_COMPLETION[:10]),
    "two_epochs_that_end_with_one_micro_batch": Case(
        EPOCHS | ACCUMULATED, PROMPT_COMPLETION[:10], [*AVERAGED, "epoch"]
    ),
    "two_epochs_whose_last_row_is_dropped": Case(
        EPOCHS | ACCUMULATED | {"dataloader_drop_last": True}, PROMPT_COMPLETION[:11], [*AVERAGED, "epoch"]
    ),
    "gradients_clipped": Case({"max_grad_norm": 0.05}),
    "gradients_never_clipped": Case({"max_grad_norm": 0}),
    "weight_decay_cosine_warm_up": Case(DECAYING),
    "warm_up_for_a_share": Case({"warmup_ratio": 0.4, "max_steps": 4}),
    "other_adam": Case({"adam_beta1": 0.7, "adam_beta2": 0.95, "adam_epsilon": 1e-3}),
    "tied_embeddings": Case(DECAYING, model={"tie_word_embeddings": True}),
    "noise": Case({"neftune_noise_alpha": 500.0}, TEXT),
    "noise_packed": Case(
        {"neftune_noise_alpha": 500.0, "packing": True, "padding_free": True, "max_length": 64} | ACCUMULATED,
        unlike=[*AVERAGED, "epoch"],
    ),
    "biases": Case(DECAYING, model={"family": "qwen2"}),
}


def train_ours(model: str, case: Case, folder: Path) -> Training:
    def train() -> tuple[Steps, torch.nn.Module]:
        arguments = OUR_ARGUMENTS | SETTINGS | case.settings
        trainer = SFTTrainer(SFTConfig(model=model, dataset=case.rows, output_dir=str(folder), **arguments))
        trainer.train()
        return logged_steps(folder), trainer.policy.built.module

    return recorded(train)


def train_trls(model: str, case: Case, folder: Path) -> Training:
    def train() -> tuple[Steps, torch.nn.Module]:
        arguments = TRL_ARGUMENTS | SETTINGS | {"train_sampling_strategy": "sequential"} | case.settings
        if "warmup_ratio" in arguments:  # transformers reads a number of steps below 1 as a share of all
            arguments["warmup_steps"] = arguments.pop("warmup_ratio")
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=trl.SFTConfig(output_dir=str(folder), **arguments),
            train_dataset=Dataset.from_list(case.rows),
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
        return trainer.state.log_history[:-1], trainer.model  # the last entry sums the run up

    return recorded(train)


def seeded(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Noise on embeddings is then drawn alike for the same tokens, whatever was drawn before."""
    if isinstance(module, torch.nn.Embedding):
        torch.manual_seed(int(inputs[0].sum()))


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_trl(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = save_tiny(tmp_path / "model", **case.model)
    hook = register_module_forward_pre_hook(seeded)
    try:
        ours = train_ours(model, case, tmp_path / "ours")
        theirs = train_trls(model, case, tmp_path / "trl")
    finally:
        hook.remove()
    assert_same_training(ours, theirs, unlike=case.unlike)


LONG: Rows = [{"prompt": f"{i % 10} is", "completion": f" {WORDS[i % 10]:>8}"} for i in range(12)]  # all of one length
BALANCED: dict[str, Case] = {
    "padded": Case(),
    "packed": Case({"packing": True, "max_length": 64, "per_device_train_batch_size": 2}),
    "accumulated": Case(ACCUMULATED, LONG, AVERAGED),  # TRL's micro-batches count alike
    "recomputed": Case({"gradient_checkpointing": True}),
}


@pytest.mark.parametrize(("name", "kind"), [*((name, "qwen3_moe") for name in BALANCED), ("padded", "mixtral")])
def test_experts_are_balanced_as_by_trl(tmp_path: Path, name: str, kind: str) -> None:
    """TRL calls the number aux_loss."""
    case = BALANCED[name]
    smooth = {"adam_epsilon": 1e-6}  # or a gradient of nearly 0 becomes a whole step
    case = Case(case.settings | smooth | {"router_aux_loss_coef": 0.5}, case.rows, [*case.unlike, "aux_loss"])
    model = save(kind, tmp_path / "model")
    ours = train_ours(model, case, tmp_path / "ours")
    theirs = train_trls(model, case, tmp_path / "trl")
    assert_same_training(ours, theirs, unlike=case.unlike)
    for our_step, their_step in zip(ours.steps, theirs.steps, strict=True):
        assert our_step["moe_aux_loss"] == pytest.approx(their_step["aux_loss"], abs=1e-5)
    without = train_ours(model, Case(case.settings | {"router_aux_loss_coef": 0.0}, case.rows), tmp_path / "without")
    assert abs(ours.steps[0]["grad_norm"] - without.steps[0]["grad_norm"]) > 1e-2, "it pulls at something"
