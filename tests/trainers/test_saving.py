"""When a run saves, evaluates and ends: beside transformers' Trainer, and resumed beside a run that never stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from rayhelper import ConfigError
from tests.e2e.runs import TEXTS, final_bytes, grpo_config, interrupted_after, lines, sft_config
from tests.golden.tiny import save_tiny
from trainers.checkpoint import checkpoints, read_state
from trainers.configuration.shared import TrainConfig
from trainers.data.batches import Batches
from trainers.grpo.trainer import GRPOTrainer
from trainers.metrics import Metrics
from trainers.run.run import Run
from trainers.sft.trainer import SFTTrainer

ROWS, EPOCHS = 11, 3
LOSSES = [5.0, 4.0, 4.5, 3.0, 3.0, 3.5, 6.0, 2.0, 4.0]  # of evaluations, one after the other


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), attention_dropout=0.1)


# Beside transformers' Trainer


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


class Scripted(Trainer):
    """Its evaluations find LOSSES."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        self.evaluated = [*getattr(self, "evaluated", []), self.state.global_step]
        numbers = {"eval_loss": LOSSES[len(self.evaluated) - 1]}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, numbers)
        return numbers


def theirs(folder: Path, callbacks: list[Any], **keys: Any) -> Scripted:
    """After it has trained."""
    settings: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "num_train_epochs": EPOCHS}
    arguments = TrainingArguments(str(folder / "theirs"), per_device_train_batch_size=2, **(settings | keys))
    rows = [{"x": torch.ones(1)}] * ROWS
    trainer = Scripted(Line(), arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=callbacks)
    trainer.train()
    return trainer


class Ours:
    """A trainer whose steps do nothing, and whose evaluations find LOSSES; its weight is its step."""

    def __init__(self) -> None:
        self.tokenizer = self
        self.evaluated: list[int] = []
        self.weight = 0

    def train(self, run: Run, steps_per_epoch: int, at_once: int = 1) -> None:
        self.run = run
        for _ in run.rounds(self):
            for _ in range(min(at_once, run.num_steps - run.step)):
                self.weight = run.step + 1
                run.log_step(Metrics(), epoch=self.weight / steps_per_epoch)

    def evaluate(self) -> dict[str, float]:
        self.evaluated.append(self.run.step)
        return {"eval_loss": LOSSES[len(self.evaluated) - 1]}

    def save(self, folder: Path) -> None:
        (folder / "weight").write_text(str(self.weight))

    def load(self, folder: Path) -> None:
        self.weight = int((folder / "weight").read_text())

    def save_pretrained(self, folder: Path) -> None:
        pass


