"""A run as its driver sees it: what is counted, when something is due, what a checkpoint keeps."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig

from rayhelper import ConfigError, DeviceGroups
from tests.e2e.runs import TEXTS, final_bytes, grpo_config, interrupted_after, lines, sft_config
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.checkpoint import Writing, checkpoints, read_state, resolve_resume
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import SEQUENCES_PER_STEP, TrainConfig, order_of, sequences_per_step
from trainers.data.batches import Batches
from trainers.grpo.plan import GenerationPlan
from trainers.grpo.trainer import GRPOTrainer
from trainers.metrics import Metrics
from trainers.parts.checks import num_train_shards
from trainers.parts.models import resolve_dtype
from trainers.parts.tokenizer import load_tokenizer
from trainers.plugins import MODELS, _Entry, resolve_model
from trainers.run import origin, stopping
from trainers.run.going_on import builds_model
from trainers.run.run import Run, saved_order
from trainers.run.stopping import StepGivenUp, Stop, Stopped
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer

ORDER = {"sequences": 11, "sequences a step": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


class Nothing:
    """A backend and a tokenizer that write one file."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")

    def save(self, folder: Path) -> None:
        (folder / "model.bin").write_text("weights")


def opened(folder: Path, num_steps: int = 9, order: dict[str, Any] | None = None, **keys: Any) -> Run:
    config = TrainConfig(model="m", dataset=[{"text": "a"}], output_dir=str(folder), report_to=["none"], **keys)
    return Run(config, num_steps, headline=("loss",), order=ORDER if order is None else order)


def stepped(run: Run, num_steps: int = 1) -> Run:
    for _ in range(num_steps):
        metrics = Metrics()
        metrics.sum("loss", 1 / (run.step + 1))
        metrics.sum("num_tokens", 10)
        run.log_step(metrics, epoch=(run.step + 1) / 3)
    return run


# Counting


def test_a_step_is_logged_with_the_tokens_so_far_and_its_epoch(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        stepped(run, 3)
    assert lines(tmp_path)[-1] == {"step": 3, "loss": 1 / 3, "num_tokens": 30.0, "epoch": 1.0}
    assert all(json.loads(line)["step_time"] > 0 for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("every", "steps_at_once", "due_after"),
    [(3, 1, [3, 6]), (1, 1, [1, 2, 3, 4, 5, 6, 7, 8]), (4, 3, [6]), (2, 3, [3, 6]), (0, 1, []), (None, 1, [])],
)
def test_something_is_due_whenever_a_multiple_was_passed_and_never_at_the_end(
    every: int | None, steps_at_once: int, due_after: list[int], tmp_path: Path
) -> None:
    found = []
    with opened(tmp_path) as run:
        while run.step < 9:
            stepped(run, steps_at_once)
            if run.due(every, steps_at_once):
                found.append(run.step)
    assert found == due_after


@pytest.mark.parametrize(("steps_at_once", "shown_before"), [(1, [1, 5, 10]), (4, [1, 5, 9]), (10, [1])])
def test_completions_are_shown_whatever_the_steps_of_a_generation(
    steps_at_once: int, shown_before: list[int], tmp_path: Path
) -> None:
    found = []
    with opened(tmp_path, num_steps=12, logging_steps=5) as run:
        while run.step < 10:
            if run.shows_completions(steps_at_once):
                found.append(run.step + 1)
            stepped(run, steps_at_once)
    assert found == shown_before


def test_a_run_says_that_it_replaces_the_model_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path, num_steps=2) as first:
        stepped(first).save_checkpoint(Nothing().save, Nothing())
        stepped(first).finish(Nothing().save, Nothing())
    assert "earlier run" not in capsys.readouterr().out
    with opened(tmp_path, num_steps=2):
        (told,) = [line for line in capsys.readouterr().out.splitlines() if "earlier run" in line]
    assert told.startswith(f"{tmp_path / 'final'} is of an earlier run, and is replaced at the end of this one")
    with opened(tmp_path, num_steps=2, resume_from_checkpoint=True):
        assert "earlier run" not in capsys.readouterr().out


