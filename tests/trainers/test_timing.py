"""Where the time of a step went, and how much was worked through in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhelper import ConfigError
from tests.e2e.runs import (
    dpo_config,
    gkd_config,
    grpo_config,
    ppo_config,
    reward_config,
    sft_config,
    whole_lines,
)
from tests.golden.tiny import save_tiny
from trainers.configuration.shared import TrainConfig
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.metrics import Metrics
from trainers.ppo.trainer import PPOTrainer
from trainers.reward.trainer import RewardTrainer
from trainers.run.run import Run
from trainers.run.throughput import add_memory, add_work, flops_of, known_peak, throughput
from trainers.run.timing import Stopwatch, step_times
from trainers.sft.trainer import SFTTrainer


class Clock:
    """Time goes by when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def breaks_after(self, seconds: float) -> None:
        self.passes(seconds)
        raise RuntimeError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


# The stopwatch


def test_what_no_phase_covers_is_idle_and_a_phase_entered_twice_adds_up(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    clock.passes(1)
    for seconds in (2, 4):
        with stopwatch.phase("update"):
            clock.passes(seconds)
        clock.passes(8)
    assert stopwatch.lap() == {"idle": 17.0, "update": 6.0}


def test_a_phase_inside_a_phase_counts_once(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    with stopwatch.phase("generate"):
        clock.passes(1)
        with stopwatch.phase("data"):
            clock.passes(2)
            with stopwatch.phase("generate"):
                clock.passes(4)
        clock.passes(8)
    assert stopwatch.lap() == {"idle": 0.0, "generate": 13.0, "data": 2.0}


def test_an_error_ends_the_phases_that_it_leaves(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    with stopwatch.phase("update"):
        with pytest.raises(RuntimeError), stopwatch.phase("logps"):
            clock.breaks_after(1)
        clock.passes(2)
    clock.passes(4)
    assert stopwatch.lap() == {"idle": 4.0, "update": 2.0, "logps": 1.0}


def test_a_lap_begins_where_the_last_one_ended_within_a_phase_too(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    clock.passes(1)
    with stopwatch.phase("update"):
        clock.passes(2)
        assert stopwatch.lap() == {"idle": 1.0, "update": 2.0}
        clock.passes(4)
    assert stopwatch.lap() == {"idle": 0.0, "update": 4.0}
    assert stopwatch.lap() == {"idle": 0.0}


def test_while_it_is_stopped_nothing_counts_whatever_is_entered(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    with stopwatch.phase("update"):
        clock.passes(1)
        with stopwatch.stopped(), stopwatch.phase("generate"):
            clock.passes(2)
        clock.passes(4)
    with pytest.raises(RuntimeError), stopwatch.stopped():
        clock.breaks_after(8)
    clock.passes(16)
    assert stopwatch.lap() == {"idle": 16.0, "update": 5.0}


def test_shares_are_of_the_step_and_a_step_that_took_no_time_has_none() -> None:
    assert step_times({"idle": 1.0, "update": 3.0}) == {
        "time/step": 4.0,
        **{"time/idle": 1.0, "time/update": 3.0},
        **{"time_share/idle": 0.25, "time_share/update": 0.75},
    }
    assert step_times({"idle": 0.0}) == {"time/step": 0.0, "time/idle": 0.0, "time_share/idle": 0.0}


# Throughput


def test_mfu_is_six_flops_a_parameter_and_token_by_what_the_devices_could_do() -> None:
    """Two workers of 1000 FLOP/s: 6 x 20 x (30 + 50) = 9600 FLOPs in 8 of the 10 seconds."""
    layer = torch.nn.Linear(4, 4)  # 20 parameters
    parts = []
    for num_tokens in (30, 50):
        metrics = Metrics()
        add_work(metrics, num_tokens, flops_of(layer, num_tokens), 1000.0)
        parts.append(metrics)
    found = throughput(Metrics.merge(parts), {"idle": 2.0, "update": 8.0})
    assert found == {"throughput/tokens_per_second": 8.0, "throughput/mfu": 9600 / (8 * 2 * 1000)}


def test_memory_is_that_of_the_fullest_gpu_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((60 - 8 * device.index) * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: (10 + device.index) * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (15 - device.index) * gib)
    parts = [Metrics(), Metrics(), Metrics()]
    for part, device in zip(parts, ("cuda:0", "cuda:1", "cpu"), strict=True):
        add_memory(part, torch.device(device))
    found = Metrics.merge(parts).values()
    assert found == {"memory/peak_gib": 11.0, "memory/reserved_gib": 15.0, "memory/device_used_gib": 28.0}
    assert parts[2].values() == {}


def test_what_is_frozen_costs_no_gradient_of_its_own() -> None:
    """4 x 20 + 2 x 4 a token: of the layer's parameters only the 4 of its bias are trained."""
    layer, metrics = torch.nn.Linear(4, 4), Metrics()
    layer.weight.requires_grad_(False)
    add_work(metrics, 10, flops_of(layer, 10), None)
    assert metrics.values() == {"update_tokens": 10.0, "update_flops": 880.0}
    assert throughput(metrics, {"idle": 0.0, "update": 5.0}) == {"throughput/tokens_per_second": 2.0}


def test_completions_are_counted_by_token_not_by_their_mean() -> None:
    metrics = Metrics()
    for lengths in ([3, 5], [4]):
        metrics.mean("completions/mean_length", sum(lengths), len(lengths))
    assert throughput(metrics, {"idle": 6.0}) == {"throughput/completion_tokens_per_second": 2.0}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
    ],
)
def test_a_peak_is_known_by_the_very_name_or_not_at_all(name: str, tflops: float | None) -> None:
    assert known_peak(name) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_peak_without_meaning_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="peak_tflops must be a positive number"):
        TrainConfig(model="m", dataset=[{"text": "a"}], peak_tflops=value)


# Runs


def test_evaluations_and_checkpoints_are_of_no_step(clock: Clock, tmp_path: Path) -> None:
    config = TrainConfig(model="m", dataset=[{"text": "a"}], output_dir=str(tmp_path), report_to=["none"])

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            clock.passes(32)

    with Run(config, 3, headline=("loss",), order={}) as run:
        run.stopwatch = Stopwatch(clock)

        def evaluate() -> Mapping[str, float]:
            with run.phase("generate"):
                clock.passes(64)
            return {"eval_loss": 1.0}

        run.evaluate(evaluate)
        clock.passes(1)
        with run.phase("update"):
            clock.passes(2)
        run.log_step(Metrics(), epoch=0.5)
        with run.phase("sync"):
            clock.passes(4)
        run.evaluate(evaluate)
        run.save_checkpoint(lambda folder: clock.passes(128), Tokenizer())
        clock.passes(8)
        run.log_step(Metrics(), epoch=1.0)
    steps = [line for line in whole_lines(tmp_path) if "time/step" in line]
    seconds = [{name[5:]: value for name, value in line.items() if name.startswith("time/")} for line in steps]
    assert seconds == [{"step": 3.0, "idle": 1.0, "update": 2.0}, {"step": 12.0, "idle": 8.0, "sync": 4.0}]
    assert [line["step_time"] for line in steps] == [3.0, 12.0]


def phases(line: dict[str, Any]) -> set[str]:
    """Those that a step tells; what it tells of each must fit."""
    seconds = {name[5:]: value for name, value in line.items() if name.startswith("time/")}
    step = seconds.pop("step")
    assert sum(seconds.values()) == pytest.approx(step)
    assert all(value >= 0 for value in seconds.values())
    assert seconds["update"] > 0
    shares = {name[11:]: value for name, value in line.items() if name.startswith("time_share/")}
    assert shares == pytest.approx({name: value / step for name, value in seconds.items()})
    return set(seconds) - {"idle"}


def test_grpo_tells_the_phases_of_a_generation_with_its_first_step(model: str, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path, max_steps=3, peak_tflops=0.5)
    trainer = GRPOTrainer(config)
    trainer.train()
    first, second, third = (line for line in whole_lines(tmp_path) if "loss" in line)
    exploring = {"data", "generate", "reward", "logps"}
    assert phases(first) == exploring | {"sync", "update"}
    assert phases(second) == phases(third) == {"sync", "update"}
    num_parameters = sum(weight.numel() for weight in trainer.policy.built.module.parameters())
    num_tokens = first["throughput/tokens_per_second"] * first["time/step"]
    assert num_tokens == pytest.approx(round(num_tokens))
    assert first["throughput/mfu"] == pytest.approx(6 * num_parameters * num_tokens / (first["time/update"] * 0.5e12))
    # 16 completions, learned from in two steps of 8: the two steps together go through all their tokens
    num_tokens += second["throughput/tokens_per_second"] * second["time/step"]
    assert num_tokens == pytest.approx(first["num_tokens"])
    num_completed = first["throughput/completion_tokens_per_second"] * first["time/step"]
    assert num_completed == pytest.approx(16 * first["completions/mean_length"])
    assert not any("completion_tokens" in name for name in second)


def test_ppo_counts_policy_and_critic_on_the_devices_that_they_share(model: str, tmp_path: Path) -> None:
    trainer = PPOTrainer(ppo_config(model, tmp_path, eval_dataset=None, max_steps=1, peak_tflops=0.5))
    trainer.train()
    (line,) = whole_lines(tmp_path)
    models = (trainer.policy.built.module, trainer.critic.built.module)
    num_parameters = sum(weight.numel() for module in models for weight in module.parameters())
    num_tokens = line["throughput/tokens_per_second"] * line["time/step"]
    flops = line["throughput/mfu"] * line["time/update"] * 0.5e12
    assert flops == pytest.approx(6 * num_parameters * num_tokens)


def test_every_other_trainer_tells_its_phases(model: str, tmp_path: Path) -> None:
    short: dict[str, Any] = {"eval_dataset": None, "max_steps": 2}
    teacher: dict[str, Any] = {"teacher_model": model, "gkd_logits_topk": 4, "lmbda": 1.0, "sft_alpha": 0.0}
    runs: dict[str, tuple[Any, Any, set[str]]] = {
        "sft": (SFTTrainer, sft_config(model, tmp_path / "sft", **short), {"data", "update"}),
        "reward": (RewardTrainer, reward_config(model, tmp_path / "reward", **short), {"data", "update"}),
        "dpo": (DPOTrainer, dpo_config(model, tmp_path / "dpo", **short), {"data", "logps", "update"}),
        "gkd": (
            GKDTrainer,
            gkd_config(model, tmp_path / "gkd", **short, **teacher),
            {"data", "sync", "generate", "logps", "update"},
        ),
        "ppo": (
            PPOTrainer,
            ppo_config(model, tmp_path / "ppo", **short),
            {"data", "sync", "generate", "logps", "reward", "update"},
        ),
    }
    for name, (trainer, config, expected) in runs.items():
        trainer(config).train()
        first, *_ = whole_lines(tmp_path / name)
        assert phases(first) == expected, name
        assert first["throughput/tokens_per_second"] > 0
        assert "throughput/mfu" not in first, "what a CPU can do is not known"
        assert not any(word.startswith("update_") for word in first)
