"""The numbers of a run: nothing lost, nothing twice, nothing rounded."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rayhelper import ConfigError
from trainers.run import trackers as module
from trainers.run.trackers import Trackers, check_installed
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer


def opened(output_dir: Path, **changed: Any) -> Trackers:
    settings: dict[str, Any] = {
        "report_to": ["none"],
        "run_name": None,
        "total_steps": 4,
        "first_step": 0,
        "headline": ("loss", "reward"),
        "logging_steps": 2,
        "config": {"seed": 42},
    }
    return Trackers(output_dir, **(settings | changed))


def lines(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_a_line_that_begins_with_the_step(tmp_path: Path) -> None:
    with opened(tmp_path) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"loss": 1 / step})
    assert [list(line) for line in lines(tmp_path)] == [["step", "loss"]] * 3
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_numbers_keep_every_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, float(np.float32(0.1)), 1e22]
    with opened(tmp_path) as trackers:
        trackers.log(1, {str(i): value for i, value in enumerate(values)})
    (line,) = lines(tmp_path)
    assert [line[str(i)] for i in range(len(values))] == values


def test_nan_and_infinity_are_null_as_json_has_neither(tmp_path: Path) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(1, {"loss": math.nan, "grad_norm": math.inf, "reward": 1.0})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "reward": 1.0}]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(1, {"loss": np.float32(0.5), "count": np.int64(3)})  # type: ignore[dict-item]
    assert lines(tmp_path) == [{"step": 1, "loss": 0.5, "count": 3.0}]


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(1, {"loss": 1.0})
        assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_resumed_run_drops_the_steps_that_it_will_repeat(tmp_path: Path) -> None:
    with opened(tmp_path) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"loss": float(step)})
    with opened(tmp_path, first_step=2) as trackers:
        trackers.log(3, {"loss": 30.0})
    assert [line["loss"] for line in lines(tmp_path)] == [1.0, 2.0, 30.0]


def test_a_resumed_run_drops_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with opened(tmp_path, first_step=2) as trackers:
        trackers.log(3, {"loss": 3.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]


def test_a_new_run_keeps_the_numbers_of_earlier_ones(tmp_path: Path) -> None:
    for run in (1.0, 2.0, 3.0):
        with opened(tmp_path) as trackers:
            trackers.log(1, {"loss": run})
    found = {path.name: json.loads(path.read_text())["loss"] for path in tmp_path.glob("metrics*.jsonl")}
    assert found == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}


def test_the_console_shows_the_headline_every_logging_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path) as trackers:
        for step in (1, 2, 3, 4):
            trackers.log(step, {"loss": 0.123456, "reward": step / 10, "step_time": 1.0})
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["step 2: loss 0.1235  reward 0.2", "step 4: loss 0.1235  reward 0.4"]


def test_a_line_shows_rewards_of_an_earlier_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several optimizer steps learn from one generation, and the first of them has its rewards."""
    with opened(tmp_path) as trackers:
        for step in (1, 2, 3, 4):
            trackers.log(step, {"loss": 0.5} | ({"reward": 0.25} if step == 1 else {}))
    assert capsys.readouterr().out.splitlines() == ["step 2: loss 0.5  reward 0.25", "step 4: loss 0.5"]


def test_evaluations_are_rows_below_one_another_and_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as trackers:
        for step, loss in ((0, 2.0), (1, 1.23456)):
            told = {"eval_rewards/right/mean": 0.5 + loss, "eval_loss": loss, "eval_reward_std": 1.0}
            trackers.log(step, told | {"eval_completions/min_length": 1.0}, advance=False)
        assert trackers.console.bar.n == 0
    assert lines(tmp_path)[1]["eval_reward_std"] == 1.0, "the file has every number"
    assert capsys.readouterr().out.splitlines() == [
        "evaluation  step  rewards/right/mean      loss",
        "               0                 2.5         2",
        "               1               1.735     1.235",
    ]


def test_an_evaluation_of_many_numbers_has_several_rows_and_none_is_wide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(7, {f"eval_number/of/some/length/{i}": float(i) for i in range(9)}, advance=False)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 120
    assert [line.split()[:2] for line in shown if line.startswith("evaluation")] == [["evaluation", "step"]] * 3
    assert [number for line in shown for number in line.split()[1:] if number.isdigit()] == [str(i) for i in range(9)]


