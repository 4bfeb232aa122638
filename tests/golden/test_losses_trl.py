"""Our losses and advantages against TRL's own trainers, on a tiny model: values, gradients of all weights, metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.golden.tiny import tiny_model, tiny_tokenizer
from trainers.advantages import add_reward_metrics, group_advantages
from trainers.losses import (
    add_policy_metrics,
    entropy_bonus,
    grpo_normaliser,
    policy_gradient_loss,
    sft_loss,
    token_entropy,
    token_logps,
)
from trainers.metrics import Metrics

TEMPERATURE = 0.9
MAX_COMPLETION_LENGTH = 11
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ARGUMENTS: dict[str, Any] = {
    "output_dir": "unused",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "per_device_train_batch_size": 8,
    "max_steps": 1,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "on_policy": {"on_policy": True},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.28},
    "two_sided": {"delta": 1.3},
    "two_sided_within_the_region": {"delta": 1.1},
    "kl": {"beta": 0.3},
    "kl_on_policy": {"beta": 0.3, "on_policy": True},
    "kl_uncorrected": {"beta": 0.3, "use_bias_correction_kl": False},
    "rollout_ratios": {"beta": 0.3, "rollout_ratios": True},
    "token_advantages": {"token_advantages": True},
    "cap_of_five": {"epsilon_high": 5.0},
    "entropy_bonus": {"entropy_coef": 0.2},
    "everything": {"epsilon_high": 0.28, "delta": 1.5, "beta": 0.1, "rollout_ratios": True, "entropy_coef": 0.01},
}


def no_reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """One trainer whose attributes each case sets. TRL patches its model's head; the plain forward still works."""
    arguments = ARGUMENTS | {"output_dir": str(tmp_path_factory.mktemp("grpo")), "temperature": TEMPERATURE}
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=no_reward,
        args=GRPOConfig(**arguments, num_generations=4, max_completion_length=MAX_COMPLETION_LENGTH),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def rollouts(grpo_trainer: GRPOTrainer) -> SimpleNamespace:
    """Six ragged completions off the current policy, by enough to be clipped on both sides; one has no loss tokens."""
    generator = torch.Generator().manual_seed(7)
    prompt_lengths, completion_lengths = torch.tensor([3, 5, 4, 5, 2, 5]), torch.tensor([9, 4, 1, 7, 9, 6])
    prompt_mask = torch.arange(5)[None, :] >= 5 - prompt_lengths[:, None]
    mask = torch.arange(9)[None, :] < completion_lengths[:, None]
    ids = torch.randint(4, 260, (6, 14), generator=generator)
    batch = SimpleNamespace(
        prompt_ids=ids[:, :5] * prompt_mask,
        prompt_mask=prompt_mask.long(),
        completion_ids=ids[:, 5:] * mask,
        completion_mask=mask.long(),
        tool_mask=torch.ones(6, 9, dtype=torch.long),  # 0 takes a token out of the loss, not out of the context
        advantages=torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, -0.3]),
        token_advantages=torch.randn(6, 9, generator=generator),
        rollout_ratios=torch.rand(6, 9, generator=generator) * 2,
    )
    batch.tool_mask[3, 2:4] = 0
    batch.tool_mask[5] = 0
    with torch.no_grad():
        logps, _ = model_logps(grpo_trainer.model, batch)
    batch.old_logps = logps + 0.3 * torch.randn(6, 9, generator=generator)
    batch.ref_logps = logps + 0.3 * torch.randn(6, 9, generator=generator)
    return batch


