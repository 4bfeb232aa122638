"""New weights in the middle of completions (``weight_sync_interval``): each token says whose it is, and is of those.

The engine writes a token at a time without a cache, so that what a policy thinks of a token can be looked up. To leave
nothing to chance every generation but the first waits after three tokens until new weights are offered.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayhelper import Channel, ChannelError, ConfigError, RayHelper
from tests.conftest import RaySession
from tests.e2e.runs import apart, lines
from tests.e2e.test_vllm_runs import ROLES, greedy_config, prompts_learned
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Ragged, Rollouts, Samples, Sequences, Tasks
from trainers.grpo.config import GRPOConfig
from trainers.grpo.plan import GenerationPlan
from trainers.grpo.samples import Rewarded
from trainers.grpo.trainer import GRPOTrainer
from trainers.metrics import Metrics
from trainers.parts.generator import Generator
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.run.run import Run

BEFORE = 3  # tokens of a completion before new weights come


class StepByStep(HfEngine):
    """The likeliest token of all that have not been written yet, again and again."""

    waits_for: Channel | None = None  # to offer weights, when it has written a few tokens

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        between: Callable[[], object] | None = None,
        interval: int = 1,
        **_: Any,
    ) -> Rollouts:
        written: list[list[int]] = [[] for _ in range(len(prompts))]
        logps: list[list[float]] = [[] for _ in range(len(prompts))]
        versions: list[list[int]] = [[] for _ in range(len(prompts))]
        for step in range(1, sampling.max_completion_length + 1):
            for row, prompt in enumerate(prompts.prompt_ids):
                with torch.no_grad():
                    logits = self.module(torch.tensor([[*prompt.tolist(), *written[row]]])).logits[0, -1]
                likeliest = logits.clone()
                likeliest[written[row]] = -torch.inf
                token = int(likeliest.argmax())
                written[row].append(token)
                logps[row].append(float(logits.log_softmax(-1)[token]))
                versions[row].append(self.version or 0)
            if step == BEFORE and self.waits_for is not None:
                wait_until_offered(self.waits_for)
            if between is not None and not step % interval:
                between()
        return Rollouts(
            prompts.prompt_ids,
            Ragged.of(written, np.int64),
            Ragged.of(logps, np.float32),
            np.ones(len(prompts), bool),
            policy_versions=Ragged.of(versions, np.int64),
        )

    def all_agree(self, is_so: bool) -> bool:
        return is_so


class StepByStepGenerator(Generator):
    """Whose engine that is. Every worker notes the generations that it has begun, and dies where a file says so."""

    def new_engine(self, path: str, tokenizer: Any, *, gathers: bool) -> Any:
        return StepByStep(path, tokenizer)

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Prompts | Tasks, sampling: Sampling, channel: Channel | None, *numbers: int) -> Rollouts:
        engine: Any = self.engine
        generation, folder = numbers[0], Path(self.config.output_dir)
        waited = folder / f"waited {generation} {RayHelper.current().rank}"
        is_first = generation > 0 and engine is not None and not waited.exists()
        waited.touch()
        if engine is not None:
            engine.waits_for = channel if is_first else None
        dies = folder / f"dies {generation} {RayHelper.current().rank}"
        if engine is not None and dies.exists():
            dies.unlink()
            load = engine.load_weights
            engine.load_weights = lambda weights, **settings: load(killed_after_three(weights), **settings)
        return super().generate(starts, sampling, channel, *numbers)


@RayHelper.worker(group=ROLES)
class InFlightTrainer(GRPOTrainer):
    """Notes what every generation consists of, and keeps every policy."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.generator = StepByStepGenerator(config, self.policy, sync_interval=config.weight_sync_interval)

    def prepare(self) -> None:
        super().prepare()
        self.ledger: list[list[list[int]]] = []
        self.explored: list[Rewarded] = []

    def explore(self, plan: GenerationPlan, run: Run) -> tuple[Rewarded, Metrics]:
        explored, metrics = super().explore(plan, run)
        self.explored.append(explored)
        return explored, metrics

    def learn(self, chunk: Samples, generation: Samples) -> Metrics:
        self.ledger.append([row.tolist() for row in chunk.input_ids])
        metrics = super().learn(chunk, generation)
        self.policy.export(Path(self.config.output_dir) / f"policy {len(self.ledger)}")
        return metrics