def test_the_bar_says_step_headline_speed_and_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with opened(tmp_path) as trackers:
        trackers.log(1, {"loss": 0.5, "throughput/tokens_per_second": 12345.6})
        trackers.console.bar.refresh()
    assert re.search(r"step 1/4 \|.+\| loss 0\.5, 12,346 tokens/s \| 00:00 done, .* left", capsys.readouterr().err)


def test_where_stderr_is_a_file_no_bar_fills_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(1, {"loss": 1.0})
    assert capsys.readouterr().err == ""


def test_completions_are_kept_under_trls_name_and_shown_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "prompt": ["1+1=", "2+2=", "3+3="],
        "completion": ["2", "[red]4[/red]", "not shown"],
        "accuracy": np.array([1.0, 0.12345678, math.nan], np.float32),
    }
    with opened(tmp_path) as trackers:
        trackers.completions(10, columns, num_shown=2)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00010.parquet")
    assert list(table.columns) == ["step", "prompt", "completion", "accuracy"]
    assert list(table["step"]) == [10, 10, 10]
    assert list(table["completion"]) == columns["completion"]
    shown = capsys.readouterr().out
    assert "[red]4[/red]" in shown  # a completion is text, whatever it looks like
    assert "0.1235" in shown
    assert "not shown" not in shown


def test_a_conversation_is_a_prompt_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[{"role": "user", "content": "What is 1+1?"}]]
    with opened(tmp_path) as trackers:
        trackers.completions(1, {"prompt": prompts, "completion": ["2"]})
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["prompt"][0][0]["content"] == "What is 1+1?"
    assert "What is 1+1?" in capsys.readouterr().out


def test_a_long_completion_is_shown_with_its_beginning_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as trackers:
        trackers.completions(1, {"completion": ["begin" + "x" * 5000 + "end"]})
    shown = capsys.readouterr().out
    assert "begin" in shown
    assert "[...]" in shown
    assert len(shown) < 1500


