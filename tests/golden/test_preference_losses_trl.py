"""Our preference and reward-model losses against TRL's own trainers, on a tiny model: values, gradients, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from tests.golden.tiny import tiny_model, tiny_tokenizer
from trainers.losses.preference import (
    Completions,
    add_preference_metrics,
    preference_loss,
)
from trainers.losses.reward_model import add_reward_model_metrics, reward_model_loss
from trainers.losses.tokens import token_logps
from trainers.metrics import Metrics

LOSS_TYPES = [
    *["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"],
    *["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"],
]
OF_DIFFERENCES = ["sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm"]
UNWEIGHTED = ["aot", "aot_unpaired", "sft", "hinge"]  # TRL refuses the first two and fails on the others
SMOOTHED = ["exo_pair", "robust", "aot", "aot_unpaired"]
DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js": {"f_divergence_type": "js_divergence"},
    "alpha_half": {"f_divergence_type": "alpha_divergence"},
    "alpha_one": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    "alpha_two": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beta": {"beta": 0.7},
    "length_desensitized": {"ld_alpha": 0.3},
    "weighted": {"use_weighting": True},
    "weighted_and_length_desensitized": {"use_weighting": True, "ld_alpha": 0.0, "beta": 0.5},
}
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "per_device_train_batch_size": 8,
    "max_steps": 1,
    "max_length": None,
}
NUM_PAIRS, WIDTH = 6, 12


def cases() -> list[Any]:
    """Every type with every option that TRL trains it with, as (loss types, options)."""
    found = []
    for loss_type in LOSS_TYPES:
        smoothing = {"label_smoothing": 0.1} if loss_type in SMOOTHED else {}
        divergences = DIVERGENCES if loss_type in OF_DIFFERENCES else {}
        for name, options in (OPTIONS | divergences).items():
            if not (options.get("use_weighting") and loss_type in UNWEIGHTED):
                found.append(pytest.param([loss_type], smoothing | options, id=f"{loss_type}-{name}"))
    mixed = {"loss_weights": [0.8, 0.2, 1.0]}
    found.append(pytest.param(["sigmoid", "bco_pair", "sft"], mixed, id="mpo"))
    found.append(pytest.param(["sigmoid", "aot"], {"label_smoothing": 0.1}, id="equal_weights"))
    for loss_type in ("robust", "aot", "aot_unpaired"):
        found.append(pytest.param([loss_type], {}, id=f"{loss_type}-unsmoothed"))
    weighted_js = {"use_weighting": True, "ld_alpha": 0.5, "f_divergence_type": "js_divergence", "beta": 0.4}
    found.append(pytest.param(["sigmoid", "ipo"], weighted_js | {"loss_weights": [0.5, 2.0]}, id="everything"))
    return found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> DPOTrainer:
    """One trainer whose attributes each case sets; its reference is the policy, disturbed."""
    reference = tiny_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.04 * torch.randn(parameter.shape, generator=generator)
    trainer = DPOTrainer(
        model=tiny_model(),
        ref_model=reference,
        args=DPOConfig(**ARGUMENTS, output_dir=str(tmp_path_factory.mktemp("dpo")), use_weighting=True),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Six pairs, all chosen before all rejected, padded on the right.

    Lengths differ little within a pair: else they alone would order the pairs, alike for both models.
    """
    generator = torch.Generator().manual_seed(11)
    prompt_lengths = torch.tensor([3, 5, 4, 5, 2, 1]).repeat(2)[:, None]
    lengths = torch.tensor([7, 2, 1, 6, 7, 4, 6, 3, 2, 7, 6, 4])[:, None]  # the last pair's are equal
    positions = torch.arange(WIDTH)[None, :]
    attention_mask = positions < prompt_lengths + lengths
    return {
        "input_ids": torch.randint(4, 260, (2 * NUM_PAIRS, WIDTH), generator=generator) * attention_mask,
        "attention_mask": attention_mask.long(),
        "completion_mask": (attention_mask & (positions >= prompt_lengths)).long(),
    }


def pairs(inputs: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: torch.cat([c[start:stop], c[NUM_PAIRS:][start:stop]]) for name, c in inputs.items()}


def trl_loss(
    trainer: DPOTrainer, inputs: dict[str, torch.Tensor], loss_types: list[str], **options: Any
) -> torch.Tensor:
    trainer.loss_types = loss_types
    trainer.loss_weights = options.get("loss_weights") or [1.0] * len(loss_types)
    trainer.beta = options.get("beta", 0.1)
    trainer.label_smoothing = options.get("label_smoothing", 0.0)
    trainer.f_divergence_type = options.get("f_divergence_type", "reverse_kl")
    trainer.f_alpha_divergence_coef = options.get("f_alpha_divergence_coef", 0.5)
    trainer.ld_alpha = options.get("ld_alpha")
    trainer.use_weighting = options.get("use_weighting", False)
    trainer._metrics["train"].clear()
    return trainer._compute_loss(trainer.model, dict(inputs), return_outputs=False)


def sides(trainer: DPOTrainer, inputs: dict[str, torch.Tensor], use_weighting: bool) -> list[Completions]:
    """Chosen and rejected, from ordinary logits of both models."""
    model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    targets, mask = inputs["input_ids"][:, 1:], inputs["completion_mask"][:, 1:].bool()
    logits = trainer.model(**model_inputs).logits[:, :-1]
    with torch.no_grad():
        ref_logps = token_logps(trainer.ref_model(**model_inputs).logits[:, :-1], targets)
        log_sum_sq_probs = (2 * logits.log_softmax(-1)).logsumexp(-1)
    columns = [token_logps(logits, targets), mask, ref_logps, log_sum_sq_probs if use_weighting else None]
    halves = [(None, None) if column is None else column.chunk(2) for column in columns]
    return [Completions(*(half[i] for half in halves)) for i in (0, 1)]