BY_EPOCH: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch"}
BEST: dict[str, Any] = {"metric_for_best_model": "loss", "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("accumulation", "keys"),
    [
        (1, BY_EPOCH),
        (2, BY_EPOCH),
        (4, BY_EPOCH),  # an epoch of 6 micro-batches: a step of 4, and one of 2
        (1, BY_EPOCH | BEST | {"save_total_limit": 1}),
        (1, BEST | {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}),
        (1, BEST | {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}),
        (1, {"eval_strategy": "no", "save_strategy": "no"}),
    ],
    ids=str,
)
def test_a_run_saves_and_evaluates_when_transformers_does(
    accumulation: int, keys: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But for the last step, whose model is in the folder final."""
    trainer = theirs(tmp_path, [], gradient_accumulation_steps=accumulation, **keys)
    steps_per_epoch = Batches(ROWS, 2 * accumulation).steps_per_epoch
    config = TrainConfig(
        model="m", dataset=[{}], eval_dataset=[{}], output_dir=str(tmp_path), report_to=["none"], **keys
    )
    with Run(config, EPOCHS * steps_per_epoch, headline=(), order={}) as run:
        ours = Ours()
        with caplog.at_level(logging.INFO):
            ours.train(run, steps_per_epoch)
    assert run.num_steps == trainer.state.global_step
    assert ours.evaluated == getattr(trainer, "evaluated", [])
    saved = {path.name for path in (tmp_path / "theirs").glob("checkpoint-*")}
    assert {path.name for path in checkpoints(tmp_path)} == saved - {f"checkpoint-{run.num_steps}"}
    if config.load_best_model_at_end:
        source = "the last step" if ours.weight == run.num_steps else str(tmp_path / f"checkpoint-{ours.weight}")
        assert any(
            line.startswith(f"load_best_model_at_end: the final model comes from {source}") for line in caplog.messages
        )
        assert f"checkpoint-{ours.weight}" == Path(str(trainer.state.best_model_checkpoint)).name


def run_of(folder: Path, num_steps: int, **keys: Any) -> Run:
    data: dict[str, Any] = {"model": "m", "dataset": [{}], "eval_dataset": [{}], "report_to": ["none"]}
    return Run(TrainConfig(**data, output_dir=str(folder), **keys), num_steps, headline=(), order={})


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_a_run_ends_where_transformers_patience_ends(interval: int, tmp_path: Path) -> None:
    """Which counts evaluations, one at each checkpoint here."""
    keys: dict[str, Any] = BY_EPOCH | BEST
    trainer = theirs(tmp_path, [EarlyStoppingCallback(interval)], num_train_epochs=9, **keys)
    with run_of(tmp_path, 9 * 6, early_stop_interval=interval, **keys) as run:
        ours = Ours()
        ours.train(run, steps_per_epoch=6)
    assert (run.step, ours.evaluated) == (trainer.state.global_step, trainer.evaluated)
    assert f"checkpoint-{ours.weight}" == Path(str(trainer.state.best_model_checkpoint)).name


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_resumed_run_counts_on(stop: int, tmp_path: Path) -> None:
    """An evaluation between two checkpoints counts: 4.0, 3.0 and then 3.0 once more are the best at each of them."""
    keys: dict[str, Any] = {"eval_steps": 1, "save_steps": 2, "metric_for_best_model": "loss", "early_stop_interval": 1}
    with interrupted_after(stop), pytest.raises(KeyboardInterrupt), run_of(tmp_path, 9, **keys) as run:
        Ours().train(run, steps_per_epoch=1)
    with run_of(tmp_path, 9, resume_from_checkpoint="auto", **keys) as resumed:
        ours = Ours()
        ours.evaluated = list(range(1, resumed.step + 1))
        ours.train(resumed, steps_per_epoch=1)
    assert (resumed.step, ours.evaluated) == (6, [1, 2, 3, 4, 5, 6])
    with run_of(tmp_path, 9, resume_from_checkpoint="auto", **keys) as over:
        ours.train(over, steps_per_epoch=1)
    assert (over.step, ours.evaluated) == (6, [1, 2, 3, 4, 5, 6])  # it has ended, and is not evaluated again
    with run_of(tmp_path, 9, resume_from_checkpoint="auto", **keys | {"early_stop_interval": 2}) as patient:
        ours.train(patient, steps_per_epoch=1)
    assert patient.step == 9


def test_rounds_of_several_steps_end_with_the_epoch_that_they_pass(tmp_path: Path) -> None:
    config = TrainConfig(
        model="m", dataset=[{}], eval_dataset=[{}], output_dir=str(tmp_path), report_to=["none"], **BY_EPOCH
    )
    with Run(config, 12, headline=(), order={}) as run:
        ours = Ours()
        ours.train(run, steps_per_epoch=3, at_once=2)
    assert ours.evaluated == [4, 6, 10, 12]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6", "checkpoint-10"]


def test_the_last_evaluation_may_be_the_best(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "report_to": ["none"]}
    config = TrainConfig(model="m", dataset=[{}], eval_dataset=[{}], output_dir=str(tmp_path), **keys, **BEST)
    with Run(config, 8, headline=(), order={}) as run:
        ours = Ours()
        ours.train(run, steps_per_epoch=1)
    assert (run.best.checkpoint, ours.weight) == ("checkpoint-4", 8)  # 3.0 at its step, and 2.0 at the last


def test_what_is_saved_out_of_turn_is_not_judged(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"eval_steps": 2, "save_steps": 2, "report_to": ["none"], **BEST}
    config = TrainConfig(model="m", dataset=[{}], eval_dataset=[{}], output_dir=str(tmp_path), **keys)
    with Run(config, 8, headline=(), order={}) as run:
        run.log_evaluation({"eval_loss": 1.0})
        run.log_step(Metrics(), epoch=0.5)
        run.save_checkpoint(Ours().save, Ours(), is_due=False)
    assert read_state(tmp_path / "checkpoint-1")["best_model_checkpoint"] is None


def test_the_best_checkpoint_must_be_there_to_be_loaded(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"eval_steps": 1, "save_steps": 1, "report_to": ["none"], **BEST}
    data: dict[str, Any] = {"model": "m", "dataset": [{}], "eval_dataset": [{}]}
    with Run(TrainConfig(**data, **keys, output_dir=str(tmp_path / "a")), 8, headline=(), order={}) as run:
        run.log_step(Metrics(), epoch=0.5)
        run.log_evaluation({"eval_loss": 1.0})
        run.save_checkpoint(Ours().save, Ours())
    keys |= {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-1")}
    with pytest.raises(ConfigError, match=f"checkpoint-1, which is not in {tmp_path / 'b'}"):
        Run(TrainConfig(**data, **keys, output_dir=str(tmp_path / "b")), 8, headline=(), order={})


def test_a_best_checkpoint_with_a_flipped_bit_does_not_become_the_model(tmp_path: Path) -> None:
    """It may be days old when it is loaded."""
    keys: dict[str, Any] = {"eval_steps": 1, "save_steps": 1, **BEST}

    def flips_a_bit(self: Ours, folder: Path) -> None:
        (folder / "weight").write_text(str(self.weight))
        if self.weight == 6:  # the best one is of step 4
            (tmp_path / "checkpoint-4" / "weight").write_text("5")

    ours = type("Damaged", (Ours,), {"save": flips_a_bit})()
    with (
        run_of(tmp_path, 7, **keys) as run,
        pytest.raises(ConfigError, match=r"checkpoint-4 is damaged: weight differs"),
    ):
        ours.train(run, steps_per_epoch=7)
    assert ours.weight == 7


# Whole runs

STREAM: dict[str, Any] = {"streaming": True, "max_steps": 9, "disable_dropout": False}
EVALUATED = {"eval_dataset": [{"text": text} for text in TEXTS[:3]]}
RUNS: dict[str, tuple[Any, Any, int, dict[str, Any], list[int]]] = {  # trainer, config, interrupted after, keys, saved
    "sft": (SFTTrainer, sft_config, 7, {"disable_dropout": False} | EVALUATED | BY_EPOCH, [3, 6]),
    "a stream": (SFTTrainer, sft_config, 7, STREAM | EVALUATED | BY_EPOCH, [3, 6]),
    "a stream that ends": (SFTTrainer, sft_config, 4, STREAM | {"save_strategy": "epoch", "end_after_epochs": 2}, [3]),
    "grpo": (GRPOTrainer, grpo_config, 9, BY_EPOCH, [6]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_saves_by_epochs_resumes_bit_for_bit(name: str, model: str, tmp_path: Path) -> None:
    trainer, config, stop, keys, saved = RUNS[name]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    trainer(config(model, whole, **keys)).train()
    with interrupted_after(stop), pytest.raises(KeyboardInterrupt):
        trainer(config(model, parted, **keys)).train()
    trainer(config(model, parted, **keys, resume_from_checkpoint="auto")).train()
    assert [path.name for path in checkpoints(whole)] == [f"checkpoint-{step}" for step in saved]
    assert lines(parted) == lines(whole)
    assert final_bytes(parted) == final_bytes(whole)
    last = saved[-1] + saved[0]
    assert lines(whole)[-1]["step"] == last
    evaluated = [line["step"] for line in lines(whole) if any(key.startswith("eval_") for key in line)]
    assert evaluated == ([*saved, last] if "eval_strategy" in keys else [])


def test_rows_held_back_are_learned_where_nothing_is_evaluated(model: str, tmp_path: Path) -> None:
    for strategy, num_rows in (("no", 11), ("epoch", 8)):
        trainer = SFTTrainer(sft_config(model, tmp_path, split_dataset_ratio=0.3, eval_strategy=strategy))
        assert (len(trainer.sequences), trainer.eval_sequences is None) == (num_rows, strategy == "no")


def test_the_final_model_is_that_of_the_best_checkpoint(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"eval_dataset": [{"text": "QZX 741 %&$ KJWVQ 963"}], "eval_steps": 1, "save_steps": 1}
    keys |= {"learning_rate": 1e-2, "metric_for_best_model": "loss"}
    SFTTrainer(sft_config(model, tmp_path / "best", **keys, load_best_model_at_end=True)).train()
    losses = {line["step"]: line["eval_loss"] for line in lines(tmp_path / "best") if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best < 9
    with interrupted_after(best + 1), pytest.raises(KeyboardInterrupt):
        SFTTrainer(sft_config(model, tmp_path / "short", **keys)).train()
    config = sft_config(model, tmp_path / "short", **keys, resume_from_checkpoint="auto", end_after_epochs=1)
    trainer = SFTTrainer(config)
    trainer.policy.build(trainer.model_path, 9)
    trainer.policy.load(tmp_path / "short" / f"checkpoint-{best}")
    (tmp_path / "short" / "final").mkdir()
    trainer.policy.export(tmp_path / "short" / "final")
    assert final_bytes(tmp_path / "short") == final_bytes(tmp_path / "best")