def test_resume_without_a_checkpoint_says_that_the_run_starts_at_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path, num_steps=1) as first:
        stepped(first).finish(Nothing().save, Nothing())
    capsys.readouterr()
    with opened(tmp_path, num_steps=1):
        assert "resume_from_checkpoint" not in capsys.readouterr().out  # nothing could be resumed
    with opened(tmp_path, num_steps=1, resume_from_checkpoint="auto"):
        told = capsys.readouterr().out
    assert f"resume_from_checkpoint: {tmp_path} has no checkpoint, so the run starts at step 0\n" in told
    assert f"{tmp_path / 'final'} is of an earlier run" in told
    assert "write resume_from_checkpoint" not in told


def test_a_run_inside_a_plugin_continues_where_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def built(output_dir: Path, seed: int) -> Path:
        folder = output_dir / "warm"
        with opened(folder, num_steps=4, seed=seed) as run:
            begun.append(run.step)
            stepped(run, 2)
            if run.step == 2:
                run.save_checkpoint(Nothing().save, Nothing())
                run.end_early(Stop("SIGTERM", 143))
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setitem(MODELS.entries, "warm", _Entry(built, (__file__, "built")))
    for reuse in (False, False):
        with pytest.raises(Stopped):
            resolve_model("warm", output_dir=tmp_path, seed=7, reuse=reuse)
    resolve_model("warm", output_dir=tmp_path, seed=7, reuse=True)
    resolve_model("warm", output_dir=tmp_path, seed=7, reuse=True)  # which is whole, and not built again
    assert begun == [0, 0, 2]


def test_a_run_inside_a_plugin_gives_advice_about_the_command_only_if_it_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = builds_model.set("addition")
    try:
        with opened(tmp_path, num_steps=2) as run:
            stepped(run).save_checkpoint(Nothing().save, Nothing())
            with pytest.raises(Stopped):
                run.end_early(Stop("SIGTERM", 143))
        with opened(tmp_path, num_steps=2) as run:
            stepped(run).finish(Nothing().save, Nothing())
    finally:
        builds_model.reset(token)
    told = capsys.readouterr().out
    assert told.count("resume_from_checkpoint") == 1
    assert (
        "To continue, run the same command with --resume_from_checkpoint auto" in told.partition("the model is in")[0]
    )


def test_the_end_says_that_an_adapter_is_merged_and_where_it_is_alone(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys: dict[str, Any] = {"dataset": [{"text": "a b c"}], "max_steps": 1, "report_to": ["none"]}
    for name, tuner in (("lora", {"tuner_type": "lora", "lora_rank": 2}), ("full", {})):
        folder = tmp_path / name
        SFTTrainer(SFTConfig(model=model, output_dir=str(folder), **keys, **tuner)).train()
        said = f"is merged into this model, and is also in {folder / 'final' / 'adapter'}"
        assert (said in capsys.readouterr().out) is (name == "lora")
        assert (folder / "final" / "adapter" / "adapter_model.safetensors").is_file() is (name == "lora")


# Checkpoints


def test_a_checkpoint_keeps_what_the_driver_knows(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.log_evaluation({"eval_loss": 0.1 + 0.2})
        stepped(run, 2)
        run.log_evaluation({"eval_loss": 0.2})
        run.save_checkpoint(Nothing().save, Nothing())
        stepped(run, 2)
    with opened(tmp_path, resume_from_checkpoint=True) as resumed:
        assert (resumed.step, resumed.num_tokens, resumed.first_evaluation) == (2, 20.0, {"eval_loss": 0.1 + 0.2})
        assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 2]  # the evaluations too
    assert {path.name for path in checkpoints(tmp_path)[0].iterdir()} == {
        "model.bin",
        "tokenizer.json",
        "trainer_state.json",
        "manifest.json",
    }


class Later:
    """Workers that go on writing when ``save`` has returned, until ``end`` or ``fail``."""

    def save(self, folder: Path) -> None:
        self.writing = Writing(folder / "critic", rank=3)
        self.writing.begin()


def test_a_checkpoint_has_its_name_when_workers_have_written_it(tmp_path: Path) -> None:
    workers = Later()
    with opened(tmp_path, save_total_limit=1) as run:
        stepped(run).save_checkpoint(Nothing().save, Nothing())
        stepped(run).save_checkpoint(workers.save, Nothing())
        stepped(run)
        assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]  # which rotation has left
        with pytest.raises(ConfigError, match="is not a checkpoint"):
            resolve_resume(str(tmp_path / "checkpoint-2.tmp"), tmp_path)
        workers.writing.end()
        stepped(run)
        assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
        assert read_state(tmp_path / "checkpoint-2")["step"] == 2


