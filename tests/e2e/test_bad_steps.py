"""Runs in which steps are not finite: what is skipped, said, saved, and when the run ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rayhelper import RayHelper
from tests.conftest import without_runtime
from tests.e2e.runs import final_weights, grpo_config, lines, sft_config, together
from tests.golden.tiny import save_tiny
from trainers.grpo import trainer as grpo
from trainers.grpo.trainer import GRPOTrainer
from trainers.run.bad_steps import BadStepsError
from trainers.sft import trainer as sft
from trainers.sft.loss import supervised_loss
from trainers.sft.trainer import SFTTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def poisoned(rows: set[int]) -> Any:
    """SFT's loss, NaN for micro-batches with one of these rows."""

    def loss(config: Any, number: Any, *args: Any) -> torch.Tensor:
        micro = args[3]
        return supervised_loss(config, number, *args) * (math.nan if rows & set(micro.row_ids.tolist()) else 1.0)

    return patch.object(sft, "supervised_loss", loss)


@contextmanager
def place(workers: int) -> Iterator[None]:
    with without_runtime():
        if not workers:
            yield
            return
        with RayHelper.session(together(workers), runtime="inprocess"):
            yield


def test_a_row_whose_loss_is_nan_costs_one_step_and_is_named(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = sft_config(model, tmp_path, num_train_epochs=2, save_steps=1)
    with without_runtime(), poisoned({3}), caplog.at_level(logging.WARNING, "trainers.run.bad_steps"):
        SFTTrainer(config).train()
    told = lines(tmp_path)
    bad = [step for step, line in enumerate(told, 1) if line["loss"] is None]  # how NaN is written
    assert len(bad) == 2  # once an epoch
    assert [line.get("bad_steps", 0) for line in told] == [
        sum(step <= k for step in bad) for k in range(1, len(told) + 1)
    ]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(f"step {step} was skipped: loss nan" in line for step, line in zip(bad, said, strict=True))
    assert all("3" in line.partition("rows")[2] for line in said)
    assert all(bool(weight.isfinite().all()) for weight in final_weights(tmp_path).values())
    saved = {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*")}
    assert saved == set(range(1, len(told))) - set(bad)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_ends_after_max_bad_steps_with_the_rows(workers: int, model: str, tmp_path: Path) -> None:
    config = sft_config(model, tmp_path, max_bad_steps=2, save_steps=1)
    told = r"^2 optimizer steps in a row had .* \(the last one: loss nan.*\), rows \d.*max_bad_steps"
    with place(workers), poisoned(set(range(11))), pytest.raises(BadStepsError, match=told):
        SFTTrainer(config).train()
    assert [line["bad_steps"] for line in lines(tmp_path)] == [1, 2]
    assert not list(tmp_path.glob("checkpoint-*"))


def test_grpo_names_the_rows_of_advantages_that_are_no_numbers(model: str, tmp_path: Path) -> None:
    credit = grpo.credit

    def infinite(*args: Any) -> Any:
        samples, metrics = credit(*args)
        samples.advantages[:] = math.inf
        return samples, metrics

    config = grpo_config(model, tmp_path, eval_dataset=None, max_bad_steps=1, shuffle_dataset=False)
    told = "1 optimizer steps in a row .*, rows [0-3, ]*. They changed no weight"
    with without_runtime(), patch.object(grpo, "credit", infinite), pytest.raises(BadStepsError, match=told):
        GRPOTrainer(config).train()
