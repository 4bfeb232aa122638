"""GRPO: groups of completions, rewards, advantages relative to the group, clipped policy gradient.

    driver                rollout workers           train workers           reference, teacher, reward
    ------                ---------------           -------------           --------------------------
    prompts ────────────► generate, play
    completions ◄──────── slice, flatten ──────────────────────────────────► model_rewards
    samples ──────────────────────────────────────► policy_scores ─────────► reference_logps, teacher_logps
            ◄────────────────────────────────────── slice, flatten ◄──────── slice, flatten: side by side
    rewards, advantages
    samples ──────────────────────────────────────► update           one optimizer step
    metrics ◄────────────────────────────────────── slice, merge
                          receive_weights ◄──────── send_weights     through a channel; see parts/weights.py

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

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rayhelper import Channel, ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import Prompts, Ragged, Rollouts, Samples, Tasks
from trainers.data.rows import Batches, prompt_of
from trainers.grpo.config import GRPOConfig
from trainers.grpo.entropy_coefficient import EntropyCoefficient
from trainers.grpo.loss import StepNumbers, grpo_loss
from trainers.grpo.plan import RowStream, StepPlan
from trainers.grpo.samples import (
    Rewarded,
    TokenScores,
    credit,
    differing_groups,
    fullest,
    to_samples,
    with_policy_mask,
)
from trainers.losses import policy as policy_losses
from trainers.metrics import Metrics
from trainers.parts.engine import (
    add_token_staleness,
    build_engine,
    check_completions,
    check_prompts_fit,
    check_staleness,
    prompts_of,
    rollout_metrics,
    sampling_of,
    seed_of,
)
from trainers.parts.engine_updates import EngineUpdates
from trainers.parts.models import check_same_tokens, resolved_models
from trainers.parts.rewarded_completions import complete, pool_of, with_rows
from trainers.parts.weights import (
    Route,
    arrivals,
    built,
    copy,
    exported,
    first_of,
    make_room,
    receive,
    rest,
    send,
    trained,
)
from trainers.plugins import load_plugins
from trainers.rewards.advantages import add_reward_metrics, group_advantages
from trainers.rewards.functions import chat_completions, numbered, resolve_rewards, score
from trainers.rewards.models import RewardModel, model_name
from trainers.rewards.pool import RewardPool
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.environments import Environment, resolve_environment
from trainers.rollout.episodes import Stage
from trainers.rollout.hf import check_stop_tokens
from trainers.rollout.tools import ToolEnvironment, resolve_tools, schemas
from trainers.run.run import (
    Run,
    build_backend,
    check_before_start,
    load_model_and_tokenizer,
    load_tokenizer,
    mistakes_of,
    num_shards,
    num_train_shards,
    read_rows,
    resolve_dtype,
    saved_order,
)


@dataclass
class Started:
    """Completions that are under way."""

    rows: Any  # one a completion
    begin: Callable[[], Any]  # begins them once more
    rollouts: Any  # a future of Rollouts
    num_learned: int  # generations that the policy had learned from when it began


@RayHelper.worker(group=["train", "rollout", "reference", "teacher", "reward"])
class GRPOTrainer:
    """``GRPOTrainer(config).train()``; its roles may share device groups or have their own.

    ``reference``, ``teacher`` and ``reward`` are hosted with ``train`` unless a device group names them.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.backend: Backend | None = None
        self.engine: Engine | None = None
        self.reward_pool: RewardPool | None = None  # with reward_processes, beside the engine
        self.prepare()

    @staticmethod
    def check(config: GRPOConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        with mistakes_of("reward_funcs"):
            resolve_rewards(config.reward_funcs)
        pool_of(config)
        check_completions(config, groups)
        environment_of(config)
        check_staleness(config.max_staleness, groups)
        check_used(config, groups)
        StepPlan.of(config, 1, num_train_shards(config, groups), saved_order(config))

    # The driver's part

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the data and resolves what the configuration names."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        check_stop_tokens(config.stop_token_ids, self.tokenizer)
        judges = {"ref_model": config.ref_model or config.model, "teacher_model": config.teacher_model}
        named = [name for name in (*judges.values(), *config.reward_model) if name is not None]
        self.models = resolved_models(config, self.model_path, named)
        for key, name in judges.items():
            if name is not None:
                check_same_tokens(key, self.models[name], self.tokenizer, config.trust_remote_code)
        with mistakes_of("reward_funcs"):
            self.rewards, _ = resolve_rewards(config.reward_funcs)
        self.reward_names = [name for _, name in self.rewards] + list(map(model_name, config.reward_model))
        self.reward_names = numbered([*self.reward_names, *(["environment"] if config.has_environment else [])])
        self.reward_weights = np.array(config.reward_weights or [1.0] * len(self.reward_names), np.float32)
        self.rows: Any = self.read(config.dataset, config.dataset_split)
        self.eval_rows: Any = self.read(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None
        if not config.has_environment:  # whose prompts are what it makes of the rows
            datasets = {"dataset": self.rows, "eval_dataset": self.eval_rows}
            check_prompts_fit(config, datasets, self.tokenizer, self.model_path)
        self.async_runner = asyncio.Runner()  # one event loop for all calls: clients may hold connections
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
        """The rows of a dataset, each with a prompt."""
        rows = read_rows(self.config, source, split)
        with mistakes_of("dataset"):
            is_text = isinstance(prompt_of(rows[0]), str)
        if not self.config.tools:
            return rows
        if is_text or "tools" in rows.column_names:
            raise ConfigError(
                "tools are shown by the chat template: prompts must be conversations, without own 'tools'"
            )
        shown = json.dumps(schemas(resolve_tools(self.config.tools)))
        return rows.add_column("tools", [shown] * len(rows))

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        plan = StepPlan.of(config, len(self.rows), self.num_train_shards(), saved_order(config))
        plan.check_rows()
        self.build(plan.num_steps)
        headline = ("reward", "loss", "completions/mean_length")
        with Run(config, plan.num_steps, headline=headline, order=plan.order()) as run, closing(self):
            run.resume(self.load)
            self.engines.follow(run)
            self.begin(run.trainer_state)
            if config.val_before_train and run.step == 0:
                run.evaluate(self.evaluate)
            while run.step < plan.num_steps:
                start, generation = run.step, plan.generation(run.step)
                explored, metrics = self.explore(plan, run)
                samples = to_samples(explored, config.mask_truncated_completions)
                with run.phase("logps"):
                    samples = self.with_logps(samples, off_policy=plan.num_updates(plan.num_prompts) > 1)
                samples, seen = credit(config, samples, explored.rewards, self.reward_weights, self.reward_names)
                metrics = Metrics.merge([metrics, seen])
                for chunk in plan.chunks(samples, seed=(config.seed, generation)):
                    with run.phase("update"):
                        learned = self.learn(chunk, samples)
                    self.engines.learned()
                    epoch = self.stream.epoch if plan.is_dynamic else (run.step + 1) / plan.steps_per_epoch
                    run.log_step(Metrics.merge([metrics, learned]), epoch=epoch)
                    with run.phase("sync"):
                        self.sync_reference(run.step)
                    metrics = Metrics()  # what was seen of the rollouts is told with the first step on them
                    if run.step == plan.num_steps:
                        break
                if run.due(config.eval_steps, run.step - start):
                    run.evaluate(self.evaluate)
                if run.due(config.save_steps, run.step - start):
                    run.save_checkpoint(self.save, self.tokenizer, self.state())
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
        """Builds every model where its role runs; the policy after the others, as building it settles random states."""
        config = self.config
        if config.beta and not config.is_own_reference:
            self.build_reference(self.models[config.ref_model or config.model])
        if config.teacher_model is not None:
            self.build_teacher(self.models[config.teacher_model])
        if config.reward_model:
            self.build_reward([self.models[name] for name in config.reward_model])
        self.build_train(self.model_path, num_steps)
        self.build_rollout(self.model_path)
        self.engines = EngineUpdates.of(self, in_flight=config.weight_sync_interval is not None)

    def explore(self, plan: StepPlan, run: Run) -> tuple[Rewarded, Metrics]:
        """G completions of each of the generation's prompts, rewarded, and what was seen of all that were drawn.

        Up to ``max_staleness`` further generations are begun, which go on while this one is learned from.
        """
        config, generation = self.config, plan.generation(run.step)
        if not plan.is_dynamic:
            self.begin_ahead(plan, run)
            started = self.ahead.popleft()
            explored = self.finished(started, run, generation)
            metrics = rollout_metrics(explored)
            if config.max_staleness:
                metrics.mean("staleness", generation - started.num_learned, 1)
                add_token_staleness(metrics, explored, run.step)
        else:
            drawn = self.stream.take(plan.num_prompts)
            explored = self.finished(self.started(drawn, run, generation), run, generation)
            for attempt in range(1, config.max_resample_times + 1):
                missing = plan.num_prompts - int(self.differing(explored).sum())
                places = self.stream.take(max(missing, 0), held=drawn.tolist())
                if not len(places):
                    break
                drawn = np.concatenate([drawn, places])
                further = self.finished(self.started(places, run, generation, attempt), run, generation)
                explored = Rewarded.concat([explored, further])
            metrics = rollout_metrics(explored)
            num_drawn = len(explored) // config.num_generations
            metrics.mean("resampled_share", num_drawn - plan.num_prompts, num_drawn)
            explored = fullest(explored, self.differing(explored), plan.num_prompts, config.num_generations)
        self.engines.end_generation()
        num_updates = plan.num_updates(len(explored) // config.num_generations)
        if config.log_completions and run.shows_completions(num_updates):
            run.log_completions(self.shown(explored))
        return explored, metrics

    def differing(self, explored: Rewarded) -> np.ndarray:
        """(P,) bool: prompts whose completions are not all rewarded alike."""
        config = self.config
        assert explored.rewards is not None
        return differing_groups(
            explored.rewards, self.reward_weights, config.num_generations, config.multi_objective_aggregation
        )

    def begin_ahead(self, plan: StepPlan, run: Run) -> None:
        """Begins what is missing of this generation and the ``max_staleness`` next ones of the run.

        Weights that do not come in flight wait for all that is under way: then nothing begins before it is needed.
        """
        config, generation = self.config, plan.generation(run.step)
        if len(self.ahead) > 1 and not self.engines.in_flight:
            return
        batches = Batches(len(self.rows), plan.num_prompts, seed=config.seed, shuffle=config.shuffle_dataset)
        last = min(generation + config.max_staleness, plan.generation(plan.num_steps - 1))
        for number in range(generation + len(self.ahead), last + 1):
            self.ahead.append(self.started(batches[number], run, number, num_learned=generation))

    def started(
        self, places: np.ndarray, run: Run, generation: int, attempt: int = 0, num_learned: int | None = None
    ) -> Started:
        """G completions of the rows at ``places`` are under way, by the policy as it is now."""
        with run.phase("data"):
            rows = self.rows.select(np.repeat(places, self.config.num_generations))
            starts = self.starts(rows)
        self.engines.update()
        with run.phase("generate"):
            begin = partial(self.rollout, starts, self.config.temperature, generation, attempt)
            return Started(rows, begin, begin(), generation if num_learned is None else num_learned)

    def finished(self, started: Started, run: Run, generation: int) -> Rewarded:
        """The completions, rewarded; drawn once more, by the policy as it is now, if a worker has died meanwhile."""

        def again() -> Any:
            started.num_learned = generation
            return started.begin()

        with run.phase("generate"):
            rollouts = self.engines.completed(started.rollouts, again)
        with run.phase("reward"):
            rewards = self.reward(started.rows, rollouts)
        return Rewarded(**rollouts.columns(), prompts=list(map(prompt_of, started.rows)), rewards=rewards)

    def starts(self, rows: Any, num_generations: int | None = None) -> Prompts | Tasks:
        """What ``rollout`` takes: the rows' prompts as token ids, or whole rows where an environment plays them."""
        groups = np.arange(len(rows)) // (num_generations or self.config.num_generations)
        if self.config.has_environment:
            return Tasks(list(rows), groups)
        prompts = prompts_of(self.config, rows, self.tokenizer)
        return with_rows(prompts, rows, groups) if self.config.reward_processes else prompts

    def rollout(self, starts: Prompts | Tasks, temperature: float, generation: int, attempt: int = 0) -> Any:
        """A future of ``Rollouts``: one completion of every prompt."""
        sampling = sampling_of(self.config, temperature)
        channel = self.engines.channel if self.engines.in_flight else None  # by which weights may come meanwhile
        if isinstance(starts, Prompts):
            return self.generate.defer(starts, sampling, generation, attempt, channel)
        return self.play.defer(starts, sampling, generation, attempt, channel)

    def reward(self, rows: Any, rollouts: Rollouts) -> np.ndarray:
        """(B, K) float32: of the functions, the reward models, the environment; NaN where one had nothing to say."""
        modelled, scored = None, rollouts.function_rewards
        if self.config.reward_model:
            modelled = self.model_rewards.defer(list(map(prompt_of, rows)), self.completions(rows, rollouts))
        columns = [self.score(rows, rollouts) if scored is None else scored]
        if modelled is not None:
            columns.append(modelled.result())
        if rollouts.environment_rewards is not None:
            columns.append(rollouts.environment_rewards[:, None])
        return np.concatenate(columns, axis=1)

    @RayHelper.function(group="driver", execute="first")
    def score(self, rows: Any, rollouts: Rollouts) -> np.ndarray:
        """(B, K) float32 rewards of the functions, NaN where one had nothing to say."""
        prompts, completions = list(map(prompt_of, rows)), self.completions(rows, rollouts)
        return score(self.rewards, prompts, completions, rollouts.completion_ids, rows[:], runner=self.async_runner)

    def completions(self, rows: Any, rollouts: Rollouts) -> list[Any]:
        """As texts or messages, in the form of the prompts."""
        if rollouts.transcripts is not None:
            return rollouts.transcripts
        texts = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
        return chat_completions(list(map(prompt_of, rows)), texts)

    def shown(self, explored: Rewarded) -> dict[str, Any]:
        """Prompts, completions and rewards as the columns of a table."""
        assert explored.prompts is not None
        assert explored.rewards is not None
        texts = self.tokenizer.batch_decode(list(explored.completion_ids), skip_special_tokens=True)
        rewards = {name: explored.rewards[:, k] for k, name in enumerate(self.reward_names)}
        return {"prompt": explored.prompts, "completion": texts, **rewards}

    def with_logps(self, samples: Samples, off_policy: bool) -> Samples:
        """The samples with what other policies make of them: the one that generated, the reference, the teacher.

        ``off_policy``: several steps on one generation, so that the policy that generated is soon gone.
        """
        config = self.config
        # Begun ahead: the clipped ratio is to the policy that drew the tokens, whose numbers the engine has given
        old_is_known = config.max_staleness > 0 and config.rollout_correction is None
        needs_old = (
            off_policy
            or config.has_kl_in_reward
            or config.advantage_estimator == "reinforce_plus_plus_token"
            or config.teacher_model is not None
            or config.rollout_correction is not None
        )
        asks_policy = (needs_old and not old_is_known) or config.top_entropy_quantile < 1
        old = self.policy_scores.defer(samples) if asks_policy else None
        judged: dict[str, Any] = {}
        if config.beta:
            judged["ref_logps"] = (self.bare_logps if config.is_own_reference else self.reference_logps).defer(samples)
        if config.teacher_model is not None:
            judged["teacher_logps"] = self.teacher_logps.defer(samples)
        columns = {name: logps.result() for name, logps in judged.items()}
        if old is not None:
            scores = old.result()
            columns |= {"old_logps": scores.logps, "entropies": scores.entropies}
        if old_is_known:
            columns["old_logps"] = samples.rollout_logps
        return dataclasses.replace(samples, **columns)

    def learn(self, chunk: Samples, generation: Samples) -> Metrics:
        """One optimizer step on a chunk of a generation."""
        config = self.config
        share = len(chunk) / len(generation)  # TRL: tokens of the generation, shared out evenly over its steps
        num_tokens = chunk.num_loss_tokens if config.loss_type == "bnpo" else generation.num_loss_tokens * share
        normaliser = policy_losses.grpo_normaliser(
            config.loss_type,
            num_sequences=len(chunk),
            num_tokens=num_tokens,
            max_completion_length=config.max_completion_length,
        )
        num_bonus_tokens, entropy = chunk.num_loss_tokens, "entropy"
        if config.top_entropy_quantile < 1:
            chunk = with_policy_mask(chunk, config.top_entropy_quantile)
            assert chunk.policy_mask is not None
            num_bonus_tokens, entropy = int(chunk.policy_mask.values.sum()), "top_entropy"
        metrics = self.update(chunk, StepNumbers(normaliser, num_bonus_tokens, self.entropy_coef.applied))
        if self.entropy_coef.is_on:
            self.entropy_coef = self.entropy_coef.after(metrics.values().get(entropy))
            metrics.same("entropy_coef", self.entropy_coef.coefficient)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Mean rewards and lengths on the evaluation prompts, under training's names with ``eval_`` before them."""
        config = self.config
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        num_generations = config.num_generations_eval or (config.num_generations if temperature else 1)
        assert self.eval_rows is not None
        rows = self.eval_rows.select(np.repeat(np.arange(len(self.eval_rows)), num_generations))
        self.engines.update()
        begin = partial(self.rollout, self.starts(rows, num_generations), temperature, -1)
        rollouts = self.engines.completed(begin(), begin)
        self.engines.end_generation()
        _, statistics = group_advantages(
            self.reward(rows, rollouts),
            num_generations=num_generations,
            weights_K=self.reward_weights,
            scale_rewards="none",
        )
        metrics = rollout_metrics(rollouts)
        add_reward_metrics(metrics, statistics, self.reward_names)
        metrics.entries.pop("num_tokens")  # of training alone
        return {f"eval_{name}": value for name, value in metrics.values().items()}

    def sync_reference(self, step: int) -> None:
        """Mixes the policy into a reference that follows it, when that is due."""
        if self.config.sync_ref_model and step % self.config.ref_model_sync_steps == 0:
            weights: Any = self.export_weights.defer()  # goes from worker to workers, not through the driver
            self.mix_reference(weights)

    def save(self, folder: Path) -> None:
        """The policy as it trains; the reference beside it if it has moved."""
        self.save_policy(folder)
        if self.config.sync_ref_model:
            self.save_reference(folder / "reference")

    def load(self, folder: Path) -> None:
        """The reference first: where both share a process, its random state is the policy's."""
        if self.config.sync_ref_model:
            self.load_reference(folder / "reference")
        self.load_policy(folder)

    # Role rollout

    @RayHelper.function(group="rollout")
    def build_rollout(self, model: str) -> None:
        if self.engine is not None:
            return
        config = self.config
        self.rollout_tokenizer = tokenizer = load_tokenizer(config, model)
        environment = environment_of(config)
        self.engine = build_engine(config, model, tokenizer, self.backend, gathers=environment is None)
        self.reward_pool = pool_of(config)
        if environment is not None:
            gather = None if self.backend is None else self.backend.whole_weights
            self.stage = Stage(
                environment, tokenizer, config.turn_limit, config.max_prompt_length, config.chat_template_kwargs, gather
            )

    @RayHelper.function(group="rollout", collect=first_of)
    def meet_engine(self) -> Route:
        return Route.between(built(self.engine), trains=self.backend is not None)

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(
        self, prompts: Prompts, sampling: Sampling, generation: int, attempt: int, channel: Channel | None
    ) -> Rollouts:
        engine, seed = built(self.engine), seed_of(self.config.seed, generation, attempt)
        between = arrivals(engine, channel, self.config.weight_sync_interval)
        return complete(engine, prompts, sampling, self.reward_pool, self.rollout_tokenizer, seed=seed, **between)

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def play(
        self, tasks: Tasks, sampling: Sampling, generation: int, attempt: int, channel: Channel | None
    ) -> Rollouts:
        """An episode of each row's prompt."""
        engine, seed = built(self.engine), partial(seed_of, self.config.seed, generation, attempt)
        between = arrivals(engine, channel, self.config.weight_sync_interval)
        play = partial(self.stage.play, engine, tasks.rows, sampling, seed, **between)
        if self.reward_pool is None:
            return play()
        with self.reward_pool.scoring(tasks.rows, tasks.groups) as scoring:
            return scoring.rewarded(play(finished=scoring.add))

    @RayHelper.function(group="rollout")
    def close_rewards(self) -> None:
        self.close()

    @RayHelper.function(group="rollout")
    def copy_weights(self, version: int) -> None:
        if self.backend is not None:  # where it is trained as well
            copy(self.config, self.backend, built(self.engine), version)

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
    def build_reward(self, models: list[str]) -> None:
        config = self.config
        self.reward_models = [
            RewardModel(
                model,
                dtype=resolve_dtype(config),
                batch_size=config.per_device_train_batch_size,
                chat_template_kwargs=config.chat_template_kwargs,
                trust_remote_code=config.trust_remote_code,
            )
            for model in models
        ]

    @RayHelper.function(group="reward", dispatch="slice", collect="flatten")
    def model_rewards(self, prompts: list[Any], completions: list[Any]) -> np.ndarray:
        """(B, models) float32."""
        scores = [model.score(prompts, completions) for model in self.reward_models]
        return np.array(scores, np.float32).reshape(len(scores), len(prompts)).T

    # Roles reference and teacher

    @RayHelper.function(group="reference")
    def build_reference(self, model: str) -> None:
        self.reference = build_backend(self.config, model, num_training_steps=None)

    @RayHelper.function(group="reference", dispatch="slice", collect="flatten")
    def reference_logps(self, samples: Samples) -> Ragged:
        return self.reference.token_logps(samples, **self.scoring())

    @RayHelper.function(group="reference")
    def mix_reference(self, weights: dict[str, torch.Tensor]) -> None:
        self.reference.mix_weights(weights.items(), self.config.ref_model_mixup_alpha)

    @RayHelper.function(group="reference")
    def save_reference(self, folder: Path) -> None:
        self.reference.save(folder)

    @RayHelper.function(group="reference")
    def load_reference(self, folder: Path) -> None:
        self.reference.load(folder)

    @RayHelper.function(group="teacher")
    def build_teacher(self, model: str) -> None:
        self.teacher = build_backend(self.config, model, num_training_steps=None)

    @RayHelper.function(group="teacher", dispatch="slice", collect="flatten")
    def teacher_logps(self, samples: Samples) -> Ragged:
        return self.teacher.token_logps(samples, **self.scoring())

    # Role train

    @RayHelper.function(group="train", execute="first")
    def num_train_shards(self) -> int:
        return num_shards(self.config)

    @RayHelper.function(group="train")
    def build_train(self, model: str, num_steps: int) -> None:
        self.backend = build_backend(self.config, model, num_training_steps=num_steps)

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def policy_scores(self, samples: Samples) -> TokenScores:
        if self.config.top_entropy_quantile == 1:
            return TokenScores(self.policy.token_logps(samples, **self.scoring()))
        return TokenScores(*self.policy.token_scores(samples, **self.scoring()))

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def bare_logps(self, samples: Samples) -> Ragged:
        """Of the policy without its LoRA adapter."""
        return self.policy.token_logps(samples, **self.scoring(), adapter=False)

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def update(self, samples: Samples, step: StepNumbers) -> Metrics:
        """One optimizer step over all train workers."""
        return self.policy.step(
            samples,
            partial(grpo_loss, self.config, step),
            **self.scoring(),
            entropy_gradient=step.entropy_coef > 0,
        )

    @RayHelper.function(group="train")
    def send_weights(self, channel: Channel, version: int) -> None:
        send(self.config, self.policy, channel, version)

    @RayHelper.function(group="train")
    def make_room(self, part: Literal["weights", "kv_cache"]) -> None:
        make_room(self.config, trained(self.backend), part)

    @RayHelper.function(group="train")
    def reload_policy(self) -> None:
        trained(self.backend).reload()

    @RayHelper.function(group="train", collect=first_of)
    def export_weights(self) -> dict[str, torch.Tensor]:
        return exported(self.policy)

    @RayHelper.function(group="train")
    def save_policy(self, folder: Path) -> None:
        self.policy.save(folder)

    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None:
        self.policy.export(folder)

    @RayHelper.function(group="train")
    def load_policy(self, folder: Path) -> None:
        self.policy.load(folder)

    @property
    def policy(self) -> Backend:
        assert self.backend is not None, "build_train comes first"
        return self.backend

    def scoring(self) -> dict[str, Any]:
        """How every model looks at samples."""
        return {
            "micro_batch_size": self.config.per_device_train_batch_size,
            "temperature": self.config.temperature,
        }


def environment_of(config: GRPOConfig) -> Callable[[], Environment] | None:
    """What makes the environment of an episode; None: there is none. Raises ConfigError for one that cannot be made."""
    load_plugins(config.external_plugins)
    if config.tools:
        with mistakes_of("tools"):
            return partial(ToolEnvironment, resolve_tools(config.tools))
    if config.environment is None:
        return None
    with mistakes_of("environment"):
        return resolve_environment(config.environment)


def check_used(config: GRPOConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for a device group whose roles have nothing to do."""
    is_used = {
        "reference": config.beta > 0 and not config.is_own_reference,
        "teacher": config.teacher_model is not None,
        "reward": bool(config.reward_model),
    }
    for group in () if groups is None else groups.groups:
        if not any(is_used.get(role, True) for role in group.roles):
            raise ConfigError(
                f"device group {group.name!r} hosts {', '.join(group.roles)} alone, which this run does not use (role "
                "reference needs beta and, with LoRA, ref_model; teacher: teacher_model; reward: reward_model). Its "
                "devices would stand idle: remove the group."
            )