def model_logps(model: torch.nn.Module, batch: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Our log-probabilities and entropies of the completions, from ordinary logits."""
    input_ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    attention_mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    width = batch.completion_ids.shape[1]
    logits = logits[:, -width - 1 : -1]
    return token_logps(logits, batch.completion_ids, TEMPERATURE), token_entropy(logits, TEMPERATURE)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def rows(batch: SimpleNamespace, start: int, stop: int) -> SimpleNamespace:
    return SimpleNamespace(**{name: column[start:stop] for name, column in vars(batch).items()})


def loss_mask(batch: SimpleNamespace) -> torch.Tensor:
    return (batch.completion_mask * batch.tool_mask).bool()


def set_up(
    trainer: GRPOTrainer, loss_type: str, level: str, *, accumulation: int = 1, per_generation: int = 1, **options: Any
) -> None:
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    trainer.epsilon_low = options.get("epsilon", 0.2)
    trainer.epsilon_high = options.get("epsilon_high", trainer.epsilon_low)
    trainer.beta = options.get("beta", 0.0)
    trainer.args.delta = options.get("delta")
    trainer.args.use_bias_correction_kl = options.get("use_bias_correction_kl", True)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = options.get("rollout_ratios", False)
    trainer.entropy_coef = options.get("entropy_coef", 0.0)
    trainer._entropy_bonus_enabled = bool(trainer.entropy_coef)
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.args.steps_per_generation = per_generation
    trainer._metrics["train"].clear()


def trl_loss(trainer: GRPOTrainer, batch: SimpleNamespace, num_items: float, **options: Any) -> torch.Tensor:
    inputs = {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": batch.prompt_mask,
        "completion_ids": batch.completion_ids,
        "completion_mask": batch.completion_mask,
        "tool_mask": batch.tool_mask,
        "advantages": batch.token_advantages if options.get("token_advantages") else batch.advantages,
        "num_items_in_batch": torch.tensor(num_items),
        "importance_sampling_ratio": batch.rollout_ratios,
        "ref_per_token_logps": batch.ref_logps,
    }
    if not options.get("on_policy"):
        inputs["old_per_token_logps"] = batch.old_logps
    return trainer._compute_loss(trainer.model, inputs)


def our_loss(
    model: torch.nn.Module, batch: SimpleNamespace, loss_type: str, level: str, num_tokens: float, **options: Any
) -> tuple[torch.Tensor, Metrics]:
    logps, entropy = model_logps(model, batch)
    mask = loss_mask(batch)
    loss, diagnostics = policy_gradient_loss(
        logps,
        None if options.get("on_policy") else batch.old_logps,
        batch.token_advantages if options.get("token_advantages") else batch.advantages,
        mask,
        loss_type=loss_type,
        normaliser=grpo_normaliser(
            loss_type, num_sequences=6, num_tokens=num_tokens, max_completion_length=MAX_COMPLETION_LENGTH
        ),
        importance_sampling_level=level,
        ref_logps_BT=batch.ref_logps,
        token_weights=batch.rollout_ratios if options.get("rollout_ratios") else None,
        entropy_BT=entropy,
        **{key: options[key] for key in ("epsilon", "epsilon_high", "delta", "beta") if key in options},
        use_bias_correction_kl=options.get("use_bias_correction_kl", True),
    )
    metrics = Metrics()
    add_policy_metrics(metrics, diagnostics)
    coefficient = options.get("entropy_coef", 0.0)
    return loss + entropy_bonus(entropy, mask, coefficient=coefficient, num_tokens=float(mask.sum())), metrics


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_loss_and_gradients_equal_trl(
    grpo_trainer: GRPOTrainer, rollouts: SimpleNamespace, loss_type: str, level: str, options: dict[str, Any]
) -> None:
    num_tokens = float(loss_mask(rollouts).sum())
    set_up(grpo_trainer, loss_type, level, **options)
    expected = trl_loss(grpo_trainer, rollouts, num_tokens, **options)
    expected_gradients = gradients(grpo_trainer.model, expected)

    actual, _ = our_loss(grpo_trainer.model, rollouts, loss_type, level, num_tokens, **options)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for ours, trls in zip(gradients(grpo_trainer.model, actual), expected_gradients, strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-4, atol=1e-5 * float(trls.abs().max()))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize("per_generation", [2, 4])
def test_whole_step_equals_trls_sum_over_two_equal_micro_batches(
    grpo_trainer: GRPOTrainer, rollouts: SimpleNamespace, loss_type: str, per_generation: int
) -> None:
    """TRL divides by gradient accumulation steps and shares out the generation batch; we count the step once."""
    num_generated_tokens = 70.0  # of the generation batch, of which this step takes 2 of per_generation micro-batches
    set_up(grpo_trainer, loss_type, "token", accumulation=2, per_generation=per_generation)
    expected = sum(trl_loss(grpo_trainer, rows(rollouts, i, i + 3), num_generated_tokens) for i in (0, 3))
    expected_gradients = gradients(grpo_trainer.model, expected)

    actual, _ = our_loss(grpo_trainer.model, rollouts, loss_type, "token", num_generated_tokens * 2 / per_generation)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for ours, trls in zip(gradients(grpo_trainer.model, actual), expected_gradients, strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-4, atol=1e-5 * float(trls.abs().max()))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_metrics_have_trls_names_and_values(
    grpo_trainer: GRPOTrainer, rollouts: SimpleNamespace, loss_type: str, level: str
) -> None:
    options = {"beta": 0.1, "epsilon": 0.05, "epsilon_high": 1.1 if loss_type == "cispo" else 0.02}
    batch = rows(rollouts, 0, 5)  # at sequence level TRL counts the row without loss tokens, and we do not
    set_up(grpo_trainer, loss_type, level, **options)
    trl_loss(grpo_trainer, batch, 20.0, **options)
    expected = {name: values[-1] for name, values in grpo_trainer._metrics["train"].items()}

    _, metrics = our_loss(grpo_trainer.model, batch, loss_type, level, 20.0, **options)

    assert metrics.values() == pytest.approx(expected, rel=1e-5)
    clipped = [value for name, value in expected.items() if name in ("cispo_clip_ratio", "clip_ratio/region_mean")]
    assert 0 < clipped[0] < 1


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_supervised_loss_and_gradients_equal_trl(
    tmp_path_factory: pytest.TempPathFactory, rollouts: SimpleNamespace, loss_type: str
) -> None:
    trainer = SFTTrainer(
        model=tiny_model(),
        args=SFTConfig(**ARGUMENTS | {"output_dir": str(tmp_path_factory.mktemp("sft"))}, loss_type=loss_type),
        train_dataset=Dataset.from_dict({"input_ids": [[4, 5, 6]]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.model.train()
    mask = loss_mask(rollouts)
    input_ids = torch.cat([rollouts.prompt_ids, rollouts.completion_ids], dim=1)
    attention_mask = torch.cat([rollouts.prompt_mask, rollouts.completion_mask], dim=1)
    labels = input_ids.masked_fill(~torch.cat([torch.zeros(6, 5, dtype=torch.bool), mask], dim=1), -100)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    expected = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(57))
    expected_gradients = gradients(trainer.model, expected)

    logits = trainer.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 4:-1]
    actual = sft_loss(token_logps(logits, rollouts.completion_ids), mask, normaliser=57, loss_type=loss_type)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for ours, trls in zip(gradients(trainer.model, actual), expected_gradients, strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-4, atol=1e-5 * float(trls.abs().max()))


SCORED = [[1.0, 0.5], [0.0, 0.25], [2.0, 0.5], [0.5, -1.0], *[[1.0, 0.1]] * 4]  # groups of four, two functions
PARTLY_SCORED = [*SCORED, [None, 3.0], [0.0, None], [None, None], [0.5, 1.0]]


@pytest.mark.parametrize("rewards", [SCORED, PARTLY_SCORED], ids=["scored", "partly_scored"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_and_reward_metrics_equal_trl(
    grpo_trainer: GRPOTrainer,
    monkeypatch: pytest.MonkeyPatch,
    rewards: list[list[float | None]],
    aggregation: str,
    scale: str,
) -> None:
    """The completions are injected, so that TRL generates nothing; its rewards are ours."""
    set_up(grpo_trainer, "grpo", "token")
    completions = [[10 + i, 11, 2] for i in range(len(rewards))]
    columns = [[row[k] for row in rewards] for k in range(2)]
    functions = [lambda completions, **_: columns[0], lambda completions, **_: columns[1]]
    injected = {"prompt_ids": [[5]] * len(rewards), "completion_ids": completions, "logprobs": None}
    for name, value in {
        "rollout_func": lambda prompts, trainer: injected,
        "reward_funcs": functions,
        "reward_func_names": ["first", "second"],
        "reward_processing_classes": [None, None],
        "reward_weights": torch.tensor([1.0, 0.3]),
        "scale_rewards": scale,
        "multi_objective_aggregation": aggregation,
    }.items():
        monkeypatch.setattr(grpo_trainer, name, value)
    expected = grpo_trainer._generate_and_score_completions([{"prompt": "a"} for _ in rewards])["advantages"]

    advantages, statistics = group_advantages(
        rewards,
        num_generations=4,
        weights_K=[1.0, 0.3],
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
    )

    np.testing.assert_allclose(advantages, expected.numpy(), rtol=1e-5, atol=1e-6)
    metrics = Metrics()
    add_reward_metrics(metrics, statistics, ["first", "second"])
    logged = {name: values[-1] for name, values in grpo_trainer._metrics["train"].items() if "reward" in name}
    assert metrics.values() == pytest.approx(logged, rel=1e-5, abs=1e-7)
