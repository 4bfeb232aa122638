"""The same numbers, however many workers there are, wherever the roles run, with Ray and without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rayhelper import Channel, RayHelper, WorkerDiedError
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import TEXTS, final_bytes, grpo_config, lines, separate, sft_config, together
from tests.golden.tiny import save_tiny
from trainers.batch import Ragged, Samples
from trainers.grpo.config import GRPOConfig
from trainers.grpo.loss import grpo_loss
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.generator import Generator
from trainers.parts.policy import Policy
from trainers.sft.trainer import SFTTrainer

Step = tuple[dict[str, float], dict[str, torch.Tensor]]  # the metrics of one optimizer step, and the weights after it
UNDER_TEST = {"sft": (SFTTrainer, sft_config), "grpo": (GRPOTrainer, grpo_config)}
ROLES = list(GRPOTrainer.__rayhelper_roles__)  # type: ignore[attr-defined]
CASES = {  # loss, sequences: four workers get 2, 2, 2, 1 of seven and 1, 1, 1, 0 of three; and micro-batches of
    "sft": ("nll", 7, (1, 2, 8)),
    "sft of three sequences": ("nll", 3, (2,)),
    "sft of weighted tokens": ("nll", 7, (2,)),
    "grpo": ("dapo", 7, (1, 2, 8)),
    "grpo with the mean of means": ("grpo", 7, (2,)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    """One step of each case in this process, all sequences at once."""
    return {case: one_step(case, 8, model, tmp_path_factory.mktemp("alone")) for case in CASES}


@pytest.fixture(scope="module")
def off(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs of both trainers in this process."""
    folder = tmp_path_factory.mktemp("off")
    for name, (trainer, config) in UNDER_TEST.items():
        trainer(config(model, folder / name)).train()
    return folder


def one_step(case: str, micro_batch_size: int, model: str, folder: Path) -> Step:
    """One optimizer step from the weights of ``model``, over the workers there are."""
    loss_type, num_sequences, _ = CASES[case]
    # Adam divides gradients by their own size: an epsilon above their rounding errors keeps those from growing
    keys: dict[str, Any] = {"per_device_train_batch_size": micro_batch_size, "warmup_steps": 0, "adam_epsilon": 1e-4}
    if case == "sft of weighted tokens":
        keys |= {"loss_scale": "react", "dataset": [{"text": f"Action: {text} Thought: {text}"} for text in TEXTS]}
    if case.startswith("sft"):
        sft = SFTTrainer(sft_config(model, folder, **keys))
        sft.policy.build(model, 10)
        batch = sft.sequences[np.arange(num_sequences)]
        metrics = sft.policy.step(batch, int(batch.target_mask.values.sum()))
        sft.policy.export(folder)
    else:
        grpo = GRPOTrainer(grpo_config(model, folder, **keys, loss_type=loss_type, entropy_coef=0.01, temperature=0.9))
        grpo.build(10)
        samples = grpo.with_logps(injected_samples(), off_policy=False)
        metrics = grpo.learn(samples, samples)
        grpo.policy.export(folder)
    return metrics.values(), load_file(folder / "model.safetensors")


def injected_samples() -> Samples:
    """Seven completions of 1 to 13 random tokens, some so far off the policy that they are clipped, one masked out."""
    random = np.random.default_rng(5)
    prompts, completions = [2, 9, 4, 1, 6, 3, 5], [13, 1, 7, 2, 10, 5, 1]
    lengths = np.add(prompts, completions)
    return Samples(
        input_ids=Ragged.split(random.integers(4, 260, lengths.sum()), lengths),
        target_mask=Ragged.of([[False] * p + [True] * c for p, c in zip(prompts, completions, strict=True)], bool),
        advantages=random.normal(size=7).astype(np.float32),
        loss_mask=Ragged.of([[k != 3] * length for k, length in enumerate(completions)], bool),
        old_logps=Ragged.split(random.normal(-6.0, 0.7, sum(completions)).astype(np.float32), completions),
    )


def assert_same_step(found: Step, expected: Step, where: str) -> None:
    """Metrics and weights equal to 1e-6, those of weights that were trained."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6), where
    furthest = {name: float((found[1][name] - weight).abs().max()) for name, weight in expected[1].items()}
    assert max(furthest.values()) < 1e-6, f"{where}: {furthest}"


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_do_not_change_a_step(case: str, alone: dict[str, Step], model: str, tmp_path: Path) -> None:
    untrained = load_file(Path(model) / "model.safetensors")
    assert max(float((weight - untrained[name]).abs().max()) for name, weight in alone[case][1].items()) > 1e-3
    for size in CASES[case][2]:
        assert_same_step(one_step(case, size, model, tmp_path), alone[case], f"micro-batches of {size}")


def test_a_step_over_four_workers_is_the_step_of_one(
    alone: dict[str, Step], model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    with ray_session(together(4)):
        for case in CASES:
            assert_same_step(one_step(case, 1, model, tmp_path), alone[case], f"{case} on four workers")


def test_one_ray_worker_equals_ray_off_bit_for_bit(
    off: Path, model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """So does GRPO with its roles on two: the next test."""
    with ray_session(together(1)):
        SFTTrainer(sft_config(model, tmp_path)).train()
    assert lines(tmp_path) == lines(off / "sft")
    assert final_bytes(tmp_path) == final_bytes(off / "sft")


def test_roles_on_separate_groups_equal_roles_that_share_one(
    off: Path, model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """Every completion was drawn from weights that went from one worker to the other."""
    with ray_session(separate()):
        trainer = GRPOTrainer(grpo_config(model, tmp_path))
        trainer.train()
        greedy = trainer.evaluate()
        assert lines(tmp_path) == lines(off / "grpo")
        assert final_bytes(tmp_path) == final_bytes(off / "grpo")
        assert greedy == {name: value for name, value in lines(off / "grpo")[-1].items() if name.startswith("eval_")}


class DyingPolicy(Policy):
    """Its worker ends before the engine has met it."""

    @RayHelper.function(group="train")
    def send(self, channel: Channel, version: int) -> None:
        os._exit(1)


class DyingTrainer(GRPOTrainer):
    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.policy = DyingPolicy(config, loss=grpo_loss)
        self.generator = Generator(config, self.policy, self.rewarder)


def test_a_policy_that_died_is_told_while_engines_wait_for_its_weights(
    ray_cluster: None, model: str, tmp_path: Path
) -> None:
    """They would wait for ten minutes, and tell of the channel alone."""
    groups = {
        "learner": {"device": "CPU", "ranks": 1, "workers": [role for role in ROLES if role != "rollout"]},
        "engine": {"device": "CPU", "ranks": 1, "workers": ["rollout"]},
    }
    with (
        without_runtime(),
        RayHelper.session(groups, runtime="ray"),
        pytest.raises(WorkerDiedError, match=r"policy\.send"),
    ):
        DyingTrainer(grpo_config(model, tmp_path)).train()