def test_the_next_folder_waits_for_the_one_before(tmp_path: Path) -> None:
    workers = Later()
    with opened(tmp_path) as run:
        stepped(run).save_checkpoint(workers.save, Nothing())
        ending = threading.Timer(0.05, workers.writing.end)
        ending.start()
        stepped(run).save_checkpoint(Nothing().save, Nothing())
        ending.join()
        assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
        run.finish(Nothing().save, Nothing())
    assert not list(tmp_path.glob("*.tmp"))


def test_workers_that_could_not_go_on_writing_are_told_at_the_next_step(tmp_path: Path) -> None:
    workers = Later()
    with opened(tmp_path) as run:
        stepped(run).save_checkpoint(Nothing().save, Nothing())
        stepped(run).save_checkpoint(workers.save, Nothing())
        workers.writing.fail(OSError("disk full"))
        with pytest.raises(RuntimeError, match=r"rank_3 could not write its part .OSError: disk full"):
            stepped(run)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_run_killed_while_workers_write_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        stepped(run).save_checkpoint(Nothing().save, Nothing())
        stepped(run).save_checkpoint(Later().save, Nothing())
    with opened(tmp_path, resume_from_checkpoint=True) as resumed:
        assert resumed.step == 1


def test_a_damaged_checkpoint_is_passed_over_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as run:
        for _ in range(2):
            stepped(run).save_checkpoint(Nothing().save, Nothing())
    (tmp_path / "checkpoint-2" / "model.bin").write_text("Weights")  # a bit differs
    with opened(tmp_path, resume_from_checkpoint="auto") as resumed:
        assert resumed.step == 1
    told = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert told == [
        "resume_from_checkpoint: skipped checkpoint-2 (model.bin differs from the written file (checksum)); the run "
        "continues from checkpoint-1"
    ]


def test_what_workers_wrote_later_is_in_the_manifest(tmp_path: Path) -> None:
    workers = Later()
    with opened(tmp_path) as run:
        stepped(run).save_checkpoint(workers.save, Nothing())
        (tmp_path / "checkpoint-1.tmp" / "critic" / "shard.distcp").write_text("weights")
        workers.writing.end()
        stepped(run)
    (tmp_path / "checkpoint-1" / "critic" / "shard.distcp").write_text("weight")
    with pytest.raises(ConfigError, match=r"critic/shard.distcp has 6 bytes, and was written with 7"):
        resolve_resume(str(tmp_path / "checkpoint-1"), tmp_path)


def test_a_failing_worker_leaves_no_checkpoint(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        (folder / "model.bin").write_text("half")
        raise OSError("disk full")

    with opened(tmp_path) as run:
        stepped(run)
        with pytest.raises(OSError, match="disk full"):
            run.save_checkpoint(save, Nothing())
    assert checkpoints(tmp_path) == []
    assert not list(tmp_path.glob("checkpoint*"))


class Loop(Nothing):
    """A trainer whose steps take ten seconds of the run's clock."""

    tokenizer = Nothing()

    def train(self, run: Run) -> None:
        assert run.lock is not None
        for _ in run.rounds(self):  # type: ignore[arg-type]
            stepped(run)
            run.lock = dataclasses.replace(run.lock, owner=dataclasses.replace(
                run.lock.owner, began=run.lock.owner.began - 10
            ))  # fmt: skip

    def load(self, folder: Path) -> None:
        pass


def test_a_run_saves_and_ends_well_when_its_time_is_over(tmp_path: Path) -> None:
    with opened(tmp_path, save_before_s=35) as run, pytest.raises(Stopped) as ended:
        Loop().train(run)
    assert ended.value.code == 0
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]
    with opened(tmp_path, resume_from_checkpoint="auto", save_before_s=35) as resumed, pytest.raises(Stopped):
        Loop().train(resumed)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8"]
    with opened(tmp_path, resume_from_checkpoint="auto", save_before_s=5) as resumed:
        Loop().train(resumed)  # no step is left to save for
    assert resumed.is_over