def our_loss(
    trainer: DPOTrainer, inputs: dict[str, torch.Tensor], loss_types: list[str], **options: Any
) -> tuple[torch.Tensor, Metrics]:
    chosen, rejected = sides(trainer, inputs, options.pop("use_weighting", False))
    loss, diagnostics = preference_loss(
        chosen,
        rejected,
        num_pairs=len(chosen.mask_BT),
        num_chosen_tokens=float(chosen.mask_BT.sum()),
        loss_type=loss_types,
        **options,
    )
    metrics = Metrics()
    add_preference_metrics(metrics, diagnostics)
    return loss, metrics


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(model: torch.nn.Module, actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    expected_gradients = gradients(model, expected)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients)
    assert largest > 0
    for ours, trls in zip(gradients(model, actual), expected_gradients, strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize(("loss_types", "options"), cases())
def test_preference_loss_and_gradients_equal_trl(
    trainer: DPOTrainer, inputs: dict[str, torch.Tensor], loss_types: list[str], options: dict[str, Any]
) -> None:
    expected = trl_loss(trainer, inputs, loss_types, **options)
    actual, _ = our_loss(trainer, inputs, loss_types, **options)
    assert_same(trainer.model, actual, expected)


def test_weighted_hinge_has_trls_value(trainer: DPOTrainer, inputs: dict[str, torch.Tensor]) -> None:
    """The value alone: TRL's backward pass stops at a weight that is multiplied into the relu in place."""
    expected = trl_loss(trainer, inputs, ["hinge"], use_weighting=True)
    actual, _ = our_loss(trainer, inputs, ["hinge"], use_weighting=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name not in ("aot", "aot_unpaired", "sft")])
def test_whole_step_equals_trls_mean_over_two_equal_micro_batches(
    trainer: DPOTrainer, inputs: dict[str, torch.Tensor], loss_type: str
) -> None:
    options = {"label_smoothing": 0.1} if loss_type in SMOOTHED else {}
    parts = [trl_loss(trainer, pairs(inputs, i, i + 3), [loss_type], **options) for i in (0, 3)]
    actual, _ = our_loss(trainer, inputs, [loss_type], **options)
    assert_same(trainer.model, actual, sum(parts) / 2)


@pytest.mark.parametrize("loss_type", ["sft", "aot", "aot_unpaired"])
def test_where_micro_batches_of_trl_depart_from_the_whole_step(
    trainer: DPOTrainer, inputs: dict[str, torch.Tensor], loss_type: str
) -> None:
    """sft: a mean of means there; aot: the pairs of each micro-batch are sorted alone there."""
    parts = [trl_loss(trainer, pairs(inputs, i, i + 3), [loss_type]) for i in (0, 3)]
    actual, _ = our_loss(trainer, inputs, [loss_type])
    assert abs(actual.item() - sum(part.item() for part in parts) / 2) > 1e-4


@pytest.mark.parametrize("options", [{}, {"beta": 0.7, "ld_alpha": 0.3}], ids=["plain", "length_desensitized"])
def test_metrics_have_trls_names_and_values(
    trainer: DPOTrainer, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    trl_loss(trainer, inputs, ["sigmoid"], **options)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    _, metrics = our_loss(trainer, inputs, ["sigmoid"], **options)
    expected = {name: value for name, value in logged.items() if name.startswith(("rewards/", "logps/"))}
    assert len(expected) == 6
    assert 0 < expected["rewards/accuracies"] < 1
    assert metrics.values() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def reward_trainer(tmp_path_factory: pytest.TempPathFactory) -> RewardTrainer:
    config = tiny_model().config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Qwen3ForSequenceClassification(config).float()
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**ARGUMENTS, output_dir=str(tmp_path_factory.mktemp("reward"))),
        train_dataset=Dataset.from_dict({"chosen": ["b"], "rejected": ["c"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.model.train()
    return trainer


@pytest.mark.parametrize("centering", [None, 0.01, 0.5])
@pytest.mark.parametrize("with_margins", [False, True], ids=["no_margin", "margin"])
def test_reward_model_loss_gradients_and_metrics_equal_trl(
    reward_trainer: RewardTrainer, inputs: dict[str, torch.Tensor], with_margins: bool, centering: float | None
) -> None:
    margins = torch.tensor([0.0, 1.0, 0.5, 2.0, -1.0, 0.1]) if with_margins else None
    model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    reward_trainer.args.center_rewards_coefficient = centering
    reward_trainer._metrics["train"].clear()
    with_margin = model_inputs | ({} if margins is None else {"margin": margins})
    expected = reward_trainer.compute_loss(reward_trainer.model, with_margin)
    logged = {name: values[-1] for name, values in reward_trainer._metrics["train"].items() if name != "num_tokens"}

    chosen, rejected = reward_trainer.model(**model_inputs).logits[:, 0].chunk(2)
    actual, diagnostics = reward_model_loss(
        chosen, rejected, margins, num_pairs=NUM_PAIRS, center_rewards_coefficient=centering
    )

    assert_same(reward_trainer.model, actual, expected)
    metrics = Metrics()
    add_reward_model_metrics(metrics, diagnostics)
    assert metrics.values() == pytest.approx(logged, rel=1e-5, abs=1e-6)
    assert 0 < logged["accuracy"] < 1