def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with opened(tmp_path, report_to=["tensorboard"]) as trackers:
        trackers.log(1, {"loss": 0.5})
        trackers.log(2, {"loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with opened(tmp_path, report_to=["tensorboard"]) as trackers:
        for step in (1, 2, 3, 4):
            trackers.log(step, {"loss": float(step)})
    with opened(tmp_path, report_to=["tensorboard"], first_step=2) as trackers:
        trackers.log(3, {"loss": 30.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_is_not_opened_unless_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path, report_to=["none"]) as trackers:
        trackers.log(1, {"loss": 0.5})
    assert not (tmp_path / "tensorboard").exists()


class FakeWandb:
    """Keeps what a run sends."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0

    def init(self, **settings: Any) -> Any:
        self.inits.append(settings)
        return SimpleNamespace(
            id=settings["id"] or f"run{len(self.inits)}",
            log=lambda numbers, step: self.logged.append((numbers, step)),
            finish=self.finish,
        )

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_is_installed", lambda name: True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_wandb_gets_name_configuration_and_numbers(tmp_path: Path, wandb: FakeWandb) -> None:
    with opened(tmp_path, report_to=["wandb"], run_name="first") as trackers:
        trackers.log(1, {"loss": 0.5})
    assert wandb.inits[0]["name"] == "first"
    assert wandb.inits[0]["config"] == {"seed": 42}
    assert wandb.logged == [({"loss": 0.5}, 1)]
    assert wandb.finished == 1


def test_a_resumed_run_goes_on_in_its_wandb_run_and_a_new_one_does_not(tmp_path: Path, wandb: FakeWandb) -> None:
    opened(tmp_path, report_to=["wandb"]).close()
    opened(tmp_path, report_to=["wandb"], first_step=2).close()
    opened(tmp_path, report_to=["wandb"]).close()
    assert [settings["id"] for settings in wandb.inits] == [None, "run1", None]


class FakeTrackio(FakeWandb):
    """trackio's module: runs have names, and no ids."""

    def init(self, **settings: Any) -> Any:
        self.inits.append(settings)
        name = settings["name"] or f"named{len(self.inits)}"
        return SimpleNamespace(name=name, log=lambda numbers, step: self.logged.append((numbers, step)), finish=list)

    @staticmethod
    def Table(dataframe: pd.DataFrame) -> list[Any]:  # noqa: N802 - its name there
        return dataframe.to_numpy().tolist()


def test_trackio_gets_numbers_and_completions_and_continues_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are those of trackio 0.43."""
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_is_installed", lambda name: True)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    with opened(tmp_path, report_to=["trackio"]) as trackers:
        trackers.log(1, {"loss": 0.5})
        trackers.completions(1, {"prompt": [[{"role": "user"}]], "reward": [1.0]})
    opened(tmp_path, report_to=["trackio"], first_step=1).close()
    assert fake.logged == [({"loss": 0.5}, 1), ({"completions": [[1, "[{'role': 'user'}]", 1.0]]}, 1)]
    told = [(one["project"], one["name"], one["resume"]) for one in fake.inits]
    assert told == [("rayhelper", None, "never"), ("rayhelper", "named1", "must")]


class FakeMLflow:
    """mlflow's client: it has no run that is current."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if ("experiment", name) in self.calls else None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("experiment", name))
        return "7"

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id{len(self.calls)}"))

    def log_param(self, *given: Any) -> None:
        self.calls.append(("key", *given))

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.calls += [("number", run_id, key, value, step) for key, value, _, step in metrics]

    def log_table(self, run_id: str, table: pd.DataFrame, file: str) -> None:
        self.calls.append(("table", run_id, list(table.columns), file))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append((status, run_id))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append(("end", run_id))


def test_mlflow_gets_keys_numbers_and_completions_and_continues_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are those of mlflow 3.17."""
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: fake))  # type: ignore[arg-type]
    entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_is_installed", lambda name: True)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    with opened(tmp_path, report_to=["mlflow"], run_name="first", config={"key": "x" * 7000}) as trackers:
        trackers.log(1, {"loss": 0.5})
        trackers.completions(1, {"completion": ["2"]})
    with opened(tmp_path, report_to=["mlflow"], first_step=1) as trackers:
        trackers.log(2, {"loss": 0.25})
    assert fake.calls == [
        ("experiment", "rayhelper"),
        ("run", "7", "first"),
        ("key", "id2", "key", "x" * 6000),
        ("number", "id2", "loss", 0.5, 1),
        ("table", "id2", ["step", "completion"], "completions/00001.json"),
        ("end", "id2"),
        ("RUNNING", "id2"),
        ("number", "id2", "loss", 0.25, 2),
        ("end", "id2"),
    ]


def test_a_plugin_registers_a_tracker_which_a_run_then_knows(tmp_path: Path, own_registries: None) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from trainers.plugins import register_tracker\n"
        "@register_tracker('lines')\n"
        "class Lines:\n"
        "    def __init__(self, run): self.file = (run.folder / 'lines.txt').open('a')\n"
        "    def log(self, step, numbers): print(step, numbers, file=self.file)\n"
        "    def completions(self, step, table): print(step, len(table), file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    keys: dict[str, Any] = {"model": "m", "dataset": [{"text": "a"}]}
    with pytest.raises(ConfigError, match=r"report_to must be one of tensorboard, .*; got 'lines'"):
        SFTConfig(**keys, report_to=["lines"])
    config = SFTConfig(**keys, report_to=["linse"], external_plugins=[str(plugin)])
    with pytest.raises(ConfigError, match=r"report_to has 'linse', which no plugin registers \(did you mean lines\?\)"):
        SFTTrainer.check(config, None)
    with opened(tmp_path / "run", report_to=["lines", "none"]) as trackers:
        trackers.log(1, {"loss": 0.5})
        trackers.completions(1, {"completion": ["2", "3"]})
    assert (tmp_path / "run" / "lines.txt").read_text() == "1 {'loss': 0.5}\n1 2\n"


def test_what_is_not_installed_is_told_before_a_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(ConfigError, match=r"report_to has wandb, which is not installed. Run `pip install wandb`"):
        opened(tmp_path, report_to=["wandb"])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_installed_or_not_asked_for_is_fine() -> None:
    check_installed(["tensorboard", "none"])
    check_installed([])
