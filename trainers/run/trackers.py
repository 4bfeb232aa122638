"""Where the numbers of a run go: the console (``console.py``), ``metrics.jsonl``, and the trackers of ``services/``.

``metrics.jsonl`` holds every step at full precision, one JSON object a line; NaN and infinity, which JSON lacks, are
written as null. Completions go to ``completions/completions_00010.parquet``, under the names of TRL.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import trainers.run.services.built_in  # noqa: F401 - which registers ours
from rayhelper import ConfigError
from rayhelper.text import nearest
from trainers.plugins import TRACKERS
from trainers.run.console import Console
from trainers.run.services import TrackedRun, Tracker

NONE = "none"
BUILT_IN = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")


class Trackers:
    """Open files and connections of one run; a context manager.

    ``first_step`` is the step that a resumed run goes on from, 0 for a new one; ``headline`` names the few numbers that
    the progress bar and the console show. Raises ConfigError if ``report_to`` needs what is not installed, or names a
    tracker that nobody registered.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        report_to: Sequence[str],
        run_name: str | None,
        total_steps: int,
        first_step: int,
        headline: Sequence[str],
        logging_steps: int,
        config: Mapping[str, Any],
    ) -> None:
        self.output_dir = output_dir
        check_installed(report_to)
        check_known(report_to)
        output_dir.mkdir(parents=True, exist_ok=True)
        _keep_until(output_dir / "metrics.jsonl", first_step)
        self.lines = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
        run = TrackedRun(output_dir, run_name, config, first_step)
        self.open: list[Tracker] = [TRACKERS[name](run) for name in report_to if name != NONE]
        self.console = Console(total_steps, first_step, tuple(headline), logging_steps)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, numbers: Mapping[str, float], *, advance: bool = True) -> None:
        """Writes one step's numbers everywhere; ``advance``: they are of a step, not of an evaluation."""
        numbers = {name: float(value) for name, value in numbers.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.lines.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self.lines.flush()
        for tracker in self.open:
            tracker.log(step, numbers)
        if advance:
            self.console.step(step, numbers)
        else:
            self.console.evaluation(step, numbers)

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]], *, num_shown: int = 2) -> None:
        """Keeps the completions of a step in a Parquet file and shows the first few as a table."""
        import pandas as pd

        folder = self.output_dir / "completions"
        folder.mkdir(exist_ok=True)
        table = pd.DataFrame({"step": step, **{name: list(column) for name, column in columns.items()}})
        table.to_parquet(folder / f"completions_{step:05d}.parquet")
        names = [name for name in columns if name != "turns"]
        for tracker in self.open:
            tracker.completions(step, table.map(lambda value: value if isinstance(value, (float, int)) else str(value)))
        rows = table[names].head(num_shown).to_numpy().tolist()
        self.console.write(_drawn(f"step {step}", names, [[_cell(value) for value in row] for row in rows]))

    def close(self) -> None:
        """Closes everything; nothing is lost."""
        self.console.close()
        self.lines.close()
        for tracker in self.open:
            tracker.close()


def check_installed(report_to: Sequence[str]) -> None:
    """Raises ConfigError with the line that installs what ``report_to`` needs and this Python lacks."""
    for name in BUILT_IN:
        if name in report_to and not _is_installed(name):
            raise ConfigError(
                f"report_to has {name}, which is not installed. Run `pip install {name}`, or remove it from report_to "
                "(report_to: none leaves metrics.jsonl)."
            )


def check_known(report_to: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that neither is ours nor was registered. Called when plugins are loaded."""
    for name in report_to:
        if name not in (*TRACKERS, NONE):
            known = ", ".join([*TRACKERS, NONE])
            raise ConfigError(
                f"report_to has {name!r}, which no plugin registers{nearest(name, list(TRACKERS))}. Known: {known}."
            )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _cell(value: Any) -> str:
    """A value as a table shows it: numbers short, text cut in the middle."""
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 400 else f"{text[:200]} [...] {text[-200:]}"


def _drawn(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The text of a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_lines=True, title_justify="left")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a completion may hold what looks like markup
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def _keep_until(file: Path, last_step: int) -> None:
    """Drops the lines of steps after ``last_step``, and one that a kill cut short: a resumed run writes them again.

    A run that starts anew leaves the file of an earlier one as ``metrics.1.jsonl``, ``metrics.2.jsonl``, ...
    """
    if not file.exists():
        return
    if last_step == 0:
        names = (file.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        file.rename(next(name for name in names if not name.exists()))
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last_step]
    rewritten = file.with_name(file.name + ".tmp")
    rewritten.write_text("".join(kept), encoding="utf-8")
    rewritten.replace(file)
