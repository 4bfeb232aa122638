"""The last rows of an epoch are learned, or left out, as transformers' Trainer does it, with one worker and two."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden.rows_of_steps import rows_of_steps
from tests.rayhelper.test_torchrun import torchrun
from trainers.configuration.shared import order_by_rows_of, sequences_per_step
from trainers.data.packs import batches_of
from trainers.sft.config import SFTConfig

Steps = list[list[int]]
RUNS = [*itertools.product((9, 11), (False, True), (1, 2))]


def ours(num_rows: int, drop_last: bool, accumulated: int, num_workers: int) -> Steps:
    config = SFTConfig(
        model="m",
        dataset="d",
        shuffle_dataset=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulated,
        dataloader_drop_last=drop_last,
    )
    size = sequences_per_step(config, num_workers)
    batches = batches_of(np.ones(num_rows, np.int64), size, **order_by_rows_of(config))
    return [batches[step].tolist() for step in range(batches.steps_per_epoch)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Steps]]:
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    root = Path(__file__).parents[2]
    done = torchrun(2, "-m", "tests.golden.rows_of_steps", json.dumps(RUNS), str(file), cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    return {1: [rows_of_steps(*run) for run in RUNS], 2: json.loads(file.read_text())}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_steps_have_the_rows_that_transformers_gives_them(theirs: dict[int, list[Steps]], num_workers: int) -> None:
    """Two workers of transformers fill the last micro-batches with rows that they have seen, which is not done here."""
    for run, steps in zip(RUNS, theirs[num_workers], strict=True):
        seen: set[int] = set()
        for step in steps:
            step[:] = sorted(set(step) - seen)
            seen |= set(step)
        assert ours(*run, num_workers) == steps, run
