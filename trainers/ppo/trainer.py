"""PPO: completions, scores, a critic's values, advantages per token (GAE), clipped steps of policy and critic.

    driver               generator    rewarder   policy     reference   critic
    ------               ---------    --------   ------     ---------   ------
    prompts ───────────► generate
    completions ────────────────────► judge      logps      logps       values    side by side
    functions' rewards
    KL, GAE, whitening ◄──────────── all of them
    samples ───────────────────────────────────► step                   step      side by side
                         receive ◄────────────── send

Everything but the driver is a part of the trainer (``trainers/parts/``), on the workers of its role.

Schulman et al. (arXiv 1707.06347), as Ziegler et al. (arXiv 1909.08593) used it on language models. Names, defaults and
metrics are those of TRL 1.12, the last that had it. A *batch* is ``num_mini_batches`` optimizer steps' worth of
completions, one per prompt; it is gone through ``num_ppo_epochs`` times, shuffled anew each time.

Departures from TRL: a step, in logs and keys, is an optimizer step, so that ``..._avg`` are over its tokens. Policy and
critic have an optimizer each, with a learning rate and a gradient norm of their own. What TRL averages over processes
and micro-batches (loss, whitening) is over all tokens. A completion that no reward had anything to say about is left
out of the loss.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from rayhelper import DeviceGroups, RayHelper
from trainers.batch import Ragged, Rollouts
from trainers.configuration.shared import order_of
from trainers.data.batches import Batches, DrawnRows
from trainers.data.rows import prompt_of
from trainers.losses.ppo import with_ratio_variance
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start, check_completions, check_prompts_fit
from trainers.parts.completion_metrics import rollout_metrics
from trainers.parts.frozen import Reference
from trainers.parts.generator import Generator
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_prompts, without_long
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.policy import Critic, Policy
from trainers.parts.rewarder import Rewarder, check_rewards
from trainers.ppo.config import PPOConfig
from trainers.ppo.loss import policy_loss, value_loss
from trainers.ppo.plan import BatchPlan
from trainers.ppo.samples import (
    PolicySamples,
    ValueSamples,
    credit,
    num_counted,
    policy_samples,
    value_samples,
)
from trainers.rewards import gae
from trainers.rollout.hf.settings import check_stop_tokens
from trainers.run.run import Run, saved_order

HEADLINE = ("objective/scores", "objective/kl", "loss/policy_avg", "loss/value_avg")


@RayHelper.worker(group=["train", "critic", "reference", "reward", "rollout"])
class PPOTrainer:
    """``PPOTrainer(config).train()``; its five roles may share device groups or have their own.

    Critic, reference and reward share the train workers where no device group names them.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=policy_loss)
        own = {"learning_rate": config.critic_learning_rate, "max_grad_norm": config.critic_max_grad_norm}
        self.critic = Critic(config, self.policy, loss=value_loss, **own)
        self.reference = Reference(config)
        self.rewarder = Rewarder(
            config,
            config.reward_funcs,
            models=[] if config.reward_model is None else [config.reward_model],
            weights=config.reward_weights,
            num_processes=config.reward_processes,
            timeout_s=config.reward_timeout_s,
        )
        self.generator = Generator(config, self.policy, self.rewarder)
        self.prepare()

    @staticmethod
    def check(config: PPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        check_rewards(config, config.reward_funcs, config.reward_processes)
        check_completions(config, groups)

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
        self.models: dict[str, str] = {key: found[name] for key, name in given.items()}
        for key in ("value_model", "ref_model"):
            check_same_tokens(key, self.models[key], self.tokenizer, config.trust_remote_code, policy=self.model_path)
        self.images = image_reader(config, self.model_path, self.tokenizer, self.models)
        self.rewarder.prepare(self.tokenizer, self.images)
        self.rows: Any = self.read(*config.training_data)
        self.eval_rows: Any = self.read(*config.evaluation_data) if config.evaluates else None
        datasets = {"dataset": self.rows, "eval_dataset": self.eval_rows}
        check_prompts_fit(config, datasets, self.tokenizer, self.model_path, self.images)

    def read(self, source: Any, split: str) -> Any:
        """The rows of a dataset, each with a prompt; without long ones where ``drop_long_prompts`` says so."""
        rows = read_prompts(self.config, source, split, self.images, self.tokenizer)
        return without_long(self.config, rows, self.tokenizer, self.images)

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        plan = BatchPlan.of(config, len(self.rows), self.policy.num_shards(), saved_order(config))
        batches = Batches(len(self.rows), plan.batch_size, **order_of(config))
        self.build(plan.num_steps)
        with (
            Run(config, plan.num_steps, headline=HEADLINE, order=plan.order(), rows=self.rows) as run,
            self.generator.following(run),
        ):
            for step in run.rounds(self):
                batch = plan.batch(step)
                samples, states, metrics = self.explore(DrawnRows(self.rows, batches[batch]), plan, run)
                for rows in plan.mini_batches(len(samples), seed=(config.seed, batch)):
                    with run.phase("update"):
                        learned = self.learn(samples[rows], states[rows])
                    self.generator.learned()
                    run.log_step(Metrics.merge([metrics, learned]), epoch=(run.step + 1) / plan.steps_per_epoch)
                    metrics = metrics.only("objective/")  # a line on the console may fall on any step of a batch
                    if run.is_over:
                        break
            return run.finish(self.policy.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """Builds every model where its role runs."""
        config, models = self.config, self.models
        self.policy.build(self.model_path, num_steps)
        self.critic.build(models["value_model"], num_steps, warmup_steps=config.critic_warmup_steps(num_steps))
        if config.has_reference and not config.is_own_reference:
            self.reference.build(models["ref_model"])
        if config.reward_model is not None:
            self.rewarder.build([models["reward_model"]])
        self.generator.build(self.model_path)

    def explore(self, rows: Any, plan: BatchPlan, run: Run) -> tuple[PolicySamples, ValueSamples, Metrics]:
        """A completion of every row: what policy and critic learn from it, and what was seen."""
        config, batch = self.config, plan.batch(run.step)
        with run.phase("data"):
            starts = self.generator.starts(rows, self.tokenizer, np.arange(len(rows)), self.images)
        rollouts = self.generator.complete(starts, batch)
        samples, states, ref_logps, rewards_BK = self.judged(rows, rollouts, run)
        scores_B = self.rewarder.totals(rewards_BK)
        scores_B -= rollouts.truncated * (config.missing_eos_penalty or 0.0)
        samples = dataclasses.replace(samples, ref_logps=ref_logps if config.kl_loss_coef else None)
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
            lam_critic=config.lam_critic,
            length_adaptive_alpha=config.length_adaptive_alpha,
        )
        if config.log_completions and run.shows_completions(plan.num_updates(len(rows))):
            prompts = list(map(prompt_of, rows))
            run.log_completions(self.rewarder.shown(prompts, rollouts, rewards_BK, samples.advantages))
        metrics.same("episode", plan.num_episodes(batch + 1))
        metrics.sum("val/num_eos_tokens", float((~rollouts.truncated).sum()))
        return samples, states, Metrics.merge([self.seen(rollouts, rewards_BK), metrics])

    def judged(
        self, rows: Any, rollouts: Rollouts, run: Run
    ) -> tuple[PolicySamples, ValueSamples, Ragged | None, np.ndarray]:
        """The completions for policy and critic, with what these say of them; what the reference says; rewards.

        Models answer side by side where they run apart, and while the driver runs reward functions.
        """
        config = self.config
        num_places_B = rollouts.completion_ids.lengths
        if not config.score_on_last_token:
            num_places_B = gae.num_places(num_places_B, config.max_completion_length)
        samples = policy_samples(rollouts)
        states = value_samples(rollouts, num_places_B, self.tokenizer.eos_token_id)
        with run.phase("logps"):
            old_logps = self.policy.logps.defer(samples)
            ref_logps = None
            if config.has_reference and config.is_own_reference:
                ref_logps = self.policy.logps.defer(samples, adapter=False)
            elif config.has_reference:
                ref_logps = self.reference.logps.defer(samples)
            old_values = self.critic.values.defer(states)
        with run.phase("reward"):
            rewards_BK = self.rewarder(rows, rollouts)
        with run.phase("logps"):
            samples = dataclasses.replace(samples, old_logps=old_logps.result())
            states = dataclasses.replace(states, old_values=old_values.result())
            return samples, states, None if ref_logps is None else ref_logps.result(), rewards_BK

    def seen(self, rollouts: Rollouts, rewards_BK: np.ndarray) -> Metrics:
        """Lengths and rewards of completions."""
        rewards = self.rewarder.metrics(rewards_BK).without("frac_reward_zero_std")  # there are no groups
        return Metrics.merge([rollout_metrics(rollouts), rewards])

    def learn(self, samples: PolicySamples, states: ValueSamples) -> Metrics:
        """One optimizer step of the policy and one of the critic, at the same time where they run apart."""
        policy = self.policy.step.defer(samples, num_counted(samples))
        critic = self.critic.step.defer(states, num_counted(states))
        return with_ratio_variance(Metrics.merge([policy.result(), critic.result()]))

    def evaluate(self) -> dict[str, float]:
        """Mean rewards and lengths on the evaluation prompts, under training's names with ``eval_`` before them."""
        config = self.config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        starts = self.generator.starts(self.eval_rows, self.tokenizer, np.arange(len(self.eval_rows)), self.images)
        rollouts = self.generator.complete(starts, -1, temperature=temperature)
        metrics = self.seen(rollouts, self.rewarder(self.eval_rows, rollouts))
        return metrics.without("num_tokens").values("eval_")  # which is of training alone

    def save(self, folder: Path) -> None:
        """The policy in the folder itself, the critic in ``critic``."""
        self.policy.save(folder)
        self.critic.save(folder / "critic")

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote."""
        self.policy.load(folder)
        self.critic.load(folder / "critic")