def test_a_run_whose_step_hangs_after_sigterm_names_the_checkpoint_to_go_on_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Hanging(Loop):
        def evaluate(self) -> dict[str, float]:
            if checkpoints(tmp_path):
                signal.raise_signal(signal.SIGTERM)
                try:
                    time.sleep(100)
                except Exception as error:
                    raise RuntimeError("raised by an evaluation") from error
            return {"eval_loss": 1.0}

    keys: dict[str, Any] = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "split_dataset_ratio": 0.5}
    with pytest.raises(StepGivenUp) as ended, opened(tmp_path, stop_grace_s=0.1, **keys) as run:
        Hanging().train(run)
    assert ended.value.code == 143
    told = capfd.readouterr().err
    assert "time.sleep(100)" in told
    assert f"stopped after step 3 of 9; saved before: {tmp_path / 'checkpoint-2'}. To continue, run the same" in told
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert "stopped in a step or a save that did not end; nothing was saved" in (tmp_path / "run.json").read_text()


def test_a_process_that_cannot_reach_process_0_tells_itself_where_it_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between nodes without a common key."""
    monkeypatch.setattr("trainers.run.run.pass_end_on", lambda: False)

    def hang(run: Run) -> None:
        assert run.trackers is not None
        run.trackers.close()
        run.trackers = None  # process 0 alone has them
        with run.signals.watch.step():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(100)

    with pytest.raises(StepGivenUp), opened(tmp_path, stop_grace_s=0.1) as run:
        hang(run)
    told = capfd.readouterr().err
    assert "time.sleep(100)" in told
    assert "stopped after step 0 of 9; nothing is saved" in told


def test_a_run_whose_checkpoint_hangs_after_sigterm_ends_with_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(Loop):
        def save(self, folder: Path) -> None:
            super().save(folder)
            if checkpoints(tmp_path):
                signal.raise_signal(signal.SIGTERM)
                time.sleep(100)

    monkeypatch.setattr(stopping, "SAVE_GRACE_S", 0.0)
    with pytest.raises(StepGivenUp), opened(tmp_path, save_steps=2) as run:
        Hanging().train(run)
    assert f"stopped after step 4 of 9; saved before: {tmp_path / 'checkpoint-2'}" in capfd.readouterr().err
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_the_first_checkpoint_has_time_by_the_size_of_the_model_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the hub lies in its cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--own--llama" / "snapshots" / "main"
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True).save_pretrained(snapshot)
    for model in (str(snapshot), "own/llama"):
        config = TrainConfig(model=model, dataset=[{"text": "a"}], output_dir=str(tmp_path), report_to=["none"])
        with Run(config, 9, headline=("loss",), order=ORDER) as run:
            watch = run.signals.watch
            assert watch.limit_s(watch.savings) == pytest.approx(1_235_814_400 * 0.32e-6)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_of_time_is_a_positive_number(limit: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save_before_s must be a (positive number of seconds|finite number)"):
        opened(tmp_path, save_before_s=limit)


def test_old_checkpoints_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, save_total_limit=2) as run:
        for _ in range(4):
            stepped(run).save_checkpoint(Nothing().save, Nothing())
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("name", "greater", "best"),
    [("loss", None, 3), ("eval_loss", None, 3), ("reward", None, 2), ("reward", False, 3), ("loss", True, 2)],
)
def test_the_best_checkpoint_is_that_of_the_best_evaluation(
    name: str, greater: bool | None, best: int, tmp_path: Path
) -> None:
    """A run that was resumed remembers it; the first of equals counts, and what is not a number never."""
    keys: dict[str, Any] = {"eval_dataset": [{"text": "a"}], "eval_steps": 1, "save_steps": 1, "save_total_limit": 1}
    keys |= {"metric_for_best_model": name, "greater_is_better": greater}
    for values in ([math.nan, 2.0, 1.0], [1.0, 2.0, 1.5]):
        with opened(tmp_path, resume_from_checkpoint="auto", **keys) as run:
            for value in values:
                stepped(run).log_evaluation({"eval_loss": value, "eval_reward": value})
                run.save_checkpoint(Nothing().save, Nothing())
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{best}", "checkpoint-6"]
    state = read_state(tmp_path / "checkpoint-6")
    assert state["best_model_checkpoint"] == f"checkpoint-{best}"
    assert state["best_metric"] == {2: 2.0, 3: 1.0}[best]


def test_a_metric_that_evaluation_does_not_give_is_told_with_those_it_gives(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"eval_dataset": [{"text": "a"}], "eval_steps": 1, "save_steps": 1}
    told = "evaluation gives no 'eval_accuracy'; it gives eval_loss"
    with opened(tmp_path, metric_for_best_model="accuracy", **keys) as run, pytest.raises(ConfigError, match=told):
        run.log_evaluation({"eval_loss": 1.0})


def test_a_new_run_in_the_folder_of_a_longer_one_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path) as longer:
        stepped(longer, 8).save_checkpoint(Nothing().save, Nothing())
    with opened(tmp_path, save_total_limit=1) as run:
        stepped(run, 2).save_checkpoint(Nothing().save, Nothing())
    with opened(tmp_path, resume_from_checkpoint="auto") as resumed:
        assert resumed.step == 2


@pytest.mark.parametrize(
    ("order", "keys", "told"),
    [
        ({**ORDER, "sequences a step": 8}, {}, "sequences a step was 4 and is 8"),
        ({**ORDER, "sequences": 12}, {}, "sequences was 11 and is 12"),
        (ORDER, {"seed": 1}, "seed was 42 and is 1"),
        (ORDER, {"shuffle_dataset": False}, "shuffle_dataset was True and is False"),
    ],
)
def test_a_run_that_would_see_other_rows_does_not_resume(
    order: dict[str, int], keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with opened(tmp_path) as run:
        stepped(run, 2).save_checkpoint(Nothing().save, Nothing())
        stepped(run)
    with pytest.raises(ConfigError, match=rf"{told}.*Rows would be repeated or left out.*global_batch_size"):
        opened(tmp_path, order=order, resume_from_checkpoint=True, **keys)
    assert len(lines(tmp_path)) == 3  # nothing was touched


def test_a_resumed_run_keeps_its_batch_unless_the_configuration_says_another(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model": "m", "dataset": "d", "output_dir": str(tmp_path), "resume_from_checkpoint": "auto"}
    config = TrainConfig(**keys, per_device_train_batch_size=2)
    assert sequences_per_step(config, 4, saved_order(config)) == 8
    with opened(tmp_path, order={SEQUENCES_PER_STEP: 8}) as run:
        stepped(run).save_checkpoint(Nothing().save, Nothing())
    assert sequences_per_step(config, 1, saved_order(config)) == 8
    config = TrainConfig(**keys, global_batch_size=4)
    assert sequences_per_step(config, 1, saved_order(config)) == 4


def test_a_generation_of_a_resumed_run_keeps_its_size_too(model: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"global_batch_size": None, "generation_batch_size": None, "steps_per_generation": 4}
    config = grpo_config(model, tmp_path, **sizes, per_device_train_batch_size=2)
    four = GenerationPlan.of(config, 6, 4, {})
    assert (four.step_size, four.num_prompts) == (8, 8)
    assert GenerationPlan.of(config, 6, 1, four.order()) == four


def test_generations_that_are_parts_of_a_step_are_drawn_at_once(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"global_batch_size": 16, "num_generations": 2, "num_iterations": 1}
    with caplog.at_level(logging.INFO):
        plan = GenerationPlan.of(grpo_config(model, tmp_path, **sizes, generation_batch_size=4), 16, 1, {})
    assert (plan.step_size, plan.num_prompts) == (16, 8)
    assert "the 4 generations of an optimizer step are drawn at once" in caplog.text
    for further in ({"generation_batch_size": 6}, {"generation_batch_size": 4, "num_iterations": 2}):
        with pytest.raises(ConfigError, match="must be a multiple of the 16 sequences"):
            GenerationPlan.of(grpo_config(model, tmp_path, **sizes | further), 16, 1, {})


@pytest.mark.parametrize(("drops", "rows", "num_steps"), [(False, [4, 4, 2], 5), (True, [4, 4], 4)])
def test_rows_that_fill_no_generation_may_be_left_out(
    drops: bool, rows: list[int], num_steps: int, model: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "num_generations": 2,
        "global_batch_size": 4,
        "generation_batch_size": 8,
        "max_steps": -1,
        "num_iterations": 1,
    }
    epochs: dict[str, Any] = {"num_train_epochs": 1, "dataloader_drop_last": drops}
    config = grpo_config(model, tmp_path, **sizes, **epochs)
    plan = GenerationPlan.of(config, 10, 1, {})
    batches = Batches(10, plan.num_prompts, **order_of(config))
    assert plan.num_steps == num_steps
    generations = sorted({plan.generation(step) for step in range(plan.num_steps)})
    assert [len(batches[number]) for number in generations] == rows
    assert batches.epoch(plan.generation(num_steps)) == 1
    if drops:
        with pytest.raises(ConfigError, match="dataloader_drop_last: the rows fill no batch of 4"):
            GenerationPlan.of(config, 3, 1, {}).check_rows()


def test_a_resumed_run_may_be_longer(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        stepped(run, 2).save_checkpoint(Nothing().save, Nothing())
    with opened(tmp_path, num_steps=20, resume_from_checkpoint=True) as resumed:
        assert resumed.step == 2


def test_a_checkpoint_that_cannot_be_read_is_named_beside_the_mistake(tmp_path: Path) -> None:
    def load(folder: Path) -> None:
        raise EOFError(f"{folder.name} ends too early")

    with opened(tmp_path) as run:
        stepped(run, 2).save_checkpoint(Nothing().save, Nothing())
    with opened(tmp_path, resume_from_checkpoint=True) as resumed, pytest.raises(EOFError, match="too early") as told:
        resumed.resume(load)
    assert "checkpoint-2. If that is damaged, name an earlier one" in told.value.__notes__[-1]


def test_the_first_and_the_last_evaluation_are_told_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as run:
        run.log_evaluation({"eval_rewards/exact_answer/mean": 0.25, "eval_loss": 2.0})
        stepped(run).save_checkpoint(Nothing().save, Nothing())
    with opened(tmp_path, resume_from_checkpoint=True) as resumed:
        resumed.log_evaluation({"eval_rewards/exact_answer/mean": 0.75, "eval_loss": 1.0})
        last = resumed.finish(Nothing().save, Nothing())
    assert "eval_rewards/exact_answer/mean: 25.0% before, 75.0% after" in capsys.readouterr().out
    assert last == {"eval_rewards/exact_answer/mean": 0.75, "eval_loss": 1.0}
    assert (tmp_path / "final" / "model.bin").exists()


def test_what_cannot_be_copied_may_be_in_a_configuration(tmp_path: Path) -> None:
    client = threading.Lock()  # as clients of judges hold
    with opened(tmp_path, model_init_kwargs={"client": client}) as run:
        assert run.config.model_init_kwargs["client"] is client
    assert "lock" in (tmp_path / "config.yaml").read_text()


# What trainers build from the shared keys


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    template = "{{ messages }}"
    (tmp_path / "template.jinja").write_text("{{ messages[0] }}")
    config = TrainConfig(model=str(tmp_path), dataset="d", chat_template=template)
    loaded = load_tokenizer(config, str(tmp_path))
    assert (loaded.pad_token, loaded.chat_template) == (loaded.eos_token, template)
    config = TrainConfig(model=str(tmp_path), dataset="d", chat_template=str(tmp_path / "template.jinja"))
    assert load_tokenizer(config, str(tmp_path)).chat_template == "{{ messages[0] }}"


def test_a_tokenizer_that_cannot_end_a_sequence_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no eos_token"):
        load_tokenizer(TrainConfig(model=str(tmp_path), dataset="d"), str(tmp_path))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no tokenizer could be loaded from '{tmp_path}'"):
        load_tokenizer(TrainConfig(model=str(tmp_path), dataset="d"), str(tmp_path))


def test_auto_is_float32_where_no_gpu_has_bfloat16() -> None:
    config = TrainConfig(model="m", dataset="d")
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    assert resolve_dtype(config) == ("bfloat16" if has_bfloat16 else "float32")
    assert resolve_dtype(TrainConfig(model="m", dataset="d", dtype="bfloat16")) == "bfloat16"


def test_the_train_workers_are_known_before_they_start() -> None:
    config, three = TrainConfig(model="m", dataset="d"), DeviceGroups.single(["train", "rollout"], "CPU", 3)
    assert (num_train_shards(config, None), num_train_shards(config, three)) == (1, 3)


def test_workers_that_hold_one_model_together_are_one_shard() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    config = TrainConfig(model="m", dataset="d", backend="megatron", **sizes)
    assert num_train_shards(config, DeviceGroups.single(["train"], "GPU", 24)) == 3
    experts = TrainConfig(model="m", dataset="d", backend="megatron", expert_model_parallel_size=4)
    assert num_train_shards(experts, DeviceGroups.single(["default"], "GPU", 8), "default") == 8


def test_a_bug_in_a_plugin_is_no_mistake_of_the_configuration() -> None:
    with pytest.raises(ImportError, match="plugin"), mistakes_of("external_plugins"):
        raise ImportError("plugin 'p.py' cannot be imported: NameError") from NameError("x")
    with pytest.raises(ConfigError, match="external_plugins: no module p"), mistakes_of("external_plugins"):
        raise ImportError("no module p") from ModuleNotFoundError("p")


def test_a_mistake_is_told_with_the_row_it_was_found_in() -> None:
    error = ValueError("no prompt")
    error.add_note("while tokenizing row 3 of the dataset")
    with pytest.raises(ConfigError, match="dataset: no prompt; while tokenizing row 3"), mistakes_of("dataset"):
        raise error


def test_a_wrong_column_is_told_before_a_model_is_loaded(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset: rows have no prompt: .* got promt, answer"):
        GRPOTrainer(grpo_config(model, tmp_path, dataset=[{"promt": "1+1=", "answer": "2"}]))
    with pytest.raises(ConfigError, match=r"dataset: columns: there is no column 'question'.*Columns: prompt"):
        GRPOTrainer(grpo_config(model, tmp_path, columns={"question": "prompt"}))
    with pytest.raises(ConfigError, match=r"dataset: a row to learn from has 'body', .*while tokenizing row 0"):
        SFTTrainer(sft_config(model, tmp_path, dataset_text_field="body"))


# Whole runs


@pytest.mark.parametrize("packing", [False, True])
def test_sft_learns_its_texts(packing: bool, model: str, tmp_path: Path) -> None:
    config = sft_config(
        model,
        tmp_path,
        packing=packing,
        max_length=64,
        num_train_epochs=15,
        learning_rate=1e-2,
        eval_dataset=[{"text": text} for text in TEXTS],
        eval_steps=10,
    )
    numbers = SFTTrainer(config).train()
    evaluations = [line["eval_loss"] for line in lines(tmp_path) if "eval_loss" in line]
    assert evaluations == sorted(evaluations, reverse=True)
    assert numbers["eval_loss"] == evaluations[-1] < 1.0 < 5.0 < lines(tmp_path)[0]["loss"]


def test_grpo_learns_what_is_rewarded(model: str, tmp_path: Path) -> None:
    config = grpo_config(
        model,
        tmp_path,
        reward_funcs=["tests.e2e.runs.evenness"],
        reward_weights=None,
        num_train_epochs=12,
        learning_rate=1e-2,
        beta=0.0,
        val_before_train=True,
        log_completions=True,
        logging_steps=5,
    )
    numbers = GRPOTrainer(config).train()
    (before,) = [line for line in lines(tmp_path) if line["step"] == 0]
    name = next(key for key in before if key.startswith("eval_rewards/") and key.endswith("/mean"))
    assert numbers[name] > before[name] + 0.3
    kept = sorted((tmp_path / "completions").iterdir())
    tables = pd.concat([pd.read_parquet(path) for path in kept])
    assert [path.name for path in kept][:3] == [
        "completions_00001.parquet",
        "completions_00005.parquet",
        "completions_00007.parquet",
    ]
    assert set(tables.columns) == {"step", "prompt", "completion", name.split("/")[1], "advantage"}
    for _, group in tables.groupby(["step", "prompt"]):
        assert group["advantage"].sum() == pytest.approx(0, abs=1e-4)
        assert group.sort_values(name.split("/")[1])["advantage"].is_monotonic_increasing


def test_every_step_of_every_generation_is_taken(model: str, tmp_path: Path) -> None:
    GRPOTrainer(grpo_config(model, tmp_path, save_steps=4)).train()
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in steps if "reward" in line] == [1, 5, 7, 11]  # the first of each generation
    assert steps[5]["epoch"] == 1.0
    # 4 steps a generation: 4 and then 8, which is passed at the end of the second epoch's first generation
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-10"]
    assert read_state(tmp_path / "checkpoint-10")["order"]["num_rows"] == 6


def test_max_steps_may_end_a_run_within_a_generation(model: str, tmp_path: Path) -> None:
    GRPOTrainer(grpo_config(model, tmp_path, max_steps=3)).train()
    assert [line["step"] for line in lines(tmp_path) if "loss" in line] == [1, 2, 3]


def test_resuming_a_finished_run_ends_as_it_did(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_steps": 2, "eval_dataset": [{"text": TEXTS[0]}]}
    SFTTrainer(sft_config(model, tmp_path, **keys)).train()
    finished = final_bytes(tmp_path), lines(tmp_path)
    SFTTrainer(sft_config(model, tmp_path, **keys, resume_from_checkpoint="auto")).train()
    assert (final_bytes(tmp_path), lines(tmp_path)) == finished


def test_the_logs_are_closed_however_a_run_ends(model: str, tmp_path: Path) -> None:
    opened_logs: list[Any] = []
    init = Run.__init__

    def remember(self: Run, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        opened_logs.append(self.trackers.lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "__init__", remember)
        with interrupted_after(2), pytest.raises(KeyboardInterrupt):
            SFTTrainer(sft_config(model, tmp_path)).train()
    assert [log.closed for log in opened_logs] == [True]


def test_git_is_asked_once_for_each_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the state of every file."""
    asked: list[str] = []

    def told(command: list[str]) -> str:
        if command[0] == "git":
            asked.append(command[2])
        return f"{Path(command[2]).name}\n"

    monkeypatch.setattr(origin, "_told", told)
    root = Path(origin.__file__).parents[2]  # of this repository, as of the package
    (tmp_path / "other" / "folder").mkdir(parents=True)
    (tmp_path / "other" / ".git").mkdir()
    commits = []
    for number, folder in enumerate((root / "tests", tmp_path / "other" / "folder")):
        monkeypatch.chdir(folder)
        origin.begin(
            tmp_path / str(number), SFTConfig(model="m", dataset="d"), trainer="sft", first_step=0, num_steps=1
        )
        commits.append(json.loads((tmp_path / str(number) / origin.ORIGIN_FILE).read_text())["starts"][0]["commits"])
    assert commits[0] == {"the folder of the run": root.name, "rayhelper": root.name}
    assert commits[1] == {"the folder of the run": "other", "rayhelper": root.name}
    assert asked == [str(root), str(tmp_path / "other"), str(root)]


def test_a_run_does_not_go_on_with_other_keys_than_its_checkpoint_was_made_with(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        stepped(run, 2).save_checkpoint(Nothing().save, Nothing())
    for keys, told in (
        ({"learning_rate": 5.0}, "learning_rate was .* and is 5.0"),
        ({"tuner_type": "lora"}, "tuner_type was full and is lora"),
        ({"backend": "megatron"}, "backend was fsdp and is megatron"),
        ({"num_steps": 1}, "is from step 2, and the run has 1 steps"),
    ):
        with pytest.raises(ConfigError, match=told):
            opened(tmp_path, resume_from_checkpoint=True, **keys)
