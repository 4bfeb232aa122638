"""The trackers that ``report_to`` knows without a plugin. A resumed run continues its run in each service."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from trainers.plugins import register_tracker
from trainers.run.services import TrackedRun

TABLE = "completions"


@register_tracker("tensorboard")
class TensorBoard:
    """Files in ``output_dir/tensorboard``."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def completions(self, step: int, table: Any) -> None:
        """As text, between lines: TensorBoard reads Markdown, and completions may hold some."""
        rows = ["\n".join(f"    {line}" for line in str(row).splitlines()) for row in table.to_dict("records")]
        self.writer.add_text(TABLE, "\n\n".join(rows), step)

    def close(self) -> None:
        self.writer.close()


class LikeWandb:
    """A service whose module has wandb's names: its run takes numbers and tables, and is finished."""

    module: Any
    run: Any

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def completions(self, step: int, table: Any) -> None:
        self.run.log({TABLE: self.module.Table(dataframe=table)}, step=step)

    def close(self) -> None:
        self.run.finish()


@register_tracker("wandb")
class Wandb(LikeWandb):
    """Weights & Biases. WANDB_PROJECT names the project."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.module = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=run.known_id("wandb"),
            resume="allow",
        )
        run.keep_id("wandb", str(self.run.id))


@register_tracker("swanlab")
class SwanLab(LikeWandb):
    """SwanLab. SWANLAB_PROJECT names the project."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self.module = swanlab
        self.run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", run.project),
            name=run.name,
            log_dir=str(run.folder),
            config=dict(run.config),
            id=run.known_id("swanlab"),
            resume="allow",
        )
        run.keep_id("swanlab", str(self.run.id))

    def completions(self, step: int, table: Any) -> None:
        shown = self.module.echarts.Table()
        shown.add(headers=list(table.columns), rows=table.to_numpy().tolist())
        self.run.log({TABLE: shown}, step=step)


@register_tracker("mlflow")
class MLflow:
    """MLflow. MLFLOW_TRACKING_URI names the server or database, MLFLOW_EXPERIMENT_NAME the experiment."""

    MOST = 6000  # characters of a parameter

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self.client = mlflow.MlflowClient()
        known = run.known_id("mlflow")
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
            there = self.client.get_experiment_by_name(name)
            experiment = self.client.create_experiment(name) if there is None else there.experiment_id
            known = self.client.create_run(experiment, run_name=run.name).info.run_id
            for key, value in run.config.items():
                self.client.log_param(known, key, str(value)[: self.MOST])
        else:
            self.client.update_run(known, status="RUNNING")
        self.run_id = str(known)
        run.keep_id("mlflow", self.run_id)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())  # milliseconds
        self.client.log_batch(self.run_id, metrics=[Metric(name, value, now, step) for name, value in numbers.items()])

    def completions(self, step: int, table: Any) -> None:
        self.client.log_table(self.run_id, table, f"{TABLE}/{step:05d}.json")

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


@register_tracker("trackio")
class Trackio(LikeWandb):
    """trackio. TRACKIO_PROJECT names the project, TRACKIO_SPACE_ID a Space in place of local files."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.module = trackio
        known = run.known_id("trackio")
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", run.project),
            name=known or run.name,
            config=dict(run.config),
            resume="never" if known is None else "must",
        )
        run.keep_id("trackio", str(self.run.name))
