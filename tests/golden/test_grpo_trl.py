"""Whole GRPO runs beside TRL's GRPOTrainer, on the same injected completions: logs, gradients and weights are equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM

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
from trainers.batch import Ragged, Rollouts, Samples
from trainers.grpo.plan import GenerationPlan
from trainers.grpo.trainer import GRPOConfig, GRPOTrainer
from trainers.parts.generator import Generator
from trainers.rewards.texts import completion_text

NUM_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 10
Rows = list[dict[str, Any]]


def injected_completions(generation: int, count: int) -> list[list[int]]:
    """Words of one to nine letters and the end token, or of ten letters and no end: those are truncated."""
    draws = np.random.default_rng([7, generation])
    words = [
        "".join(draws.choice(list("abc "), size=draws.integers(1, MAX_COMPLETION_LENGTH + 1))) for _ in range(count)
    ]
    tokenizer = tiny_tokenizer()
    return [(tokenizer(word)["input_ids"] + [tokenizer.eos_token_id])[:MAX_COMPLETION_LENGTH] for word in words]


def injected_logps(generation: int, completions: Sequence[Sequence[int]]) -> list[list[float]]:
    """What an engine may have found of the completions: near what the random model does, NaN for one token in ten."""
    draws = np.random.default_rng([8, generation])
    logps = [draws.normal(-5.7, 0.4, len(ids)) for ids in completions]
    return [np.where(draws.random(len(row)) < 0.1, np.nan, row).astype(np.float32).tolist() for row in logps]


def sampled_mask(ids: Sequence[int]) -> list[bool]:
    return [k % 3 != 1 for k in range(len(ids))]


def rollout_function(prompts: list[str], trainer: trl.GRPOTrainer) -> dict[str, Any]:
    """What TRL takes from an environment: completions, and which of their tokens are the model's."""
    completions = injected_completions(trainer.num_generated, len(prompts))
    trainer.num_generated += 1
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    masks = [list(map(int, sampled_mask(completion))) for completion in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


class InjectedGenerator(Generator):
    """Ours, its rollout engine replaced."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Any, sampling: Any, channel: Channel | None, *numbers: int) -> Rollouts:
        prompts, generation = starts, numbers[0]
        completions = Ragged.of(injected_completions(generation, len(prompts)), np.int64)
        truncated = np.array([ids[-1] != self.tokenizer.eos_token_id for ids in completions])
        logps = Ragged.of(injected_logps(generation, list(completions)), np.float32)
        rollouts = Rollouts(prompts.prompt_ids, completions, logps, truncated)
        if self.config.run_name == "environment":  # every third token is not the model's
            return dataclasses.replace(rollouts, is_sampled=Ragged.of(map(sampled_mask, completions), bool))
        return rollouts


class OurTrainer(GRPOTrainer):
    """Ours, with that generator."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.generator = InjectedGenerator(config, self.policy)


class TrlTrainer(trl.GRPOTrainer):
    """TRL's, its call of ``generate`` replaced."""

    num_generated = 0
    tells_logps = False

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *_: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        completions = injected_completions(self.num_generated, len(prompt_ids))
        logps = injected_logps(self.num_generated, completions) if self.tells_logps else None
        self.num_generated += 1
        return completions, logps


class TrlRLOOTrainer(trl.RLOOTrainer):
    """The same."""

    num_generated = 0

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
        completions = injected_completions(self.num_generated, len(prompt_ids))
        self.num_generated += 1
        return completions


def letters(completions: list[Any], **_: Any) -> list[float]:
    """The share of the letter a."""
    texts = [completion_text(completion) for completion in completions]
    return [text.count("a") / len(text) for text in texts]


def wanted_letter(completions: list[Any], letter: list[str], **_: Any) -> list[float]:
    """1 for completions that begin as the row says: alike within many a group."""
    pairs = zip(completions, letter, strict=True)
    return [float(completion_text(completion).startswith(wanted)) for completion, wanted in pairs]


def no_opinion_on_b(completions: list[Any], **_: Any) -> list[float | None]:
    texts = [completion_text(completion) for completion in completions]
    return [None if text.startswith("b") else text.count("c") / len(text) for text in texts]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS: Rows = [{"prompt": f"{i} times {'x' * (i % 5)}:", "letter": "abc "[i % 4]} for i in range(8)]
CONVERSATIONS: Rows = [
    row | {"prompt": [turn("system", "Be brief."), turn("user", row["prompt"])][i % 2 :]} for i, row in enumerate(ROWS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def train_ours(config: GRPOConfig) -> Training:
    def train() -> tuple[Steps, torch.nn.Module]:
        trainer = OurTrainer(config)
        trainer.train()
        return logged_steps(Path(config.output_dir)), trainer.policy.built.module

    return recorded(train)


def train_trls(model: str, case: Case, folder: Path) -> Training:
    trainer_type, config_type = (TrlTrainer, trl.GRPOConfig) if case.trls is None else (TrlRLOOTrainer, trl.RLOOConfig)

    def train() -> tuple[Steps, torch.nn.Module]:
        named_alike = {key: value for key, value in case.settings.items() if not key.startswith("rollout_")}
        settings = TRL_ARGUMENTS | SETTINGS | (named_alike if case.trls is None else case.trls)
        trainer = trainer_type(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),  # the reference is read anew
            reward_funcs=list(case.rewards),
            args=config_type(output_dir=str(folder), shuffle_dataset=False, **settings | case.engine),
            train_dataset=Dataset.from_list(case.rows),
            processing_class=tiny_tokenizer(),
            **({"rollout_func": rollout_function} if case.settings.get("run_name") == "environment" else {}),
        )
        if case.tells_logps:
            trainer.tells_logps = True
        if case.engine:
            trainer.use_vllm = True  # corrects for the engine, which is replaced
        trainer.train()
        return trainer.state.log_history[:-1], trainer.model  # the last entry sums the run up

    return recorded(train)


def shuffle_of_ours(config: GRPOConfig, num_rows: int) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Puts each generation of TRL's into the order in which ours goes to the optimizer steps."""
    plan = GenerationPlan.of(config, num_rows, num_workers=1, saved_order={})
    generations = itertools.count()

    def shuffle(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        size = len(batch["advantages"])
        ones = Ragged.split(np.ones(size, np.int64), np.ones(size, np.int64))
        numbered = Samples(ones, ones, advantages=np.arange(size))
        chunks = plan.chunks(numbered, seed=(config.seed, next(generations)))
        order = np.concatenate([chunk.advantages for chunk in chunks])[:size]  # TRL keeps it in all iterations
        return {name: column[order] if column.dim() else column for name, column in batch.items()}

    return shuffle


@dataclass(frozen=True)
class Case:
    """What differs from ``SETTINGS``, and which of TRL's numbers ours are not meant to equal."""

    settings: dict[str, Any] = field(default_factory=dict)
    rewards: Sequence[Callable[..., Any]] = (letters,)
    rows: Rows = field(default_factory=lambda: ROWS)
    unlike: Sequence[str] = ()
    trls: dict[str, Any] | None = None  # TRL's RLOOTrainer, with these settings
    tells_logps: bool = False
    engine: dict[str, Any] = field(default_factory=dict)  # of TRL: how it corrects for its engine, under its own names


SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 8,
    "num_generations": NUM_GENERATIONS,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "max_steps": 4,
    "num_iterations": 2,
    "epsilon": 0.1,
    "adam_epsilon": 1e-6,  # above the rounding of gradients, which Adam makes into whole steps where they are nearly 0
}
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
AVERAGED = ("entropy", "clip_ratio/", "cispo_clip_ratio")
CHUNKED: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 1}
FAR: dict[str, Any] = {"epsilon_high": 5.0, "epsilon": 0.2}
CASES: dict[str, Case] = {
    "dapo": Case(),
    **{loss_type: Case({"loss_type": loss_type}) for loss_type in ("grpo", "dr_grpo")},
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.2}),
    "sapo": Case({"loss_type": "sapo", "epsilon": 0.2, "sapo_temperature_neg": 1.5}),
    "sapo_kl": Case({"loss_type": "sapo", "epsilon": 0.2, "sapo_temperature_pos": 0.7, "beta": 0.1}),
    "luspo": Case({"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    "vespo": Case({"loss_type": "vespo", "epsilon": 0.2, "vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}),
    "top_entropy": Case({"top_entropy_quantile": 0.3, "num_iterations": 1}, unlike=("clip_ratio/",)),
    "top_entropy_twice": Case({"top_entropy_quantile": 0.3}, unlike=("clip_ratio/",)),
    "top_entropy_bonus": Case({"top_entropy_quantile": 0.5, "num_iterations": 1, "entropy_coef": 1.0}),
    "adaptive_entropy": Case(
        {"use_adaptive_entropy": True, "entropy_coef": 0.4, "entropy_coef_delta": 0.3, "entropy_target": 5.45}
    ),
    "off_policy_mask": Case({"off_policy_mask_threshold": -0.2}, tells_logps=True),
    **{
        f"corrected_{mode}": Case(
            {
                "rollout_importance_sampling_mode": mode,
                "rollout_importance_sampling_clip_max": 1.3,
                "rollout_importance_sampling_clip_min": 0.6,
                "num_iterations": iterations,
                **further,
            },
            tells_logps=True,
            engine={
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_max": 1.3,
                "vllm_importance_sampling_clip_min": 0.6,
            },
        )
        for mode, iterations, further in [
            ("token_truncate", 1, {}),
            ("token_mask", 2, {}),
            ("sequence_truncate", 1, {"loss_type": "grpo"}),
            ("sequence_mask", 2, {"beta": 0.1}),
        ]
    },
    "corrected_vespo": Case(
        {"loss_type": "vespo", "epsilon": 0.2, "rollout_importance_sampling_mode": "token_truncate"},
        tells_logps=True,
        engine={"vllm_importance_sampling_mode": "token_truncate"},
    ),
    **{
        f"rloo{name}": Case(
            {
                "advantage_estimator": "rloo",
                "loss_type": "grpo",
                "importance_sampling_level": "sequence_product",
                **settings,
            },
            rewards=[letters, no_opinion_on_b],
            trls=settings,
        )
        for name, settings in [
            ("", {"beta": 0.05, "max_steps": 3}),
            ("_without_kl", {"beta": 0.0, "reward_clip_range": [0.1, 0.9]}),
            ("_normalized", {"beta": 0.1, "normalize_advantages": True}),
        ]
    },
    "sequence_level": Case({"importance_sampling_level": "sequence"}),
    "sequence_level_kl": Case({"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.3}),
    "three_iterations": Case({"num_iterations": 3, "max_steps": 6}),
    "on_policy": Case({"num_iterations": 1}),
    "asymmetric": Case({"epsilon_high": 0.2}),
    "two_sided": Case({"delta": 1.15}),
    "kl": Case({"beta": 0.3}),
    "kl_uncorrected": Case({"beta": 0.3, "use_bias_correction_kl": False}),
    "temperature": Case({"temperature": 0.8, "beta": 0.1}),
    "entropy_bonus": Case({"entropy_coef": 1.0}),
    "scaled_by_batch": Case({"scale_rewards": "batch"}),
    "not_scaled": Case({"scale_rewards": "none"}),
    "groups_alike": Case(rewards=[wanted_letter]),
    "weighted_rewards": Case({"reward_weights": [1.0, 0.3]}, rewards=[letters, wanted_letter]),
    "normalized_then_summed": Case({"multi_objective_aggregation": "normalize_then_sum"}, [letters, wanted_letter]),
    "some_unscored": Case(rewards=[no_opinion_on_b]),
    "some_unscored_by_one": Case({"reward_weights": [0.5, 2.0]}, rewards=[no_opinion_on_b, letters]),
    "mask_truncated": Case({"mask_truncated_completions": True}),
    "mask_truncated_grpo": Case({"mask_truncated_completions": True, "loss_type": "grpo"}),
    "conversations": Case(rows=CONVERSATIONS),
    "environment": Case({"run_name": "environment", "beta": 0.1}),
    "environment_grpo": Case({"run_name": "environment", "loss_type": "grpo", "mask_truncated_completions": True}),
    "one_epoch": Case({"max_steps": -1, "num_train_epochs": 1}),
    # Where a step has several micro-batches, TRL averages what it measured in them, and its bnpo and its entropy bonus
    # are such averages too; ours are over all tokens of the step. So those numbers and losses are left out here.
    **{
        f"accumulated_{loss_type}": Case(ACCUMULATED | {"loss_type": loss_type} | FAR, unlike=AVERAGED)
        for loss_type in ("grpo", "dr_grpo", "dapo", "cispo")
    },
    # One generation for several optimizer steps.
    **{
        f"chunks_{loss_type}": Case(CHUNKED | {"loss_type": loss_type} | FAR)
        for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
    },
    "chunks_accumulated": Case(CHUNKED | ACCUMULATED, unlike=AVERAGED),
    "chunks_by_size": Case({"generation_batch_size": 16, "num_iterations": 1}),
}


def gradient_norms(training: Training) -> list[float]:
    return [step["grad_norm"] for step in training.steps]


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """TRL's run without any change to ``SETTINGS``."""
    return train_trls(model, Case(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_trl(
    model: str, plain: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    config = GRPOConfig(
        model=model,
        dataset=case.rows,
        reward_funcs=list(case.rewards),
        output_dir=str(tmp_path / "ours"),
        **OUR_ARGUMENTS | SETTINGS | case.settings,
    )
    module = "rloo_trainer" if case.trls is not None else "grpo_trainer"
    monkeypatch.setattr(f"trl.trainer.{module}.shuffle_sequence_dict", shuffle_of_ours(config, len(case.rows)))
    theirs = train_trls(model, case, tmp_path / "trl")
    ours = train_ours(config)
    assert_same_training(ours, theirs, unlike=case.unlike)
    differs = gradient_norms(theirs) != pytest.approx(gradient_norms(plain), rel=1e-2)
    assert name == "dapo" or differs, "what this case changes makes no difference"
