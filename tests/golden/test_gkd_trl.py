"""Whole runs beside TRL's GKDTrainer (dataset rows) and DistillationTrainer (injected completions): equal numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDConfig as TrlGKDConfig
from trl.experimental.gkd import GKDTrainer as TrlGKDTrainer

from rayhelper import Channel, RayHelper
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
from trainers.batch import Ragged, Rollouts
from trainers.gkd.trainer import GKDConfig, GKDTrainer
from trainers.parts.generator import Generator

MAX_COMPLETION_LENGTH = 10
Rows = list[dict[str, Any]]
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "adam_epsilon": 1e-6,  # Adam divides gradients by their own size: those of rounding errors must not count
}
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# Where a step has several micro-batches, TRL averages the entropies that it measured in them; ours are over all tokens.
AVERAGED = ("entropy",)


@dataclass(frozen=True)
class Case:
    """What differs from ``SETTINGS``, and which of TRL's numbers ours are not meant to equal."""

    settings: dict[str, Any] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


MESSAGES: Rows = [
    {
        "messages": [turn("system", "Be brief."), turn("user", str(i) * i), turn("assistant", "no " * (1 + 5 * i % 7))][
            i % 2 :
        ]
    }
    for i in range(12)
]
PROMPTS: Rows = [{"prompt": f"{i} times {'x' * (i % 5)}:"} for i in range(12)]

DATASET_CASES = {
    "generalised_jsd": Case(),
    "forward_kl": Case({"beta": 0.0}),
    "reverse_kl": Case({"beta": 1.0}),
    "nearly_forward": Case({"beta": 0.1}),
    "accumulated": Case(ACCUMULATED),
    "cut": Case({"max_length": 60}),
}
OWN_CASES = {
    "reverse_kl": Case(),
    "generalised_jsd": Case({"beta": 0.3}),
    "forward_kl": Case({"beta": 0.0}),
    "temperature": Case({"temperature": 1.7, "beta": 0.7}),
    "accumulated": Case(ACCUMULATED, unlike=AVERAGED),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("teacher"), seed=1, hidden_size=96)


def loaded(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def injected_completions(step: int, count: int) -> list[list[int]]:
    """Words of one to nine letters and the end token, or of ten letters and no end: those are truncated."""
    draws = np.random.default_rng([7, step])
    words = [
        "".join(draws.choice(list("abc "), size=draws.integers(1, MAX_COMPLETION_LENGTH + 1))) for _ in range(count)
    ]
    tokenizer = tiny_tokenizer()
    return [(tokenizer(word)["input_ids"] + [tokenizer.eos_token_id])[:MAX_COMPLETION_LENGTH] for word in words]


class InjectedGenerator(Generator):
    """Ours, its rollout engine replaced."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Any, sampling: Any, channel: Channel | None, *numbers: int) -> Rollouts:
        completions = Ragged.of(injected_completions(numbers[0], len(starts)), np.int64)
        truncated = np.array([ids[-1] != self.tokenizer.eos_token_id for ids in completions])
        unused = Ragged.split(np.zeros(len(completions.values), np.float32), completions.lengths)
        return Rollouts(starts.prompt_ids, completions, unused, truncated)


class OurTrainer(GKDTrainer):
    """Ours, with that generator."""

    def __init__(self, config: GKDConfig) -> None:
        super().__init__(config)
        self.generator = InjectedGenerator(config, self.policy)


class TrlTrainer(trl.DistillationTrainer):
    """TRL's, its call of ``generate`` replaced."""

    num_generated = 0

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        completions = injected_completions(self.num_generated, len(prompt_ids))
        self.num_generated += 1
        return completions


def train_ours(kind: type[GKDTrainer], model: str, teacher: str, rows: Rows, folder: Path, **keys: Any) -> Training:
    def train() -> tuple[Steps, torch.nn.Module]:
        arguments = OUR_ARGUMENTS | SETTINGS | keys
        trainer = kind(GKDConfig(model=model, teacher_model=teacher, dataset=rows, output_dir=str(folder), **arguments))
        trainer.train()
        return logged_steps(folder), trainer.policy.built.module

    return recorded(train)


def train_trls(trainer: Any) -> Training:
    def train() -> tuple[Steps, torch.nn.Module]:
        trainer.train()
        return trainer.state.log_history[:-1], trainer.model  # the last entry sums the run up

    return recorded(train)


@pytest.mark.parametrize("name", DATASET_CASES)
def test_steps_on_dataset_rows_equal_trls_gkd(name: str, model: str, teacher: str, tmp_path: Path) -> None:
    """TRL's has no temperature in its loss, so ours is 1."""
    case = DATASET_CASES[name]
    ours = train_ours(
        GKDTrainer, model, teacher, MESSAGES, tmp_path / "ours", lmbda=0.0, temperature=1.0, **case.settings
    )
    arguments = TRL_ARGUMENTS | SETTINGS | {"train_sampling_strategy": "sequential", "lmbda": 0.0} | case.settings
    theirs = train_trls(
        TrlGKDTrainer(
            model=loaded(model),
            teacher_model=loaded(teacher),
            args=TrlGKDConfig(output_dir=str(tmp_path / "trl"), **arguments),
            train_dataset=Dataset.from_list(MESSAGES),
            processing_class=tiny_tokenizer(),
        )
    )
    assert_same_training(ours, theirs, unlike=case.unlike)
    assert theirs.steps[0]["loss"] > 0.01


@pytest.mark.parametrize("name", OWN_CASES)
def test_steps_on_the_students_completions_equal_trls_distillation(
    name: str, model: str, teacher: str, tmp_path: Path
) -> None:
    case = OWN_CASES[name]
    settings: dict[str, Any] = {"beta": 1.0, "temperature": 1.0, "max_completion_length": MAX_COMPLETION_LENGTH}
    settings |= case.settings
    ours = train_ours(OurTrainer, model, teacher, PROMPTS, tmp_path / "ours", lmbda=1.0, **settings)
    theirs = train_trls(
        TrlTrainer(
            model=loaded(model),
            teacher_model=loaded(teacher),
            args=trl.DistillationConfig(
                output_dir=str(tmp_path / "trl"), shuffle_dataset=False, **TRL_ARGUMENTS | SETTINGS | settings
            ),
            train_dataset=Dataset.from_list(PROMPTS),
            processing_class=tiny_tokenizer(),
        )
    )
    assert_same_training(ours, theirs, unlike=case.unlike)
    assert theirs.steps[0]["loss"] > 0.01