def wait_until_offered(channel: Channel) -> None:
    """Returns when weights are offered, or never will be."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ChannelError):
        while not channel.is_offered():
            assert time.monotonic() < deadline, "no weights were offered"
            time.sleep(0.001)


def killed_after_three(weights: Iterable[Any]) -> Iterator[Any]:
    for number, weight in enumerate(weights):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield weight


def in_flight_config(model: str, folder: Path, **keys: Any) -> GRPOConfig:
    settings: dict[str, Any] = {"rollout_engine": "vllm", "max_staleness": 1, "weight_sync_interval": BEFORE}
    settings |= {"top_k": 0, "repetition_penalty": 1.0, "max_completion_length": 8}
    return greedy_config(model, folder, **settings | keys)


def trained(config: GRPOConfig) -> InFlightTrainer:
    trainer = InFlightTrainer(config)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workers(ray_session: RaySession) -> Iterator[None]:
    with ray_session(apart(restarts=50)):
        yield


def versions_of(trainer: InFlightTrainer) -> list[list[list[int]]]:
    found = []
    for explored in trainer.explored:
        assert explored.policy_versions is not None
        found.append([row.tolist() for row in explored.policy_versions])
    return found


def assert_tokens_are_of_their_policies(trainer: InFlightTrainer, model: str) -> None:
    """What each token's policy thinks of it is what the engine said."""
    folder = Path(trainer.config.output_dir)
    policies = [model, *(str(folder / f"policy {step}") for step in range(1, len(trainer.ledger)))]
    backends = [FsdpBackend(policy) for policy in policies]
    for explored in trainer.explored:
        assert explored.policy_versions is not None
        whole = [np.concatenate([p, c]) for p, c in zip(explored.prompt_ids, explored.completion_ids, strict=True)]
        mask = [np.arange(len(row)) >= len(p) for row, p in zip(whole, explored.prompt_ids, strict=True)]
        sequences = Sequences(Ragged.of(whole, np.int64), Ragged.of(mask, bool))
        by_policy = np.stack([b.token_logps(sequences, micro_batch_size=8).values for b in backends])
        versions = explored.policy_versions.values
        found = by_policy[versions, np.arange(len(versions))]
        np.testing.assert_allclose(found, explored.rollout_logps.values, atol=1e-5)
        others = by_policy[(versions + 1) % len(backends), np.arange(len(versions))]
        assert np.abs(others - explored.rollout_logps.values).max() > 1e-3


def test_tokens_behind_new_weights_are_of_the_new_policy(workers: None, model: str, tmp_path: Path) -> None:
    trainer = trained(in_flight_config(model, tmp_path))
    fresh, mixed = [[0] * 8] * 8, lambda g: [[g - 1] * BEFORE + [g] * (8 - BEFORE)] * 8
    assert versions_of(trainer) == [fresh, mixed(1), mixed(2), mixed(3)]
    assert_tokens_are_of_their_policies(trainer, model)
    told = lines(tmp_path)
    assert [line["staleness/tokens_mean"] for line in told] == pytest.approx([0, *[BEFORE / 8] * 3])
    assert [line["staleness/tokens_max"] for line in told] == [0, 1, 1, 1]
    assert [line["staleness/mixed_completions"] for line in told] == [0, 1, 1, 1]
    assert [line["staleness"] for line in told] == [0, 1, 1, 1]


def test_a_worker_that_dies_while_weights_come_in_flight_is_replaced_and_no_row_is_lost(
    workers: None, model: str, tmp_path: Path
) -> None:
    """The other worker has half of the new weights then: it too completes its prompts once more."""
    config = in_flight_config(model, tmp_path)
    dies = tmp_path / "dies 2 1"
    dies.touch()
    trainer = trained(config)
    assert not dies.exists(), "nobody died"
    rows = [prompt for step in prompts_learned(trainer.ledger, config) for prompt in step]
    assert len(rows) == 32
    assert all(rows[:24].count(prompt) == 2 for prompt in rows[:24])  # an epoch
    assert versions_of(trainer)[2] == [[2] * 8] * 8
    assert_tokens_are_of_their_policies(trainer, model)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_staleness": 0}, "weight_sync_interval is set, but max_staleness is 0"),
        ({"weight_sync_interval": 0}, "weight_sync_interval"),
    ],
)
def test_an_interval_without_a_meaning_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        in_flight_config("model", tmp_path, **keys)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_an_interval_is_taken_with_every_engine(engine: str, tmp_path: Path) -> None:
    assert in_flight_config("model", tmp_path, rollout_engine=engine).weight_sync_interval == BEFORE
