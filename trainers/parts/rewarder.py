"""Rewards of completions: by functions on the driver or in processes beside the engines, by models of role reward.

    rewarder = Rewarder(config, ["exact_answer"], models=["path/to/judge"])
    rewarder.prepare(tokenizer)                    # on the driver: finds the functions
    rewarder.build(["path/to/judge"])              # loads the models where role reward runs
    rewards_BK = rewarder(rows, rollouts)          # (B, K) float32, NaN where a reward has nothing to say
    totals_B = rewarder.totals(rewards_BK)         # (B,) their weighted sums
    rewarder.names, rewarder.weights               # K each: the functions, then the models, then the others

Which functions there are is ``rewards/functions.py``; processes are ``rewards/pool.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayhelper import ConfigError, RayHelper
from trainers.batch import Ragged, Rollouts
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.mistakes import mistakes_of
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import prompt_of
from trainers.metrics import Metrics
from trainers.parts.models import resolve_dtype
from trainers.rewards.advantages import add_reward_metrics, group_advantages, total_rewards
from trainers.rewards.functions import numbered, resolve_rewards, score
from trainers.rewards.models import RewardModel, check_reward_model, model_name
from trainers.rewards.pool import RewardPool
from trainers.rewards.texts import chat_completions


@RayHelper.worker(group="reward")
class Rewarder:
    """K rewards per completion: of ``functions``, of ``models`` and, if ``has_environment``, of the environment.

    ``functions`` and ``models`` have the form of the configuration. ``weights`` None: 1 for each. ``num_processes``:
    reward processes per rollout worker. 0: the driver runs the functions. ``timeout_s``: the limit of one call of a
    function. None: no limit.
    """

    def __init__(
        self,
        config: CompletionConfig,
        functions: Sequence[Any],
        *,
        models: Sequence[str] = (),
        has_environment: bool = False,
        weights: Sequence[float] | None = None,
        num_processes: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self.config, self.num_processes, self.timeout_s = config, num_processes, timeout_s
        self.named_functions, self.named_models, self.has_environment = functions, models, has_environment
        self.named_weights = weights
        self.models: list[RewardModel] = []

    # The driver's part

    def prepare(self, tokenizer: Any, images: ImageReader | None = None) -> None:
        """Finds the functions. ``tokenizer`` decodes completions. ``images`` reads pictures for the models.

        Raises ConfigError for an unknown function, or if nothing rewards completions.
        """
        self.tokenizer, self.images = tokenizer, images
        with mistakes_of("reward_funcs"):
            self.functions, _ = resolve_rewards(self.named_functions)
        names = [name for _, name in self.functions] + list(map(model_name, self.named_models))
        self.names = numbered([*names, *(["environment"] if self.has_environment else [])])
        if not self.names:
            raise ConfigError("nothing rewards completions. Name a function in reward_funcs, such as exact_answer.")
        self.weights = np.array(self.named_weights or [1.0] * len(self.names), np.float32)
        self.async_runner = asyncio.Runner()  # one event loop for all calls: clients may hold connections

    def __call__(self, rows: Any, rollouts: Rollouts) -> np.ndarray:
        """(B, K) float32, NaN where a reward has nothing to say; ``rows`` of the dataset, one per completion."""
        modelled, scored = None, rollouts.function_rewards
        if self.named_models:
            modelled = self.judge.defer(self.asked(rows), self.completions(rows, rollouts), rollouts.images)
        columns = [self.run_functions(rows, rollouts) if scored is None else scored]
        if modelled is not None:
            columns.append(modelled.result())
        if self.has_environment and rollouts.environment_rewards is not None:
            columns.append(rollouts.environment_rewards[:, None])
        return np.concatenate(columns, axis=1)

    @RayHelper.function(group="driver", execute="first")
    def run_functions(self, rows: Any, rollouts: Rollouts) -> np.ndarray:
        """(B, functions) float32."""
        prompts, completions = list(map(prompt_of, rows)), self.completions(rows, rollouts)
        ids = rollouts.completion_ids
        runner, limit_s = self.async_runner, self.timeout_s
        told = dict(rows[:])
        if rollouts.rollout_infos is not None:
            told["rollout_infos"] = rollouts.rollout_infos
        return score(self.functions, prompts, completions, ids, told, runner=runner, limit_s=limit_s)

    def asked(self, rows: Any) -> list[Any]:
        """The prompts in the form for models. For vision models, each picture is a part of its message."""
        images = self.images
        return [prompt_of(row if images is None else images.prompt(row)[0]) for row in rows]

    def completions(self, rows: Any, rollouts: Rollouts) -> list[Any]:
        """As texts or messages, in the form of the prompts."""
        if rollouts.transcripts is not None:
            return rollouts.transcripts
        return chat_completions(list(map(prompt_of, rows)), self.texts(rollouts))

    def texts(self, rollouts: Rollouts) -> list[str]:
        """The text of the model, without special tokens."""
        texts: list[str] = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
        return texts

    def shown(
        self,
        prompts: list[Any],
        rollouts: Rollouts,
        rewards_BK: np.ndarray,
        advantages: np.ndarray | Ragged | None = None,
    ) -> dict[str, Any]:
        """Prompts, completions, rewards and advantages as the columns of a table. An advantage per token is shown as
        its mean.

        With an environment, also ``turns``: each turn with its author, in order.
        """
        rewards = {name: rewards_BK[:, k] for k, name in enumerate(self.names)}
        columns = {"prompt": prompts, "completion": self.texts(rollouts), **rewards}
        if isinstance(advantages, Ragged):
            advantages = np.array([float(row.mean()) if len(row) else np.nan for row in advantages])
        if advantages is not None:
            columns["advantage"] = advantages
        if rollouts.is_sampled is not None:
            columns["turns"] = self.turns(rollouts)
        return columns

    def turns(self, rollouts: Rollouts) -> list[list[dict[str, str]]]:
        """The turns of each completion with their authors, in order: ``model`` for sampled text, ``environment`` for
        all other text."""
        assert rollouts.is_sampled is not None
        told = []
        for ids, is_sampled in zip(rollouts.completion_ids, rollouts.is_sampled, strict=True):
            starts = np.flatnonzero(np.diff(is_sampled.astype(np.int8))) + 1
            parts, whose = np.split(ids, starts), np.split(is_sampled, starts)
            texts = self.tokenizer.batch_decode(parts, skip_special_tokens=True)
            roles = ["model" if len(who) and who[0] else "environment" for who in whose]
            told.append([{"role": role, "text": text} for role, text in zip(roles, texts, strict=True)])
        return told

    def totals(self, rewards_BK: np.ndarray) -> np.ndarray:
        """(B,) float64, the weighted sum of each completion's rewards. NaN for a completion without any reward."""
        return total_rewards(rewards_BK, self.weights)

    def metrics(self, rewards_BK: np.ndarray, num_generations: int = 1) -> Metrics:
        """Means and standard deviations of the rewards, under TRL's names; ``num_generations`` per prompt."""
        metrics = Metrics()
        _, statistics = group_advantages(
            rewards_BK, num_generations=num_generations, weights_K=self.weights, scale_rewards="none"
        )
        add_reward_metrics(metrics, statistics, self.names)
        return metrics

    # Beside an engine, on a worker of role rollout

    def new_pool(self) -> RewardPool | None:
        """Processes for the functions. None: the driver runs them, or another worker returns this worker's completions.

        Raises ConfigError for functions that cannot be sent to other processes.
        """
        if not self.num_processes or not RayHelper.current().shard.leader:
            return None
        return pool_of(self.config, self.named_functions, self.num_processes, self.timeout_s)

    # Role reward

    @RayHelper.function(group="reward")
    def build(self, models: list[str]) -> None:
        """Loads the models, folders or hub names."""
        config = self.config
        self.models = [
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
    def judge(self, prompts: list[Any], completions: list[Any], images: list[Pictures] | None = None) -> np.ndarray:
        """(B, models) float32. Raises ValueError with the name of the model for a score that is not finite.

        ``images``: the pictures of each prompt.
        """
        scores = [model.score(prompts, completions, images) for model in self.models]
        return np.array(scores, np.float32).reshape(len(scores), len(prompts)).T


def pool_of(
    config: CompletionConfig, functions: Sequence[Any], num_processes: int, timeout_s: float | None = None
) -> RewardPool:
    plugins = config.external_plugins
    return RewardPool(functions, num_processes=num_processes, external_plugins=plugins, limit_s=timeout_s)


def check_rewards(config: CompletionConfig, functions: Sequence[Any], num_processes: int = 0) -> None:
    """Raises ConfigError for unknown functions, functions that cannot be sent to other processes, and models that are
    no reward models."""
    models = getattr(config, "reward_model", None) or []
    with mistakes_of("reward_model"):
        for model in [models] if isinstance(models, str) else models:
            check_reward_model(model, config.trust_remote_code)
    with mistakes_of("reward_funcs"):
        resolve_rewards(functions)
    if num_processes:
        pool_of(config, functions, num_processes)
