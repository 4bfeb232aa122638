"""Our losses and advantages against TRL's own trainers, on a tiny model: values, gradients of all weights, metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.trainer import add_fused_lm_head

from tests.golden.tiny import tiny_model, tiny_tokenizer
from trainers.batch import Ragged
from trainers.losses.entropy import (
    applied_entropy_coefficient,
    entropy_bonus,
    entropy_threshold,
    next_entropy_coefficient,
)
from trainers.losses.policy import add_policy_metrics, grpo_normaliser, policy_gradient_loss
from trainers.losses.policy_terms import SapoGate, VespoWeight
from trainers.losses.rollout_correction import add_rollout_metrics, off_policy_mask, rollout_ratios
from trainers.losses.tokens import sft_loss, token_entropy, token_logps
from trainers.metrics import Metrics
from trainers.rewards.advantages import add_reward_metrics, group_advantages, leave_one_out_advantages, sequence_kl

TEMPERATURE = 0.9
MAX_COMPLETION_LENGTH = 11
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
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
SHAPES = {  # TRL's defaults of the constants of sapo and vespo
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
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
    "off_policy_mask": {"off_policy_mask_threshold": 0.1, "beta": 0.3},
    "off_policy_mask_of_tokens": {"off_policy_mask_threshold": 0.1, "token_advantages": True},
    "high_entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.2, "beta": 0.3},
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
    batch.rollout_ratios[~loss_mask(batch)] = 1.0
    with torch.no_grad():
        logps, _ = model_logps(grpo_trainer.model, batch)
    batch.old_logps = logps + 0.3 * torch.randn(6, 9, generator=generator)
    batch.ref_logps = logps + 0.3 * torch.randn(6, 9, generator=generator)
    batch.sampling_logps = logps + 0.3 * torch.randn(6, 9, generator=generator)
    batch.sampling_logps[3] += 0.2  # a sequence of negative advantage from which the policy has moved away
    batch.sampling_logps[1, 2] = torch.nan  # a token that the engine could not score
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
    trainer.off_policy_mask_threshold = options.get("off_policy_mask_threshold")
    trainer.top_entropy_quantile = options.get("top_entropy_quantile", 1.0)
    for name, value in (SHAPES | options.get("shapes", {})).items():
        setattr(trainer.args, name, value)
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
        "ref_per_token_logps": batch.ref_logps,
    }
    if options.get("rollout_ratios"):
        inputs["importance_sampling_ratio"] = batch.rollout_ratios
    if options.get("off_policy_mask_threshold"):
        inputs["sampling_per_token_logps"] = batch.sampling_logps
    if not options.get("on_policy"):
        inputs["old_per_token_logps"] = batch.old_logps
    return trainer._compute_loss(trainer.model, inputs)


def our_loss(
    model: torch.nn.Module, batch: SimpleNamespace, loss_type: str, level: str, num_tokens: float, **options: Any
) -> tuple[torch.Tensor, Metrics]:
    logps, entropy = model_logps(model, batch)
    mask = chosen = loss_mask(batch)
    advantages = batch.token_advantages if options.get("token_advantages") else batch.advantages
    weights = torch.ones(len(mask), 1)
    if "off_policy_mask_threshold" in options:
        threshold = options["off_policy_mask_threshold"]
        weights = weights * off_policy_mask(logps, batch.sampling_logps, advantages, mask, threshold=threshold)
    if "top_entropy_quantile" in options:
        threshold = entropy_threshold(entropy.detach()[mask].numpy(), options["top_entropy_quantile"])
        chosen = mask & (entropy >= threshold)
        weights = weights * chosen
    constants = SHAPES | options.get("shapes", {})
    loss, diagnostics = policy_gradient_loss(
        logps,
        None if options.get("on_policy") else batch.old_logps,
        advantages,
        mask,
        loss_type=loss_type,
        normaliser=grpo_normaliser(
            loss_type, num_sequences=6, num_tokens=num_tokens, max_completion_length=MAX_COMPLETION_LENGTH
        ),
        importance_sampling_level=level,
        ref_logps_BT=batch.ref_logps,
        rollout_ratios=batch.rollout_ratios if options.get("rollout_ratios") else None,
        token_weights=weights,
        entropy_BT=entropy,
        sapo=SapoGate(**{k.removeprefix("sapo_"): v for k, v in constants.items() if k.startswith("sapo_")}),
        vespo=VespoWeight(**{k.removeprefix("vespo_"): v for k, v in constants.items() if k.startswith("vespo_")}),
        **{key: options[key] for key in ("epsilon", "epsilon_high", "delta", "beta") if key in options},
        use_bias_correction_kl=options.get("use_bias_correction_kl", True),
    )
    metrics = Metrics()
    add_policy_metrics(metrics, diagnostics)
    coefficient = options.get("entropy_coef", 0.0)
    return loss + entropy_bonus(entropy, chosen, coefficient=coefficient, num_tokens=float(chosen.sum())), metrics


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


@pytest.mark.parametrize(
    ("loss_type", "shapes"),
    [
        ("sapo", {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 4.0}),
        ("vespo", {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 4.0, "vespo_lambda_neg": 1.5}),
    ],
)
def test_constants_of_sapo_and_vespo_are_trls(
    grpo_trainer: GRPOTrainer, rollouts: SimpleNamespace, loss_type: str, shapes: dict[str, float]
) -> None:
    num_tokens = float(loss_mask(rollouts).sum())
    set_up(grpo_trainer, loss_type, "token", shapes=shapes)
    expected = trl_loss(grpo_trainer, rollouts, num_tokens)
    expected_gradients = gradients(grpo_trainer.model, expected)

    actual, _ = our_loss(grpo_trainer.model, rollouts, loss_type, "token", num_tokens, shapes=shapes)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for ours, trls in zip(gradients(grpo_trainer.model, actual), expected_gradients, strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-4, atol=1e-5 * float(trls.abs().max()))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
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
    telling = {"cispo": "cispo_clip_ratio", "vespo": "vespo/phi_seq_mean", "sapo": "kl"}
    assert 0 < expected[telling.get(loss_type, "clip_ratio/region_mean")] < 1


def test_adaptive_entropy_coefficient_goes_trls_way(
    grpo_trainer: GRPOTrainer, rollouts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step: what is applied is decided by the last step's entropy, and moves after it."""
    measured = float(model_logps(grpo_trainer.model, rollouts)[1].detach()[loss_mask(rollouts)].mean())
    bounds = {"delta": 0.05, "minimum": 0.0, "maximum": 0.12}
    set_up(grpo_trainer, "grpo", "token", entropy_coef=0.04)
    grpo_trainer.use_adaptive_entropy, grpo_trainer._last_world_entropy = True, float("inf")
    grpo_trainer._entropy_window_stats = None
    for name, value in bounds.items():
        trls = {"delta": "delta", "minimum": "min", "maximum": "max"}[name]
        monkeypatch.setattr(grpo_trainer.args, f"entropy_coef_{trls}", value)
    coefficient, entropy = 0.04, None
    try:
        for target in (measured + 1, measured + 1, measured + 1, measured - 1, measured + 1):
            monkeypatch.setattr(grpo_trainer.args, "entropy_target", target)
            expected = trl_loss(grpo_trainer, rollouts, 20.0)
            applied = applied_entropy_coefficient(coefficient, entropy, target=target)
            actual, _ = our_loss(grpo_trainer.model, rollouts, "grpo", "token", 20.0, entropy_coef=applied)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            entropy = measured
            coefficient = next_entropy_coefficient(coefficient, entropy, target=target, **bounds)
            assert coefficient == pytest.approx(grpo_trainer.entropy_coef)
    finally:
        grpo_trainer.use_adaptive_entropy = False


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


