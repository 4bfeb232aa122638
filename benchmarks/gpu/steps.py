"""What the steps of a training run took, ours as its metrics say and TRL's by a clock; those that warm up left out."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.so_far import note

PHASES = ("time/", "time_share/", "throughput/")
ON_GPU = torch.cuda.is_available()  # without one a benchmark can be tried, but measures nothing


def our_steps(output_dir: Path, warm: int) -> list[dict[str, float]]:
    """The metrics of the steps after the first ``warm`` ones; none of a run that wrote none."""
    file = output_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if "time/step" in line][warm:]


def phases(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians of where our time went, and of how fast that was."""
    names = dict.fromkeys(name for step in steps for name in step if name.startswith(PHASES))
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def clock() -> Any:
    """A callback of transformers' Trainer: ``ends`` and ``seconds`` of its steps, from end to end, and its ``logs``."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends, self.seconds, self.logs = [time.perf_counter()], [], []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.ends.append(time.perf_counter())
            self.seconds.append(self.ends[-1] - self.ends[-2])
            note("seconds", self.seconds)

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            self.logs.append(dict(logs or {}))

        def logged(self, name: str) -> list[float]:
            return [float(logs[name]) for logs in self.logs if name in logs]

    return Clock()


def trl_settings(folder: Path, num_steps: int) -> dict[str, Any]:
    """What all of TRL's trainers are told: bfloat16 where there is a GPU, and nothing kept or sent."""
    return {
        "output_dir": str(folder),
        "max_steps": num_steps,
        "learning_rate": 1e-6,
        "bf16": ON_GPU,
        "use_cpu": not ON_GPU,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
