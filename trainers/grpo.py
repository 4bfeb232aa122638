"""GRPO: groups of completions, rewards, advantages relative to the group, clipped policy gradient.

    driver                rollout workers           train workers
    ------                ---------------           -------------
    prompts ────────────► generate
    completions ◄──────── slice, flatten
    rewards, advantages
    samples ──────────────────────────────────────► token_logps      old and reference policies
            ◄────────────────────────────────────── slice, flatten
    samples ──────────────────────────────────────► update           one optimizer step
    metrics ◄────────────────────────────────────── slice, merge
                          load_weights ◄─────────── export_weights   nothing to do where one process hosts both

DeepSeekMath (arXiv 2402.03300); the variants' papers stand beside their formulas in ``losses.py``. Names, defaults and
metrics are TRL's. A *generation* is ``generation_batch_size`` completions, G = ``num_generations`` a prompt. It is
cut into optimizer steps, and gone through ``num_iterations`` times.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that a mistake in the configuration is told before torch is imported
    from trainers.cli import main

    main("grpo")
    raise SystemExit

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers import losses
from trainers.advantages import add_reward_metrics, group_advantages
from trainers.backends.base import Backend
from trainers.batch import Prompts, Ragged, Rollouts, Samples
from trainers.config import sequences_per_step
from trainers.data import Batches, prompt_of, tokenize_prompts
from trainers.grpo_config import GRPOConfig
from trainers.metrics import Metrics
from trainers.rewards import chat_completions, resolve_rewards, score
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf import HfEngine, check_generation_kwargs
from trainers.run import (
    Run,
    build_backend,
    check_before_start,
    load_model_and_tokenizer,
    load_tokenizer,
    mistakes_of,
    num_train_workers,
    read_rows,
    resolve_dtype,
)

ENGINES = {"hf": HfEngine}


@dataclass(frozen=True)
class StepPlan:
    """How rows become generations and generations become optimizer steps. Sizes are sequences over all workers.

    The last generation of an epoch holds what is left of the rows; it has fewer optimizer steps, none of them empty.
    """

    num_rows: int
    num_generations: int  # completions a prompt, G
    num_prompts: int  # a generation
    step_size: int  # sequences an optimizer step
    num_iterations: int
    max_steps: int
    num_epochs: float

    @classmethod
    def of(cls, config: GRPOConfig, num_rows: int, num_workers: int) -> StepPlan:
        """Raises ConfigError if groups, generations and steps do not fit into each other."""
        step_size = sequences_per_step(config, num_workers)
        size = config.generation_batch_size
        if size is None and config.steps_per_generation is not None:
            size = config.per_device_train_batch_size * config.steps_per_generation * num_workers
        size = step_size if size is None else size
        if size % step_size:
            raise ConfigError(
                f"a generation of {size} completions must be a multiple of the {step_size} sequences of an optimizer "
                "step; change generation_batch_size (or steps_per_generation) or the batch size"
            )
        if size % config.num_generations:
            raise ConfigError(
                f"a generation of {size} completions must be a multiple of num_generations={config.num_generations}, "
                "so that no group is torn apart; change generation_batch_size, the batch size, or num_generations"
            )
        return cls(
            num_rows,
            config.num_generations,
            size // config.num_generations,
            step_size,
            config.num_iterations,
            config.max_steps,
            config.num_train_epochs,
        )

    def num_updates(self, num_prompts: int) -> int:
        """Optimizer steps on a generation of so many prompts."""
        return -(-num_prompts * self.num_generations // self.step_size) * self.num_iterations

    def order(self) -> dict[str, int]:
        """What decides which rows a step sees."""
        names = ("num_rows", "num_generations", "num_prompts", "step_size", "num_iterations")
        return {name: getattr(self, name) for name in names}

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_rows, self.num_prompts)
        return whole * self.num_updates(self.num_prompts) + (self.num_updates(rest) if rest else 0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps if self.max_steps > 0 else max(1, round(self.num_epochs * self.steps_per_epoch))

    def generation(self, step: int) -> int:
        """The generation that optimizer step ``step`` (from 0) learns from."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * -(-self.num_rows // self.num_prompts) + rest // self.num_updates(self.num_prompts)

    def chunks(self, samples: Samples, seed: tuple[int, int]) -> Iterator[Samples]:
        """The samples of each optimizer step of a generation, shuffled if there are several."""
        num_chunks = -(-len(samples) // self.step_size)
        for iteration in range(self.num_iterations):
            order = np.arange(len(samples))
            if num_chunks > 1:
                order = np.random.default_rng([*seed, iteration]).permutation(len(samples))
            for part in np.array_split(order, num_chunks):
                yield samples if num_chunks == 1 else samples[part]


@RayHelper.worker(group=["train", "rollout"])
class GRPOTrainer:
    """``GRPOTrainer(config).train()``; roles ``train`` and ``rollout`` may share a device group or have their own."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.backend: Backend | None = None
        self.reference: Backend | None = None
        self.prepare()

    @staticmethod
    def check(config: GRPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config)
        with mistakes_of("reward_funcs"):
            resolve_rewards(config.reward_funcs, config.reward_weights)
        with mistakes_of("generation_kwargs"):
            check_generation_kwargs(config.generation_kwargs)
        StepPlan.of(config, 1, num_train_workers(groups))

    # The driver's part

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the data and resolves what the configuration names."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        with mistakes_of("reward_funcs"):
            self.rewards, self.reward_weights = resolve_rewards(config.reward_funcs, config.reward_weights)
        self.rows: Any = self.read(config.dataset, config.dataset_split)
        self.eval_rows: Any = self.read(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None
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
        plan = StepPlan.of(config, len(self.rows), self.num_train_workers())
        batches = Batches(len(self.rows), plan.num_prompts, seed=config.seed, shuffle=config.shuffle_dataset)
        self.build_train(self.model_path, plan.num_steps)
        self.build_rollout(self.model_path)
        headline = ("reward", "loss", "completions/mean_length")
        with Run(config, plan.num_steps, headline=headline, order=plan.order()) as run:
            run.resume(self.load)
            self.sync_weights()
            if config.val_before_train and run.step == 0:
                run.log_evaluation(self.evaluate())
            while run.step < plan.num_steps:
                start, generation = run.step, plan.generation(run.step)
                samples, metrics = self.explore(self.rows.select(batches[generation]), plan, run)
                samples = self.with_logps(samples, off_policy=plan.num_updates(plan.num_prompts) > 1)
                for chunk in plan.chunks(samples, seed=(config.seed, generation)):
                    learned = self.learn(chunk, samples)
                    run.log_step(Metrics.merge([metrics, learned]), epoch=(run.step + 1) / plan.steps_per_epoch)
                    metrics = Metrics()  # what was seen of the rollouts is told with the first step on them
                    if run.step == plan.num_steps:
                        break
                self.sync_weights()
                if run.due(config.eval_steps, run.step - start):
                    run.log_evaluation(self.evaluate())
                if run.due(config.save_steps, run.step - start):
                    run.save_checkpoint(self.save, self.tokenizer)
            if self.eval_rows is not None:
                run.log_evaluation(self.evaluate())
            return run.finish(self.export, self.tokenizer)

    def explore(self, rows: Any, plan: StepPlan, run: Run) -> tuple[Samples, Metrics]:
        """G completions of every row, rewarded and compared: what to learn from, and what was seen."""
        config = self.config
        num_updates = plan.num_updates(len(rows))
        rows = rows.select(np.repeat(np.arange(len(rows)), config.num_generations))
        rollouts = self.rollout(rows, config.temperature, plan.generation(run.step))
        rewards_BK = self.score(rows, rollouts)
        if config.log_completions and run.shows_completions(num_updates):
            run.log_completions(self.shown(rows, rollouts, rewards_BK))
        advantages_B, statistics = group_advantages(
            rewards_BK,
            num_generations=config.num_generations,
            weights_K=self.reward_weights,
            scale_rewards=config.scale_rewards,
            multi_objective_aggregation=config.multi_objective_aggregation,
        )
        metrics = rollout_metrics(rollouts)
        add_reward_metrics(metrics, statistics, [name for _, name in self.rewards])
        return to_samples(rollouts, advantages_B, config.mask_truncated_completions), metrics

    def rollout(self, rows: Any, temperature: float, generation: int) -> Rollouts:
        """One completion of every row's prompt."""
        config = self.config
        prompt_ids = tokenize_prompts(
            rows,
            self.tokenizer,
            max_prompt_length=config.max_prompt_length,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        sampling = Sampling(
            max_completion_length=config.max_completion_length,
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            generation_kwargs=config.generation_kwargs,
        )
        return self.generate(Prompts(Ragged.of(prompt_ids, np.int64)), sampling, generation)

    def score(self, rows: Any, rollouts: Rollouts) -> np.ndarray:
        """(B, K) float32 rewards, NaN where a function had nothing to say."""
        prompts = [prompt_of(row) for row in rows]
        texts = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
        completions = chat_completions(prompts, texts)
        return score(self.rewards, prompts, completions, rollouts.completion_ids, rows[:], runner=self.async_runner)

    def shown(self, rows: Any, rollouts: Rollouts, rewards_BK: np.ndarray) -> dict[str, Any]:
        """Prompts, completions and rewards as the columns of a table."""
        texts = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
        rewards = {name: rewards_BK[:, k] for k, (_, name) in enumerate(self.rewards)}
        return {"prompt": [prompt_of(row) for row in rows], "completion": texts, **rewards}

    def with_logps(self, samples: Samples, off_policy: bool) -> Samples:
        """The samples with the log-probabilities that the loss compares with: of the old policy and the reference."""
        if off_policy:  # several steps on one generation: the policy that generated is soon gone
            samples = dataclasses.replace(samples, old_logps=self.policy_logps(samples))
        if self.config.beta:
            samples = dataclasses.replace(samples, ref_logps=self.reference_logps(samples))
        return samples

    def learn(self, chunk: Samples, generation: Samples) -> Metrics:
        """One optimizer step on a chunk of a generation."""
        config = self.config
        share = len(chunk) / len(generation)  # TRL: tokens of the generation, shared out evenly over its steps
        num_tokens = chunk.num_loss_tokens if config.loss_type == "bnpo" else generation.num_loss_tokens * share
        normaliser = losses.grpo_normaliser(
            config.loss_type,
            num_sequences=len(chunk),
            num_tokens=num_tokens,
            max_completion_length=config.max_completion_length,
        )
        return self.update(chunk, normaliser, chunk.num_loss_tokens)

    def evaluate(self) -> dict[str, float]:
        """Mean rewards and lengths on the evaluation prompts, under training's names with ``eval_`` before them."""
        config = self.config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        num_generations = config.num_generations_eval or (config.num_generations if temperature else 1)
        assert self.eval_rows is not None
        rows = self.eval_rows.select(np.repeat(np.arange(len(self.eval_rows)), num_generations))
        rollouts = self.rollout(rows, temperature, generation=-1)
        _, statistics = group_advantages(
            self.score(rows, rollouts),
            num_generations=num_generations,
            weights_K=self.reward_weights,
            scale_rewards="none",
        )
        metrics = rollout_metrics(rollouts)
        add_reward_metrics(metrics, statistics, [name for _, name in self.rewards])
        return {f"eval_{name}": value for name, value in metrics.values().items()}

    def sync_weights(self) -> None:
        """Gives the rollout workers the policy's weights; nothing travels where one process hosts both roles."""
        if not self.shares_weights():
            weights: Any = self.export_weights.defer()  # goes from worker to workers, not through the driver
            self.load_weights(weights)

    # Role rollout

    @RayHelper.function(group="rollout")
    def build_rollout(self, model: str) -> None:
        config = self.config
        self.engine: Engine = ENGINES[config.rollout_engine](
            model if self.backend is None else self.backend.module,
            load_tokenizer(config, model),
            batch_size=config.rollout_batch_size,
            dtype=resolve_dtype(config),
            model_init_kwargs=config.model_init_kwargs,
            trust_remote_code=config.trust_remote_code,
        )

    @RayHelper.function(group="rollout", execute="first")
    def shares_weights(self) -> bool:
        """Whether the engine generates with the very model that is trained."""
        return self.backend is not None

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, prompts: Prompts, sampling: Sampling, generation: int) -> Rollouts:
        """The seed depends on the generation and the worker alone, so that a resumed run draws the same."""
        shard = RayHelper.current().shard
        entropy = [self.config.seed, generation + 1, shard.index]
        return self.engine.generate(prompts, sampling, seed=int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    @RayHelper.function(group="rollout")
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.engine.load_weights(weights.items())

    # Role train

    @RayHelper.function(group="train", execute="first")
    def num_train_workers(self) -> int:
        return RayHelper.current().shard.count

    @RayHelper.function(group="train")
    def build_train(self, model: str, num_steps: int) -> None:
        self.backend = build_backend(self.config, model, num_training_steps=num_steps)
        if self.config.beta:
            self.reference = build_backend(self.config, model, num_training_steps=None)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def policy_logps(self, samples: Samples) -> Ragged:
        return self.scored_by(self.backend, samples)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def reference_logps(self, samples: Samples) -> Ragged:
        return self.scored_by(self.reference, samples)

    def scored_by(self, backend: Backend | None, samples: Samples) -> Ragged:
        assert backend is not None, "build_train comes first"
        config = self.config
        return backend.token_logps(
            samples, micro_batch_size=config.per_device_train_batch_size, temperature=config.temperature
        )

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def update(self, samples: Samples, normaliser: float, num_tokens: int) -> Metrics:
        """One optimizer step over all train workers; ``normaliser`` and ``num_tokens`` are those of the whole step."""
        assert self.backend is not None, "build_train comes first"
        config = self.config
        return self.backend.step(
            samples,
            partial(grpo_loss, config, normaliser, num_tokens),
            micro_batch_size=config.per_device_train_batch_size,
            temperature=config.temperature,
            entropy_gradient=config.entropy_coef > 0,
        )

    @RayHelper.function(group="train", execute="first")
    def export_weights(self) -> dict[str, torch.Tensor]:
        assert self.backend is not None, "build_train comes first"
        return {name: weight.detach().cpu() for name, weight in self.backend.named_weights()}

    @RayHelper.function(group="train")
    def save(self, folder: Path) -> None:
        assert self.backend is not None, "build_train comes first"
        self.backend.save(folder)

    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None:
        assert self.backend is not None, "build_train comes first"
        self.backend.export(folder)

    @RayHelper.function(group="train")
    def load(self, folder: Path) -> None:
        assert self.backend is not None, "build_train comes first"
        self.backend.load(folder)


def grpo_loss(
    config: GRPOConfig,
    normaliser: float,
    num_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Samples,
    metrics: Metrics,
) -> torch.Tensor:
    """The loss of one micro-batch, already divided by the normalisers of the whole optimizer step."""

    def padded(column: Ragged | None, fill: Any = 0) -> torch.Tensor | None:
        return None if column is None else column.padded(fill, device=logps_BT.device)

    loss_mask_BT = mask_BT if micro.loss_mask is None else padded(micro.loss_mask, False)
    assert loss_mask_BT is not None
    assert micro.advantages is not None
    loss, diagnostics = losses.policy_gradient_loss(
        logps_BT,
        padded(micro.old_logps),
        torch.tensor(micro.advantages).to(logps_BT),  # a copy: what came through Ray is read-only
        loss_mask_BT,
        loss_type=config.loss_type,
        normaliser=normaliser,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        importance_sampling_level=config.importance_sampling_level,
        ref_logps_BT=padded(micro.ref_logps),
        beta=config.beta,
        use_bias_correction_kl=config.use_bias_correction_kl,
        entropy_BT=entropy_BT.detach(),
    )
    if config.entropy_coef:
        metrics.sum("policy_loss", loss.item())
        metrics.same("entropy_coef", config.entropy_coef)
        loss = loss + losses.entropy_bonus(
            entropy_BT, loss_mask_BT, coefficient=config.entropy_coef, num_tokens=num_tokens
        )
    losses.add_policy_metrics(metrics, diagnostics)
    return loss


def to_samples(rollouts: Rollouts, advantages_B: np.ndarray, mask_truncated: bool) -> Samples:
    """Prompt and completion as one sequence each, the completion's tokens as targets."""
    pairs = zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)
    lengths = zip(rollouts.prompt_ids.lengths, rollouts.completion_ids.lengths, strict=True)
    kept_B = ~rollouts.truncated if mask_truncated else np.ones(len(rollouts), bool)
    return Samples(
        input_ids=Ragged.of([np.concatenate(pair) for pair in pairs], np.int64),
        target_mask=Ragged.of([np.repeat([False, True], pair) for pair in lengths], bool),
        advantages=advantages_B,
        loss_mask=Ragged.split(np.repeat(kept_B, rollouts.completion_ids.lengths), rollouts.completion_ids.lengths),
        rollout_logps=rollouts.rollout_logps,
    )


def rollout_metrics(rollouts: Rollouts) -> Metrics:
    """Lengths of the completions, and how many ran into the limit, under TRL's names."""
    metrics = Metrics()
    lengths_B = rollouts.completion_ids.lengths
    finished = lengths_B[~rollouts.truncated]
    for suffix, lengths in (("length", lengths_B), ("terminated_length", finished if len(finished) else np.zeros(1))):
        metrics.mean(f"completions/mean_{suffix}", float(lengths.sum()), len(lengths))
        metrics.min(f"completions/min_{suffix}", float(lengths.min()))
        metrics.max(f"completions/max_{suffix}", float(lengths.max()))
    metrics.mean("completions/clipped_ratio", float(rollouts.truncated.sum()), len(rollouts))
    metrics.sum("num_tokens", float(rollouts.prompt_ids.lengths.sum() + lengths_B.sum()))
    return metrics
