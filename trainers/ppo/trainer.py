"""PPO: completions, scores, a critic's values, advantages a token (GAE), clipped steps of policy and critic.

    driver               rollout      reward       train          reference     critic
    ------               -------      ------       -----          ---------     ------
    prompts ───────────► generate
    completions ────────────────────► model_scores policy_logps   ref_logps     values       side by side
    functions' rewards
    KL, GAE, whitening ◄──────────── all of them
    samples ─────────────────────────────────────► update_policy                update_critic      side by side
                         receive_weights ◄──────── send_weights

Schulman et al. (arXiv 1707.06347), as Ziegler et al. (arXiv 1909.08593) used it on language models. Names, defaults and
metrics are those of TRL 1.12, the last that had it. A *batch* is ``num_mini_batches`` optimizer steps' worth of
completions, one a prompt; it is gone through ``num_ppo_epochs`` times, shuffled anew each time.

Departures from TRL: a step, in logs and keys, is an optimizer step, so that ``..._avg`` are over its tokens. Policy and
critic have an optimizer each, with a learning rate and a gradient norm of their own. What TRL averages over processes
and micro-batches (loss, whitening) is over all tokens. A completion that no reward had anything to say about is left
out of the loss.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rayhelper import Channel, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import Prompts, Ragged, Rollouts, Sequences
from trainers.data.rows import Batches, prompt_of
from trainers.losses.ppo import (
    add_ppo_metrics,
    add_value_metrics,
    ppo_policy_loss,
    ppo_value_loss,
    with_ratio_variance,
)
from trainers.metrics import Metrics
from trainers.parts.engine import (
    build_engine,
    check_completions,
    check_prompts_fit,
    prompts_of,
    rollout_metrics,
    sampling_of,
    seed_of,
)
from trainers.parts.engine_updates import EngineUpdates
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.rewarded_completions import complete, pool_of, with_rows
from trainers.parts.weights import Route, built, copy, first_of, make_room, receive, rest, send, trained
from trainers.ppo.config import PPOConfig
from trainers.ppo.plan import StepPlan
from trainers.ppo.samples import (
    PolicySamples,
    ValueSamples,
    credit,
    num_counted,
    policy_samples,
    total_scores,
    value_samples,
)
from trainers.rewards import gae
from trainers.rewards.advantages import add_reward_metrics, group_advantages
from trainers.rewards.functions import chat_completions, numbered, resolve_rewards, score
from trainers.rewards.models import RewardModel, model_name
from trainers.rewards.pool import RewardPool
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf import check_stop_tokens
from trainers.run.run import (
    Run,
    build_backend,
    check_before_start,
    load_model_and_tokenizer,
    load_tokenizer,
    mistakes_of,
    num_shards,
    read_rows,
    resolve_dtype,
    saved_order,
)


@RayHelper.worker(group=["train", "critic", "reference", "reward", "rollout"])
class PPOTrainer:
    """``PPOTrainer(config).train()``; its five roles may share device groups or have their own.

    Critic, reference and reward share the train workers where no device group names them.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.policy: Backend | None = None
        self.engine: Engine | None = None
        self.reward_pool: RewardPool | None = None  # with reward_processes, beside the engine
        self.prepare()

    @staticmethod
    def check(config: PPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        with mistakes_of("reward_funcs"):
            resolve_rewards(config.reward_funcs)
        pool_of(config)
        check_completions(config, groups)

    # The driver's part

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the data and resolves what the configuration names."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        check_stop_tokens(config.stop_token_ids, self.tokenizer)
        names = {
            "reward_model": config.reward_model,
            "ref_model": config.ref_model or config.model,
            "value_model": config.critic_model,
        }
        given = {key: name for key, name in names.items() if name is not None}
        found = resolved_models(config, self.model_path, given.values())
        self.models = {key: found[name] for key, name in given.items()}
        for key in ("value_model", "ref_model"):
            check_same_tokens(key, self.models[key], self.tokenizer, config.trust_remote_code)
        with mistakes_of("reward_funcs"):
            self.rewards, _ = resolve_rewards(config.reward_funcs)
        self.reward_names = [name for _, name in self.rewards]
        if config.reward_model is not None:
            self.reward_names = numbered([*self.reward_names, model_name(config.reward_model)])
        self.reward_weights = np.array(config.reward_weights or [1.0] * len(self.reward_names), np.float32)
        self.rows: Any = self.read(config.dataset, config.dataset_split)
        self.eval_rows: Any = self.read(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None
        datasets = {"dataset": self.rows, "eval_dataset": self.eval_rows}
        check_prompts_fit(config, datasets, self.tokenizer, self.model_path)
        self.async_runner = asyncio.Runner()  # one event loop for all calls: clients may hold connections

    def read(self, source: Any, split: str) -> Any:
        """The rows of a dataset, each with a prompt."""
        rows = read_rows(self.config, source, split)
        with mistakes_of("dataset"):
            prompt_of(rows[0])
        return rows

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        plan = StepPlan.of(config, len(self.rows), self.num_train_shards(), saved_order(config))
        batches = Batches(len(self.rows), plan.batch_size, seed=config.seed, shuffle=config.shuffle_dataset)
        self.build(plan.num_steps)
        headline = ("objective/scores", "objective/kl", "loss/policy_avg", "loss/value_avg")
        with Run(config, plan.num_steps, headline=headline, order=plan.order()) as run, closing(self):
            run.resume(self.load)
            self.engines.follow(run)
            if config.val_before_train and run.step == 0:
                run.evaluate(self.evaluate)
            while run.step < plan.num_steps:
                start, batch = run.step, plan.batch(run.step)
                samples, states, metrics = self.explore(self.rows.select(batches[batch]), plan, run)
                for rows in plan.mini_batches(len(samples), seed=(config.seed, batch)):
                    with run.phase("update"):
                        learned = self.learn(samples[rows], states[rows])
                    self.engines.learned()
                    run.log_step(Metrics.merge([metrics, learned]), epoch=(run.step + 1) / plan.steps_per_epoch)
                    metrics = objective_of(metrics)  # the rest is told with the first step on the completions alone
                    if run.step == plan.num_steps:
                        break
                if run.due(config.eval_steps, run.step - start):
                    run.evaluate(self.evaluate)
                if run.due(config.save_steps, run.step - start):
                    run.save_checkpoint(self.save, self.tokenizer)
            if self.eval_rows is not None:
                run.evaluate(self.evaluate)
            self.engines.close()
            if config.reward_processes:
                self.close_rewards()
            return run.finish(self.export, self.tokenizer)

    def close(self) -> None:
        """Ends the reward processes of this process, however the run has ended."""
        if self.reward_pool is not None:
            self.reward_pool.close()

    def build(self, num_steps: int) -> None:
        """Builds every model where its role runs."""
        self.build_train(self.model_path, num_steps)
        self.build_critic(self.models["value_model"], num_steps)
        if self.has_reference_role:
            self.build_reference(self.models["ref_model"])
        if self.config.reward_model is not None:
            self.build_reward(self.models["reward_model"])
        self.build_rollout(self.model_path)
        self.engines = EngineUpdates.of(self)

    @property
    def has_reference_role(self) -> bool:
        """Whether the reference is a model of its own, and not the policy without its LoRA adapter."""
        config = self.config
        return config.kl_coef > 0 and (config.ref_model is not None or config.tuner_type != "lora")

    def explore(self, rows: Any, plan: StepPlan, run: Run) -> tuple[PolicySamples, ValueSamples, Metrics]:
        """A completion of every row: what policy and critic learn from it, and what was seen."""
        config = self.config
        batch = plan.batch(run.step)
        with run.phase("data"):
            prompts = self.starts(rows)
        self.engines.update()
        with run.phase("generate"):
            rollouts = self.rollout(prompts, config.temperature, batch)
        self.engines.end_generation()
        num_places_B = gae.num_places(rollouts.completion_ids.lengths, config.max_completion_length)
        samples = policy_samples(rollouts)
        states = value_samples(rollouts, num_places_B, self.tokenizer.eos_token_id)
        with run.phase("logps"):
            old, ref = self.policy_logps.defer(samples), None
            if config.kl_coef:
                ref = (self.reference_logps if self.has_reference_role else self.bare_policy_logps).defer(samples)
            values = self.values.defer(states)
        with run.phase("reward"):
            rewards_BK = self.reward(rows, rollouts)
        scores_B = total_scores(rewards_BK, self.reward_weights)
        scores_B -= rollouts.truncated * (config.missing_eos_penalty or 0.0)
        with run.phase("logps"):
            samples = dataclasses.replace(samples, old_logps=old.result())
            states = dataclasses.replace(states, old_values=values.result())
            ref_logps = None if ref is None else ref.result()
        samples, states, metrics = credit(
            samples,
            states,
            ref_logps,
            scores_B,
            kl_coef=config.kl_coef,
            kl_estimator=config.kl_estimator,
            whiten_rewards=config.whiten_rewards,
            gamma=config.gamma,
            lam=config.lam,
        )
        if config.log_completions and run.shows_completions(plan.num_updates(len(rows))):
            run.log_completions(self.shown(rows, rollouts, rewards_BK))
        metrics.same("episode", plan.num_episodes(batch + 1))
        metrics.sum("val/num_eos_tokens", float((~rollouts.truncated).sum()))
        return samples, states, Metrics.merge([self.seen(rollouts, rewards_BK), metrics])

    def starts(self, rows: Any) -> Prompts:
        """The rows' prompts as token ids."""
        prompts = prompts_of(self.config, rows, self.tokenizer)
        return with_rows(prompts, rows, np.arange(len(rows))) if self.config.reward_processes else prompts

    def rollout(self, prompts: Prompts, temperature: float, batch: int) -> Rollouts:
        """One completion of every prompt."""
        begin = partial(self.generate.defer, prompts, sampling_of(self.config, temperature), batch)
        rollouts: Rollouts = self.engines.completed(begin(), begin)
        return rollouts

    def reward(self, rows: Any, rollouts: Rollouts) -> np.ndarray:
        """(B, K) float32 rewards of the functions and, last, of the reward model; NaN where one had nothing to say."""
        prompts = [prompt_of(row) for row in rows]
        completions = chat_completions(prompts, self.texts(rollouts))
        modelled, rewards_BK = None, rollouts.function_rewards
        if self.config.reward_model is not None:
            modelled = self.model_scores.defer(prompts, completions)
        if rewards_BK is None:
            rewards_BK = self.function_rewards(prompts, completions, rollouts.completion_ids, rows[:])
        if modelled is None:
            return rewards_BK
        return np.column_stack([rewards_BK, np.array(modelled.result(), np.float32)])

    @RayHelper.function(group="driver", execute="first")
    def function_rewards(self, prompts: list[Any], completions: list[Any], ids: Ragged, columns: Any) -> np.ndarray:
        return score(self.rewards, prompts, completions, ids, columns, runner=self.async_runner)

    def texts(self, rollouts: Rollouts) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
        return texts

    def shown(self, rows: Any, rollouts: Rollouts, rewards_BK: np.ndarray) -> dict[str, Any]:
        """Prompts, completions and rewards as the columns of a table."""
        rewards = {name: rewards_BK[:, k] for k, name in enumerate(self.reward_names)}
        return {"prompt": [prompt_of(row) for row in rows], "completion": self.texts(rollouts), **rewards}

    def seen(self, rollouts: Rollouts, rewards_BK: np.ndarray) -> Metrics:
        """Lengths and rewards of completions."""
        metrics = rollout_metrics(rollouts)
        _, statistics = group_advantages(
            rewards_BK, num_generations=1, weights_K=self.reward_weights, scale_rewards="none"
        )
        add_reward_metrics(metrics, statistics, self.reward_names)
        metrics.entries.pop("frac_reward_zero_std", None)  # there are no groups
        return metrics

    def learn(self, samples: PolicySamples, states: ValueSamples) -> Metrics:
        """One optimizer step of the policy and one of the critic, at the same time where they run apart."""
        policy = self.update_policy.defer(samples, num_counted(samples))
        critic = self.update_critic.defer(states, num_counted(states))
        return with_ratio_variance(Metrics.merge([policy.result(), critic.result()]))

    def evaluate(self) -> dict[str, float]:
        """Mean rewards and lengths on the evaluation prompts, under training's names with ``eval_`` before them."""
        config = self.config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        assert self.eval_rows is not None
        prompts = self.starts(self.eval_rows)
        self.engines.update()
        rollouts = self.rollout(prompts, temperature, batch=-1)
        self.engines.end_generation()
        metrics = self.seen(rollouts, self.reward(self.eval_rows, rollouts))
        metrics.entries.pop("num_tokens")  # of training alone
        return {f"eval_{name}": value for name, value in metrics.values().items()}

    def save(self, folder: Path) -> None:
        """The policy in the folder itself, the critic in ``critic``."""
        self.save_policy(folder)
        self.save_critic(folder / "critic")

    def load(self, folder: Path) -> None:
        self.load_policy(folder)
        self.load_critic(folder / "critic")

    # Role rollout

    @RayHelper.function(group="rollout")
    def build_rollout(self, model: str) -> None:
        if self.engine is None:
            self.rollout_tokenizer = load_tokenizer(self.config, model)
            self.engine = build_engine(self.config, model, self.rollout_tokenizer, self.policy)
            self.reward_pool = pool_of(self.config)

    @RayHelper.function(group="rollout", collect=first_of)
    def meet_engine(self) -> Route:
        return Route.between(built(self.engine), trains=self.policy is not None)

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, prompts: Prompts, sampling: Sampling, batch: int) -> Rollouts:
        engine, seed = built(self.engine), seed_of(self.config.seed, batch)
        return complete(engine, prompts, sampling, self.reward_pool, self.rollout_tokenizer, seed=seed)

    @RayHelper.function(group="rollout")
    def close_rewards(self) -> None:
        self.close()

    @RayHelper.function(group="rollout")
    def copy_weights(self, version: int) -> None:
        if self.policy is not None:  # where it is trained as well
            copy(self.config, self.policy, built(self.engine), version)

    @RayHelper.function(group="rollout")
    def receive_weights(self, channel: Channel, unless: int | None = None) -> None:
        receive(built(self.engine), channel, unless)

    @RayHelper.function(group="rollout")
    def wake_engine(self) -> None:
        built(self.engine).wake("kv_cache")

    @RayHelper.function(group="rollout")
    def rest_engine(self) -> None:
        if self.engine is not None:
            rest(self.engine)

    # Role reward

    @RayHelper.function(group="reward")
    def build_reward(self, model: str) -> None:
        config = self.config
        self.reward_model = RewardModel(
            model,
            dtype=resolve_dtype(config),
            batch_size=config.per_device_train_batch_size,
            chat_template_kwargs=config.chat_template_kwargs,
            trust_remote_code=config.trust_remote_code,
        )

    @RayHelper.function(group="reward", dispatch="slice", collect="flatten")
    def model_scores(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        return self.reward_model.score(prompts, completions)

    # Role reference

    @RayHelper.function(group="reference")
    def build_reference(self, model: str) -> None:
        self.reference = build_backend(self.config, model, num_training_steps=None)

    @RayHelper.function(group="reference", dispatch="slice", collect="flatten")
    def reference_logps(self, samples: PolicySamples) -> Ragged:
        return token_logps(self.config, self.reference, samples)

    # Role critic

    @RayHelper.function(group="critic")
    def build_critic(self, model: str, num_steps: int) -> None:
        config = self.config
        rate = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
        self.critic = build_backend(
            config, model, num_training_steps=num_steps, head="value", values_at="predicting", learning_rate=rate
        )

    @RayHelper.function(group="critic", dispatch="slice", collect="flatten")
    def values(self, states: ValueSamples) -> Ragged:
        return self.critic.token_values(states, micro_batch_size=self.config.per_device_train_batch_size)

    @RayHelper.function(group="critic", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def update_critic(self, states: ValueSamples, num_places: int) -> Metrics:
        """One optimizer step over all critic workers; ``num_places`` are those of the whole step."""
        loss = partial(value_loss, self.config, num_places)
        metrics = self.critic.step(states, loss, micro_batch_size=self.config.per_device_train_batch_size)
        own = {"grad_norm", "learning_rate", "moe_aux_loss", "moe_z_loss"}  # the policy has these too; losses add up
        for name in sorted(own & metrics.entries.keys()):
            metrics.entries[f"critic/{name}"] = metrics.entries.pop(name)
        del metrics.entries["update_tokens"]  # the policy's, told there
        if self.policy is not None:
            metrics.entries.pop("update_peak_flops", None)  # of the same devices
        return metrics

    @RayHelper.function(group="critic")
    def save_critic(self, folder: Path) -> None:
        self.critic.save(folder)

    @RayHelper.function(group="critic")
    def load_critic(self, folder: Path) -> None:
        self.critic.load(folder)

    # Role train

    @RayHelper.function(group="train", execute="first")
    def num_train_shards(self) -> int:
        return num_shards(self.config)

    @RayHelper.function(group="train")
    def build_train(self, model: str, num_steps: int) -> None:
        self.policy = build_backend(self.config, model, num_training_steps=num_steps)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def policy_logps(self, samples: PolicySamples) -> Ragged:
        assert self.policy is not None, "build_train comes first"
        return token_logps(self.config, self.policy, samples)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def bare_policy_logps(self, samples: PolicySamples) -> Ragged:
        """Of the policy without its LoRA adapter."""
        assert self.policy is not None, "build_train comes first"
        return token_logps(self.config, self.policy, samples, adapter=False)

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def update_policy(self, samples: PolicySamples, num_tokens: int) -> Metrics:
        """One optimizer step over all train workers; ``num_tokens`` are the loss tokens of the whole step."""
        assert self.policy is not None, "build_train comes first"
        return self.policy.step(
            samples,
            partial(policy_loss, self.config, num_tokens),
            micro_batch_size=self.config.per_device_train_batch_size,
            temperature=self.config.temperature,
        )

    @RayHelper.function(group="train")
    def send_weights(self, channel: Channel, version: int) -> None:
        assert self.policy is not None, "build_train comes first"
        send(self.config, self.policy, channel, version)

    @RayHelper.function(group="train")
    def make_room(self, part: Literal["weights", "kv_cache"]) -> None:
        make_room(self.config, trained(self.policy), part)

    @RayHelper.function(group="train")
    def reload_policy(self) -> None:
        trained(self.policy).reload()

    @RayHelper.function(group="train")
    def save_policy(self, folder: Path) -> None:
        assert self.policy is not None, "build_train comes first"
        self.policy.save(folder)

    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None:
        """The policy alone: who goes on with its critic finds it in the checkpoints."""
        assert self.policy is not None, "build_train comes first"
        self.policy.export(folder)

    @RayHelper.function(group="train")
    def load_policy(self, folder: Path) -> None:
        assert self.policy is not None, "build_train comes first"
        self.policy.load(folder)


def objective_of(metrics: Metrics) -> Metrics:
    """What is told with every step on a batch, as a line on the console may fall on any of them."""
    kept = Metrics()
    kept.entries = {name: entry for name, entry in metrics.entries.items() if name.startswith("objective/")}
    return kept


def token_logps(config: PPOConfig, backend: Backend, samples: Sequences, adapter: bool = True) -> Ragged:
    """Under the temperature that completions are drawn with."""
    return backend.token_logps(
        samples,
        micro_batch_size=config.per_device_train_batch_size,
        temperature=config.temperature,
        adapter=adapter,
    )


def policy_loss(
    config: PPOConfig,
    num_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: PolicySamples,
    metrics: Metrics,
) -> torch.Tensor:
    """The policy's loss of one micro-batch, divided by the loss tokens of the whole optimizer step."""
    loss, diagnostics = ppo_policy_loss(
        logps_BT,
        padded(micro.old_logps, logps_BT),
        padded(micro.advantages, logps_BT),
        padded(micro.loss_mask, mask_BT),
        cliprange=config.cliprange,
        normaliser=num_tokens,
        entropy_BT=entropy_BT,
    )
    add_ppo_metrics(metrics, diagnostics)
    return loss


def value_loss(
    config: PPOConfig,
    num_places: int,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: ValueSamples,
    metrics: Metrics,
) -> torch.Tensor:
    """The critic's loss of one micro-batch times ``vf_coef``, divided by the places of the whole optimizer step."""
    loss, diagnostics = ppo_value_loss(
        values_BT,
        padded(micro.old_values, values_BT),
        padded(micro.returns, values_BT),
        padded(micro.loss_mask, mask_BT),
        cliprange_value=config.cliprange_value,
        normaliser=num_places,
    )
    add_value_metrics(metrics, diagnostics)
    return config.vf_coef * loss


def padded(column: Ragged | None, like: torch.Tensor) -> torch.Tensor:
    """(B, T) a column of a micro-batch, beside what the model made of it."""
    assert column is not None, "credit comes first"
    return column.padded(device=like.device)
