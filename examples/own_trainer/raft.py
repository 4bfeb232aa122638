"""Expert iteration (RAFT, arXiv 2304.06767): complete every prompt several times, learn the best completions.

    driver             generator (rollout)    rewarder (driver)    policy (train)
    ------             -------------------    -----------------    --------------
    prompts ─────────► complete
    completions ◄───── slice, flatten ──────► rewards
    the best of each prompt ─────────────────────────────────────► step       one optimizer step
    metrics ◄───────────────────────────────────────────────────── balanced, merge

The keys, a loop over the parts, and the loss; ``README.md`` has the commands, ``docs/own_trainer.md`` builds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rayhelper import ConfigError, RayHelper
from trainers.batch import Samples
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.roles import REWARD, ROLLOUT, TRAIN
from trainers.configuration.shared import SEQUENCES_PER_STEP, at_least, order_of, sequences_per_step, total_steps
from trainers.data.batches import Batches
from trainers.data.rows import prompt_of
from trainers.losses.tokens import sft_loss
from trainers.metrics import Metrics
from trainers.parts import Generator, Policy, Rewarder, load_model_and_tokenizer, read_prompts, rollout_metrics
from trainers.run.run import Run, saved_order


@dataclass(frozen=True, kw_only=True)
class RaftConfig(CompletionConfig):
    """The keys of expert iteration beside the shared ones. Batch sizes count the completions that are learned."""

    ROLES: ClassVar = {"train": TRAIN, "rollout": ROLLOUT, "reward": REWARD}

    output_dir: str = "outputs/raft"
    reward_funcs: list[Any] = field(default_factory=list)
    """Names, dotted paths, or {name: ..., argument: value}; at least one."""
    num_generations: int = 8
    """Completions per prompt."""
    num_kept: int = 1
    """The best completions of each prompt, which are learned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "num_kept")
        if self.num_kept > self.num_generations:
            raise ConfigError(f"num_kept is {self.num_kept}, more than num_generations={self.num_generations}.")


@RayHelper.worker(group=["train", "rollout", "reward"])
class RaftTrainer:
    """``RaftTrainer(config).train()``; roles ``train`` and ``rollout`` on one device group or two."""

    def __init__(self, config: RaftConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=raft_loss)
        self.generator = Generator(config, self.policy)
        self.rewarder = Rewarder(config, config.reward_funcs)
        self.prepare()

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the data."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        self.rewarder.prepare(self.tokenizer)
        self.rows = read_prompts(config, config.dataset, config.dataset_split)
        self.eval_rows: Any = None
        if config.eval_dataset:
            self.eval_rows = read_prompts(config, config.eval_dataset, config.eval_dataset_split)

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        num_learned = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        num_prompts = max(1, num_learned // config.num_kept)
        batches = Batches(len(self.rows), num_prompts, **order_of(config))
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.policy.build(self.model_path, num_steps)
        self.generator.build(self.model_path)
        order = {"prompts": len(self.rows), SEQUENCES_PER_STEP: num_learned}
        with Run(config, num_steps, headline=("reward", "loss"), order=order) as run, self.generator.following(run):
            for step in run.rounds(self):
                samples, metrics = self.explore(self.rows.select(batches[step]), run)
                with run.phase("update"):
                    learned = self.policy.step(samples, samples.num_loss_tokens)
                self.generator.learned()
                run.log_step(Metrics.merge([metrics, learned]), epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def explore(self, rows: Any, run: Run) -> tuple[Samples, Metrics]:
        """The best completions of every row, and what was seen of all of them."""
        config = self.config
        asked = rows.select(np.repeat(np.arange(len(rows)), config.num_generations))  # those of a prompt side by side
        rollouts = self.generator.complete(self.generator.starts(asked, self.tokenizer), run.step)
        with run.phase("reward"):
            rewards_BK = self.rewarder(asked, rollouts)
        totals_B = self.rewarder.totals(rewards_BK)
        best = best_of(totals_B, config.num_generations, config.num_kept)
        metrics = Metrics.merge([rollout_metrics(rollouts), self.rewarder.metrics(rewards_BK, config.num_generations)])
        metrics.mean("reward_kept", float(totals_B[best].sum()), len(best))
        if config.log_completions and run.shows_completions(1):
            run.log_completions(self.rewarder.shown(list(map(prompt_of, asked)), rollouts, rewards_BK))
        return rollouts[best].samples(), metrics

    def evaluate(self) -> dict[str, float]:
        """Mean rewards of greedy completions of the evaluation prompts."""
        rollouts = self.generator.complete(self.generator.starts(self.eval_rows, self.tokenizer), -1, temperature=0.0)
        return self.rewarder.metrics(self.rewarder(self.eval_rows, rollouts)).values("eval_")

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def best_of(totals_B: np.ndarray, num_generations: int, num_kept: int) -> np.ndarray:
    """Places of the best completions of each prompt; of equal ones the earlier.

    Prompts whose completions are all rewarded alike have no best one and are left out, unless there are no others.
    """
    totals_PG = np.nan_to_num(totals_B, nan=-np.inf).reshape(-1, num_generations)
    differ_P = totals_PG.max(1) > totals_PG.min(1)
    chosen_P = np.flatnonzero(differ_P if differ_P.any() else ~differ_P)
    places_PK = np.argsort(-totals_PG[chosen_P], axis=1, kind="stable")[:, :num_kept]
    return (places_PK + num_generations * chosen_P[:, None]).reshape(-1)


def raft_loss(
    config: RaftConfig,
    num_tokens: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Samples,
    metrics: Metrics,
) -> torch.Tensor:
    """The supervised loss of one micro-batch, divided by the tokens of the whole optimizer step."""
    metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
    return sft_loss(logps_BT, mask_BT, normaliser=num_tokens)
