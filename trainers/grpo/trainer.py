"""GRPO: groups of completions, rewards, advantages relative to the group, clipped policy gradient.

    driver                generator                 policy                  reference, teacher, rewarder
    ------                ---------                 ------                  ----------------------------
    prompts ────────────► generate
    completions ◄──────── slice, flatten ──────────────────────────────────► judge
    samples ──────────────────────────────────────► logps, scores ─────────► logps
            ◄────────────────────────────────────── slice, flatten ◄──────── slice, flatten: side by side
    rewards, advantages
    samples ──────────────────────────────────────► step             one optimizer step
    metrics ◄────────────────────────────────────── balanced, merge
                          receive ◄──────────────── send             through a channel; see parts/weights.py

Everything but the driver is a part of the trainer (``trainers/parts/``), on the workers of its role.

DeepSeekMath (arXiv 2402.03300); the variants' papers stand beside their formulas in ``losses/policy.py`` and
``rewards/advantages.py``. Names, defaults and metrics are TRL's. A *generation* is ``generation_batch_size``
completions, G = ``num_generations`` a prompt. It is cut into optimizer steps, and gone through ``num_iterations``
times.

Order of the data: a generation has the next rows of the epoch, each row once in an epoch. With ``dynamic_sample`` it
draws as many further rows as it has prompts whose completions were rewarded alike, up to ``max_resample_times`` times;
it learns from the prompts that tell something, in the order drawn, and if these are too few from the first others. A
row that was drawn and left out comes again in the next epoch. No generation draws a row twice: where the next epoch
begins within it, rows that it has already are passed over in that epoch; once it has drawn all rows it makes do with
them. How far the rows have been gone through stands in the checkpoint. ``num_train_epochs`` counts steps as if nothing
were drawn again, so that the rows are gone through more often than that.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.batch import Samples
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import order_of
from trainers.data.batches import Batches, DrawnRows
from trainers.data.rows import prompt_of
from trainers.grpo.checks import check_sampled, check_used, environment_of
from trainers.grpo.config import GRPOConfig, check_chosen
from trainers.grpo.entropy_coefficient import EntropyCoefficient
from trainers.grpo.loss import grpo_loss, step_numbers
from trainers.grpo.plan import GenerationPlan, RowStream
from trainers.grpo.samples import Rewarded, credit, differing_prompts, fullest, with_selection, with_slopes
from trainers.metrics import Metrics
from trainers.parts.checks import (
    check_before_start,
    check_completions,
    check_prompts_fit,
    check_staleness,
    num_train_shards,
)
from trainers.parts.completion_metrics import add_token_staleness, rollout_metrics
from trainers.parts.frozen import Reference, Teacher
from trainers.parts.generator import Generator, Pending
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_prompts, without_long
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.policy import Policy
from trainers.parts.rewarder import Rewarder, check_rewards
from trainers.parts.tokenizer import tokenizer_there
from trainers.rollout.hf.settings import check_stop_tokens
from trainers.rollout.tools import resolve_tools, schemas
from trainers.run.run import Run, saved_order

HEADLINE = ("reward", "loss", "completions/mean_length")
Started = tuple[Any, np.ndarray, Pending]  # rows, one per completion, their places in the data, their completions


@RayHelper.worker(group=["train", "rollout", "reference", "teacher", "reward"])
class GRPOTrainer:
    """``GRPOTrainer(config).train()``; its roles may share device groups or have their own.

    ``reference``, ``teacher`` and ``reward`` are hosted with ``train`` unless a device group names them.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=grpo_loss)
        self.reference = Reference(
            config,
            every=config.ref_model_sync_steps if config.sync_ref_model else None,
            share=config.ref_model_mixup_alpha,
        )
        self.teacher = Teacher(config)
        self.rewarder = Rewarder(
            config,
            config.functions,
            models=config.reward_model,
            has_environment=config.is_rewarded_by_environment,
            weights=config.reward_weights,
            num_processes=config.reward_processes,
            timeout_s=config.reward_timeout_s,
        )
        self.generator = Generator(
            config,
            self.policy,
            self.rewarder,
            environment=partial(environment_of, config) if config.has_environment else None,
            turn_limit=config.turn_limit,
            limits_each_turn=config.completion_length_limit_scope == "per_round",
            sync_interval=config.weight_sync_interval,
        )
        self.prepare()

    @staticmethod
    def check(config: GRPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        check_chosen(config)
        check_rewards(config, config.functions, config.reward_processes)
        check_completions(config, groups)
        if config.has_environment:
            environment_of(config, tokenizer_there(config))
        check_staleness(config.max_staleness, groups)
        check_used(config, groups)
        check_sampled(config)
        GenerationPlan.of(config, 1, num_train_shards(config, groups), saved_order(config))

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the data and resolves what the configuration names."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        check_stop_tokens(config.stop_token_ids, self.tokenizer)
        judges = {"ref_model": config.ref_model or config.model}
        if config.teacher_model is not None:
            judges["teacher_model"] = config.teacher_model
        self.models = resolved_models(config, self.model_path, [*judges.values(), *config.reward_model])
        beside = {key: self.models[name] for key, name in judges.items()}
        for key, model in beside.items():
            check_same_tokens(key, model, self.tokenizer, config.trust_remote_code, policy=self.model_path)
        beside |= {f"reward_model {name}": self.models[name] for name in config.reward_model}
        self.images = image_reader(config, self.model_path, self.tokenizer, beside)
        if config.tools:
            environment_of(config, self.tokenizer)
        self.rewarder.prepare(self.tokenizer, self.images)
        self.rows: Any = self.read(*config.training_data)
        self.eval_rows: Any = self.read(*config.evaluation_data) if config.evaluates else None
        datasets = {"dataset": self.rows, "eval_dataset": self.eval_rows}
        if not config.has_environment:  # whose prompts are what it makes of the rows
            check_prompts_fit(config, datasets, self.tokenizer, self.model_path, self.images)
        self.begin({})

    def begin(self, state: dict[str, Any]) -> None:
        """What changes from step to step, as it is at the start or in a checkpoint's ``state``."""
        config, num_rows = self.config, len(self.rows)
        self.entropy_coef = EntropyCoefficient.of(config, state)
        drawn = state.get("rows_drawn", 0)
        self.stream = RowStream(num_rows, seed=config.seed, shuffle=config.shuffle_dataset, num_drawn=drawn)
        self.ahead: deque[Started] = deque()

    def state(self) -> dict[str, Any]:
        """What ``begin`` takes."""
        return {**self.entropy_coef.state(), "rows_drawn": self.stream.num_drawn}

    def read(self, source: Any, split: str) -> Any:
        """The rows of a dataset, each with a prompt; without long ones where ``drop_long_prompts`` says so."""
        rows = read_prompts(self.config, source, split, self.images, self.tokenizer)
        with mistakes_of("dataset"):
            is_text = isinstance(prompt_of(rows[0]), str)
        if not self.config.tools:
            return without_long(self.config, rows, self.tokenizer, self.images)
        if is_text or "tools" in rows.column_names:
            raise ConfigError(
                "the chat template writes the tools: prompts must be conversations without their own 'tools'"
            )
        shown = json.dumps(schemas(resolve_tools(self.config.tools)))
        return without_long(self.config, rows.add_column("tools", [shown] * len(rows)), self.tokenizer, self.images)

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        plan = GenerationPlan.of(config, len(self.rows), self.policy.num_shards(), saved_order(config))
        plan.check_rows()
        self.build(plan.num_steps)
        with (
            Run(config, plan.num_steps, headline=HEADLINE, order=plan.order(), rows=self.rows) as run,
            self.generator.following(run),
        ):
            self.begin(run.trainer_state)
            for _ in run.rounds(self, self.state):
                generation = plan.generation(run.step)
                explored, metrics = self.explore(plan, run)
                samples = explored.samples(config.mask_truncated_completions)
                with run.phase("logps"):
                    samples = self.with_logps(samples, off_policy=plan.num_updates(plan.num_prompts) > 1)
                rewards, greedy = explored.rewards, explored.greedy_rewards
                samples, seen = credit(config, samples, rewards, self.rewarder.weights, self.rewarder.names, greedy)
                metrics = Metrics.merge([metrics, seen])
                self.show(explored, samples, plan, run)
                for chunk in plan.chunks(samples, seed=(config.seed, generation)):
                    with run.phase("update"):
                        learned = self.learn(self.selected(chunk, run.step), samples)
                    self.generator.learned()
                    epoch = self.stream.epoch if plan.is_dynamic else (run.step + 1) / plan.steps_per_epoch
                    run.log_step(Metrics.merge([metrics, learned]), epoch=epoch)
                    with run.phase("sync"):
                        self.reference.follow(self.policy, run.step)
                    metrics = Metrics()  # what was seen of the rollouts is reported with the first step on them
                    if run.is_over:
                        break
            return run.finish(self.policy.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """Builds every model where its role runs; the policy after the others, as building it settles random states."""
        config, models = self.config, self.models
        if config.beta and not config.is_own_reference:
            self.reference.build(models[config.ref_model or config.model])
        if config.teacher_model is not None:
            self.teacher.build(models[config.teacher_model])
        if config.reward_model:
            self.rewarder.build([models[name] for name in config.reward_model])
        self.policy.build(self.model_path, num_steps)
        self.generator.build(self.model_path, self.images if config.has_environment else None)

    def explore(self, plan: GenerationPlan, run: Run) -> tuple[Rewarded, Metrics]:
        """G completions of each of the generation's prompts, rewarded, and what was seen of all that were drawn."""
        explored, metrics = self.redrawn(plan, run) if plan.is_dynamic else self.next_generation(plan, run)
        self.generator.rest()
        return explored, metrics

    def show(self, explored: Rewarded, samples: Samples, plan: GenerationPlan, run: Run) -> None:
        """Keeps completions with their rewards and advantages, where that is asked for and due."""
        config = self.config
        num_updates = plan.num_updates(len(explored) // config.num_generations)
        if config.log_completions and run.shows_completions(num_updates):
            assert explored.prompts is not None
            assert explored.rewards is not None
            shown = self.rewarder.shown(explored.prompts, explored, explored.rewards, samples.advantages)
            run.log_completions(shown)

    def next_generation(self, plan: GenerationPlan, run: Run) -> tuple[Rewarded, Metrics]:
        """The completions of the next rows; up to ``max_staleness`` further generations are begun, and go on meanwhile.

        Weights that do not come in flight wait for all that was begun: then nothing begins before it is needed.
        """
        config, generation = self.config, plan.generation(run.step)
        if len(self.ahead) <= 1 or self.generator.in_flight:
            batches = Batches(len(self.rows), plan.num_prompts, **order_of(config))
            last = min(generation + config.max_staleness, plan.generation(plan.num_steps - 1))
            for number in range(generation + len(self.ahead), last + 1):
                self.ahead.append(self.started(batches[number], run, number))
        started = self.ahead.popleft()
        explored = self.finished(started, run)
        metrics = rollout_metrics(explored)
        if config.max_staleness:
            *_, pending = started
            metrics.mean("staleness", generation - plan.generation(pending.version), 1)
            add_token_staleness(metrics, explored, run.step)
        return explored, metrics

    def redrawn(self, plan: GenerationPlan, run: Run) -> tuple[Rewarded, Metrics]:
        """The completions of the next rows, and of as many further ones as there are prompts with equal rewards."""
        config, generation = self.config, plan.generation(run.step)
        drawn = self.stream.take(plan.num_prompts)
        explored = self.finished(self.started(drawn, run, generation), run)
        for attempt in range(1, config.max_resample_times + 1):
            missing = plan.num_prompts - int(self.differing(explored).sum())
            places = self.stream.take(max(missing, 0), held=drawn.tolist())
            if not len(places):
                break
            drawn = np.concatenate([drawn, places])
            further = self.finished(self.started(places, run, generation, attempt), run)
            explored = Rewarded.concat([explored, further])
        metrics = rollout_metrics(explored)
        num_drawn = len(explored) // config.num_generations
        metrics.mean("resampled_share", num_drawn - plan.num_prompts, num_drawn)
        return fullest(explored, self.differing(explored), plan.num_prompts, config.num_generations), metrics

    def differing(self, explored: Rewarded) -> np.ndarray:
        """(P,) bool: prompts whose completions are not all rewarded alike."""
        return differing_prompts(self.config, explored, self.rewarder.names, self.rewarder.weights)

    def started(self, places: np.ndarray, run: Run, generation: int, attempt: int = 0) -> Started:
        """G completions of the rows at ``places`` are begun, by the policy as it is now."""
        num_generations = self.config.num_generations
        with run.phase("data"):
            row_ids = np.repeat(places, num_generations)
            rows = DrawnRows(self.rows, row_ids)
            starts = self.generator.starts(rows, self.tokenizer, np.arange(len(rows)) // num_generations, self.images)
        return rows, row_ids, self.generator.begin(starts, generation, attempt)

    def finished(self, started: Started, run: Run) -> Rewarded:
        """The completions, rewarded."""
        rows, row_ids, pending = started
        rollouts = self.generator.finished(pending)
        with run.phase("reward"):
            rewards = self.rewarder(rows, rollouts)
        prompts = list(map(prompt_of, rows))
        greedy = self.greedy_rewards(rows, run) if self.config.estimator.needs_greedy else None
        return Rewarded(**rollouts.columns(), prompts=prompts, rewards=rewards, row_ids=row_ids, greedy_rewards=greedy)

    def greedy_rewards(self, rows: Any, run: Run) -> np.ndarray:
        """(B, K) float32: the rewards of a greedy completion of each prompt, G times; of the policy as it is now."""
        num_generations = self.config.num_generations
        with run.phase("data"):
            asked_once = rows.select(np.arange(0, len(rows), num_generations))
            starts = self.generator.starts(asked_once, self.tokenizer, np.arange(len(asked_once)), self.images)
        rollouts = self.generator.finished(self.generator.begin(starts, run.step, temperature=0.0))
        with run.phase("reward"):
            return self.rewarder(asked_once, rollouts).repeat(num_generations, axis=0)

    def with_logps(self, samples: Samples, off_policy: bool) -> Samples:
        """The samples with what other policies make of them: the one that generated, the reference, the teacher.

        ``off_policy``: several steps on one generation, so that the policy that generated is soon gone.
        """
        config, futures = self.config, {}
        scored = None
        if config.asks_policy(off_policy) and config.top_entropy_quantile < 1:
            scored = self.policy.scores.defer(samples)
        elif config.asks_policy(off_policy):
            futures["old_logps"] = self.policy.logps.defer(samples)
        if config.beta and config.is_own_reference:
            futures["ref_logps"] = self.policy.logps.defer(samples, adapter=False)
        elif config.beta:
            futures["ref_logps"] = self.reference.logps.defer(samples)
        if config.teacher_model is not None:
            futures["teacher_logps"] = self.teacher.logps.defer(samples)
        columns: dict[str, Any] = {name: logps.result() for name, logps in futures.items()}
        if scored is not None:
            columns["old_logps"], columns["entropies"] = scored.result()
        if config.old_is_rollouts:
            columns["old_logps"] = samples.rollout_logps
        return dataclasses.replace(samples, **columns)

    def selected(self, chunk: Samples, step: int) -> Samples:
        """What step number ``step`` learns from, with the tokens that the loss treats otherwise, if there are any."""
        if not self.config.selects_tokens:
            return chunk
        return with_selection(self.config, chunk, self.policy.logps(chunk), seed=(self.config.seed, step))

    def learn(self, chunk: Samples, generation: Samples) -> Metrics:
        """One optimizer step on a chunk of a generation."""
        if chunk.entropies is not None and (self.config.num_iterations > 1 or len(chunk) < len(generation)):
            chunk = dataclasses.replace(chunk, entropies=self.policy.scores(chunk)[1])  # of the policy as it is now
        chunk, loss = with_slopes(self.config, chunk, self.policy.logps)
        chunk, numbers = step_numbers(self.config, chunk, generation, self.entropy_coef.applied)
        metrics = self.policy.step(chunk, numbers, entropy_gradient=numbers.entropy_coef > 0)
        metrics.sum("loss", loss)
        self.entropy_coef = self.entropy_coef.after(metrics)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Mean rewards and lengths on the evaluation prompts, under training's names with ``eval_`` before them."""
        config = self.config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        num_generations = config.num_generations_eval or (config.num_generations if temperature else 1)
        assert self.eval_rows is not None
        groups = np.repeat(np.arange(len(self.eval_rows)), num_generations)
        rows = DrawnRows(self.eval_rows, groups)
        starts = self.generator.starts(rows, self.tokenizer, groups, self.images)
        rollouts = self.generator.complete(starts, -1, 0, temperature=temperature)
        rewards_BK = self.rewarder(rows, rollouts)
        metrics = [rollout_metrics(rollouts), self.rewarder.metrics(rewards_BK, num_generations)]
        return Metrics.merge(metrics).without("num_tokens").values("eval_")  # which is of training alone

    def save(self, folder: Path) -> None:
        """The policy as it trains; the reference beside it if it has moved."""
        self.policy.save(folder)
        if self.config.sync_ref_model:
            self.reference.save(folder / "reference")

    def load(self, folder: Path) -> None:
        """The reference first: where both share a process, its random state is the policy's."""
        if self.config.sync_ref_model:
            self.reference.load(folder / "reference")
        self.policy.load(folder)