INJECTED = [[10, 11, 2], [12, 2], [13, 14, 15, 16, 2], [17, 18, 19, 2]]  # completions of one prompt


@pytest.mark.parametrize("clip_min", [None, 0.7])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_rollout_ratios_and_their_metrics_equal_trl(
    grpo_trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch, mode: str, clip_min: float | None
) -> None:
    """TRL believes that a vLLM engine drew the completions, with log-probabilities of its own; one it does not know."""
    set_up(grpo_trainer, "grpo", "token")
    mask = torch.arange(5)[None, :] < torch.tensor([len(ids) for ids in INJECTED])[:, None]
    ids = torch.zeros(4, 5, dtype=torch.long)
    ids[mask] = torch.tensor([token for row in INJECTED for token in row])
    batch = SimpleNamespace(
        prompt_ids=torch.full((4, 1), 5),
        prompt_mask=torch.ones(4, 1, dtype=torch.long),
        completion_ids=ids,
        completion_mask=mask.long(),
    )
    with torch.no_grad():
        old_logps, _ = model_logps(grpo_trainer.model, batch)
    rollout_logps = old_logps + 0.3 * torch.randn(4, 5, generator=torch.Generator().manual_seed(5))
    rollout_logps[2, 1] = torch.nan
    told = [
        [None if logp.isnan() else logp.item() for logp in row[: len(ids)]]
        for row, ids in zip(rollout_logps, INJECTED, strict=True)
    ]
    injected = {"prompt_ids": [[5]] * 4, "completion_ids": INJECTED, "logprobs": told}
    for name, value in {
        "rollout_func": lambda prompts, trainer: injected,
        "use_vllm": True,
        "_last_loaded_step": grpo_trainer.state.global_step,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": clip_min,
    }.items():
        monkeypatch.setattr(grpo_trainer, name, value, raising=False)
    output = grpo_trainer._generate_and_score_completions([{"prompt": "a"} for _ in INJECTED])
    torch.testing.assert_close(output["old_per_token_logps"][mask], old_logps[mask], rtol=1e-5, atol=1e-5)

    ratios, diagnostics = rollout_ratios(old_logps, rollout_logps, mask, mode=mode, clip_max=1.2, clip_min=clip_min)

    expected = output["importance_sampling_ratio"]
    if mode.startswith("token"):
        ratios, expected = ratios[mask], expected[mask]
    torch.testing.assert_close(ratios, expected, rtol=1e-5, atol=1e-5)
    metrics = Metrics()
    add_rollout_metrics(metrics, diagnostics)
    logged = {name: values[-1] for name, values in grpo_trainer._metrics["train"].items() if "sampling/" in name}
    assert metrics.values() == pytest.approx(logged, rel=1e-5)
    assert len(logged) == 5


