"""A run as its folder tells it: settings, numbers by step, and what is missing or damaged, in words.

Reading never fails: a run that was killed, or whose files were copied in part, is shown as far as it goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rayhelper.text import read_yaml
from trainers.run.origin import ORIGIN_FILE

EVAL = "eval_"
Points = list[tuple[int, float]]  # (step, value), in order


@dataclass
class Recorded:
    """What is known of a run."""

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # config.yaml
    settings_text: str = ""
    origin: dict[str, Any] = field(default_factory=dict)  # run.json
    series: dict[str, Points] = field(default_factory=dict)  # by name of the metric
    missing: dict[str, int] = field(default_factory=dict)  # by name: steps whose value was not finite
    problems: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step of which a number is known; 0 if there is none."""
        return max((points[-1][0] for points in self.series.values()), default=0)

    @property
    def num_steps(self) -> int | None:
        """The steps that the run was to have, where known."""
        found = self.origin.get("num_steps")
        return found if isinstance(found, int) else None

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, the resumed ones too; the last one first."""
        found = self.origin.get("starts")
        return [start for start in reversed(found) if isinstance(start, dict)] if isinstance(found, list) else []

    @property
    def ended(self) -> str | None:
        """How the run ended; None: it runs, or was killed."""
        found = self.origin.get("end")
        return str(found.get("how")) if isinstance(found, Mapping) else None

    def evaluations(self) -> dict[str, Points]:
        """The numbers of evaluations, without ``eval_``."""
        return {name.removeprefix(EVAL): found for name, found in self.series.items() if name.startswith(EVAL)}


def recorded(folder: Path, name: str | None = None) -> Recorded:
    """The run in ``folder``; ``name`` is what the page calls it.

    Raises:
        FileNotFoundError: the folder is not there, or holds nothing of a run.
    """
    files = [folder / one for one in ("metrics.jsonl", "config.yaml", ORIGIN_FILE)]
    if not any(file.is_file() for file in files):
        what = (
            "holds no run: there is no metrics.jsonl, config.yaml or run.json" if folder.is_dir() else "is not a folder"
        )
        raise FileNotFoundError(f"{folder} {what}. Name the output_dir of a run.")
    run = Recorded(folder, name or folder.resolve().name)
    _read_settings(run)
    _read_origin(run)
    _read_metrics(run)
    return run


def _read_settings(run: Recorded) -> None:
    try:
        run.settings_text = (run.folder / "config.yaml").read_text(encoding="utf-8")
        found = read_yaml(run.settings_text)
        if not isinstance(found, dict):
            raise ValueError("it holds no keys")
        run.settings = {str(key): value for key, value in found.items()}
    except FileNotFoundError:
        run.problems.append("config.yaml is missing: the settings of the run are not known.")
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.problems.append(f"config.yaml cannot be read ({_first_line(error)}): the settings are shown unchanged.")


def _read_origin(run: Recorded) -> None:
    file = run.folder / ORIGIN_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping")
        run.origin = found
    except FileNotFoundError:
        run.problems.append(f"{ORIGIN_FILE} is missing: command line, versions and GPUs are not known.")
    except (OSError, ValueError) as error:
        run.problems.append(
            f"{ORIGIN_FILE} cannot be read ({_first_line(error)}): command line, versions and GPUs are not known."
        )


def _read_metrics(run: Recorded) -> None:
    try:
        text = (run.folder / "metrics.jsonl").read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        run.problems.append("metrics.jsonl is missing: there are no curves.")
        return
    except OSError as error:
        run.problems.append(f"metrics.jsonl cannot be read ({_first_line(error)}): there are no curves.")
        return
    damaged = []
    found: dict[str, dict[int, float]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = row.pop("step")
            if not isinstance(step, int) or isinstance(step, bool):
                raise ValueError("the step is not a number")
        except (ValueError, KeyError, AttributeError, TypeError):
            damaged.append(number)
            continue
        for name, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                found.setdefault(name, {})[step] = float(value)
            else:
                run.missing[name] = run.missing.get(name, 0) + 1
    run.series = {name: sorted(by_step.items()) for name, by_step in found.items()}
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        lines = "line" if len(damaged) == 1 else "lines"
        run.problems.append(f"metrics.jsonl: {len(damaged)} damaged {lines} left out ({lines} {shown}).")
    if not run.series:
        run.problems.append("metrics.jsonl holds no step yet.")
    for name in ("loss", "grad_norm"):
        if count := run.missing.get(name):
            run.problems.append(f"{name} was not finite (NaN or infinite) in {count} step{'s' if count > 1 else ''}.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
