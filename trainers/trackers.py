"""Where the numbers of a run go: a progress bar, the console, ``metrics.jsonl``, TensorBoard, wandb.

``metrics.jsonl`` holds every step at full precision, one JSON object a line, NaN written as null. Completions go to
``completions/completions_00010.parquet``, under the names of TRL.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayhelper import ConfigError


class Trackers:
    """Open files and connections of one run; a context manager."""

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
        from tqdm.auto import tqdm

        self.output_dir = output_dir
        self.headline = headline
        self.logging_steps = logging_steps
        self.tensorboard: Any = None
        self.wandb: Any = None
        output_dir.mkdir(parents=True, exist_ok=True)
        _keep_until(output_dir / "metrics.jsonl", first_step)
        self.lines = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
        if "tensorboard" in report_to:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(output_dir / "tensorboard"), purge_step=first_step + 1)
        if "wandb" in report_to:
            try:
                import wandb
            except ImportError:
                raise ConfigError("report_to has wandb, which is not installed: pip install wandb") from None
            self.wandb = wandb.init(project="rayhelper", name=run_name, dir=str(output_dir), config=dict(config))
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, numbers: Mapping[str, float], *, advance: bool = True) -> None:
        """Writes one step's numbers everywhere; ``advance`` moves the progress bar."""
        clean = {name: None if math.isnan(value) else value for name, value in numbers.items()}
        self.lines.write(json.dumps({"step": step, **clean}) + "\n")
        self.lines.flush()
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(dict(numbers), step=step)
        if advance:
            self.bar.set_postfix(
                {name: f"{numbers[name]:.4g}" for name in self.headline if name in numbers}, refresh=False
            )
            self.bar.update(1)
            if step % self.logging_steps == 0:
                self.say(step, {name: numbers[name] for name in self.headline if name in numbers})
        else:
            self.say(step, numbers)

    def say(self, step: int, numbers: Mapping[str, float]) -> None:
        """A line on the console, above the progress bar."""
        self.bar.write(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]], *, num_shown: int = 2) -> None:
        """Keeps the completions of a step in a Parquet file and shows the first few."""
        import pandas as pd

        folder = self.output_dir / "completions"
        folder.mkdir(exist_ok=True)
        table = pd.DataFrame({"step": step, **{name: list(column) for name, column in columns.items()}})
        table.to_parquet(folder / f"completions_{step:05d}.parquet")
        for _, row in table.head(num_shown).iterrows():
            self.bar.write("  " + "  ".join(f"{name}={str(row[name])[:120]!r}" for name in columns))

    def close(self) -> None:
        """Closes everything; nothing is lost."""
        self.bar.close()
        self.lines.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def _keep_until(file: Path, last_step: int) -> None:
    """Drops the lines of steps after ``last_step``: a resumed run writes them again.

    A run that starts anew leaves the file of an earlier one as ``metrics.1.jsonl``, ``metrics.2.jsonl``, ...
    """
    if not file.exists():
        return
    if last_step == 0:
        names = (file.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        file.rename(next(name for name in names if not name.exists()))
        return
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line and json.loads(line)["step"] <= last_step]
    file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
