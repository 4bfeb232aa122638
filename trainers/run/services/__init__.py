"""Services that draw the numbers of runs: TensorBoard, wandb, SwanLab, MLflow, trackio, and those of plugins.

    @register_tracker("my_tracker")        # then: report_to: [my_tracker]
    class MyTracker:
        def __init__(self, run): ...                       # a TrackedRun
        def log(self, step, numbers): ...                  # {"loss": 0.5, ...}; NaN and infinity may be among them
        def completions(self, step, table): ...            # a pandas.DataFrame, with log_completions
        def close(self): ...

``built_in.py`` registers ours. Nothing is imported before a run asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run."""

    folder: Path
    name: str | None  # run_name
    config: Mapping[str, Any]  # every key, secrets as ***
    first_step: int  # that a resumed run continues from; 0: a new run

    @property
    def project(self) -> str:
        """Of services that divide runs into projects, unless their own environment variable names one."""
        return "rayhelper"

    def known_id(self, service: str) -> str | None:
        """The service's name of the run that this one continues; None for a new run."""
        file = self._file(service)
        return file.read_text(encoding="utf-8").strip() if file.exists() and self.first_step else None

    def keep_id(self, service: str, run_id: str) -> None:
        """Keeps the service's name of this run, for one that continues it."""
        self._file(service).write_text(run_id, encoding="utf-8")

    def _file(self, service: str) -> Path:
        return self.folder / f"{service}_run_id.txt"


class Tracker(Protocol):
    """A service that is open for one run. Process 0 calls it."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of an optimizer step, or of an evaluation behind it."""

    def completions(self, step: int, table: Any) -> None:
        """Takes completions of a step: a pandas.DataFrame of texts and numbers."""

    def close(self) -> None:
        """Sends what is left."""
