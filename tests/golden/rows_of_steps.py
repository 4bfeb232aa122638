"""The rows that transformers' Trainer gives to each optimizer step: as JSON, for ``test_rows_of_steps.py``.

    torchrun --nproc_per_node 2 tests/golden/rows_of_steps.py '[[11, true, 2]]' rows.json

Arguments: number of rows, ``dataloader_drop_last`` and ``gradient_accumulation_steps`` of each run, and the file. A
micro-batch of a worker has two rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers


class Model(torch.nn.Module):
    """One weight, and a loss that asks for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, row: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * row.float().mean()}


class Trainer(transformers.Trainer):
    """Keeps the rows of each optimizer step, those of all workers."""

    steps: list[list[int]]

    def training_step(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: Any) -> torch.Tensor:
        rows = self.accelerator.gather(inputs["row"]).tolist()
        while len(self.steps) <= self.state.global_step:
            self.steps.append([])
        self.steps[self.state.global_step] += rows
        return super().training_step(model, inputs, *args)


def rows_of_steps(num_rows: int, drop_last: bool, accumulated: int) -> list[list[int]]:
    """The rows of the steps of one epoch, in the order of the data."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulated,
            dataloader_drop_last=drop_last,
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(Model(), arguments, train_dataset=[{"row": row} for row in range(num_rows)])
        trainer.steps = []
        trainer.train()
        return trainer.steps


if __name__ == "__main__":
    found = [rows_of_steps(*run) for run in json.loads(sys.argv[1])]
    Path(sys.argv[2]).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
