"""Whole PPO runs beside a plain loop of TRL 1.12's formulas, and one batch beside what TRL 1.12 itself computed.

TRL 1.16 has no PPO any more, so the other side of whole runs is written here: TRL's masks, its padding of
log-probabilities, one optimizer for policy and critic with the loss pg + vf_coef x vf. It goes row by row, without any
batching or padding of what the models see. The numbers of TRL itself are kept in a file, see ``ppo_fixture.py``.
Completions are injected. Gradients are not clipped, as TRL clips none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rayhelper import Channel, RayHelper
from tests.golden import ppo_fixture
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import OUR_ARGUMENTS, Steps, Training, logged_steps, recorded
from trainers.batch import Ragged, Rollouts
from trainers.parts.generator import Generator
from trainers.ppo.config import PPOConfig
from trainers.ppo.plan import BatchPlan
from trainers.ppo.samples import PolicySamples, ValueSamples
from trainers.ppo.trainer import PPOTrainer
from trainers.rewards import gae

NUM_BATCHES = 3
LONGEST = 7  # max_completion_length
EOS = 2
INVALID_LOGP = 1.0  # what TRL puts where there is no token
PROMPTS = [f"{i} times {'x' * (i % 5)}:" for i in range(8)]
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "adam_epsilon": 1e-6,  # above the rounding of gradients, which Adam makes into whole steps where they are nearly 0
    "per_device_train_batch_size": 8,
    "max_completion_length": LONGEST,
    "num_ppo_epochs": 2,
    "temperature": 0.7,
    "cliprange": 0.02,  # narrow, so that tokens are clipped within so few steps
    "cliprange_value": 0.02,
}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "k3": {"kl_estimator": "k3", "kl_coef": 0.5},
    "whitened rewards": {"whiten_rewards": True},
    "missing end": {"missing_eos_penalty": 2.0},
    "discounted": {"gamma": 0.9, "lam": 0.5},
    "wide clips": {"cliprange": 10.0, "cliprange_value": 10.0, "vf_coef": 0.7},
    "mini-batches": {"per_device_train_batch_size": 4, "num_mini_batches": 2},
    "as verl": {
        **{"score_on_last_token": True, "cliprange": 0.005, "cliprange_high": 0.02, "delta": 1.02, "vf_coef": 1.0},
        **{"lr_scheduler_type": "constant_with_warmup", "value_warmup_ratio": 0.5},
    },
}


def injected_completions(batch: int, count: int) -> list[list[int]]:
    """One to six letters and the end token, or seven letters and no end; one fills the limit with its end token."""
    draws = np.random.default_rng([7, batch])
    words = [draws.integers(10, 250, size=draws.integers(1, LONGEST + 1)).tolist() for _ in range(count)]
    words[1] = draws.integers(10, 250, size=LONGEST - 1).tolist()
    return [[*word, EOS][:LONGEST] for word in words]


def evenness(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class InjectedGenerator(Generator):
    """Ours, its rollout engine replaced."""

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Any, sampling: Any, channel: Channel | None, *numbers: int) -> Rollouts:
        completions = Ragged.of(self.completions(numbers[0], len(starts)), np.int64)
        truncated = np.array([ids[-1] != EOS for ids in completions])
        unused = Ragged.split(np.zeros(len(completions.values), np.float32), completions.lengths)
        return Rollouts(starts.prompt_ids, completions, unused, truncated)

    def completions(self, batch: int, count: int) -> list[list[int]]:
        return injected_completions(batch, count)


class OurTrainer(PPOTrainer):
    """Ours, with that generator."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.generator = InjectedGenerator(config, self.policy)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A policy, a reference that is another model, and a critic."""
    policy, reference = (save_tiny(tmp_path_factory.mktemp("tiny"), seed=seed) for seed in (0, 1))
    critic = str(tmp_path_factory.mktemp("critic"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(critic)
    return policy, reference, critic


def configuration(models: tuple[str, str, str], folder: Path, settings: dict[str, Any]) -> PPOConfig:
    policy, reference, critic = models
    settings = SETTINGS | settings
    return PPOConfig(
        model=policy,
        ref_model=reference,
        value_model=critic,
        dataset=[{"prompt": prompt} for prompt in PROMPTS],
        reward_funcs=[evenness],
        output_dir=str(folder),
        max_steps=NUM_BATCHES * settings["num_ppo_epochs"] * settings.get("num_mini_batches", 1),
        **OUR_ARGUMENTS | settings,
    )


def train_ours(config: PPOConfig) -> tuple[Training, Training]:
    """What the policy and the critic leave behind."""
    kept: list[PPOTrainer] = []

    def train() -> tuple[Steps, torch.nn.Module]:
        kept.append(OurTrainer(config))
        kept[0].train()
        return logged_steps(Path(config.output_dir)), kept[0].policy.built.module

    both = recorded(train)
    critic = {name: weight.detach() for name, weight in kept[0].critic.built.module.named_parameters()}
    return Training(both.steps, both.gradients[::2], both.weights), Training([], both.gradients[1::2], critic)


# The other side


def token_numbers(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Logits or values that a model gives before each token of the completion and, last, behind its end."""
    hidden_TH = model.base_model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
    numbers = model.score(hidden_TH)[:, 0] if hasattr(model, "score") else model.lm_head(hidden_TH)
    return numbers[len(prompt) - 1 :]  # type: ignore[no-any-return]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum()


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool) -> torch.Tensor:
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def policy_table(model: Any, prompts: list[list[int]], completions: list[list[int]], temperature: float) -> Any:
    """(B, LONGEST) log-probabilities, INVALID_LOGP behind the end, and the entropies summed over all tokens."""
    logps_BT = torch.full((len(prompts), LONGEST), INVALID_LOGP)
    entropy = torch.zeros(())
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        all_logps = (token_numbers(model, prompt, completion)[: len(completion)] / temperature).log_softmax(-1)
        logps_BT[b, : len(completion)] = all_logps[range(len(completion)), completion]
        entropy = entropy - (all_logps.exp() * all_logps).sum().detach()
    return logps_BT, entropy


def value_table(model: Any, prompts: list[list[int]], completions: list[list[int]], behind: int) -> torch.Tensor:
    """(B, LONGEST) values, ``behind`` behind the end where there is room, 0 after that."""
    values_BT = torch.zeros(len(prompts), LONGEST)
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        values = token_numbers(model, prompt, completion)[: min(len(completion) + behind, LONGEST)]
        values_BT[b, : len(values)] = values
    return values_BT


def train_by_loop(models: tuple[str, str, str], config: PPOConfig) -> tuple[Training, Training]:
    """TRL's training loop for three batches; with ``score_on_last_token`` verl's, which has no place behind the end."""
    behind = int(not config.score_on_last_token)
    policy, reference = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in models[:2])
    critic = AutoModelForSequenceClassification.from_pretrained(models[2], num_labels=1, dtype=torch.float32)
    # norms last, as optimizers that do not let them decay have them
    weights = [sorted(model.parameters(), key=lambda weight: weight.dim() < 2) for model in (policy, critic)]
    optimizer = torch.optim.AdamW(
        [{"params": weights[0]}, {"params": weights[1]}],
        **{"lr": config.learning_rate, "weight_decay": 0.0, "eps": config.adam_epsilon},
    )
    num_warmup = math.ceil((config.value_warmup_ratio or 0) * config.max_steps)
    steps: Steps = []
    gradients: tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]] = ([], [])
    plan = BatchPlan.of(config, len(PROMPTS), 1, {})
    prompts = [tiny_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    for batch in range(NUM_BATCHES):
        completions = injected_completions(batch, len(prompts))
        seen: dict[str, list[float]] = defaultdict(list)
        with torch.no_grad():
            logps, _ = policy_table(policy, prompts, completions, config.temperature)
            ref_logps, _ = policy_table(reference, prompts, completions, config.temperature)
            values = value_table(critic, prompts, completions, behind)
            last = torch.tensor([len(ids) - 1 for ids in completions])  # TRL's sequence_lengths
            places = torch.arange(LONGEST)[None, :]
            is_token = places <= last[:, None]
            is_place = places <= last[:, None] + behind
            scores = torch.tensor(evenness(completions))
            scores -= torch.tensor([EOS not in ids for ids in completions]) * (config.missing_eos_penalty or 0.0)
            logr = ref_logps - logps
            kl = -logr if config.kl_estimator == "k1" else logr.exp() - 1 - logr
            rewards = -config.kl_coef * kl
            non_score = rewards.sum(1).mean()
            end = torch.where(last + behind < LONGEST, last + behind, last)
            rewards[range(len(scores)), end] += scores
            if config.whiten_rewards:
                rewards = masked_whiten(rewards, is_place, shift_mean=False) * is_place
            advantage, columns = torch.zeros(len(scores)), []
            for t in reversed(range(LONGEST)):
                following = values[:, t + 1] if t + 1 < LONGEST else torch.zeros(len(scores))
                delta = rewards[:, t] + config.gamma * following - values[:, t]
                advantage = delta + config.gamma * config.lam * advantage
                columns.append(advantage)
            advantages = torch.stack(columns[::-1], dim=1)
            returns = advantages + values
            advantages = masked_whiten(advantages, is_token, shift_mean=True) * is_token
        for rows in plan.mini_batches(len(prompts), seed=(config.seed, batch)):
            chosen = [[list_[row] for row in rows] for list_ in (prompts, completions)]
            token, place = is_token[rows], is_place[rows]
            new_logps, entropy = policy_table(policy, *chosen, config.temperature)
            new_values = value_table(critic, *chosen, behind)
            clipped_values = torch.clamp(
                new_values, values[rows] - config.cliprange_value, values[rows] + config.cliprange_value
            )
            vf_free, vf_clipped = (new_values - returns[rows]) ** 2, (clipped_values - returns[rows]) ** 2
            vf_loss = 0.5 * masked_mean(torch.max(vf_free, vf_clipped), place)
            difference = new_logps - logps[rows]
            ratio = difference.exp()
            pg_free = -advantages[rows] * ratio
            highest = 1 + (config.cliprange if config.cliprange_high is None else config.cliprange_high)
            pg_clipped = -advantages[rows] * ratio.clamp(1 - config.cliprange, highest)
            pg = torch.max(pg_free, pg_clipped)
            if config.delta is not None:
                pg = torch.where(advantages[rows] < 0, torch.min(pg, -advantages[rows] * config.delta), pg)
            pg_loss = masked_mean(pg, token)
            loss = pg_loss + config.vf_coef * vf_loss
            loss.backward()
            for kept, parameters in zip(gradients, weights, strict=True):
                kept.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
            rising = min(1.0, len(steps) / num_warmup) if num_warmup else 1.0
            optimizer.param_groups[1]["lr"] = rising * config.learning_rate
            optimizer.step()
            optimizer.zero_grad()
            numbers = {
                "loss": loss,
                "loss/policy_avg": pg_loss,
                "loss/value_avg": vf_loss,
                "policy/clipfrac_avg": masked_mean((pg_clipped > pg_free).float(), token),
                "policy/approxkl_avg": masked_mean(0.5 * difference**2, token),
                "policy/entropy_avg": entropy / token.sum(),
                "val/ratio": masked_mean(ratio, token),
                "val/ratio_var": ratio[token].var(unbiased=False),
                "val/clipfrac_avg": masked_mean((vf_clipped > vf_free).float(), place),
            }
            for name, number in numbers.items():
                seen[name].append(number.item())
            steps.append({name: series[-1] for name, series in seen.items()})
        first = {
            "objective/kl": kl.sum(1).mean(),
            "objective/entropy": -(logps * is_token).sum(1).mean(),  # TRL's counts INVALID_LOGP too
            "objective/non_score_reward": non_score,
            "objective/scores": scores.mean(),
            "objective/rlhf_reward": non_score + scores.mean(),
            "val/num_eos_tokens": torch.tensor(float(sum(ids.count(EOS) for ids in completions))),
            "episode": torch.tensor(float((batch + 1) * len(prompts))),
        }
        steps[-len(seen["loss"])] |= {name: number.item() for name, number in first.items()}
    trained = ({name: weight.detach() for name, weight in model.named_parameters()} for model in (policy, critic))
    return Training(steps, gradients[0], next(trained)), Training([], gradients[1], next(trained))


def assert_same_model(ours: Training, theirs: Training, untrained: dict[str, torch.Tensor], role: str) -> None:
    assert len(ours.gradients) == len(theirs.gradients)
    for step, (our_step, their_step) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        largest = max(float(gradient.abs().max()) for gradient in their_step)
        for found, wanted in zip(our_step, their_step, strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, s=step: f"{role}, gradient {s}: {m}"
            )
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    furthest = max(float((weight - untrained[name].detach()).abs().max()) for name, weight in theirs.weights.items())
    assert furthest > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_trl(models: tuple[str, str, str], tmp_path: Path, name: str) -> None:
    config = configuration(models, tmp_path, CASES[name])
    policy, critic = train_ours(config)
    their_policy, their_critic = train_by_loop(models, config)
    assert len(policy.steps) == len(their_policy.steps)
    for number, (ours, theirs) in enumerate(zip(policy.steps, their_policy.steps, strict=True), start=1):
        found = {key: ours[key] for key in theirs}
        assert found == pytest.approx(theirs, rel=1e-4, abs=1e-5), f"step {number}"
    assert any(step["policy/clipfrac_avg"] for step in policy.steps) == (name != "wide clips")
    assert any(step["val/clipfrac_avg"] for step in policy.steps) == (name != "wide clips")
    untrained = dict(AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).named_parameters())
    assert_same_model(policy, their_policy, untrained, "policy")
    unvalued = AutoModelForSequenceClassification.from_pretrained(models[2], num_labels=1, dtype=torch.float32)
    assert_same_model(critic, their_critic, dict(unvalued.named_parameters()), "critic")


# What TRL 1.12 itself computed


@pytest.fixture(scope="module")
def frozen() -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each case of ``ppo_fixture.py``."""
    cases: dict[str, dict[str, np.ndarray]] = {name: {} for name in ppo_fixture.CASES}
    with np.load(ppo_fixture.FIXTURE) as arrays:
        for name, array in arrays.items():
            case, key = name.split("/", maxsplit=1)
            cases[case][key] = array
    return cases


@pytest.fixture(scope="module")
def frozen_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    return ppo_fixture.save_models(tmp_path_factory.mktemp("frozen"))


def unpadded(table_BT: np.ndarray, padding_BT: np.ndarray) -> Ragged:
    return Ragged.split(table_BT[~padding_BT], (~padding_BT).sum(axis=1))


def assert_rows(found: Ragged | None, table_BT: np.ndarray, padding_BT: np.ndarray, what: str, rtol: float = 0) -> None:
    """Rows as in TRL's padded table, to 1e-5."""
    assert found is not None
    wanted = unpadded(table_BT, padding_BT)
    np.testing.assert_array_equal(found.lengths, wanted.lengths, err_msg=what)
    np.testing.assert_allclose(found.values, wanted.values, rtol=rtol, atol=1e-5, err_msg=what)


class TrlsGenerator(InjectedGenerator):
    """One that completes as TRL did."""

    def completions(self, batch: int, count: int) -> list[list[int]]:
        return ppo_fixture.completions()


class Watched(PPOTrainer):
    """Ours, with that generator, and keeping what it explored."""

    explored: tuple[PolicySamples, ValueSamples]

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.generator = TrlsGenerator(config, self.policy)

    def explore(self, rows: Any, plan: BatchPlan, run: Any) -> Any:
        samples, states, metrics = super().explore(rows, plan, run)
        self.explored = samples, states
        return samples, states, metrics


def watched_training(
    models: tuple[str, str, str], folder: Path, case: dict[str, Any]
) -> tuple[Watched, dict[str, list[float]]]:
    """The trainer after one batch, and the gradient norms of each step by role and name of the weight."""
    settings = ppo_fixture.SETTINGS | case
    num_mini_batches = settings.get("num_mini_batches", 1)
    config = PPOConfig(
        model=models[0],
        ref_model=models[1],
        value_model=models[2],
        dataset=[{"prompt": prompt} for prompt in ppo_fixture.PROMPTS],
        reward_funcs=[fixed_scores],
        output_dir=str(folder),
        max_steps=settings["num_ppo_epochs"] * num_mini_batches,
        per_device_train_batch_size=len(ppo_fixture.PROMPTS) // num_mini_batches,
        max_completion_length=ppo_fixture.LONGEST,
        max_grad_norm=0.0,
        **OUR_ARGUMENTS | settings,
    )
    trainer = Watched(config)
    norms: dict[str, list[float]] = defaultdict(list)

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for role, name, weight in trained_weights(trainer):
            if id(weight) in own and weight.grad is not None:
                norms[f"{role}/gradient norms/{name}"].append(weight.grad.norm().item())

    hook = register_optimizer_step_pre_hook(look)
    try:
        trainer.train()
    finally:
        hook.remove()
    return trainer, norms


def fixed_scores(**_: Any) -> list[float]:
    return ppo_fixture.scores()


def trained_weights(trainer: PPOTrainer) -> list[tuple[str, str, torch.nn.Parameter]]:
    """Role, name and weight of all that is trained."""
    models = (("policy", trainer.policy.built.module), ("critic", trainer.critic.built.module))
    return [(role, name, weight) for role, model in models for name, weight in model.named_parameters()]


@pytest.mark.parametrize("name", ppo_fixture.CASES)
def test_rewards_advantages_and_returns_equal_those_trl_computed(
    frozen: dict[str, dict[str, np.ndarray]], name: str
) -> None:
    """From TRL's log-probabilities, values and scores."""
    case, theirs = ppo_fixture.SETTINGS | ppo_fixture.CASES[name], frozen[name]
    padding, behind = theirs["padding_mask"], theirs["padding_mask_p1"]
    logps = unpadded(theirs["logprobs"], padding)
    kl = gae.kl_estimates(logps, unpadded(theirs["ref_logprobs"], padding), case["kl_estimator"])
    assert_rows(kl, theirs["kl"], padding, "kl", rtol=1e-5)
    places_B = gae.num_places(logps.lengths, ppo_fixture.LONGEST)
    rewards = gae.place_rewards(Ragged(-case["kl_coef"] * kl.values, kl.offsets), theirs["scores"], places_B)
    if case.get("whiten_rewards"):
        everywhere = np.ones(len(rewards.values), bool)
        rewards = Ragged(gae.whiten(rewards.values, everywhere, shift_mean=False), rewards.offsets)
    assert_rows(rewards, theirs["rewards"], behind, "rewards", rtol=1e-5)
    values = unpadded(theirs["values"], behind)
    gamma, lam = case.get("gamma", 1.0), case.get("lam", 0.95)
    advantages, returns = gae.generalized_advantages(rewards, values, gamma=gamma, lam=lam)
    assert_rows(returns, theirs["returns"], behind, "returns", rtol=1e-5)
    acted = advantages.values[gae.acting_places(places_B, logps.lengths)]
    whitened = Ragged(gae.whiten(acted, np.ones(len(acted), bool)), logps.offsets)
    assert_rows(whitened, theirs["advantages"], padding, "advantages")


@pytest.mark.parametrize("name", ppo_fixture.CASES)
def test_a_batch_equals_one_of_trl_itself(
    frozen: dict[str, dict[str, np.ndarray]],
    frozen_models: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """On the mini-batches that TRL drew: the losses, gradient norms and weights that TRL had."""
    theirs = frozen[name]
    padding, behind = theirs["padding_mask"], theirs["padding_mask_p1"]
    monkeypatch.setattr(BatchPlan, "mini_batches", lambda *_, **__: iter(theirs["mini_batch_inds"]))
    trainer, norms = watched_training(frozen_models, tmp_path, ppo_fixture.CASES[name])
    samples, states = trainer.explored
    assert_rows(Ragged.of(ppo_fixture.completions(), np.int64), theirs["responses"], padding, "responses")
    assert_rows(samples.old_logps, theirs["logprobs"], padding, "logprobs")
    assert_rows(states.old_values, theirs["values"], behind, "values")
    assert_rows(states.returns, theirs["returns"], behind, "returns", rtol=1e-5)
    assert_rows(samples.advantages, theirs["advantages"], padding, "advantages")
    steps = logged_steps(tmp_path)
    assert len(steps) == len(theirs["loss"])
    for number, step in enumerate(steps):
        wanted = {key: theirs[key][number] for key in ("loss", "pg_loss", "vf_loss")}
        found = {"loss": step["loss"], "pg_loss": step["loss/policy_avg"], "vf_loss": step["loss/value_avg"]}
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5), f"step {number + 1}"
    objective = {key: float(value) for key, value in theirs.items() if key.startswith("objective/")}
    assert {key: steps[0][key] for key in objective} == pytest.approx(objective, rel=1e-5, abs=1e-5)
    their_norms = {key: series for key, series in theirs.items() if "/gradient norms/" in key}
    assert norms.keys() == their_norms.keys()
    for key, series in their_norms.items():
        np.testing.assert_allclose(norms[key], series, rtol=1e-4, atol=1e-5, err_msg=key)
    for role, weight_name, weight in trained_weights(trainer):
        kept = theirs[f"{role}/weights/{weight_name}"]
        np.testing.assert_allclose(ppo_fixture.some(weight), kept, rtol=0, atol=1e-5, err_msg=f"{role}, {weight_name}")