@pytest.fixture(scope="module")
def rloo_trainer(tmp_path_factory: pytest.TempPathFactory) -> RLOOTrainer:
    arguments = ARGUMENTS | {"output_dir": str(tmp_path_factory.mktemp("rloo")), "temperature": TEMPERATURE}
    trainer = RLOOTrainer(
        model=tiny_model(),
        reward_funcs=no_reward,
        args=RLOOConfig(**arguments, beta=0.0, num_generations=4, max_completion_length=MAX_COMPLETION_LENGTH),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.model.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reward_clip_range": (0.0, 1.0)},
        {"normalize_advantages": True},
        {"beta": 0.2, "normalize_advantages": True},
    ],
    ids=str,
)
def test_leave_one_out_advantages_and_reward_metrics_equal_trl(
    rloo_trainer: RLOOTrainer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    beta = options.get("beta", 0.0)
    completions = [INJECTED[i % 4] for i in range(len(PARTLY_SCORED))]
    columns = [[row[k] for row in PARTLY_SCORED] for k in range(2)]
    functions = [lambda completions, **_: columns[0], lambda completions, **_: columns[1]]
    reference = tiny_model(seed=1)
    add_fused_lm_head(reference, temperature=TEMPERATURE)
    rloo_trainer._metrics["train"].clear()
    for name, value in {
        "_generate_single_turn": lambda *_: completions,
        "reward_funcs": functions,
        "reward_func_names": ["first", "second"],
        "reward_processing_classes": [None, None],
        "reward_weights": torch.tensor([1.0, 0.3]),
        "ref_model": reference,
        "beta": beta,
        "reward_clip_range": options.get("reward_clip_range"),
        "normalize_advantages": options.get("normalize_advantages", False),
    }.items():
        monkeypatch.setattr(rloo_trainer, name, value)
    output = rloo_trainer._generate_and_score_completions([{"prompt": "a"} for _ in PARTLY_SCORED])

    mask = output["completion_mask"].bool()
    with torch.no_grad():
        old, ref = (
            Ragged.split(model_logps(model, SimpleNamespace(**output))[0][mask].numpy(), mask.sum(1).numpy())
            for model in (rloo_trainer.model, reference)
        )
    advantages, statistics = leave_one_out_advantages(
        PARTLY_SCORED,
        num_generations=4,
        weights_K=[1.0, 0.3],
        reward_clip_range=options.get("reward_clip_range"),
        penalties_B=beta * sequence_kl(old, ref),
        normalize_advantages=options.get("normalize_advantages", False),
    )

    np.testing.assert_allclose(advantages, output["advantages"].numpy(), rtol=1e-4, atol=1e-5)
    metrics = Metrics()
    add_reward_metrics(metrics, statistics, ["first", "second"])
    logged = {name: values[-1] for name, values in rloo_trainer._metrics["train"].items() if "reward" in name}
    assert metrics.values() == pytest.approx(logged, rel=1e-5, abs=1e-7)


def test_product_of_ratios_is_what_trls_rloo_clips(rloo_trainer: RLOOTrainer, rollouts: SimpleNamespace) -> None:
    batch = rows(rollouts, 0, 5)
    batch.tool_mask = torch.ones_like(batch.tool_mask)  # which this trainer does not know
    batch.old_logps = model_logps(rloo_trainer.model, batch)[0].detach()
    batch.old_logps[:, 0] += torch.tensor([-0.3, 0.3, 0.3, 0.1, 0.0])  # two of five are clipped
    inputs = {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": batch.prompt_mask,
        "completion_ids": batch.completion_ids,
        "completion_mask": batch.completion_mask,
        "advantages": batch.advantages,
        "old_logps": (batch.old_logps * batch.completion_mask).sum(1),
    }
    rloo_trainer._metrics["train"].clear()
    expected = rloo_trainer._compute_loss(rloo_trainer.model, inputs)
    expected_gradients = gradients(rloo_trainer.model, expected)
    logged = {name: values[-1] for name, values in rloo_trainer._metrics["train"].items()}

    actual, metrics = our_loss(rloo_trainer.model, batch, "grpo", "sequence_product", 0.0)
    actual = actual * 6 / 5  # our_loss counts six sequences

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for ours, trls in zip(gradients(rloo_trainer.model, actual), expected_gradients, strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-4, atol=1e-5 * float(trls.abs().max()))
    assert metrics.values() == pytest.approx(logged, rel=1e-5)
    assert 0 < logged["clip_ratio/region_mean"] < 1
