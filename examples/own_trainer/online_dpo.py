"""Online DPO (arXiv 2402.04792): two completions per prompt, ranked by the rewards, learned by the DPO loss.

    driver             generator (rollout)    rewarder (driver)    reference    policy (train)
    ------             -------------------    -----------------    ---------    --------------
    prompts ─────────► complete
    completions ◄───── slice, flatten ──────► rewards ───────────► logps
    pairs ◄─────────────────────────────────────────────────────── slice, flatten
    pairs ────────────────────────────────────────────────────────────────────► step       one optimizer step
    metrics ◄────────────────────────────────────────────────────────────────── balanced, merge

The keys, a loop over the parts, and the loss; ``README.md`` has the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from rayhelper import RayHelper
from trainers.batch import Ragged, Samples
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.roles import REFERENCE, REWARD, ROLLOUT, TRAIN
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_of, sequences_per_step, total_steps
from trainers.data.batches import Batches
from trainers.data.preferences import Preferences
from trainers.data.rows import prompt_of
from trainers.losses.tokens import masked
from trainers.metrics import Metrics
from trainers.parts import (
    Generator,
    Policy,
    Reference,
    Rewarder,
    load_model_and_tokenizer,
    read_prompts,
    rollout_metrics,
)
from trainers.run.run import Run, saved_order


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(CompletionConfig):
    """The keys of online DPO beside the shared ones. Batch sizes count pairs."""

    ROLES: ClassVar = {"train": TRAIN, "rollout": ROLLOUT, "reference": REFERENCE, "reward": REWARD}

    output_dir: str = "outputs/online_dpo"
    reward_funcs: list[Any] = field(default_factory=list)
    """Names, dotted paths, or {name: ..., argument: value}; at least one."""
    beta: float = 0.1
    """How strongly the policy is held to the reference, which is the model as it starts."""


@RayHelper.worker(group=["train", "rollout", "reference", "reward"])
class OnlineDPOTrainer:
    """``OnlineDPOTrainer(config).train()``; its roles may share a device group or have their own."""

    def __init__(self, config: OnlineDPOConfig) -> None:
        self.config = config
        self.policy = Policy(config, loss=online_dpo_loss)
        self.reference = Reference(config)
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
        num_pairs = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = Batches(len(self.rows), num_pairs, **order_of(config))
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.reference.build(self.model_path)
        self.policy.build(self.model_path, num_steps)
        self.generator.build(self.model_path)
        order = {"prompts": len(self.rows), SEQUENCES_PER_STEP: num_pairs}
        with Run(config, num_steps, headline=("reward", "loss"), order=order) as run, self.generator.following(run):
            for step in run.rounds(self):
                pairs, metrics = self.explore(self.rows.select(batches[step]), run)
                with run.phase("update"):
                    learned = self.policy.step(pairs, len(pairs))
                self.generator.learned()
                run.log_step(Metrics.merge([metrics, learned]), epoch=(step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def explore(self, rows: Any, run: Run) -> tuple[Preferences, Metrics]:
        """A pair of completions of every row, with what the reference says of them, and what was seen."""
        asked = rows.select(np.repeat(np.arange(len(rows)), 2))
        rollouts = self.generator.complete(self.generator.starts(asked, self.tokenizer), run.step)
        samples = rollouts.samples()
        ref_logps = self.reference.logps.defer(samples)  # while the driver rewards
        with run.phase("reward"):
            rewards_BK = self.rewarder(asked, rollouts)
        if self.config.log_completions and run.shows_completions(1):
            run.log_completions(self.rewarder.shown(list(map(prompt_of, asked)), rollouts, rewards_BK))
        with run.phase("logps"):
            pairs = paired(samples, ref_logps.result(), self.rewarder.totals(rewards_BK))
        return pairs, Metrics.merge([rollout_metrics(rollouts), self.rewarder.metrics(rewards_BK, 2)])

    def evaluate(self) -> dict[str, float]:
        """Mean rewards of greedy completions of the evaluation prompts."""
        rollouts = self.generator.complete(self.generator.starts(self.eval_rows, self.tokenizer), -1, temperature=0.0)
        return self.rewarder.metrics(self.rewarder(self.eval_rows, rollouts)).values("eval_")

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)


def paired(samples: Samples, ref_logps: Ragged, totals_B: np.ndarray) -> Preferences:
    """Completions 2k and 2k + 1 as a pair, the one with the higher reward chosen; none where the rewards are equal."""
    first_P, second_P = totals_B.reshape(-1, 2).T
    differs_P = (first_P > second_P) | (first_P < second_P)  # not where one is NaN
    chosen = (2 * np.arange(len(first_P)) + (second_P > first_P))[differs_P]
    return Preferences.of(samples, chosen, chosen ^ 1, ref_logps)


def online_dpo_loss(
    config: OnlineDPOConfig,
    num_pairs: int,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: Preferences,
    metrics: Metrics,
) -> torch.Tensor:
    """The DPO loss of one micro-batch, divided by the pairs of the whole step. B: all chosen, then all rejected."""
    assert micro.ref_logps is not None
    log_ratios_BT = logps_BT - micro.ref_logps.padded(0, logps_BT.device)
    log_ratios_B = masked(log_ratios_BT, mask_BT, "log_ratios_BT").sum(1)
    margins_P = config.beta * (log_ratios_B[: len(micro)] - log_ratios_B[len(micro) :])
    metrics.mean("rewards/margins", margins_P.sum(), len(margins_P))
    return -logsigmoid(margins_P).sum() / max(1, num_pairs)
